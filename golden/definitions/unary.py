"""Elementary functions, element by element.

Values at the infinities are limits (softplus(-inf) = 0; sin has none, and is NaN there), outside of a function's domain
they are NaN, at its poles infinite: log(0) = -inf, and 1/x and 1/sqrt(x) keep the sign of a zero, as IEEE 754 has it.
"""

from __future__ import annotations

from collections.abc import Callable

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.registry import define

FUNCTIONS = (
    "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "erf", "sigmoid", "softplus", "sqrt", "rsqrt", "reciprocal",
    "sin", "cos",
)  # fmt: skip


def _elementary(name: str) -> Callable[[Arithmetic[N], N], N]:
    def definition(xp: Arithmetic[N], x: N) -> N:
        return xp.function(name, x)

    definition.__name__ = name
    return definition


_OVERFLOWING = ("exp", "exp2", "expm1")
_LIMITLESS = ("log", "log2", "log1p", "sqrt", "softplus", "rsqrt", "reciprocal", "sin", "cos")  # unlike exp and tanh
_NEVER_SUBNORMAL = ("cos", "sigmoid", "softplus", "log", "log2", "rsqrt", "sqrt")

for _name in FUNCTIONS:
    define(
        _name,
        "x[R,N] -> y[R,N]",
        rows="R",
        elementwise=True,
        faults=("saturating_store",) * (_name in _OVERFLOWING) + ("infinity_read_as_largest",) * (_name in _LIMITLESS),
        exempt=("flushed_subnormals",) * (_name in _NEVER_SUBNORMAL),
    )(_elementary(_name))
