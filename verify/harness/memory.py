"""Fresh memory: what a kernel finds in tensors that it allocates and does not fill.

`PoisonedMemory` intercepts allocation inside a call, and inside the operators of libraries that it calls: every
uninitialised tensor is filled with NaN or with 2^100 and lies between guard zones. `litter` merely leaves such values
in memory that the allocator is about to hand out again, and so costs nothing and reaches compiled code too.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from assay.formats.format import format_named
from assay.golden.inputs.values import torch_dtype
from assay.runtime.dispatch import ALLOCATIONS, AllocationMode
from assay.verify.cases.case import Case

_GUARD = 32
_MARK = 0xA5


def poison_value(memory: str, dtype: torch.dtype) -> float:
    """What fresh memory holds: NaN or 2^100 (the largest value where that is less); 0 or 1 for integers.

    Integers stay small because an index out of all bounds would take the process down instead of being seen.
    """
    if not dtype.is_floating_point:
        return 0.0 if memory == "nan" else 1.0
    return math.nan if memory == "nan" else min(2.0**100, format_named(dtype).largest)


class PoisonedMemory(AllocationMode):
    """Inside it, uninitialised tensors hold ``poison_value(memory, dtype)`` and lie between guard zones."""

    def __init__(self, memory: str) -> None:
        super().__init__()
        self.memory = memory
        self._guarded: list[torch.Tensor] = []

    def called(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        """A fresh tensor is poisoned."""
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
