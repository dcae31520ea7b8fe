"""Elementary functions, element by element.

Values at the infinities are limits (softplus(-inf) = 0; sin has none, and is NaN there), outside of a function's domain
they are NaN, at its poles infinite: log(0) = -inf, and 1/x and 1/sqrt(x) keep the sign of a zero, as IEEE 754 has it.
"""

from __future__ import annotations

from typing import Any

from assay.golden.registry import define

FUNCTIONS = (
    "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "erf", "sigmoid", "softplus", "sqrt", "rsqrt", "reciprocal",
    "sin", "cos",
)  # fmt: skip


def _elementary(name: str) -> Any:
    def definition(xp: Any, x: Any) -> Any:
        return xp.function(name, x)

    definition.__name__ = name
    return definition


for _name in FUNCTIONS:
    define(_name, "x[R,N] -> y[R,N]", rows="R", elementwise=True)(_elementary(_name))
