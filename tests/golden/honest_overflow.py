"""Honest float32 kernels of every composite, in many orders, whose partial sums and products may overflow.

Each entry of `COMPOSITES` has the shapes of its tensors, the definition in terms of an arithmetic, and kernels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.golden.float32 import EXPONENTIALS, SUMS, Functions, Sum

Tensor = torch.Tensor
Results = Iterator[tuple[str, Any]]

F = Functions(0)
PERMUTED = (0, 1, 2)


def _shuffled(seed: int) -> Sum:
    def total(x: Tensor) -> Tensor:
        order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(seed))
        return SUMS["forward"](x[..., order])

    return total


ORDERS: dict[str, Sum] = {
    **{name: total for name, total in SUMS.items() if name != "Kahan"},  # which has NaN where a sum is infinite
    **{f"permuted {seed}": _shuffled(seed) for seed in PERMUTED},
    "ascending": lambda x: SUMS["forward"](x.sort(-1).values),
    "descending": lambda x: SUMS["forward"](x.sort(-1, descending=True).values),
}


@dataclass(frozen=True)
class Composite:
    """``shapes`` in terms of n; ``kernels`` of float32 tensors."""

    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    definition: Callable[..., Any]
    kernels: Callable[..., Results]


def _row(n: int) -> tuple[tuple[int, ...], ...]:
    return ((1, n),)


def _rows(count: int) -> Callable[[int], tuple[tuple[int, ...], ...]]:
    return lambda n: ((1, n),) * count


def _sums(x: Tensor) -> Results:
    for name, total in ORDERS.items():
        yield name, total(x)[..., None]


def _means(x: Tensor) -> Results:
    n = x.shape[-1]
    for name, total in ORDERS.items():
        yield name, total(x)[..., None] / n
        yield f"{name}, divided first", total(x / n)[..., None]


def _running(x: Tensor) -> Results:
    for name, total in ORDERS.items():
        yield name, torch.stack([total(x[..., : t + 1]) for t in range(x.shape[-1])], -1)


def _product_terms(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None, :] * b.mT[..., None, :, :]


def _matmuls(a: Tensor, b: Tensor) -> Results:
    for name, total in ORDERS.items():
        yield name, total(_product_terms(a, b))


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Results:
    for name, total in ORDERS.items():
        terms = torch.cat([c[..., None], _product_terms(a, b)], -1)
        yield name, total(terms)
        yield f"{name}, then c", total(terms[..., 1:]) + c


def _two_layers(a: Tensor, b: Tensor, c: Tensor) -> Results:
    for (name, first), (other, second) in zip(ORDERS.items(), reversed(ORDERS.items()), strict=True):
        yield f"{name}, {other}", second(_product_terms(first(_product_terms(a, b)), c))


def _gates(a: Tensor, b: Tensor, c: Tensor) -> Results:
    for name, y in _matmuls(a, b):
        yield name, torch.sigmoid(y) * c
        yield f"{name}, tanh", torch.sigmoid(y) * c


def _standardized(x: Tensor) -> Results:
    n = x.shape[-1]
    for name, total in ORDERS.items():
        centred = x - total(x)[..., None] / n
        yield name, centred * F.rsqrt(total(centred * centred)[..., None] / n + 1e-5)


def _variances(x: Tensor) -> Results:
    n = x.shape[-1]
    for name, total in ORDERS.items():
        centred = x - total(x)[..., None] / n
        yield name, total(centred * centred)[..., None] / n


def _rms(x: Tensor, w: Tensor) -> Results:
    n = x.shape[-1]
    for name, total in ORDERS.items():
        factor = F.rsqrt(total(x * x)[..., None] / n + 1e-6)
        yield name, x * factor * w
        yield f"{name}, w first", x * (factor * w)


def _softmaxes(x: Tensor) -> Results:
    most = x.amax(-1, keepdim=True)
    for name, exponential in EXPONENTIALS.items():
        weights = exponential(F, x, most)
        yield name, weights / weights.sum(-1, keepdim=True)


def _logsumexps(x: Tensor) -> Results:
    most = x.amax(-1, keepdim=True)
    for name, exponential in EXPONENTIALS.items():
        yield name, most + F.log(exponential(F, x, most).sum(-1, keepdim=True))


def _log_softmaxes(x: Tensor) -> Results:
    for name, lse in _logsumexps(x):
        yield name, x - lse
    most = x.amax(-1, keepdim=True)
    yield "shifted", (x - most) - F.log(F.exp(x - most).sum(-1, keepdim=True))


def _products(a: Tensor, b: Tensor, c: Tensor) -> Results:
    yield "(a b) c", (a * b) * c
    yield "a (b c)", a * (b * c)
    yield "(a c) b", (a * c) * b


def _prods(x: Tensor) -> Results:
    for seed in range(4):
        y = torch.ones_like(x[..., :1])
        for place in torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(seed)):
            y = y * x[..., place, None]
        yield f"permuted {seed}", y


def _recurrences(a: Tensor, b: Tensor) -> Results:
    h, parts = b[..., 0], [b[..., 0]]
    for t in range(1, b.shape[-1]):
        h = a[..., t] * h + b[..., t]
        parts.append(h)
    yield "in sequence", torch.stack(parts, -1)
    one, other, reach = a.clone(), b.clone(), 1
    while reach < b.shape[-1]:
        other = torch.cat([other[..., :reach], one[..., reach:] * other[..., :-reach] + other[..., reach:]], -1)
        one = torch.cat([one[..., :reach], one[..., reach:] * one[..., :-reach]], -1)
        reach *= 2
    yield "by doubling", other


def _solved(lower: Tensor, right: Tensor) -> Results:
    rows = [right[..., 0, :]]
    for t in range(1, right.shape[-2]):
        total = right[..., t, :]
        for s in range(t):
            total = total - lower[..., t, s, None] * rows[s]
        rows.append(total)
    yield "substitution", torch.stack(rows, -2)


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Results:
    scores = (_product_terms(q, k.mT)).sum(-1)
    weights = F.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    for name, order in ORDERS.items():
        yield name, order(_product_terms(weights, v)) / total
        yield f"{name}, divided first", order(_product_terms(weights / total, v))


def _entropies(x: Tensor) -> Results:
    for name, lse in _logsumexps(x):
        yield name, lse - x[..., :1]
    for name, y in _log_softmaxes(x):
        yield f"{name}, by log-softmax", -y[..., :1]


def _attend(xp: Any, q: Any, k: Any, v: Any) -> Any:
    scores = xp.scores(q, k, 1.0)
    visible = torch.ones(scores.shape, dtype=torch.bool)
    return xp.attend(scores, visible, v, None)[0]


def _standardize(xp: Any, x: Any) -> Any:
    centred, factor = xp.standardize(x, 1e-5)
    return centred * factor


COMPOSITES: dict[str, Composite] = {
    "sum": Composite(_row, lambda xp, x: xp.sum(x), _sums),
    "mean": Composite(_row, lambda xp, x: xp.mean(x), _means),
    "running sum": Composite(_row, lambda xp, x: xp.cumsum(x), _running),
    "product": Composite(lambda n: ((2, n), (n, 2)), lambda xp, a, b: xp.matmul(a, b), _matmuls),
    "product plus": Composite(
        lambda n: ((2, n), (n, 2), (2, 2)), lambda xp, a, b, c: xp.matmul(a, b, c), _fused
    ),
    "product of a product": Composite(
        lambda n: ((1, n), (n, 2), (2, 1)), lambda xp, a, b, c: xp.matmul(xp.matmul(a, b), c), _two_layers
    ),
    "gate": Composite(
        lambda n: ((2, n), (n, 2), (2, 2)), lambda xp, a, b, c: xp.function("sigmoid", xp.matmul(a, b)) * c, _gates
    ),
    "sum, plus": Composite(
        _rows(2), lambda xp, x, y: xp.sum(x) + y,
        lambda x, y: ((name, total + y) for name, total in _sums(x)),
    ),
    "sum, times": Composite(
        _rows(2), lambda xp, x, y: xp.sum(x) * y,
        lambda x, y: ((name, total * y) for name, total in _sums(x)),
    ),
    "reciprocal of a sum": Composite(
        _row, lambda xp, x: 1.0 / xp.sum(x), lambda x: ((name, 1.0 / total) for name, total in _sums(x))
    ),
    "exponential of a sum": Composite(
        _row, lambda xp, x: xp.exp(xp.sum(x)), lambda x: ((name, F.exp(total)) for name, total in _sums(x))
    ),
    "normalised by a sum": Composite(
        _row, lambda xp, x: x / xp.sum(x), lambda x: ((name, x / total) for name, total in _sums(x))
    ),
    "sum of sums": Composite(
        lambda n: ((3, n),), lambda xp, x: xp.sum(xp.sum(x), axis=0),
        lambda x: ((name, SUMS["forward"](total[..., 0])[None, None]) for name, total in _sums(x)),
    ),
    "standardised": Composite(_row, _standardize, _standardized),
    "variance": Composite(_row, lambda xp, x: xp.variance(x), _variances),
    "root mean square": Composite(
        _rows(2), lambda xp, x, w: xp.product(x, xp.rsqrt(xp.mean(x * x) + 1e-6), w), _rms
    ),
    "softmax": Composite(_row, lambda xp, x: xp.softmax(x), _softmaxes),
    "log-sum-exp": Composite(_row, lambda xp, x: xp.logsumexp(x), _logsumexps),
    "log-softmax": Composite(_row, lambda xp, x: xp.log_softmax(x), _log_softmaxes),
    "three factors": Composite(_rows(3), lambda xp, a, b, c: xp.product(a, b, c), _products),
    "product along a row": Composite(_row, lambda xp, x: xp.prod(x), _prods),
    "recurrence": Composite(_rows(2), lambda xp, a, b: xp.recurrence(a, b), _recurrences),
    "triangular system": Composite(
        lambda n: ((n, n), (n, 2)), lambda xp, a, b: xp.solve_unit_lower(a, b), _solved
    ),
    "attention": Composite(lambda n: ((2, 2), (n, 2), (n, 2)), _attend, _attended),
    "cross-entropy": Composite(_row, lambda xp, x: xp.logsumexp(x) - x[..., :1], _entropies),
}  # fmt: skip
