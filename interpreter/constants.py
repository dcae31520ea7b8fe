"""Constants of Triton's language beside tensors: an operator of both is the tensor's, on whichever side each stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import triton.language as tl

_OPERATORS = (
    "add", "sub", "mul", "mod", "truediv", "floordiv", "gt", "ge", "lt", "le", "eq", "ne", "and", "or", "xor",
    "rshift", "lshift", "radd", "rsub", "rmul", "rtruediv", "rfloordiv",
)  # fmt: skip


def constant_operators() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Each operator of `tl.constexpr`, as (class, name, operator to be used instead).

    Triton's compiles to the tensor's reflected operator (`CodeGenerator._apply_binary_method`); as Python it would wrap
    the tensor that it gives into a constant.
    """
    for name in (f"__{operator}__" for operator in _OPERATORS):
        if name in vars(tl.constexpr):
            yield tl.constexpr, name, _deferring(vars(tl.constexpr)[name])


def _deferring(operator: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(operator)
    def deferred(self: Any, other: Any) -> Any:
        return NotImplemented if isinstance(other, tl.tensor) else operator(self, other)

    return deferred
