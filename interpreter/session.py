"""`faithful`: inside it, every launch of a Triton kernel is interpreted. Triton is imported only then."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from assay.interpreter.assignment import Assignment
from assay.interpreter.fake_cuda.world import pretend_cuda
from assay.interpreter.numerics.emission import Emission, emission_named, name_of
from assay.runtime.errors import SettingError

if TYPE_CHECKING:
    import torch

    from assay.interpreter.sanitizer import Sanitizer

KNOWN_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
"""Versions of Triton in which all self-tests pass."""


class UnknownTriton(UserWarning):
    """The installed version of Triton has not been tested; the message lists the self-tests that fail in it."""


@contextlib.contextmanager
def faithful(
    device: str | None = None, *, sanitize: bool = False, pretend: str = "", emission: Emission | str | None = None
) -> Iterator[None]:
    """Interpret every Triton kernel that is launched inside, with the numbers of an NVIDIA GPU.

    Needs no environment variable and no GPU. An autotuned kernel runs in one configuration, chosen by its tuning key.

    device: a device of ``configs/devices.toml`` such as "h200", whose tensor cores dots then emulate; by default dots
    are summed in float32. sanitize: check memory accesses, as `sanitized`. pretend: "cuda" emulates a CUDA device on
    the CPU (`pretend_cuda`), ``device`` or "h200"; the name of a device emulates that one. emission: a compiler's
    arithmetic choices, such as `NVIDIA` or "nvidia": contraction, flushed subnormals, approximate functions.

    May be nested; options left out keep their outer values. Warns of `UnknownTriton` for a version other than
    `KNOWN_VERSIONS`. Raises `SettingError` for an unknown device or emission, ImportError if Triton is not installed.
    """
    emulated = pretend_cuda(device_to_pretend(pretend, device)) if pretend else contextlib.nullcontext()
    emission = emission_named(emission) if isinstance(emission, str) else emission
    interpreted = sanitized(device=device, emission=emission) if sanitize else _interpreting(device, None, emission)
    with emulated, interpreted:
        yield


@contextlib.contextmanager
def sanitized(
    tensors: Iterable[torch.Tensor] = (),
    *,
    device: str | None = None,
    allocations: bool = True,
    emission: Emission | None = None,
    unloaded: str = "plain",
) -> Iterator[Sanitizer]:
    """`faithful`, with every memory access of a kernel checked; a finding is raised as `SanitizerError`.

    Loads and stores must stay within the storage of the argument that their pointer was derived from, and for
    ``tensors`` within the tensor. Elements of tensors allocated inside (torch.empty and the like; with ``allocations``)
    must be written before they are loaded. Two programs of a launch may access one element, with at least one changing
    it, only if atomics order or perform these accesses. Lanes that a load leaves without a value (a false mask, and no
    ``other``) hold zero, or NaN and large numbers with ``unloaded`` "nan" or "huge". The context's value has the
    attributes ``finding`` (the first `SanitizerError`, or None) and ``launches``.
    """
    from assay.interpreter.sanitizer import Sanitizer

    sanitizer = Sanitizer(tensors, unloaded)
    with _interpreting(device, sanitizer, emission), sanitizer.allocations if allocations else contextlib.nullcontext():
        yield sanitizer


class Watch:
    """Sanitizes the calls of one kernel of any kind.

    Allocations are watched by a dispatch mode of torch, which disables `torch.compile`. So they are watched only after
    the first call that has launched a Triton kernel; ``launches`` says whether one has. ``contended`` names the source
    lines of the last call whose atomics depend on the order of programs, ``unloaded`` those of the last call with
    poisoned lanes whose loads leave some undefined. ``programs`` are those of the last call's launches, not all of
    which ran if ``sampled``.
    """

    def __init__(self) -> None:
        self.launches = self.sampled = False
        self.programs = 0
        self.contended = self.unloaded = ""
        self._can_allocate = True

    @contextlib.contextmanager
    def interpreting(
        self, tensors: Iterable[torch.Tensor], emission: Emission | None = None, unloaded: str = "plain"
    ) -> Iterator[Sanitizer]:
        """Interpret and sanitize one call inside; ``tensors`` are the kernel's arguments."""
        from assay.interpreter.sanitizer import contended_lines

        with sanitized(tensors, allocations=False, emission=emission, unloaded=unloaded) as sanitizer:
            try:
                yield sanitizer
            finally:
                self.launches |= sanitizer.launches > 0
                self.sampled, self.programs = sanitizer.samples is not None, sanitizer.programs
                self.contended = contended_lines(sanitizer.contended.values())
                self.unloaded = ", ".join(sanitizer.unloaded_lines) or self.unloaded

    def allocating(self, sanitizer: Sanitizer | None) -> contextlib.AbstractContextManager[object]:
        """Return a context that watches allocations, if they are watched."""
        return sanitizer.allocations if sanitizer and self.allocates else contextlib.nullcontext()

    @property
    def allocates(self) -> bool:
        return self.launches and self._can_allocate

    def give_up_allocations(self) -> None:
        """Watch no allocations: the kernel can't run under a dispatch mode."""
        self._can_allocate = False


@contextlib.contextmanager
def _interpreting(device: str | None, sanitizer: Sanitizer | None, emission: Emission | None = None) -> Iterator[None]:
    from assay.formats.devices import tensor_cores_named
    from assay.interpreter.kernels import builder
    from assay.interpreter.launch import launches

    emulated = None if device is None else tensor_cores_named(device)
    with launches, builder.settings(emulated, sanitizer, emission):
        _check_version()
        yield


@contextlib.contextmanager
def emulating(device: str, pretend: str = "", emission: str = "") -> Iterator[None]:
    """`faithful(device, emission=...)` and `pretend_cuda`, each if named. Raises as `check_emulated` does."""
    check_emulated(device, pretend, emission)
    with (
        pretend_cuda(device_to_pretend(pretend, device)) if pretend else contextlib.nullcontext(),
        faithful(device or None, emission=emission or None) if device or emission else contextlib.nullcontext(),
    ):
        yield


def device_to_pretend(pretend: str, device: str | None = None) -> str:
    """Return the device that ``pretend`` means, in lower case: "cuda" is ``device``, or "h200"."""
    from assay.formats.devices import DEFAULT_CUDA_DEVICE  # loads torch

    return (device or DEFAULT_CUDA_DEVICE if pretend == "cuda" else pretend).lower()


def check_emulated(device: str, pretend: str = "", emission: str = "") -> None:
    """Raise `SettingError` if ``device``, ``pretend`` or ``emission`` is unknown, or Triton is needed and missing."""
    from assay.formats.devices import cuda_device_named, tensor_cores_named

    if pretend:
        cuda_device_named(device_to_pretend(pretend, device))
    if device:
        tensor_cores_named(device)
    emission_named(emission)
    if (device or emission) and importlib.util.find_spec("triton") is None:
        what = f"faithful={device!r}" if device else f"emission={emission!r}"
        raise SettingError(f"{what} needs Triton, which is not installed: pip install triton")


def emulated_device() -> str:
    """Return the device whose tensor cores are emulated now, or ""."""
    kernels = sys.modules.get("assay.interpreter.kernels")  # absent until a Triton kernel is interpreted
    device = kernels.builder.device if kernels else None
    return device.name if device else ""


def emulated_emission() -> str:
    """Return the name of the emission in force, or ""."""
    kernels = sys.modules.get("assay.interpreter.kernels")
    return name_of(kernels.builder.emission) if kernels else ""


@contextlib.contextmanager
def assigned(assignment: Assignment) -> Iterator[None]:
    """Inside, launches that an autotuner would time run on the device in the configurations that are assigned."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from assay.interpreter.launch import tuning

    with tuning, assignment.current():
        yield


def triton_is_loaded() -> bool:
    """Return whether Triton has been imported."""
    return "triton.runtime" in sys.modules


@cache
def _check_version() -> None:
    """Warn once of a version of Triton that has not been tested."""
    import triton

    if not triton.__version__.startswith(tuple(f"{known}." for known in KNOWN_VERSIONS)):
        from assay.interpreter.self_test import self_test

        results = self_test()
        failed = [f"{claim} ({reason})" for claim, reason in results.items() if reason]
        warnings.warn(
            f"Triton {triton.__version__} is unknown here (known: {', '.join(KNOWN_VERSIONS)}); of the interpreter's "
            f"{len(results)} self-tests {len(results) - len(failed)} hold, and nothing is vouched for beyond them"
            + (f"; wrong: {'; '.join(failed)}" if failed else ""),
            UnknownTriton,
            stacklevel=4,
        )
