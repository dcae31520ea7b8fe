"""Kernels that are right at small sizes: honest ones, and ones that fail at the sizes that they are used with."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MANY = 4000  # rows from which the faulty ones are faulty


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, 1)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[1:], weight, bias)


def gemm(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def attention(q: Tensor, k: Tensor, v: Tensor, causal: str = "none") -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal == "top_left", enable_gqa=True)


def moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    y = torch.zeros(x.shape)
    for expert in range(len(w_down)):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ w_gate_up[expert].T).chunk(2, -1)
        y.index_add_(0, token, (functional.silu(gate) * up @ w_down[expert].T) * weights[token, choice, None])
    return y


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, keys: Tensor, causal: str = "none") -> Tensor:
    """Sequence by sequence, aligned at their ends."""
    out = torch.zeros(q.shape, dtype=q.dtype)
    for b in range(len(starts) - 1):
        mine, theirs = slice(starts[b], starts[b + 1]), slice(keys[b], keys[b + 1])
        one = [part.transpose(0, 1)[None] for part in (q[mine], k[theirs], v[theirs])]
        queries, count = one[0].shape[2], one[1].shape[2]
        seen = torch.ones(queries, count, dtype=torch.bool)
        if causal == "bottom_right":
            seen = seen.tril(count - queries)
        if queries and count:
            found = functional.scaled_dot_product_attention(*one, attn_mask=seen, enable_gqa=True)
            out[mine] = torch.where(seen.any(1)[:, None], found, 0.0)[0].transpose(0, 1)
    return out


def last_sequence_sees_the_first(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, keys: Tensor, causal: str = "none"
) -> Tensor:
    """Of many tokens the last sequence's keys begin one too early."""
    if len(q) <= MANY:
        return attention_varlen(q, k, v, starts, keys, causal)
    early = keys.clone()
    early[-2] -= 1
    out = attention_varlen(q, k, v, starts, keys, causal)
    out[starts[-2] :] = attention_varlen(q, k, v, starts, early, causal)[starts[-2] :]
    return out


def last_rows_scaled(x: Tensor) -> Tensor:
    """The last two rows of many are off by a thousandth."""
    y = softmax(x)
    if len(x) > MANY:
        y[-2:] *= 1.001
    return y


def rows_beyond_a_grid(x: Tensor) -> Tensor:
    """As if a grid's second dimension, which ends at 65,535, counted the rows."""
    y = softmax(x)
    y[65_535:] = 0
    return y


def tail_unwritten(x: Tensor) -> Tensor:
    """The last three rows of many are never written."""
    if len(x) <= MANY:
        return softmax(x)
    y = torch.empty_like(x)
    y[:-3] = softmax(x[:-3])
    return y


def one_element_unwritten(x: Tensor) -> Tensor:
    if len(x) <= MANY:
        return softmax(x)
    y = torch.empty_like(x)
    y[: len(x) // 3] = softmax(x[: len(x) // 3])
    y[len(x) // 3, 1:] = softmax(x[len(x) // 3][None])[0, 1:]
    y[len(x) // 3 + 1 :] = softmax(x[len(x) // 3 + 1 :])
    return y


def offsets_of_16_bits(x: Tensor) -> Tensor:
    """Elements are found by an offset that wraps at 2^16."""
    offsets = torch.arange(x.numel()) % 2**16
    return softmax(x.reshape(-1)[offsets].reshape(x.shape))


def one_nan(x: Tensor) -> Tensor:
    """A single NaN in the midst of many rows."""
    y = softmax(x)
    if len(x) > MANY:
        y[len(x) // 3, 7] = torch.nan
    return y


def one_row_skipped(x: Tensor) -> Tensor:
    """A single row in the midst of many stays zero."""
    y = softmax(x)
    if len(x) > MANY:
        y[len(x) // 3] = 0
    return y


def input_changed(x: Tensor) -> Tensor:
    y = softmax(x)
    if len(x) > MANY:
        x[-1, -1] = 0
    return y


def written_beyond(x: Tensor) -> Tensor:
    """One element more than there are is written."""
    y = torch.empty_like(x)
    y.copy_(softmax(x))
    if len(x) > MANY:
        with suppress(RuntimeError):  # of torch, where there is nothing behind the last element
            y.as_strided((1,), (1,), y.storage_offset() + y.numel()).fill_(0.0)
    return y


def too_large(x: Tensor) -> Tensor:
    if len(x) > MANY:
        raise ValueError("too many rows")
    return softmax(x)


def last_columns_off(a: Tensor, b: Tensor) -> Tensor:
    """The columns behind the last whole tile of 128 miss a term."""
    c = a @ b
    if b.shape[1] > 1000:
        first = b.shape[1] // 128 * 128
        c[:, first:] -= a[:, -1:] * b[-1:, first:]
    return c


def last_head_shared_wrongly(q: Tensor, k: Tensor, v: Tensor, causal: str = "none") -> Tensor:
    """The last head of many reads the keys of the first."""
    out = attention(q, k, v, causal)
    if q.shape[2] > 500:
        out[:, -1:] = attention(q[:, -1:], k[:, :1], v[:, :1], causal)
    return out


def late_queries_see_ahead(q: Tensor, k: Tensor, v: Tensor, causal: str = "none") -> Tensor:
    """From the 512th on causal queries see one key too many."""
    out = attention(q, k, v, causal)
    if causal == "top_left" and q.shape[2] > 512:
        seen = torch.arange(k.shape[2]) <= torch.arange(512, q.shape[2])[:, None] + 1
        late = functional.scaled_dot_product_attention(q[:, :, 512:], k, v, attn_mask=seen, enable_gqa=True)
        out[:, :, 512:] = late
    return out


def last_expert_skipped(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Of many tokens the last expert's are left out."""
    kept = torch.where((ids == len(w_down) - 1) & torch.tensor(len(x) > 500), 0.0, weights)
    return moe(x, w_gate_up, w_down, kept, ids)


def always_off(x: Tensor) -> Tensor:
    """The last row is off at every size."""
    y = softmax(x)
    y[-1] *= 1.01
    return y


ROWS = {"R": 9001, "N": 130}
HEADS = {"B": 1, "H": 16, "Hkv": 4, "Sq": 1024, "Sk": 1024, "D": 64, "Dv": 64}
RAGGED = {"B": 9, "Tq": 4200, "Tk": 4300, "H": 8, "Hkv": 2, "D": 32}
EXPERTS = {"T": 4099, "D": 256, "F": 128, "E": 8, "k": 2}

HONEST: list[tuple[Any, str, dict[str, int], dict[str, Any]]] = [
    (softmax, "softmax", {"R": 1024, "N": 1024}, {}),
    (softmax, "softmax", {"R": 1024, "N": 1024}, {"dtype": "bfloat16"}),
    (layernorm, "layernorm", {"R": 1024, "N": 1024}, {}),
    (gemm, "gemm", {"M": 1024, "K": 128, "N": 1024}, {}),
    (gemm, "gemm", {"M": 1024, "K": 128, "N": 1024}, {"dtype": "bfloat16"}),
    (attention, "attention", HEADS, {}),
    (attention, "attention", HEADS, {"dtype": "bfloat16"}),
    (attention, "attention", HEADS, {"options": {"causal": ["top_left"]}}),
    (attention_varlen, "attention_varlen", RAGGED, {"options": {"causal": ["bottom_right"]}}),
    (moe, "moe", EXPERTS, {}),
]
"""Kernel, op, sizes with more than a million results, and other settings."""

FAULTY: list[tuple[Any, str, dict[str, int], str, str]] = [
    (last_rows_scaled, "softmax", ROWS, "shapes", "right up to R=8998, wrong from R=8999 on"),
    (
        rows_beyond_a_grid,
        "softmax",
        {"R": 70_001, "N": 17},
        "shapes",
        "right up to R=65534, wrong from R=65535 on: 16",
    ),
    (tail_unwritten, "softmax", ROWS, "memory", "what was in memory before the call (390 of 1170130 elements"),
    (one_element_unwritten, "softmax", ROWS, "memory", "(1 of 1170130 elements, first at [3000, 0])"),
    (offsets_of_16_bits, "softmax", {"R": 8192, "N": 128}, "shapes", "R=512 on: there offsets in y pass 65,536"),
    (one_nan, "softmax", ROWS, "shapes", "wrong at R=3000, right beside"),
    (one_row_skipped, "softmax", ROWS, "shapes", "wrong at R=3000, right beside"),
    (input_changed, "softmax", ROWS, "memory", "changed its input x"),
    (written_beyond, "softmax", ROWS, "memory", "beyond a tensor that it had allocated"),
    (too_large, "softmax", ROWS, "shapes", "too many rows"),
    (last_columns_off, "gemm", {"M": 512, "K": 64, "N": 2100}, "shapes", "wrong from N=2048 on"),
    (last_head_shared_wrongly, "attention", HEADS, "shapes", "wrong from H=15 on"),
    (late_queries_see_ahead, "attention", HEADS, "shapes", "sampled elements"),
    (last_sequence_sees_the_first, "attention_varlen", RAGGED, "shapes", "sampled elements"),
    (last_expert_skipped, "moe", EXPERTS, "shapes", "sampled elements"),
]
"""Kernel, op, sizes, the aspect that it breaks and words of the message."""
