"""Honest float32 kernels along rows: softmax and its relatives, norms, activations, rotations, in many orders."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.golden.float32 import EXPONENTIALS, LN2, LOG2E, SUMS, Functions, fma, forward

Tensor = torch.Tensor
Exponential = Callable[[Functions, Tensor, Tensor], Tensor]


def _online(f: Functions, x: Tensor, exponential: Exponential, block: int) -> tuple[Tensor, Tensor]:
    """Running maximum and sum, rescaled at every block."""
    maximum, total = x.new_full((*x.shape[:-1], 1), -math.inf), x.new_zeros((*x.shape[:-1], 1))
    for part in x.split(block, -1):
        new = torch.maximum(maximum, part.amax(-1, keepdim=True))
        shift = torch.where(new == -math.inf, 0.0, new)
        decay = torch.where(maximum == new, 1.0, exponential(f, maximum, shift))  # m c - fl(m c) would add up
        total = total * decay + forward(exponential(f, part, shift)).unsqueeze(-1)
        maximum = new
    return maximum, total


def softmaxes(f: Functions, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    m = x.amax(-1, keepdim=True)
    for name, exponential in EXPONENTIALS.items():
        weights = exponential(f, x, m)
        for order, add in SUMS.items():
            total = add(weights).unsqueeze(-1)
            yield f"{name} / {order}", f.divide(weights, total)
            yield f"{name} * 1/{order}", weights * f.reciprocal(total)
            yield f"{name} as exp(x - lse), {order}", exponential(f, x, m + f.log(total))
        for block in (1, 16, 64):
            maximum, total = _online(f, x, exponential, block)
            yield f"online {name} by {block}", f.divide(exponential(f, x, maximum), total)
        yield f"rescaled outputs, {name}", _rescaled_outputs(f, x, exponential)


def _rescaled_outputs(f: Functions, x: Tensor, exponential: Exponential) -> Tensor:
    """The outputs themselves rescaled at every new maximum, as attention does with its accumulator."""
    maximum, total = x[..., :1] * 1, x.new_zeros((*x.shape[:-1], 1))
    outputs = x.new_zeros((*x.shape[:-1], 0))
    for part in x.split(1, -1):
        new = torch.maximum(maximum, part)
        decay = torch.where(maximum == new, 1.0, exponential(f, maximum, new))
        weight = exponential(f, part, new)
        outputs, total, maximum = torch.cat([outputs * decay, weight], -1), total * decay + weight, new
    return f.divide(outputs, total)


def logsumexps(f: Functions, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    m = x.amax(-1, keepdim=True)
    for name, exponential in EXPONENTIALS.items():
        for order, add in SUMS.items():
            total = add(exponential(f, x, m)).unsqueeze(-1)
            yield f"m + log, {name}, {order}", (m + f.log(total))[..., 0]
            yield f"(m c + log2) ln 2, {name}, {order}", ((m * LOG2E + f.log2(total)) * LN2)[..., 0]
            yield f"m + log2 ln 2, {name}, {order}", fma(f.log2(total), LN2, m)[..., 0]
        for block in (1, 16, 64):
            maximum, total = _online(f, x, exponential, block)
            yield f"online {name} by {block}", (maximum + f.log(total))[..., 0]


def log_softmaxes(f: Functions, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    m = x.amax(-1, keepdim=True)
    for name, lse in logsumexps(f, x):
        yield f"x - lse, {name}", x - lse.unsqueeze(-1)
    for name, exponential in EXPONENTIALS.items():
        for order, add in SUMS.items():
            yield f"(x - m) - log, {name}, {order}", (x - m) - f.log(add(exponential(f, x, m)).unsqueeze(-1))


def _welford(x: Tensor) -> tuple[Tensor, Tensor]:
    mean, squares = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
    for count, place in enumerate(range(x.shape[-1]), 1):
        delta = x[..., place] - mean
        mean = mean + delta / count
        squares = squares + delta * (x[..., place] - mean)
    return mean.unsqueeze(-1), (squares / x.shape[-1]).unsqueeze(-1)


def _merged(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Welford within blocks, merged by Chan's formula."""
    count, mean, squares = 0, torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])
    for part in x.split(block, -1):
        other, variance = _welford(part)
        size = part.shape[-1]
        delta, both = other - mean, count + size
        mean = mean + delta * (size / both)
        squares = squares + variance * size + delta * delta * (count * size / both)
        count = both
    return mean, squares / count


def moments(x: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    n = x.shape[-1]
    for order, add in SUMS.items():
        mean = add(x).unsqueeze(-1) / n
        yield f"two passes, {order}", mean, add((x - mean) * (x - mean)).unsqueeze(-1) / n
        inverse = torch.tensor(1 / n, dtype=torch.float32)
        mean = add(x).unsqueeze(-1) * inverse
        yield f"two passes by 1/n, {order}", mean, add((x - mean) * (x - mean)).unsqueeze(-1) * inverse
    yield "Welford", *_welford(x)
    for block in (8, 32):
        yield f"Welford merged by {block}", *_merged(x, block)


def layernorms(f: Functions, x: Tensor, w: Tensor, b: Tensor, *, eps: float = 1e-5) -> Iterator[tuple[str, Tensor]]:
    for name, mean, variance in moments(x):
        r = f.rsqrt(variance + torch.tensor(eps, dtype=torch.float32))
        yield f"{name}, (x - m) r w + b", (x - mean) * r * w + b
        yield f"{name}, (x - m) (r w) + b", (x - mean) * (r * w) + b
        yield f"{name}, fma", fma((x - mean) * r, w, b)
        yield f"{name}, x r - m r", (x * r - mean * r) * w + b
        yield f"{name}, x (r w) + (b - m r w)", x * (r * w) + (b - mean * (r * w))


def rmsnorms(
    f: Functions, x: Tensor, w: Tensor, *, eps: float = 1e-6, offset: float = 0.0
) -> Iterator[tuple[str, Tensor]]:
    n = x.shape[-1]
    weight = w + offset if offset else w
    for order, add in SUMS.items():
        square = add(x * x).unsqueeze(-1)
        for name, mean in (("/ n", square / n), ("* 1/n", square * torch.tensor(1 / n, dtype=torch.float32))):
            r = f.rsqrt(mean + torch.tensor(eps, dtype=torch.float32))
            yield f"x r w {name}, {order}", x * r * weight
            yield f"x (r w) {name}, {order}", x * (r * weight)
            yield f"(x w) r {name}, {order}", x * weight * r
            yield f"x / sqrt {name}, {order}", f.divide(x, torch.sqrt(mean + eps)) * weight


def add_rmsnorms(f: Functions, x: Tensor, residual: Tensor, w: Tensor, **options: Any) -> Iterator[tuple[str, Any]]:
    total = x + residual
    for name, y in rmsnorms(f, total, w, **options):
        yield name, (y, total)


def sigmoids(f: Functions, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "sigmoid", f.sigmoid(x)
    yield "1 / (1 + exp(-x))", f.reciprocal(1 + torch.exp(-x))
    yield "1 / (1 + exp2(-x c))", f.reciprocal(1 + torch.exp2(-x * LOG2E))
    small = torch.exp(-x.abs())
    yield "exp / (1 + exp) where negative", torch.where(x < 0, small / (1 + small), 1 / (1 + small))


def silus(f: Functions, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, gate in sigmoids(f, x):
        yield f"x * {name}", x * gate
    yield "x / (1 + exp(-x))", f.divide(x, 1 + torch.exp(-x))
    yield "torch", torch.nn.functional.silu(x)


def swiglus(f: Functions, gate: Tensor, up: Tensor, *, limit: float | None = None) -> Iterator[tuple[str, Tensor]]:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    for name, value in silus(f, gate):
        yield name, value * up


def gelus(f: Functions, x: Tensor, *, approximate: str = "none") -> Iterator[tuple[str, Tensor]]:
    if approximate == "none":  # torch's own vectorised kernel takes an erf that is 1.3 times as far off as allowed
        yield "x/2 (1 + erf)", 0.5 * x * (1 + f.erf(x * math.sqrt(0.5)))
        yield "x (1/2 + erf/2)", x * (0.5 + 0.5 * f.erf(x / math.sqrt(2)))
        yield "x/2 erfc", 0.5 * x * torch.erfc(-x * math.sqrt(0.5))
        return
    constant = math.sqrt(2 / math.pi)
    for name, inner in (
        ("x + a x^3", constant * (x + 0.044715 * (x * x * x))),
        ("x (1 + a x^2)", constant * x * (1 + 0.044715 * x * x)),
        ("x (c + ca x^2)", x * (constant + constant * 0.044715 * (x * x))),
    ):
        yield f"tanh of {name}", 0.5 * x * (1 + f.tanh(inner))
        yield f"sigmoid of {name}", x * f.sigmoid(2 * inner)
        yield f"1 / (1 + exp) of {name}", f.divide(x, 1 + torch.exp(-2 * inner))


def ropes(f: Functions, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Iterator[tuple[str, Any]]:
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    c, s = cos[:, None], sin[:, None]
    for name, left, right in (
        ("plain", a * c - b * s, b * c + a * s),
        ("fma", fma(a, c, -(b * s)), fma(b, c, a * s)),
        ("fma, other", fma(-b, s, a * c), fma(a, s, b * c)),
    ):
        yield name, torch.stack([left, right], -1).reshape(x.shape) if interleaved else torch.cat([left, right], -1)
