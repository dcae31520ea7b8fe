"""Orthogonal polynomials of a known degree, by their recurrences, which kernels use too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from assay.golden.lowering.evaluation import Evaluation
from assay.golden.lowering.table import constant, rule

Tensor = torch.Tensor

_FIRST: dict[str, tuple[Callable[[Any], Any], Callable[[int, Any, Any, Any], Any]]] = {
    "chebyshev_polynomial_t": (lambda x: x, lambda n, x, p, q: x * p * 2.0 - q),
    "chebyshev_polynomial_u": (lambda x: x * 2.0, lambda n, x, p, q: x * p * 2.0 - q),
    "chebyshev_polynomial_v": (lambda x: x * 2.0 - 1.0, lambda n, x, p, q: x * p * 2.0 - q),
    "chebyshev_polynomial_w": (lambda x: x * 2.0 + 1.0, lambda n, x, p, q: x * p * 2.0 - q),
    "hermite_polynomial_h": (lambda x: x * 2.0, lambda n, x, p, q: (x * p - q * float(n)) * 2.0),
    "hermite_polynomial_he": (lambda x: x, lambda n, x, p, q: x * p - q * float(n)),
    "laguerre_polynomial_l": (
        lambda x: 1.0 - x,
        lambda n, x, p, q: ((2.0 * n + 1.0 - x) * p - q * float(n)) / float(n + 1),
    ),
    "legendre_polynomial_p": (lambda x: x, lambda n, x, p, q: (x * p * (2.0 * n + 1) - q * float(n)) / float(n + 1)),
}
"""The polynomial of degree one, and that of degree n + 1 from those of n and n - 1."""


def _degree(evaluation: Evaluation, n: Any) -> Tensor:
    return evaluation.known(n).to(torch.int64) if isinstance(n, Tensor) else torch.tensor(int(n))


def _register(name: str, own: str, shifted: bool) -> None:
    @rule(f"special_{name} special_{name}.n_scalar special_{name}.x_scalar")
    def computed(evaluation: Evaluation, x: Any, n: Any) -> Tensor:
        first, following = _FIRST[own]
        xp, degrees = evaluation.xp, _degree(evaluation, n)
        number = evaluation.number(x) if isinstance(x, Tensor) else constant(xp, x)
        if shifted:
            number = number * 2.0 - 1.0
        dtype = x.dtype if isinstance(x, Tensor) and x.is_floating_point() else torch.get_default_dtype()
        zero = number * 0.0
        before, now = zero + 1.0, first(number)
        found = xp.chosen(degrees < 0, zero, before)
        for degree in range(1, max(int(degrees.max()) if degrees.numel() else 0, 0) + 1):
            found = xp.chosen(degrees == degree, now, found)
            before, now = now, following(degree, number, now, before)
        return evaluation.made(found, dtype)


for _name in _FIRST:
    _register(_name, _name, False)
    if _name.startswith("chebyshev"):
        _register(f"shifted_{_name}", _name, True)
