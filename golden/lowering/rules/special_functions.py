"""Special functions, which Arb encloses element by element, orthogonal polynomials, and unique elements and modes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from assay.golden.lowering.dispatch import Lowering
from assay.golden.lowering.rule_table import constant, promoted, rule

Tensor = torch.Tensor
Function = Callable[..., Any]  # of Arb's numbers

_MAX_TERMS = 10_000  # of polygamma's recurrence below zero; beyond, nothing is claimed


def _polygamma(n: int) -> Function:
    """(-1)^(n+1) n! zeta(n + 1, x), digamma for n = 0; below zero by the terms up to the first positive one."""
    if n == 0:
        return lambda x: x.digamma()
    factor = (-1) ** (n + 1) * math.factorial(n)

    def polygamma(x: Any) -> Any:
        below = max(0, math.ceil(-float(x.mid()))) if x.is_finite() else 0
        if below > _MAX_TERMS:
            return x * math.nan
        terms = sum(((x + k) ** -(n + 1) for k in range(below)), x * 0)
        return ((x * 0 + n + 1).zeta(x + below) + terms) * factor

    return polygamma


def _zeta(x: Any, q: Any) -> Any:
    """Hurwitz's zeta function where its series converges; infinite at its poles, NaN elsewhere, as in PyTorch."""
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
    "special_spherical_bessel_j0": lambda x: x.sin() / x if not x.contains(0) else x.sinc(),
    "special_airy_ai": lambda x: x.airy_ai(),
    "special_erfcx": lambda x: (x * x).exp() * x.erfc(),
    "special_ndtri": lambda x: (2 * x - 1).erfinv() * (x * 0 + 2).sqrt(),
    "special_log_ndtr": lambda x: ((-x / (x * 0 + 2).sqrt()).erfc() / 2).log(),
    "special_zeta": _zeta,
    "igamma": lambda a, x: x.gamma_lower(a, regularized=1) if a >= 0 and x >= 0 else a * math.nan,
    "igammac": lambda a, x: x.gamma_upper(a, regularized=1) if a >= 0 and x >= 0 else a * math.nan,
}


def _enclosed(ctx: Lowering, function: Function, eager: Function, args: Any) -> Tensor:
    """Return Arb's enclosure, but PyTorch's NaN or infinity where Arb has none: beyond the domain and at poles."""
    xp = ctx.xp
    shape = torch.broadcast_shapes(*(arg.shape for arg in args if isinstance(arg, Tensor)))  # type: ignore[no-untyped-call]
    zero = xp.exact(torch.zeros(shape, dtype=torch.float64))
    numbers = [(ctx.number(arg) if isinstance(arg, Tensor) else constant(xp, arg)) + zero for arg in args]
    result, ends = xp.special(function, *numbers), [xp.enclosure(number) for number in numbers]
    low, high = xp.enclosure(result)
    unknown = (low.isnan() | low.isinf()) & (high.isnan() | high.isinf())
    if bool(unknown.any()):
        special = eager(*(low for low, _ in ends))
        unknown = unknown & ~special.isfinite()
        for low, high in ends:
            unknown = unknown & ((low == high) | (low.isnan() & high.isnan()))
        result = xp.chosen(unknown, xp.interval(special, special), result)
    return ctx.wrap(result, promoted(args, floating=True))


def _register(name: str, function: Function) -> None:
    eager = getattr(torch.ops.aten, name)

    @rule(f"{name} {name}.self_scalar {name}.other_scalar")
    def compute(ctx: Lowering, *args: Any) -> Tensor:
        return _enclosed(ctx, function, eager, args)


for _name, _function in _FUNCTIONS.items():
    _register(_name, _function)


@rule("polygamma")
def _polygammas(ctx: Lowering, n: int, x: Tensor) -> Tensor:
    """Below zero kernels reflect at pi x, which they round."""
    xp, number = ctx.xp, ctx.number(x)
    pi = xp.constant(lambda sqrt, pi: pi)
    low = xp.enclosure(number)[0]
    reflected = xp.chosen((low < 0) & (low != low.floor()), number * pi / pi, number)
    return _enclosed(ctx, _polygamma(n), lambda values: torch.polygamma(n, values), (ctx.wrap(reflected, x.dtype),))


@rule("angle")
def _angle(ctx: Lowering, x: Tensor) -> Tensor:
    """pi for negative numbers, zero for others."""
    xp, number = ctx.xp, ctx.number(x)
    zero, pi = number * 0.0, xp.constant(lambda sqrt, pi: pi)
    order = xp.compare(number, zero)
    maybe_negative = ~(order.more | order.same | order.unordered)
    return ctx.wrap(xp.select(order.less, maybe_negative, zero + pi, zero), x.dtype)


_RECURRENCES: dict[str, tuple[Callable[[Any], Any], Callable[[int, Any, Any, Any], Any]]] = {
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
"""The polynomial of degree one, and that of degree n + 1 from those of n and n - 1. Kernels use these recurrences."""


def _register_polynomial(name: str, recurrence: str, shifted: bool) -> None:
    first, following = _RECURRENCES[recurrence]

    @rule(f"special_{name} special_{name}.n_scalar special_{name}.x_scalar")
    def compute(ctx: Lowering, x: Any, n: Any) -> Tensor:
        xp = ctx.xp
        degrees = ctx.concrete(n).to(torch.int64) if isinstance(n, Tensor) else torch.tensor(int(n))
        number = ctx.number(x) if isinstance(x, Tensor) else constant(xp, x)
        if shifted:
            number = number * 2.0 - 1.0
        dtype = x.dtype if isinstance(x, Tensor) and x.is_floating_point() else torch.get_default_dtype()
        zero = number * 0.0
        previous, current = zero + 1.0, first(number)
        result = xp.chosen(degrees < 0, zero, previous)
        for degree in range(1, max(int(degrees.max()) if degrees.numel() else 0, 0) + 1):
            result = xp.chosen(degrees == degree, current, result)
            previous, current = current, following(degree, number, current, previous)
        return ctx.wrap(result, dtype)


for _name in _RECURRENCES:
    _register_polynomial(_name, _name, False)
    if _name.startswith("chebyshev"):
        _register_polynomial(f"shifted_{_name}", _name, True)


def _register_eager(name: str) -> None:
    """Compute by PyTorch itself, of numbers that are all known."""
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    @rule(name)
    def compute(ctx: Lowering, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return tree_map(ctx.lift, operation(ctx.concrete(x), *args, **kwargs))


_EAGER = "_unique2 unique_consecutive unique_dim mode frexp.Tensor nonzero_static nanmedian nanmedian.dim"
for _name in _EAGER.split():
    _register_eager(_name)
