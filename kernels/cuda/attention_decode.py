"""Decode attention over a paged KV cache, in CUDA C++, with split-KV."""

from __future__ import annotations

import math
from ctypes import c_float, c_int, c_longlong

import torch
from torch import Tensor

from assay.kernels.cuda.compiler import launch
from assay.kernels.triton.arguments import check_decode, check_numbers, check_sm_scale
from assay.kernels.triton.operators import custom_op

_LOG2_E = math.log2(math.e)
_MAX_HEAD_DIM = 256
_THREADS, _MERGE_THREADS = 128, 128
_TARGET_BLOCKS = 528  # four for each of the 132 multiprocessors of an H100 or H200
_MIN_KEYS_PER_SPLIT = 128  # merging costs more than reading fewer keys
_MAX_SPLITS = 128


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
    (batch, heads, head_dim), (_, page, key_heads, _) = q.shape, k_cache.shape
    out = q.new_empty(q.shape)
    if not out.numel():
        return out
    heads_per_key_head, keys = heads // key_heads, block_table.shape[1] * page
    group = next((size for size in (1, 4) if heads_per_key_head <= size), 8)
    blocks = batch * key_heads * -(-heads_per_key_head // group)
    splits = max(1, min(-(-_TARGET_BLOCKS // blocks), _MAX_SPLITS, -(-keys // _MIN_KEYS_PER_SPLIT)))
    partials = lse = None
    if splits > 1:
        partials = torch.empty((batch, heads, splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
    vector = next(size for size in (2, 4, 8) if head_dim <= 32 * size)
    packed = head_dim % vector == 0 and _is_packed(k_cache, vector) and _is_packed(v_cache, vector)
    strides = (*q.stride(), *k_cache.stride(), *v_cache.stride(), *block_table.stride(), *seq_lens.stride())
    launch(
        "attention_decode",
        (blocks, splits),
        _THREADS,
        [
            *(q, k_cache, v_cache, block_table, seq_lens, out, partials, lse),
            *map(c_longlong, strides),
            *map(c_int, (head_dim, key_heads, heads_per_key_head, max(page, 1), keys, splits, packed)),
            *map(c_float, (scale * k_scale * _LOG2_E, v_scale if splits == 1 else 1.0)),
        ],
        ELEMENT=q.dtype,
        CACHE=k_cache.dtype,
        GROUP=group,
        VECTOR=vector,
    )
    if partials is not None:
        sizes = [c_int(splits), c_int(head_dim), c_float(v_scale)]
        launch("merge", (batch * heads, 1), _MERGE_THREADS, [partials, lse, out, *sizes], ELEMENT=q.dtype)
    return out


def _is_packed(cache: Tensor, vector: int) -> bool:
    """Return whether one instruction can load ``vector`` elements of a row: contiguous and aligned."""
    size = vector * cache.element_size()
    offsets = (cache.data_ptr(), *(stride * cache.element_size() for stride in cache.stride()[:3]))
    return cache.stride(3) == 1 and all(offset % size == 0 for offset in offsets)


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
    """Return softmax(q k^T scale) v for q[B,H,D] over the first seq_lens[b] keys of sequence b; H a multiple of Hkv.

    As `assay.kernels.triton.attention_decode`, with the same arguments and errors; softmax weights aren't
    rounded. There is no gradient.
    """
    check_decode(q, k_cache, v_cache, block_table, seq_lens, _MAX_HEAD_DIM)
    check_numbers(k_scale=k_scale, v_scale=v_scale)
    scale = check_sm_scale(scale, q.shape[2])
    return _attention_decode(q, k_cache, v_cache, block_table, seq_lens, scale, k_scale, v_scale)
