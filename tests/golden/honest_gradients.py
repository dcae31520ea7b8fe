"""Honest float32 functions, losses and gradients, in many orders and in the forms that kernels have them."""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import torch

from assay.golden.arithmetic.real import torch_function
from tests.golden.float32 import LN2, LOG2E, SUMS, Functions, fma, within
from tests.golden.honest_rows import logsumexps, moments, sigmoids, softmaxes

Tensor = torch.Tensor
NAMED = {"exp": 2.0, "log": 2.0, "rsqrt": 2.0}  # ulps of the default contract; four for the rest


def functions(name: str, sign: float) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """An elementary function as far off as allowed, and by others."""
    exp = within(torch.exp, 2, sign)
    yield "as far off as allowed", within(lambda x: torch_function(name, x), NAMED.get(name, 4.0), sign)
    others: dict[str, Callable[[Tensor], Tensor]] = {
        "exp": lambda x: within(torch.exp2, 2, sign)(x * LOG2E),
        "exp2": lambda x: exp(x * LN2),
        "expm1": lambda x: torch.where(x.abs() < 1, torch.expm1(x), exp(x) - 1),
        "log2": lambda x: torch.log(x) / LN2,
        "sigmoid": lambda x: within(lambda z: 1 / z, 2, -sign)(1 + exp(-x)),
        "softplus": lambda x: x.clamp(min=0) + within(torch.log1p, 4, sign)(exp(-x.abs())),
        "rsqrt": lambda x: 1 / torch.sqrt(x),
        "tanh": lambda x: torch.copysign(-torch.expm1(-2 * x.abs()) / (torch.expm1(-2 * x.abs()) + 2), x),
    }
    if name in others:
        yield "by others", others[name]


def softmax_backwards(f: Functions, y: Tensor, dy: Tensor) -> Iterator[tuple[str, Tensor]]:
    for order, add in SUMS.items():
        total = add(y * dy).unsqueeze(-1)
        yield f"y (dy - s), {order}", y * (dy - total)
        yield f"y dy - y s, {order}", y * dy - y * total
        yield f"fma, {order}", fma(y, dy, -(y * total))


def _down(add: Callable[[Tensor], Tensor], terms: Tensor) -> Tensor:
    """Sums over rows."""
    return add(terms.T.contiguous())


def layernorm_backwards(
    f: Functions, x: Tensor, w: Tensor, dy: Tensor, *, eps: float = 1e-5
) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    n = x.shape[-1]
    for (order, add), (name, mean, variance) in zip(list(SUMS.items()) * 3, moments(x), strict=False):
        r = f.rsqrt(variance + torch.tensor(eps, dtype=torch.float32))
        g, h = dy * w, (x - mean) * r
        sums = _down(add, dy * h), _down(add, dy)
        first, second = add(g).unsqueeze(-1), add(g * h).unsqueeze(-1)
        yield f"as written, {name}, {order}", ((g - first / n - h * (second / n)) * r, *sums)
        yield f"times N, {name}, {order}", ((n * g - first - h * second) * f.divide(r, torch.tensor(float(n))), *sums)
        slope = (first * mean - add(g * x).unsqueeze(-1)) * r * r * r / n
        rest = -slope * mean - first * r / n
        folded = _down(add, dy * (x * r - mean * r)), _down(add, dy)
        yield f"r g + b x + c, {name}, {order}", (r * g + slope * x + rest, *folded)


def rmsnorm_backwards(
    f: Functions, x: Tensor, w: Tensor, dy: Tensor, *, eps: float = 1e-6
) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    n = x.shape[-1]
    for order, add in SUMS.items():
        r = f.rsqrt(add(x * x).unsqueeze(-1) / n + torch.tensor(eps, dtype=torch.float32))
        g, h = dy * w, x * r
        dweight = _down(add, dy * h)
        yield f"as written, {order}", ((g - h * (add(g * h).unsqueeze(-1) / n)) * r, dweight)
        inner = add(g * x).unsqueeze(-1) / n
        yield f"r g - r^3 m x, {order}", (r * g - (r * r * r * inner) * x, _down(add, (dy * r) * x))
        yield f"r (g - r^2 m x), {order}", (r * (g - (r * r * inner) * x), dweight)


def swiglu_backwards(f: Functions, gate: Tensor, up: Tensor, dy: Tensor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    for name, s in sigmoids(f, gate):
        yield f"s (1 + x (1 - s)), {name}", (dy * up * (s * (1 + gate * (1 - s))), dy * (gate * s))
        yield f"x s (1 - s) + s, {name}", (dy * (gate * s * (1 - s) + s) * up, dy * gate * s)


@lru_cache(maxsize=1)
def some(
    kernels: Callable[[Functions, Tensor], Iterator[tuple[str, Tensor]]], step: int, f: Functions, x: Tensor
) -> tuple[tuple[str, Tensor], ...]:
    """Every ``step``-th kernel's results, kept for the next call with the same tensor."""
    return tuple(islice(kernels(f, x), 0, None, step))


def cross_entropies(
    f: Functions, x: Tensor, target: Tensor, *, label_smoothing: float, reduction: str, ignore_index: int
) -> Iterator[tuple[str, Tensor]]:
    counted = target != ignore_index
    label = torch.where(counted, target, 0)[:, None]
    smooth = torch.tensor(label_smoothing, dtype=torch.float32)
    orders = list(SUMS.items())
    for turn, (name, lse) in enumerate(some(logsumexps, 5, f, x)):
        order, add = orders[turn % len(orders)]
        own = lse - x.gather(1, label)[:, 0]
        spread = lse - add(x) / x.shape[1]
        losses = torch.where(counted, own * (1 - smooth) + spread * smooth if label_smoothing else own, 0.0)
        total = add(losses[None])[0]
        yield f"{name}, {order}", {"none": losses, "sum": total, "mean": total / counted.sum()}[reduction]


def cross_entropy_backwards(
    f: Functions, x: Tensor, target: Tensor, *, label_smoothing: float, reduction: str, ignore_index: int
) -> Iterator[tuple[str, Tensor]]:
    counted = target != ignore_index
    label = torch.where(counted, target, 0)[:, None]
    hot = torch.zeros_like(x).scatter(1, label, 1.0)
    smooth = torch.tensor(label_smoothing, dtype=torch.float32)
    count = counted.sum().clamp(min=1).float() if reduction == "mean" else torch.tensor(1.0)
    for name, shares in some(softmaxes, 7, f, x):
        away = shares - smooth / x.shape[1] - (1 - smooth) * hot
        apart = shares / count - (smooth / x.shape[1]) / count - ((1 - smooth) / count) * hot
        for form, found in (("divided last", away / count), ("by 1/n", away * (1 / count)), ("apart", apart)):
            yield f"{form}, {name}", torch.where(counted[:, None], found, 0.0)


def attention_backwards(
    f: Functions, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, stage: torch.dtype | None, **options: Any
) -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor]]]:
    """One batch and one head; delta from the probabilities or from the output, the scale before or after."""
    q, k, v, dout = (part.float() for part in (q, k, v, dout))
    queries, keys = q.shape[2], k.shape[2]
    scale = torch.tensor(1 / math.sqrt(q.shape[3]), dtype=torch.float32)
    see = torch.ones(queries, keys, dtype=torch.bool)
    if options.get("causal", "none") != "none":
        see = see.tril(keys - queries)

    def stored(values: Tensor) -> Tensor:
        return values if stage is None else values.to(stage).float()

    for early in (False, True):
        scores = (q * scale) @ k.transpose(2, 3) if early else (q @ k.transpose(2, 3)) * scale
        scores = torch.where(see, scores, -math.inf)
        m = scores.amax(-1, keepdim=True)
        m = torch.where(m == -math.inf, 0.0, m)
        total = f.exp(scores - m).sum(-1, keepdim=True)
        lse = m + f.log(total.clamp(min=1e-30))
        for kind, p in (
            ("quotient", f.divide(f.exp(scores - m), total.clamp(min=1e-30))),
            ("from lse", f.exp2(scores * LOG2E - lse * LOG2E)),
        ):
            p = torch.where(see, p, 0.0)
            products = dout @ v.transpose(2, 3)
            for source, delta in (
                ("sum P dP", (p * products).sum(-1, keepdim=True)),
                ("output", (dout * (stored(p) @ v)).sum(-1, keepdim=True)),
            ):
                slopes = torch.where(see, p * (products - delta), 0.0)
                for when in ("before", "after"):
                    ds = stored(slopes * scale) if when == "before" else stored(slopes)
                    dq, dk = ds @ k, ds.transpose(2, 3) @ q
                    pair = (dq, dk) if when == "before" else (dq * scale, dk * scale)
                    name = f"{kind}, {source}, scale {when} the stage, {'early' if early else 'late'}"
                    yield name, (*pair, stored(p).transpose(2, 3) @ dout)
