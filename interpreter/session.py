"""`faithful`: inside it, launching a Triton kernel interprets it. Triton is imported only then."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from assay.interpreter.cuda_devices import USUAL, cuda_device_named
from assay.interpreter.emission import Emission, emission_named, name_of
from assay.interpreter.pretence import pretend_cuda
from assay.runtime.errors import SettingError

if TYPE_CHECKING:
    import torch

    from assay.interpreter.sanitizer import Sanitizer

KNOWN_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
"""The versions of Triton in which every self-test has been seen to hold."""


class UnknownTriton(UserWarning):
    """This version of Triton has not been tried; the message says which self-tests hold in it and which don't."""


@contextlib.contextmanager
def faithful(
    device: str | None = None, *, sanitize: bool = False, pretend: str = "", emission: Emission | str | None = None
) -> Iterator[None]:
    """Inside it, every Triton kernel that is launched runs in the interpreter, with the right numbers.

    No environment variable is needed, and no GPU; an autotuned kernel runs in one of its configurations, chosen by its
    key. With ``device``, one of ``configs/tensor_cores.toml`` such as "h200", dots lose what that device's tensor cores
    lose; without, they are summed in float32. ``sanitize`` is `sanitized`. ``pretend="cuda"`` is `pretend_cuda`: "cuda"
    answers, as ``device`` or "h200", and is the CPU; the name of a device makes that one answer. With ``emission``,
    such as `NVIDIA` or "nvidia", products and sums are contracted, subnormals flushed and functions approximate, as a
    compiler has them. May be nested; what an inner one leaves out stays as it is outside. Warns of `UnknownTriton` in a
    version other than `KNOWN_VERSIONS`. Raises `SettingError` for an unknown device or emission and ImportError where
    Triton is not installed.
    """
    world = pretend_cuda(device_to_pretend(pretend, device)) if pretend else contextlib.nullcontext()
    emission = emission_named(emission) if isinstance(emission, str) else emission
    inner = sanitized(device=device, emission=emission) if sanitize else _interpreting(device, None, emission)
    with world, inner:
        yield


@contextlib.contextmanager
def sanitized(
    tensors: Iterable[torch.Tensor] = (),
    *,
    device: str | None = None,
    allocations: bool = True,
    emission: Emission | None = None,
) -> Iterator[Sanitizer]:
    """`faithful`, with every access of a kernel to memory checked; a finding is raised as `SanitizerError`.

    Loads and stores must stay within the storage of the argument that their pointer comes from, or, of ``tensors``,
    within the tensor; what is loaded must have been written, if a tensor came about inside (by torch.empty and the
    like, which ``allocations`` watches for); and no two programs of a launch may access one element, one of them to
    change it, unless atomics order or make these accesses. What is given has the attributes ``finding`` (the first
    `SanitizerError`, or None) and ``launches``.
    """
    from assay.interpreter.sanitizer import Sanitizer

    sanitizer = Sanitizer(tensors)
    with _interpreting(device, sanitizer, emission), sanitizer.allocations if allocations else contextlib.nullcontext():
        yield sanitizer


class Watch:
    """Sanitizes the calls of one kernel, whatever it is.

    Allocations are watched by a dispatch mode of torch, which keeps compilers of torch's operators from their work: so
    only from the call on that follows the first launch of a Triton kernel; ``launches`` says whether there was one.
    """

    def __init__(self) -> None:
        self.launches = False
        self._can_allocate = True

    @contextlib.contextmanager
    def interpreting(self, tensors: Iterable[torch.Tensor], emission: Emission | None = None) -> Iterator[Sanitizer]:
        """One call, in the interpreter; ``tensors`` are what is given to the kernel."""
        with sanitized(tensors, allocations=False, emission=emission) as sanitizer:
            try:
                yield sanitizer
            finally:
                self.launches |= sanitizer.launches > 0

    def allocating(self, sanitizer: Sanitizer | None) -> contextlib.AbstractContextManager[object]:
        """The part of a call in which allocations are watched, if they are."""
        return sanitizer.allocations if sanitizer and self.allocates else contextlib.nullcontext()

    @property
    def allocates(self) -> bool:
        """Whether allocations are watched."""
        return self.launches and self._can_allocate

    def give_up_allocations(self) -> None:
        """The kernel can't run under a dispatch mode."""
        self._can_allocate = False


@contextlib.contextmanager
def _interpreting(device: str | None, sanitizer: Sanitizer | None, emission: Emission | None = None) -> Iterator[None]:
    from assay.interpreter.devices import device_named
    from assay.interpreter.kernels import builder
    from assay.interpreter.launch import launches

    emulated = None if device is None else device_named(device)
    with launches, builder.settings(emulated, sanitizer, emission):
        _vouch()
        yield


@contextlib.contextmanager
def emulating(device: str, pretend: str = "", emission: str = "") -> Iterator[None]:
    """`faithful(device, emission=...)` and `pretend_cuda`, where they are named. Raises as `check_emulated` does."""
    check_emulated(device, pretend, emission)
    with (
        pretend_cuda(device_to_pretend(pretend, device)) if pretend else contextlib.nullcontext(),
        faithful(device or None, emission=emission or None) if device or emission else contextlib.nullcontext(),
    ):
        yield


def device_to_pretend(pretend: str, device: str | None = None) -> str:
    """The device that ``pretend`` means, in lower case: "cuda" is the emulated ``device``, or "h200"."""
    return (device or USUAL if pretend == "cuda" else pretend).lower()


def check_emulated(device: str, pretend: str = "", emission: str = "") -> None:
    """Raise `SettingError` where the interpreter can't emulate ``device`` or ``emission``, pretend a device, or run."""
    from assay.interpreter.devices import device_named

    if pretend:
        cuda_device_named(device_to_pretend(pretend, device))
    if device:
        device_named(device)
    emission_named(emission)
    if (device or emission) and importlib.util.find_spec("triton") is None:
        what = f"faithful={device!r}" if device else f"emission={emission!r}"
        raise SettingError(f"{what} needs Triton, which is not installed: pip install triton")


def emulated_device() -> str:
    """The device whose tensor cores are emulated here and now; empty where none is."""
    kernels = sys.modules.get("assay.interpreter.kernels")  # unless Triton kernels were interpreted, there is none
    device = kernels.builder.device if kernels else None
    return device.name if device else ""


def emulated_emission() -> str:
    """The name of what a compiler makes of kernels' arithmetic here and now; empty where nothing."""
    kernels = sys.modules.get("assay.interpreter.kernels")
    return name_of(kernels.builder.emission) if kernels else ""


def triton_is_loaded() -> bool:
    """Whether anything has imported Triton, as a kernel that is built with it has."""
    return "triton.runtime" in sys.modules


@cache
def _vouch() -> None:
    """Warn, once, where nobody has tried this version of Triton."""
    import triton

    if not triton.__version__.startswith(tuple(f"{known}." for known in KNOWN_VERSIONS)):
        from assay.interpreter.checks import self_test

        results = self_test()
        failed = [f"{claim} ({reason})" for claim, reason in results.items() if reason]
        warnings.warn(
            f"Triton {triton.__version__} is unknown here (known: {', '.join(KNOWN_VERSIONS)}); of the interpreter's "
            f"{len(results)} self-tests {len(results) - len(failed)} hold, and nothing is vouched for beyond them"
            + (f"; wrong: {'; '.join(failed)}" if failed else ""),
            UnknownTriton,
            stacklevel=4,
        )
