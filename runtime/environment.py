"""The numeric environment: settings that change results but are no arguments of a function.

`STANDARD` is PyTorch's default. Goldens are evaluated in it, whatever the caller has set: flush-to-zero would turn
subnormal inputs into zeros, and another default dtype would change constants. A kernel runs in the environment in which
its examination began, with random seeds of its case; settings that it leaves changed are reported and restored. A repro
line states the differences from the standard.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch
from torch.utils._device import DeviceContext

from assay.runtime.errors import SettingError, unknown

_SMALLEST = 5e-324  # the smallest subnormal float64
_PROBE = 1 << 17  # elements, enough that torch uses all of its threads


@dataclass(frozen=True)
class Setting:
    """One setting: its name in words, functions to read and write it, and its standard (None: as the caller has it)."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    standard: Any


def _flushes() -> bool:
    """Return whether this thread flushes subnormal numbers to zero; Python's own floats show it."""
    return _SMALLEST * 1.0 == 0.0


def _attribute(owner: Any, name: str, attribute: str, standard: Any) -> Setting:
    return Setting(
        f"{name}.{attribute}",
        lambda: getattr(owner, attribute),
        lambda value: setattr(owner, attribute, value),
        standard,
    )


_MATMUL, _CUDA = torch.backends.cuda.matmul, "torch.backends.cuda.matmul"
_MKLDNN = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
SETTINGS = (
    Setting("flush-to-zero (torch.set_flush_denormal)", _flushes, torch.set_flush_denormal, False),
    Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    Setting("torch's default device", torch.get_default_device, torch.set_default_device, None),
    Setting("torch's number of threads", torch.get_num_threads, torch.set_num_threads, None),
    Setting("torch's gradient mode", torch.is_grad_enabled, torch.set_grad_enabled, None),
    Setting(
        "torch.use_deterministic_algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1]),
        (False, False),
    ),
    Setting(
        "autocast on the CPU",
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
        False,
    ),
    _attribute(_MATMUL, _CUDA, "fp32_precision", "none"),
    _attribute(_MKLDNN, "torch.backends.mkldnn.matmul", "fp32_precision", "none"),
    _attribute(_MATMUL, _CUDA, "allow_fp16_reduced_precision_reduction", True),
    _attribute(_MATMUL, _CUDA, "allow_bf16_reduced_precision_reduction", True),
    _attribute(_MATMUL, _CUDA, "allow_fp16_accumulation", False),
    Setting(
        "numpy's error state",
        np.geterr,
        lambda state: np.seterr(**state),
        {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"},
    ),
)
Environment = tuple[Any, ...]
"""The value of each of `SETTINGS`, in their order."""

_MODES: tuple[tuple[Callable[[], list[Any]], Callable[[], object]], ...] = (
    (dispatch._get_current_dispatch_mode_stack, dispatch._pop_mode),
    (overrides._get_current_function_mode_stack, overrides._pop_mode),
)
"""Functions that return torch's modes that are on, and that end the last one."""
_read_device = torch.get_default_device
_NAMES = [setting.name for setting in SETTINGS if setting.standard is not None]
STANDARD: Environment = tuple(setting.standard for setting in SETTINGS)


def environment() -> Environment:
    """Return the current environment."""
    return tuple(setting.read() for setting in SETTINGS)


def changes() -> dict[str, Any]:
    """Return the current differences from `STANDARD`, by name, as JSON values."""
    result = zip(SETTINGS, environment(), strict=True)
    return {
        setting.name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for setting, value in result
        if setting.standard not in (None, value)
    }


def with_changes(changed: Mapping[str, Any]) -> Environment:
    """Return `STANDARD` with the result of `changes`; settings without a standard keep their current value.

    Raises `SettingError`.
    """
    for name in changed:
        if name not in _NAMES:
            raise SettingError(unknown("numeric setting", name, _NAMES))
    values = []
    for setting, now in zip(SETTINGS, environment(), strict=True):
        value = now if setting.standard is None else setting.standard
        if setting.name in changed:
            value = given = changed[setting.name]
            if setting.standard is torch.float32:
                value = getattr(torch, str(given), None)
            elif isinstance(given, list):
                value = tuple(given)
            if type(value) is not type(setting.standard):
                raise SettingError(f"{setting.name}: expected such as {_shown(setting.standard)}, got {given!r}")
        values.append(value)
    return tuple(values)


def with_setting(wanted: Environment, read: Callable[[], Any], value: Any) -> Environment:
    """Return ``wanted`` with another value of the setting that ``read`` reads, such as `torch.get_default_dtype`."""
    return tuple(value if setting.read is read else old for setting, old in zip(SETTINGS, wanted, strict=True))


def put(wanted: Environment, now: Environment | None = None) -> list[str]:
    """Change the environment from ``now`` to ``wanted``; return the differences, in words."""
    results = []
    for setting, value, other in zip(SETTINGS, wanted, now or environment(), strict=True):
        if value is not None and other != value:
            results.append(f"{setting.name} at {_shown(other)} (it was {_shown(value)})")
            setting.write(value)
    return results


@contextlib.contextmanager
def in_environment(wanted: Environment) -> Iterator[list[str]]:
    """Use the environment ``wanted`` inside, then restore the caller's; the list then names settings left changed.

    Modes of torch that are left on count as such.
    """
    before, left = environment(), list[str]()
    device = next(value for setting, value in zip(SETTINGS, wanted, strict=True) if setting.read is _read_device)
    with _default_device(device):
        put(wanted)
        modes = [mode for stack, _ in _MODES for mode in stack()]
        try:
            yield left
        finally:
            left += _end_modes(modes)
            left += put(wanted)
            put(_without_device(before))


@contextlib.contextmanager
def standard_environment() -> Iterator[None]:
    """Use the standard environment inside, and restore the caller's after."""
    before = environment()
    with _default_device(torch.device("cpu")):
        changed = put(STANDARD, before)
        if before[0] and _threads_flush():  # torch's threads inherited the flag when they started
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if changed:
                put(_without_device(before))


def _end_modes(kept: list[Any]) -> list[str]:
    """End torch's modes that are on besides ``kept``, and the default device; return them, in words."""
    results = []
    for stack, end_last in _MODES:
        while (on := stack()) and not isinstance(on[-1], DeviceContext) and all(on[-1] is not mode for mode in kept):
            results.append(f"torch's mode {type(on[-1]).__name__} on (it was off)")
            end_last()
    return results


@contextlib.contextmanager
def _default_device(device: torch.device | None) -> Iterator[None]:
    """Use a default device inside, as a block, which may be in another: `torch.set_default_device` would end that."""
    with torch.device(device) if device not in (None, _read_device()) else contextlib.nullcontext():
        yield


def _without_device(wanted: Environment) -> Environment:
    return with_setting(wanted, _read_device, None)


def _threads_flush() -> bool:
    return bool((torch.full((_PROBE,), _SMALLEST, dtype=torch.float64) * 1.0 == 0).any())


def seed_generators(seed: int) -> None:
    """Seed the random generators of torch (every device's that is in use), NumPy and Python."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if _devices():
        torch.cuda.manual_seed_all(seed)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the states of the random generators after the block."""
    python, numpy, devices = random.getstate(), np.random.get_state(), {}
    with contextlib.suppress(RuntimeError):  # a kernel has lost the device, and what it had is gone
        devices = {device: torch.cuda.get_rng_state(device) for device in _devices()}
    with torch.random.fork_rng(()):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            with contextlib.suppress(RuntimeError):
                for device, state in devices.items():
                    torch.cuda.set_rng_state(state, device)


def _devices() -> range:
    """Return the devices in use. A process without any must not initialise one, since it could not be forked then."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={part}" for name, part in sorted(value.items()))
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value)
