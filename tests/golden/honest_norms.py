"""Honest float32 kernels of the norms beside the plain ones, of gates, running sums and embeddings, in many orders."""

from collections.abc import Iterator
from typing import Any

import torch

from tests.golden.float32 import SUMS, Functions, backward, forward
from tests.golden.honest_rows import gelus, layernorms, rmsnorms, silus

Tensor = torch.Tensor
Results = Iterator[tuple[str, Any]]


def add_layernorms(f: Functions, x: Tensor, residual: Tensor, w: Tensor, b: Tensor, **options: Any) -> Results:
    total = x + residual
    for name, y in layernorms(f, total, w, b, **options):
        yield name, (y, total)


def group_norms(f: Functions, x: Tensor, w: Tensor, b: Tensor, *, groups: int, eps: float = 1e-5) -> Results:
    batch, channels, length = x.shape
    rows = x.reshape(batch * groups, -1)
    one, zero = torch.ones(rows.shape[1]), torch.zeros(rows.shape[1])
    for name, y in layernorms(f, rows, one, zero, eps=eps):
        yield name, y.reshape(x.shape) * w[:, None] + b[:, None]
    yield "torch", torch.native_group_norm(x, w, b, batch, channels, length, groups, eps)[0]


def l2norms(f: Functions, x: Tensor, *, clamp: str, eps: float = 1e-6) -> Results:
    for order, add in SUMS.items():
        square = add(x * x).unsqueeze(-1)
        if clamp == "sum":
            yield f"x rsqrt, {order}", x * f.rsqrt(square + eps)
            yield f"x / sqrt, {order}", f.divide(x, torch.sqrt(square + eps))
        else:
            yield f"x / max, {order}", f.divide(x, torch.sqrt(square).clamp(min=eps))
            yield f"x times 1 / max, {order}", x * f.reciprocal(torch.sqrt(square).clamp(min=eps))


def gated_rmsnorms(
    f: Functions, x: Tensor, w: Tensor, gate: Tensor, *, activation: str, gate_first: bool, eps: float = 1e-6
) -> Results:
    gates = list(silus(f, gate)) if activation == "silu" else [("sigmoid", f.sigmoid(gate))]
    for opened, factor in gates:
        if gate_first:
            yield from ((f"{opened}, {name}", y) for name, y in rmsnorms(f, x * factor, w, eps=eps))
        else:
            yield from ((f"{opened}, {name}", y * factor) for name, y in rmsnorms(f, x, w, eps=eps))


def dynamic_tanhs(f: Functions, x: Tensor, alpha: Tensor, w: Tensor, b: Tensor) -> Results:
    yield "tanh", f.tanh(alpha * x) * w + b
    yield "addcmul", torch.addcmul(b, f.tanh(alpha * x), w)


def geglus(f: Functions, gate: Tensor, up: Tensor, *, approximate: str) -> Results:
    for name, y in gelus(f, gate, approximate=approximate):
        yield name, y * up
    if approximate == "none":
        yield "up first", up * gate * (0.5 + 0.5 * f.erf(gate * 0.70710678))


def gelu_and_muls(f: Functions, x: Tensor, *, approximate: str) -> Results:
    yield from geglus(f, *x.chunk(2, -1), approximate=approximate)


def logsigmoids(f: Functions, x: Tensor) -> Results:
    yield "min - log1p", x.clamp(max=0) - torch.log1p(f.exp(-x.abs()))
    yield "torch", torch.nn.functional.logsigmoid(x)


def cumsums(f: Functions, x: Tensor, *, reverse: bool, exclusive: bool) -> Results:
    x = x.flip(-1) if reverse else x
    terms = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) if exclusive else x
    doubled, reach = terms, 1
    while reach < terms.shape[1]:
        doubled = torch.cat([doubled[:, :reach], doubled[:, reach:] + doubled[:, :-reach]], 1)
        reach *= 2
    ways = {"torch": terms.cumsum(1), "doubling": doubled}
    for name, add in (("forward", forward), ("backward", backward), ("pairwise", SUMS["pairwise"])):
        ways[name] = torch.stack([add(terms[:, : n + 1]) for n in range(terms.shape[1])], 1)
    for name, y in ways.items():
        yield name, y.flip(-1) if reverse else y


def embedding_backwards(f: Functions, table: Tensor, ids: Tensor, dy: Tensor) -> Results:
    zeros = torch.zeros(table.shape)
    yield "index_add", zeros.index_add(0, ids, dy)
    yield "from the end", zeros.index_add(0, ids.flip(0), dy.flip(0))
    yield "product with one-hot rows", torch.nn.functional.one_hot(ids, table.shape[0]).float().T @ dy


def rope_backwards(f: Functions, cos: Tensor, sin: Tensor, dy: Tensor, *, interleaved: bool) -> Results:
    half = dy.shape[-1] // 2
    a, b = (dy[..., 0::2], dy[..., 1::2]) if interleaved else (dy[..., :half], dy[..., half:])
    c, s = cos[:, None], sin[:, None]
    for name, left, right in (
        ("plain", a * c + b * s, b * c - a * s),
        ("fused", torch.addcmul(a * c, b, s), torch.addcmul(b * c, -a, s)),
    ):
        yield name, torch.stack([left, right], -1).reshape(dy.shape) if interleaved else torch.cat([left, right], -1)
