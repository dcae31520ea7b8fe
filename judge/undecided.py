"""Integers of a reference that a tie or a rounding leaves open: those that change when it rounds a little otherwise.

Eager PyTorch's index of a largest number says which of two numbers is larger by its own rounding; in another order of
sums it is the other one. So the reference runs with every result that was rounded moved by about as much as rounding
may, and with ties broken by chance where PyTorch doesn't say who wins. What is exact, as float64 tells, isn't moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

Tensor = torch.Tensor
_DRAWS = 32
_ROUNDINGS = 4.0  # unit roundoffs by which a result is moved, of its terms' absolute values where it is a sum
_LEAST = 2.0**-160  # below all formats' numbers
_TIED = ("topk", "sort", "max", "min", "kthvalue", "median", "nanmedian", "mode")
"""Of equal numbers these may take any; argmax and argmin take the first."""
_SUMS = (
    "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "addbmm", "convolution", "sum", "mean", "cumsum", "nansum",
    "_scaled_mm", "native_layer_norm", "add", "sub", "rsub", "addcmul",
)  # fmt: skip


def left_open(results: Callable[[], Sequence[Tensor]], expected: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """For each result, where it is other than ``expected`` when the reference rounds otherwise: bool, its shape."""
    entries = [torch.zeros(part.shape, dtype=torch.bool) for part in expected]
    for draw in range(_DRAWS):
        with torch.no_grad(), _Disturbed(seed + draw):
            parts = results()
        for mask, part, right in zip(entries, parts, expected, strict=True):
            if part.shape == right.shape:
                mask |= part != right
    return entries


class _Disturbed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, what is rounded is rounded otherwise."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a mode is kept from being compiled by importing the compiler: seconds, where nobody else did

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__.rstrip("_")
        if name in _TIED and _is_rounded(args[0]) and not kwargs.get("stable") and len(args) + len(kwargs) > 1:
            x = args[0].double()
            apart = self._noise(x, x.abs().clamp(min=_LEAST) * 2.0**20)  # little beside what the dtype tells apart
            results = func(x + apart, *args[1:], **kwargs)
            return tree_map(lambda part: part.to(args[0].dtype) if _is_rounded(part) else part, results)
        if not any(_is_rounded(part) for part in args) or _is_view(func):
            return func(*args, **kwargs)
        exact, size = _wide(func, args, kwargs, name in _SUMS)
        result = func(*args, **kwargs)
        if not _is_rounded(result) or exact is None or exact.shape != result.shape:
            return result
        noise = torch.where(exact == result.double(), 0.0, self._noise(result, size))
        moved = (result + noise).to(result.dtype)
        return result.copy_(moved) if func._schema.is_mutable else moved

    def _noise(self, x: Tensor, size: Tensor) -> Tensor:
        chance = torch.rand(x.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return (_ROUNDINGS * torch.finfo(x.dtype).eps * chance * size).to(x.dtype)


def _wide(func: Any, args: Any, kwargs: Any, is_sum: bool) -> tuple[Tensor | None, Tensor]:
    """The result in float64, and that of the arguments' absolute values where it is a sum; None where there is none."""
    try:
        exact = func(*tree_map(_double, args), **kwargs)
        if not isinstance(exact, Tensor) or exact.dtype != torch.float64:
            return None, torch.empty(0)
        size = func(*tree_map(lambda part: _abs(_double(part)), args), **kwargs) if is_sum else exact
    except (RuntimeError, TypeError, ValueError):
        return None, torch.empty(0)
    return exact, size.abs()


def _is_rounded(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.device.type == "cpu"


def _is_view(func: Any) -> bool:
    """Whether an operation gives a part of its argument's memory, and doesn't write to it."""
    returns = func._schema.returns
    return any(part.alias_info is not None for part in returns) and not func._schema.is_mutable


def _double(value: Any) -> Any:
    return value.double().clone() if _is_rounded(value) else value


def _abs(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value
