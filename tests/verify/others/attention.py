"""Attention as people write it: whole, in blocks with running sums, paged, ragged, backward; each with one fault."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .entry import Other

Mask = Callable[[Tensor, Tensor, int, int], Tensor]
LOG2E = 1.4426950408889634


def heads(q: Tensor, k: Tensor) -> Tensor:
    """Key/value heads, one for each query head."""
    return k.float().repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)


def whole(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, scale: float | None = None) -> Tensor:
    """Attention in one piece; a row that sees nothing is zero."""
    k, v = heads(q, k), heads(q, v)
    scores = q.float() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        rows, keys = scores.shape[-2:]
        seen = mask(torch.arange(rows)[:, None], torch.arange(keys)[None, :], rows, keys)
        scores, v = scores.masked_fill(~seen, -math.inf), torch.where(seen.any(0)[:, None], v, 0.0)
    if not scores.shape[-1]:
        return torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    weights = torch.softmax(scores, -1)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return torch.where(blind, 0.0, torch.where(blind, 0.0, weights) @ v).to(q.dtype)


def first_keys(q: Tensor, k: Tensor, v: Tensor, causal: str = "bottom_right") -> Tensor:
    """tril() of whatever shape."""
    return whole(q, k, v, lambda i, j, rows, keys: j <= i)


def one_ahead(q: Tensor, k: Tensor, v: Tensor, causal: str = "bottom_right") -> Tensor:
    """triu(diagonal=2) is masked."""
    return whole(q, k, v, lambda i, j, rows, keys: j <= i + keys - rows + 1)


def two_ahead(q: Tensor, k: Tensor, v: Tensor, causal: str = "bottom_right") -> Tensor:
    """Two keys too far."""
    return whole(q, k, v, lambda i, j, rows, keys: j <= i + keys - rows + 2)


def window_wider(
    q: Tensor, k: Tensor, v: Tensor, causal: str = "bottom_right", window: tuple[int, int] | None = (8, 0)
) -> Tensor:
    """i - j <= W + 1."""
    left = 8 if window is None else window[0]
    return whole(q, k, v, lambda i, j, rows, keys: (j <= i + keys - rows) & (j >= i + keys - rows - left - 1))


def scaled_by_width(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """1 / D."""
    return whole(q, k, v, scale=1 / max(q.shape[-1], 1))


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No scale."""
    return whole(q, k, v, scale=1.0)


def heads_by_modulo(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """repeat in place of repeat_interleave."""
    times = q.shape[1] // max(k.shape[1], 1)
    return whole(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1))


def padded_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys of zeros up to a whole tile are seen."""
    more = -k.shape[2] % 16
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (k, v))
    return whole(q, k, v)


def blocks(q: Tensor, k: Tensor, v: Tensor, step: int, *, sums: bool = True, outputs: bool = True) -> Tensor:
    """Flash attention in blocks of keys; the running sum, or the running output, rescaled or not."""
    k, v = heads(q, k), heads(q, v)
    shape = (*q.shape[:-1], 1)
    largest, total, out = torch.full(shape, -math.inf), torch.zeros(shape), torch.zeros(*q.shape[:-1], v.shape[-1])
    for first in range(0, k.shape[2], step):
        scores = q.float() @ k[:, :, first : first + step].mT * q.shape[-1] ** -0.5
        above = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, fade = torch.exp(scores - above), torch.exp(largest - above)
        total = (total * fade if sums else total) + weights.sum(-1, keepdim=True)
        out = (out * fade if outputs else out) + weights @ v[:, :, first : first + step]
        largest = above
    return (out / torch.where(total == 0, 1.0, total)).to(q.dtype)


def output_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Neither sum nor output is rescaled."""
    return blocks(q, k, v, 16, sums=False, outputs=False)


def sum_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output is rescaled, the sum isn't."""
    return blocks(q, k, v, 16, sums=False)


def whole_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys // 16 blocks."""
    keys = k.shape[2] // 16 * 16 if k.shape[2] >= 16 else k.shape[2]
    return blocks(q, k[:, :, :keys], v[:, :, :keys], 16)


def whole_blocks_of_32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys // 32 blocks."""
    keys = k.shape[2] // 32 * 32 if k.shape[2] >= 32 else k.shape[2]
    return blocks(q, k[:, :, :keys], v[:, :, :keys], 32)


def query_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q * scale in the input dtype."""
    return whole((q.float() * q.shape[-1] ** -0.5).to(q.dtype), k, v, scale=1.0)


def query_scaled_in_base_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q * (scale log2 e) in the input dtype, exp2."""
    return whole((q.float() * (q.shape[-1] ** -0.5 * LOG2E)).to(q.dtype), k, v, scale=1 / LOG2E)


def scores_in_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(q * k).sum in the input dtype, as a decode kernel has it."""
    k, v = heads(q, k).to(q.dtype), heads(q, v)
    scores = (q[:, :, :, None] * k[:, :, None]).float().sum(-1) * q.shape[-1] ** -0.5
    scores = scores - scores.amax(-1, keepdim=True)
    return (torch.softmax(scores, -1) @ v).to(q.dtype)


def scores_rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores are stored in the input dtype before the softmax."""
    k, v = heads(q, k), heads(q, v)
    scores = (q.float() @ k.mT * q.shape[-1] ** -0.5).to(q.dtype).float()
    return (torch.softmax(scores, -1) @ v).to(q.dtype)


def weights_in_e5m2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Probabilities in e5m2."""
    k, v = heads(q, k), heads(q, v)
    weights = torch.softmax(q.float() @ k.mT * q.shape[-1] ** -0.5, -1)
    return (weights.to(torch.float8_e5m2).float() @ v).to(q.dtype)


def capped_at_30(q: Tensor, k: Tensor, v: Tensor, softcap: float | None = 20.0) -> Tensor:
    """A cap of 30 whatever is asked for."""
    k, v = heads(q, k), heads(q, v)
    scores = 30.0 * torch.tanh(q.float() @ k.mT * q.shape[-1] ** -0.5 / 30.0)
    return (torch.softmax(scores, -1) @ v).to(q.dtype)


def uncapped(q: Tensor, k: Tensor, v: Tensor, softcap: float | None = 20.0) -> Tensor:
    """No cap."""
    return whole(q, k, v)


def slopes_added(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, *, alibi: bool) -> Tensor:
    """ALiBi added where it is to be subtracted."""
    rows, keys = q.shape[2], k.shape[2]
    away = (torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)[None, :]).abs()
    scores = q.float() @ heads(q, k).mT * q.shape[-1] ** -0.5 + slopes.float()[:, None, None] * away
    return (torch.softmax(scores, -1) @ heads(q, v)).to(q.dtype)


def paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, more: int, whole_pages: bool
) -> Tensor:
    """One token's attention over pages, ``more`` places too many, or whole pages alone."""
    (_, size, groups, _), out = k_cache.shape, torch.zeros(q.shape)
    for row, length in enumerate(seq_lens.tolist()):
        length = length // size * size if whole_pages and length >= size else length
        places = torch.arange(min(length + more, block_table.shape[1] * size))
        pages = block_table[row, places // size].long().clamp(0, len(k_cache) - 1)
        k, v = (cache[pages, places % size].float() for cache in (k_cache, v_cache))  # [places, groups, D]
        if len(places):
            k, v = (x.repeat_interleave(q.shape[1] // groups, 1) for x in (k, v))
            scores = torch.einsum("hd,phd->hp", q[row].float(), k) * q.shape[-1] ** -0.5
            out[row] = torch.einsum("hp,phd->hd", torch.softmax(scores, -1), v)
    return out.to(q.dtype)


def paged_one_more(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
    """place <= length."""
    return paged(q, k_cache, v_cache, block_table, seq_lens, 1, whole_pages=False)


def paged_whole(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
    """The last page only if it is full."""
    return paged(q, k_cache, v_cache, block_table, seq_lens, 0, whole_pages=True)


def ragged(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Sequences end to end: each sees the first key of the next too."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    starts, firsts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for start, end, first, last in zip(starts, starts[1:], firsts, firsts[1:], strict=False):
        parts = (q[start:end], k[first : last + 1], v[first : last + 1])
        out[start:end] = whole(*(x.transpose(0, 1)[None] for x in parts))[0].transpose(0, 1)
    return out


def gradient(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dS = P dP, no delta."""
    times, scale = q.shape[1] // max(k.shape[1], 1), q.shape[-1] ** -0.5
    keys, values, do = heads(q, k), heads(q, v), dout.float()
    p = torch.softmax(q.float() @ keys.mT * scale, -1) if k.shape[2] else torch.zeros(*q.shape[:3], 0)
    ds = p * (do @ values.mT) * scale
    dk, dv = ds.mT @ q.float(), p.mT @ do
    dk, dv = (x.unflatten(1, (-1, times)).sum(2) for x in (dk, dv))
    return (ds @ keys).to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def merged(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """2 to the power of a natural logarithm."""
    most = torch.maximum(lse_a, lse_b)
    held = torch.where(most.isinf(), 0.0, most)
    a, b = torch.exp2(lse_a - held), torch.exp2(lse_b - held)
    total = torch.where(a + b == 0, 1.0, a + b)
    left, right = (torch.where(w[..., None] == 0, 0.0, o.float() * w[..., None]) for o, w in ((o_a, a), (o_b, b)))
    return ((left + right) / total[..., None]).to(o_a.dtype), torch.where(most.isinf(), most, held + torch.log2(total))


SMALL: dict[str, Any] = {
    "shapes": {
        "B": [1],
        "Hkv": [1, 2],
        "H": [2, 4],
        "Sq": [1, 5, 17],
        "Sk": [1, 7, 33, 50, 64],
        "D": [8, 64],
        "Dv": [8],
    }
}
_WIDE = {
    "shapes": {"B": [1], "Hkv": [1], "H": [2], "Sq": [5, 65], "Sk": [7, 64], "D": [8, 64], "Dv": [8]},
    "examples": 30,
}
_CAUSAL = SMALL | {"options": {"causal": ["bottom_right"]}}
_WINDOW = SMALL | {"options": {"causal": ["bottom_right"], "window": [(8, 0)]}}
_ALIBI = SMALL | {"options": {"alibi": [True]}}
_CAP = SMALL | {"options": {"softcap": [20.0]}}
_PAGED = {"shapes": {"B": [1, 3], "H": [2], "Hkv": [1, 2], "D": [8, 16], "page": [4], "max_pages": [1, 3], "P": [8]}}

ATTENTION = (
    Other("first_keys", first_keys, "attention", "bfloat16", ("top_left_for_bottom_right",), _CAUSAL),
    Other("one_ahead", one_ahead, "attention", "bfloat16", ("diagonal_one_too_far",), _CAUSAL),
    Other("two_ahead", two_ahead, "attention", "bfloat16", (), _CAUSAL),
    Other("window_wider", window_wider, "attention", "bfloat16", ("window_one_wider",), _WINDOW),
    Other("scaled_by_width", scaled_by_width, "attention", "bfloat16", ("scale_twice",), SMALL),
    Other("unscaled", unscaled, "attention", "bfloat16", ("scale_dropped",), SMALL),
    Other("heads_by_modulo", heads_by_modulo, "attention", "bfloat16", ("wrong_head_group",), SMALL),
    Other("padded_keys", padded_keys, "attention", "bfloat16", ("padding_not_masked",), SMALL),
    Other("output_left", output_left, "attention", "float32", ("output_not_rescaled",), SMALL),
    Other("sum_left", sum_left, "attention", "float32", ("sum_not_rescaled",), SMALL),
    Other("whole_blocks", whole_blocks, "attention", "bfloat16", ("tail_of_keys_dropped",), SMALL),
    Other("whole_blocks_of_32", whole_blocks_of_32, "attention", "bfloat16", (), SMALL),
    Other("query_scaled", query_scaled, "attention", "bfloat16", ("query_rounded",), _WIDE),
    Other(
        "query_scaled_in_base_2", query_scaled_in_base_2, "attention", "float16", ("query_rounded_in_base_2",), SMALL
    ),
    Other("scores_in_half", scores_in_half, "attention", "float16", ("scores_multiplied_in_input_dtype",), SMALL),
    Other("scores_rounded", scores_rounded, "attention", "bfloat16", ("scores_rounded",), SMALL),
    Other("weights_in_e5m2", weights_in_e5m2, "attention", "bfloat16", (), SMALL),
    Other("capped_at_30", capped_at_30, "attention", "bfloat16", (), _CAP),
    Other("uncapped", uncapped, "attention", "bfloat16", ("softcap_dropped",), _CAP),
    Other("slopes_added", slopes_added, "attention", "bfloat16", ("alibi_sign",), _ALIBI),
    Other("paged_one_more", paged_one_more, "attention_decode", "bfloat16", ("one_token_too_many",), _PAGED),
    Other("paged_whole", paged_whole, "attention_decode", "bfloat16", ("partial_page_dropped",), _PAGED),
    Other("ragged", ragged, "attention_varlen", "bfloat16"),
    Other("gradient", gradient, "attention_backward", "bfloat16", ("delta_dropped",), SMALL),
    Other("merged", merged, "merge_states", "bfloat16", ("merged_in_base_2",)),
)  # fmt: skip
