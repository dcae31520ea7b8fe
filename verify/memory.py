"""Fresh memory: what a kernel finds in tensors that it allocates and does not fill.

`PoisonedMemory` intercepts allocation inside a call, and inside the operators of libraries that it calls: every
uninitialised tensor is filled with NaN or with 2^100 and lies between guard zones. `litter` merely leaves such values
in memory that the allocator is about to hand out again, and so costs nothing and reaches compiled code too.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from assay.golden.inputs.values import torch_dtype
from assay.precision.formats import format_named
from assay.verify.inputs.cases import Case

_GUARD = 32
_MARK = 0xA5

_TORCHS_OWN = ("aten", "prim", "prims", "inductor", "profiler", "c10d", "higher_order")

_aten = torch.ops.aten
ALLOCATIONS = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.empty_permuted.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)


def poison_value(memory: str, dtype: torch.dtype) -> float:
    """What fresh memory holds: NaN or 2^100 (the largest value where that is less); 0 or 1 for integers.

    Integers stay small because an index out of all bounds would take the process down instead of being seen.
    """
    if not dtype.is_floating_point:
        return 0.0 if memory == "nan" else 1.0
    return math.nan if memory == "nan" else min(2.0**100, format_named(dtype).largest)


class PoisonedMemory(TorchDispatchMode):
    """Inside it, uninitialised tensors hold ``poison_value(memory, dtype)`` and lie between guard zones."""

    def __init__(self, memory: str) -> None:
        super().__init__()
        warm_up()
        self.memory = memory
        self._guarded: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keys = operator_keys(func, args)
        if keys is not None:  # torch turns the mode off while an operator runs, whose allocations are the point
            with self:
                return func.redispatch(keys, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func not in ALLOCATIONS or result.layout != torch.strided or result.device.type == "meta":
            return result
        return self._poisoned(result)

    def _poisoned(self, tensor: torch.Tensor) -> torch.Tensor:
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span = span if tensor.numel() else 0
        buffer = torch.empty(span + 2 * _GUARD, dtype=tensor.dtype, device=tensor.device)
        buffer.view(torch.uint8).fill_(_MARK)
        self._guarded.append(buffer)
        inner = buffer[_GUARD : _GUARD + span]
        _fill(inner, poison_value(self.memory, tensor.dtype))
        return buffer.as_strided(tensor.shape, tensor.stride(), _GUARD)

    def overrun(self) -> bool:
        """Whether something was written into a guard zone."""
        zones = (part for buffer in self._guarded for part in (buffer[:_GUARD], buffer[-_GUARD:]))
        return any(bool((zone.view(torch.uint8) != _MARK).any()) for zone in zones)


@cache
def warm_up() -> None:
    """Have torch import what its first dispatch mode needs, some seconds' worth, outside of a kernel's time limit."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.empty(0)


def operator_keys(func: Any, args: Any) -> Any:
    """The dispatch keys of an operator's kernel for the device of its tensors; None for torch's own operators."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in _TORCHS_OWN:
        return None
    tensors = [arg for arg in tree_leaves(args) if isinstance(arg, torch.Tensor)]
    key = torch._C._dispatch_key_for_device(tensors[0].device.type if tensors else "cpu")
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), key):
        return None
    return torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))


def _fill(tensor: torch.Tensor, value: float) -> None:
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        tensor.copy_(torch.full(tensor.shape, value, dtype=torch.float32).to(tensor.dtype))
    else:
        tensor.fill_(value if tensor.dtype.is_floating_point or tensor.dtype.is_complex else int(value))


def litter(case: Case) -> None:
    """Free tensors of the results' sizes that are full of NaN."""
    dirt = []
    for tensor, name in zip(case.signature.returns, case.result_dtypes, strict=True):
        dtype = torch_dtype(name)
        if dtype.is_floating_point and dtype.itemsize > 1:
            dirt.append(torch.full(case.shape(tensor), math.nan, dtype=dtype))
    del dirt
