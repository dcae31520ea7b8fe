"""Attention of one new token per sequence over a paged cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch

from assay.golden.errors import ShapeError
from assay.golden.registry import define, number


def _slots(native: Any, block_table: Any, seq_lens: Any, page: int) -> tuple[Any, Any]:
    """Where each position of each sequence lies among all slots of the cache, and whether it is one at all, [B,L]."""
    position = native.arange(block_table.shape[1] * page)
    seen = position[None, :] < seq_lens[:, None]
    slots = block_table[:, position // max(page, 1)] * page + position[None, :] % max(page, 1)
    return native.where(seen, slots, 0), seen


def _unused(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Slots that no sequence has a position in, and the table's entries behind the last page of each sequence."""
    pages, page = k_cache.shape[:2]
    slots, seen = _slots(torch, block_table.to(torch.int64), seq_lens, page)
    free = torch.ones(pages * page, dtype=torch.bool)
    free[slots[seen & (slots >= 0) & (slots < pages * page)]] = False
    first = torch.arange(block_table.shape[1]) * page
    return {
        "k_cache": free.reshape(pages, page, 1, 1).expand(k_cache.shape),
        "v_cache": free.reshape(pages, page, 1, 1).expand(v_cache.shape),
        "block_table": first[None, :] >= seq_lens[:, None],
    }


@define(
    "attention_decode",
    "q[B,H,D], k_cache[P,page,Hkv,D], v_cache[P,page,Hkv,D], block_table:int32[B,max_pages]=index(P), "
    "seq_lens:int32[B]=length(max_pages*page) -> out[B,H,D]",
    options={"scale": number(None), "k_scale": number(1.0), "v_scale": number(1.0)},
    stages={"probabilities": "input"},
    rows="B",
    work="16*B*H*max_pages*page*D",
    sizes={
        "B": (1, 2, 3),
        "Hkv": (1, 2, 3),
        "D": (8, 16, 40, 64, 80, 128, 256),
        "page": (1, 2, 5, 8, 16, 32, 64),
        "max_pages": (1, 2, 3, 4, 6, 9, 13, 24, 64),
    },
    multiples={"H": "Hkv"},
    unused=_unused,
)
def attention_decode(
    xp: Any,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    scale: float | None,
    k_scale: float,
    v_scale: float,
) -> Any:
    """softmax(q k^T scale) v over the first seq_lens[b] positions; p lies in page block_table[b, p // page].

    A slot of the cache stands for its number times k_scale or v_scale.
    """
    (batch, heads, width), (pages, page, groups, _) = q.shape, k_cache.shape
    if groups == 0 or heads % groups:
        raise ShapeError(f"attention_decode: the {heads} query heads are no multiple of the {groups} key/value heads")
    slots, seen = _slots(xp.native, block_table, seq_lens, page)
    if pages * page == 0:  # then all sequences are empty
        slots, seen = slots[:, :0], seen[:, :0]
    group = xp.integers(range(groups))[None, :, None]
    k, v = (
        xp.where(seen[:, None, :, None], cache.reshape(pages * page, groups, width)[slots[:, None, :], group], 0.0)
        for cache in (k_cache, v_cache)
    )
    factor = xp.constant(lambda sqrt, pi: 1 / sqrt(max(width, 1))) if scale is None else scale
    q = q.reshape(batch, groups, heads // groups, width)
    scores = xp.scores(q, xp.represented(k, k_scale), factor)
    out, _ = xp.attend(scores, seen[:, None, None, :], xp.represented(v, v_scale), None)
    return out.reshape(batch, heads, width)
