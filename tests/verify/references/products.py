"""Products of matrices with what is fused to them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .entry import Case

LAYER = "x[T,K], w[N,K], b[N] -> y[T,N]"


def linear_relu(x: Any, w: Any, b: Any) -> Any:
    return F.relu(F.linear(x, w, b))


def _split_k(x: Any, w: Any, b: Any) -> Any:
    half = x.shape[1] // 2
    return (x[:, :half] @ w[:, :half].T + x[:, half:] @ w[:, half:].T + b).clamp(min=0)


def _rank_one_updates(x: Any, w: Any, b: Any) -> Any:
    total = b.expand(x.shape[0], -1).clone()
    for place in range(x.shape[1]):
        total += x[:, place : place + 1] * w[:, place]
    return total.relu()


def _whole_tiles_of_k(x: Any, w: Any, b: Any) -> Any:
    whole = max(x.shape[1] // 4 * 4, 1)
    return torch.relu(x[:, :whole] @ w[:, :whole].T + b)


def _sums_in_bfloat16(x: Any, w: Any, b: Any) -> Any:
    total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.bfloat16)
    for place in range(0, x.shape[1], 8):
        total += (x[:, place : place + 8] @ w[:, place : place + 8].T).bfloat16()
    return torch.relu(total.float() + b)


def transposed_product(a: Any, b: Any) -> Any:
    return a.T @ b


def half_product(x: Any, w: Any) -> Any:
    return x @ w.T


def _half_in_float32(x: Any, w: Any) -> Any:
    return (x.float() @ w.float().T).to(x.dtype)


def _half_by_blocks(x: Any, w: Any, between: torch.dtype = torch.float32) -> Any:
    total = torch.zeros(x.shape[0], w.shape[0], dtype=between)
    for place in range(0, x.shape[1], 16):
        total = (total.float() + x[:, place : place + 16].float() @ w[:, place : place + 16].float().T).to(between)
    return total.to(x.dtype)


def scaled_batch(c: Any, a: Any, b: Any) -> Any:
    return torch.baddbmm(c, a, b, beta=0.5, alpha=2.0)


def _batch_by_batch(c: Any, a: Any, b: Any) -> Any:
    return torch.stack([2 * (one @ two) + three * 0.5 for three, one, two in zip(c, a, b, strict=True)])


def gated_layer(x: Any, w: Any, v: Any) -> Any:
    return F.silu(x @ w.T) * (x @ v.T)


def _one_product(x: Any, w: Any, v: Any) -> Any:
    gate, up = (x @ torch.cat([w, v]).T).split(w.shape[0], -1)
    return gate / (1 + torch.exp(-gate)) * up


def squared_distances(x: Any, y: Any) -> Any:
    return (x[:, None] - y[None]).square().sum(-1)


def _row_by_row(x: Any, y: Any) -> Any:
    return torch.stack([((row - y) ** 2).sum(-1) for row in x])


def low_rank(x: Any, w: Any, a: Any, b: Any) -> Any:
    return x @ w.T + (x @ a.T) @ b.T * 2.0


def _low_rank(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.addmm(F.linear(x, w), F.linear(x, a), b.T, alpha=2.0)


CASES = (
    Case(linear_relu, LAYER, (_split_k, _rank_one_updates), {
        "the tail of K is left out": _whole_tiles_of_k,
        "sums in bfloat16": _sums_in_bfloat16,
        "the bias comes last": lambda x, w, b: torch.relu(x @ w.T) + b,
    }, asked={"shapes": {"K": [2, 7, 33, 131]}}),  # PyTorch's product is wrong of one column whose rows lie 4 GiB apart
    Case(transposed_product, "a[K,M], b[K,N] -> c[M,N]", (
        lambda a, b: torch.einsum("km,kn->mn", a, b),
        lambda a, b: sum((a[k, :, None] * b[k] for k in range(a.shape[0])), torch.zeros(a.shape[1], b.shape[1])),
    ), {
        "not transposed where it is square": lambda a, b: a @ b if a.shape[0] == a.shape[1] else a.T @ b,
        "the first row counts twice": lambda a, b: a.T @ b + a[:1].T @ b[:1],
        "the last column is a copy": lambda a, b: (a.T @ b)[:, [*range(max(b.shape[1] - 1, 1)), b.shape[1] - 2]]
        if b.shape[1] > 1 else a.T @ b,
    }),
    Case(half_product, "x[T,K], w[N,K] -> y[T,N]", (_half_in_float32, _half_by_blocks), {
        "sums kept in bfloat16": lambda x, w: _half_by_blocks(x, w, torch.bfloat16),
        "truncated": lambda x, w: ((x.float() @ w.float().T).view(torch.int32) & -65536).view(torch.float32).bfloat16(),
        "one block of K is left out beyond 64": lambda x, w: _half_in_float32(x[:, :64], w[:, :64]),
    }, dtype="bfloat16"),
    Case(scaled_batch, "c[B,M,N], a[B,M,K], b[B,K,N] -> y[B,M,N]", (_batch_by_batch,), {
        "c as it is": lambda c, a, b: c + 2 * (a @ b),
        "both scaled": lambda c, a, b: 2 * (0.5 * c + a @ b),
        "the first matrix for all": lambda c, a, b: 0.5 * c + 2 * (a @ b[:1]),
    }),
    Case(gated_layer, "x[T,K], w[N,K], v[N,K] -> y[T,N]", (_one_product,), {
        "gate and value swapped": lambda x, w, v: gated_layer(x, v, w),
        "a logistic gate": lambda x, w, v: torch.sigmoid(x @ w.T) * (x @ v.T),
        "the gate in float16": lambda x, w, v: F.silu((x @ w.T).half()).float() * (x @ v.T),
    }),
    Case(squared_distances, "x[T,D], y[S,D] -> d[T,S]", (_row_by_row,), {
        "expanded, which cancels": lambda x, y: (x * x).sum(-1)[:, None] - 2 * x @ y.T + (y * y).sum(-1),
        "not squared": lambda x, y: torch.cdist(x, y),
        "divided by the length": lambda x, y: squared_distances(x, y) / x.shape[1],
    }),
    Case(low_rank, "x[T,K], w[N,K], a[R,K], b[N,R] -> y[T,N]", (_low_rank,), {
        "unscaled": lambda x, w, a, b: x @ w.T + x @ a.T @ b.T,
        "between the factors in bfloat16": lambda x, w, a, b: x @ w.T + (x @ a.T).bfloat16().float() @ b.T * 2,
        "the first rank alone": lambda x, w, a, b: x @ w.T + x @ a[:1].T @ b[:, :1].T * 2,
    }),
)  # fmt: skip
