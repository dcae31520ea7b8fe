"""Attention of one new token per sequence over a paged cache, which may be in an 8-bit format."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from assay.kernels.cpu.attention import exponentials
from assay.kernels.cpu.compiling import composed
from assay.kernels.triton.arguments import check_decode, check_numbers, checked_scale


@composed
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """softmax(q k^T scale) v for q[B,H,D] over the first seq_lens[b] positions of sequence b; H a multiple of Hkv.

    k_cache and v_cache [P,page,Hkv,D] are in q's dtype (float32, bfloat16 or float16), or in float8_e4m3fn or
    float8_e5m2; a slot stands for its number times k_scale or v_scale. Position p of sequence b lies in page
    block_table[b, p // page], at p % page; block_table is int32[B,max_pages], seq_lens int32[B], and neither entries
    nor slots behind the last position are used. scale: 1 / sqrt(D) where left out. All is float32 inside.

    Returns out[B,H,D] in q's dtype, zero for an empty sequence. Raises TypeError or ValueError, naming the argument,
    for another dtype or shape. Lengths aren't checked, and page numbers are taken for the nearest that there is.
    """
    check_decode(q, k_cache, v_cache, block_table, seq_lens, widest=sys.maxsize)
    check_numbers(k_scale=k_scale, v_scale=v_scale)
    batch, heads, size = q.shape
    pages, page, shared, _ = k_cache.shape
    table = block_table.clamp(0, pages - 1).long()
    slots = page * table.shape[1]
    if not q.numel() or not slots:
        return torch.zeros_like(q)
    keys, values = (cache[table].float().reshape(batch, slots, shared, size) for cache in (k_cache, v_cache))
    unused = (torch.arange(slots) >= seq_lens[:, None])[:, None, None]
    factor = checked_scale(scale, size) * k_scale
    scores = (q.float().reshape(batch, shared, heads // shared, size) @ keys.permute(0, 2, 3, 1)).mul_(factor)
    weights, _, total = exponentials(scores.masked_fill_(unused, -torch.inf))
    values.masked_fill_(unused.view(batch, slots, 1, 1), 0.0)
    mixed = (weights @ values.transpose(1, 2)).div_(torch.where(total == 0, 1.0, total)).mul_(v_scale)
    return mixed.view(batch, heads, size).to(q.dtype)
