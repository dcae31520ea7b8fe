"""Special functions, which Arb encloses one number at a time; and what only known numbers have: unique ones, modes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from assay.golden.lowering.evaluation import Evaluation
from assay.golden.lowering.table import constant, promoted, rule

Tensor = torch.Tensor
Function = Callable[..., Any]  # of numbers of Arb


def _polygamma(n: int) -> Function:
    """(-1)^(n+1) n! zeta(n + 1, x); digamma of zero. Below zero the terms up to the first positive one are added."""
    if n == 0:
        return lambda x: x.digamma()
    factor = (-1) ** (n + 1) * math.factorial(n)

    def polygamma(x: Any) -> Any:
        below = max(0, math.ceil(-float(x.mid()))) if x.is_finite() else 0
        if below > _MOST_TERMS:
            return x * math.nan
        terms = sum(((x + place) ** -(n + 1) for place in range(below)), x * 0)
        return ((x * 0 + n + 1).zeta(x + below) + terms) * factor

    return polygamma


_MOST_TERMS = 10_000


def _spherical(x: Any) -> Any:
    return x.sin() / x if not x.contains(0) else x.sinc()


def _zeta(x: Any, q: Any) -> Any:
    """Hurwitz's zeta function where its series has a sum; infinite at its poles, and NaN elsewhere, as PyTorch's."""
    if not x > 1:
        return x * 0 + math.inf if x == 1 else x * math.nan
    if q > 0:
        return x.zeta(q)
    return x * 0 + math.inf if q == q.floor() else x.zeta(q) if x == x.floor() else x * math.nan


_FUNCTIONS: dict[str, Function] = {
    "i0": lambda x: x.bessel_i(0),
    "special_i0e": lambda x: x.bessel_i(0) * (-abs(x)).exp(),
    "special_i1": lambda x: x.bessel_i(1),
    "special_i1e": lambda x: x.bessel_i(1) * (-abs(x)).exp(),
    "special_modified_bessel_i0": lambda x: x.bessel_i(0),
    "special_modified_bessel_i1": lambda x: x.bessel_i(1),
    "special_modified_bessel_k0": lambda x: x.bessel_k(0),
    "special_modified_bessel_k1": lambda x: x.bessel_k(1),
    "special_scaled_modified_bessel_k0": lambda x: x.bessel_k(0) * x.exp(),
    "special_scaled_modified_bessel_k1": lambda x: x.bessel_k(1) * x.exp(),
    "special_bessel_j0": lambda x: x.bessel_j(0),
    "special_bessel_j1": lambda x: x.bessel_j(1),
    "special_bessel_y0": lambda x: x.bessel_y(0),
    "special_bessel_y1": lambda x: x.bessel_y(1),
    "special_spherical_bessel_j0": _spherical,
    "special_airy_ai": lambda x: x.airy_ai(),
    "special_erfcx": lambda x: (x * x).exp() * x.erfc(),
    "special_ndtri": lambda x: (2 * x - 1).erfinv() * (x * 0 + 2).sqrt(),
    "special_log_ndtr": lambda x: ((-x / (x * 0 + 2).sqrt()).erfc() / 2).log(),
    "special_zeta": _zeta,
    "igamma": lambda a, x: x.gamma_lower(a, regularized=1) if a >= 0 and x >= 0 else a * math.nan,
    "igammac": lambda a, x: x.gamma_upper(a, regularized=1) if a >= 0 and x >= 0 else a * math.nan,
}


def _register(name: str, function: Function) -> None:
    eager = getattr(torch.ops.aten, name)

    @rule(f"{name} {name}.self_scalar {name}.other_scalar")
    def computed(evaluation: Evaluation, *args: Any) -> Tensor:
        return _special(evaluation, function, eager, args)


def _special(evaluation: Evaluation, function: Function, eager: Function, args: Any) -> Tensor:
    """The function where Arb has a number; NaN or infinite where PyTorch says so, beyond the domain and at poles."""
    xp = evaluation.xp
    shape = torch.broadcast_shapes(*(arg.shape for arg in args if isinstance(arg, Tensor)))  # type: ignore[no-untyped-call]
    zero = xp.exact(torch.zeros(shape, dtype=torch.float64))
    numbers = [(evaluation.number(arg) if isinstance(arg, Tensor) else constant(xp, arg)) + zero for arg in args]
    found, ends = xp.special(function, *numbers), [xp.enclosure(number) for number in numbers]
    least, most = xp.enclosure(found)
    unknown = (least.isnan() | least.isinf()) & (most.isnan() | most.isinf())
    if bool(unknown.any()):
        classes = eager(*(low for low, _ in ends))
        unknown = unknown & ~classes.isfinite()
        for low, high in ends:
            unknown = unknown & ((low == high) | (low.isnan() & high.isnan()))
        found = xp.chosen(unknown, xp.interval(classes, classes), found)
    return evaluation.made(found, promoted(args, floating=True))


for _name, _function in _FUNCTIONS.items():
    _register(_name, _function)


@rule("polygamma")
def _polygammas(evaluation: Evaluation, n: int, x: Tensor) -> Tensor:
    """Below zero kernels reflect at pi x, which they round."""
    xp, number = evaluation.xp, evaluation.number(x)
    pi = xp.constant(lambda sqrt, pi: pi)
    least = xp.enclosure(number)[0]
    reflected = xp.chosen((least < 0) & (least != least.floor()), number * pi / pi, number)
    given = evaluation.made(reflected, x.dtype)
    return _special(evaluation, _polygamma(n), lambda values: torch.polygamma(n, values), (given,))


@rule("angle")
def _angle(evaluation: Evaluation, x: Tensor) -> Tensor:
    """pi of negative numbers, zero of others."""
    xp, number = evaluation.xp, evaluation.number(x)
    order = xp.compare(number, number * 0.0)
    pi, zero = xp.constant(lambda sqrt, pi: pi), number * 0.0
    return evaluation.made(
        xp.select(order.less, ~(order.more | order.same | order.unordered), zero + pi, zero), x.dtype
    )


def _of_known(names: str) -> None:
    packet, _, overload = names.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    @rule(names)
    def computed(evaluation: Evaluation, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = operation(evaluation.known(x), *args, **kwargs)
        return tree_map(lambda t: evaluation.exactly(t) if isinstance(t, Tensor) else t, found)


for _name in (
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "mode",
    "frexp.Tensor",
    "nonzero_static",
    "nanmedian",
    "nanmedian.dim",
):
    _of_known(_name)
