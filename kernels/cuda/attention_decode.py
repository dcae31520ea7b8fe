"""Attention of one new token per sequence over a paged cache, in CUDA C++."""

from __future__ import annotations

import math
from ctypes import c_float, c_int, c_longlong

import torch
from torch import Tensor

from assay.kernels.cuda.compiler import launch
from assay.kernels.triton.arguments import check_decode, check_numbers, check_sm_scale
from assay.kernels.triton.operators import custom_op

_LOG2_E = math.log2(math.e)
_WIDEST = 256
_THREADS, _MERGING = 128, 128
_BLOCKS = 528  # four for each of the 132 multiprocessors of an H100 or H200
_LEAST_KEYS = 128  # of a block: fewer are read sooner than merged
_MOST_SPLITS = 128


@custom_op("assay::cuda_attention_decode", lambda q, *rest: q.new_empty(q.shape))
def _attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> Tensor:
    (batch, heads, width), (_, page, key_heads, _) = q.shape, k_cache.shape
    out = q.new_empty(q.shape)
    if not out.numel():
        return out
    heads_each, keys = heads // key_heads, block_table.shape[1] * page
    group = next((size for size in (1, 4) if heads_each <= size), 8)
    blocks = batch * key_heads * -(-heads_each // group)
    splits = max(1, min(-(-_BLOCKS // blocks), _MOST_SPLITS, -(-keys // _LEAST_KEYS)))
    parts = lse = None
    if splits > 1:
        parts = torch.empty((batch, heads, splits, width), dtype=torch.float32, device=q.device)
        lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
    each = next(each for each in (2, 4, 8) if width <= 32 * each)
    packed = width % each == 0 and _is_packed(k_cache, each) and _is_packed(v_cache, each)
    strides = (*q.stride(), *k_cache.stride(), *v_cache.stride(), *block_table.stride(), *seq_lens.stride())
    launch(
        "attention_decode",
        (blocks, splits),
        _THREADS,
        [
            *(q, k_cache, v_cache, block_table, seq_lens, out, parts, lse),
            *map(c_longlong, strides),
            *map(c_int, (width, key_heads, heads_each, max(page, 1), keys, splits, packed)),
            *map(c_float, (scale * k_scale * _LOG2_E, v_scale if splits == 1 else 1.0)),
        ],
        ELEMENT=q.dtype,
        CACHE=k_cache.dtype,
        GROUP=group,
        EACH=each,
    )
    if parts is not None:
        tail = [c_int(splits), c_int(width), c_float(v_scale)]
        launch("merge", (batch * heads, 1), _MERGING, [parts, lse, out, *tail], ELEMENT=q.dtype)
    return out


def _is_packed(cache: Tensor, each: int) -> bool:
    """Whether so many neighbours of a row lie so that one instruction reads them."""
    size = each * cache.element_size()
    places = (cache.data_ptr(), *(stride * cache.element_size() for stride in cache.stride()[:3]))
    return cache.stride(3) == 1 and all(place % size == 0 for place in places)


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

    As `assay.kernels.triton.attention_decode`, with the same arguments and errors; weights aren't rounded. There
    is no gradient.
    """
    check_decode(q, k_cache, v_cache, block_table, seq_lens, _WIDEST)
    check_numbers(k_scale=k_scale, v_scale=v_scale)
    scale = check_sm_scale(scale, q.shape[2])
    return _attention_decode(q, k_cache, v_cache, block_table, seq_lens, scale, k_scale, v_scale)
