"""Parts of torch beside tensors and `torch.cuda` that take a device: autocast, generators, operators, and others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.library import Library
from torch.testing._comparison import TensorLikePair

from assay.interpreter.places import is_cuda, real
from assay.interpreter.pretended_tensors import DEVICE
from assay.interpreter.replacing import Change

_ON_CPU = {"CUDA": "CPU", "AutogradCUDA": "AutogradCPU", "AutocastCUDA": "AutocastCPU"}

_TORCHS_OWN = ("_", "inductor", "prims", "symm_mem", "fsdp", "c10d")
"""How namespaces of operators begin that torch fills itself when it is loaded."""


def changes() -> list[Change]:
    """What is replaced."""
    autocast: Any = torch.autocast
    return [
        (torch, "Generator", Generator),
        (autocast, "__enter__", _entered(autocast.__enter__)),
        (autocast, "__exit__", _left(autocast.__exit__)),
        (Library, "impl", _on_cpu_too(Library.impl)),
        (torch, "load", _loaded(torch.load)),
        (torch, "get_device_module", _device_module(torch.get_device_module)),
        (TensorLikePair, "_compare_attributes", _without_device(TensorLikePair._compare_attributes)),
    ]


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Inside it, what `torch.compile` made runs as it was written: there is no GPU to compile it for."""
    from torch._dynamo import trace_rules

    table: Any = trace_rules.get_torch_obj_rule_map
    before = table() if table.cache_info().currsize else None
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if table.cache_info().currsize and table() is not before:  # it is about functions that are put back now
            trace_rules.clear_lru_cache()


class _OfAnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_OfAnyGenerator):
    """`torch.Generator`, which draws on the CPU whatever its device is said to be."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, device=real(device))  # type: ignore[call-arg]
        made.__dict__["asked"] = DEVICE if is_cuda(device) else torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that was asked for."""
        return self.__dict__["asked"]


def _entered(original: Callable[..., Any]) -> Callable[..., Any]:
    """``with torch.autocast("cuda")`` casts what is on the CPU, and says that it does so for CUDA."""

    @functools.wraps(original)
    def enter(self: Any) -> Any:
        result = original(self)
        if self.device == "cuda":
            inner = torch.autocast(
                "cpu", dtype=self.fast_dtype, enabled=self._enabled, cache_enabled=self._cache_enabled
            )
            original(inner)
            self.__dict__.setdefault("_assay_inner", []).append(inner)
        return result

    return enter


def _left(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def leave(self: Any, *error: Any) -> Any:
        if self.__dict__.get("_assay_inner"):
            original(self._assay_inner.pop(), *error)
        return original(self, *error)

    return leave


def _on_cpu_too(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Library.impl`: what an operator does on CUDA it does on the CPU, where the tensors are."""

    @functools.wraps(original)
    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> Any:
        key = dispatch_key or self.dispatch_key
        name = str(getattr(op_name, "_name", op_name)).rpartition("::")[2]
        taken = self.__dict__.setdefault("_assay_on_cpu", set())
        if (name, key) in taken:  # that of CUDA is the one that runs
            return None
        result = original(self, op_name, fn, dispatch_key, **kwargs)
        if key in _ON_CPU and not self.ns.startswith(_TORCHS_OWN):
            taken.add((name, _ON_CPU[key]))
            original(self, op_name, fn, _ON_CPU[key], **kwargs)
        return result

    return impl


def _loaded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, (str, torch.device)):
            map_location = real(map_location)
        return original(f, "cpu" if map_location is None else map_location, *args, **kwargs)

    return load


def _device_module(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_device_module(device: Any = None) -> Any:
        return torch.cuda if device is None or is_cuda(device) else original(device)

    return get_device_module


def _without_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.testing.assert_close`, which else compares where two tensors are said to lie."""

    @functools.wraps(original)
    def compare(self: Any, *args: Any) -> None:
        before, self.check_device = self.check_device, False
        try:
            original(self, *args)
        finally:
            self.check_device = before

    return compare
