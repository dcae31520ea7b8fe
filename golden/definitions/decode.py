"""Attention of one new token per sequence over a paged cache of keys and values."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.attention import heads_per_group, score_scale
from assay.golden.options import number
from assay.golden.registry import Reduction, define


def slots_of(native: ModuleType, block_table: Idx, seq_lens: Idx, page: int) -> tuple[Idx, Idx]:
    """Where each position of each sequence lies among all slots of the cache, and whether it is one at all, [B,L]."""
    position = native.arange(block_table.shape[1] * page)
    seen = position[None, :] < seq_lens[:, None]
    slots = block_table[:, position // max(page, 1)] * page + position[None, :] % max(page, 1)
    return native.where(seen, slots, 0), seen


def _free(slots: Any, seen: Any, total: int) -> Any:
    """Which of ``total`` slots no sequence has a position in."""
    free = torch.ones(total, dtype=torch.bool)
    free[slots[seen & (slots >= 0) & (slots < total)]] = False
    return free


def unused_slots(block_table: torch.Tensor, seq_lens: torch.Tensor, **caches: torch.Tensor) -> dict[str, torch.Tensor]:
    """Slots that no sequence has a position in, and the table's entries behind the last page of each sequence."""
    pages, page = next(iter(caches.values())).shape[:2]
    slots, seen = slots_of(torch, block_table.to(torch.int64), seq_lens, page)
    free = _free(slots, seen, pages * page).reshape(pages, page)
    first = torch.arange(block_table.shape[1]) * page
    return {
        **{name: free[(..., *(None,) * (x.dim() - 2))].expand(x.shape) for name, x in caches.items()},
        "block_table": first[None, :] >= seq_lens[:, None],
    }


def _unused(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> dict[str, torch.Tensor]:
    return unused_slots(block_table, seq_lens, k_cache=k_cache, v_cache=v_cache)


@define(
    "attention_decode",
    "q[B,H,D], k_cache[P,page,Hkv,D], v_cache[P,page,Hkv,D], block_table:int32[B,max_pages]=index(P), "
    "seq_lens:int32[B]=length(max_pages*page) -> out[B,H,D]",
    options={
        "scale": number(None, usual=(None, 0.3)),
        "k_scale": number(1.0, usual=(1.0, 0.5)),
        "v_scale": number(1.0, usual=(1.0, 2.5)),
    },
    stages={"query": None, "scores": None, "probabilities": "input"},
    rows="B",
    work="16*B*H*max_pages*page*D",
    sizes={
        "B": (1, 2, 3),
        "Hkv": (1, 2, 3),
        "D": (8, 16, 40, 64, 80, 128, 256),
        "page": (1, 2, 5, 8, 16, 32, 64),
        "max_pages": (1, 2, 3, 4, 6, 9, 13, 24, 64),
    },
    groups={"H": "Hkv"},
    gathered=("P",),
    grid=("B", "P"),
    reduction=Reduction("max_pages*page"),
    faults=("inputs_in_tf32",),
    unused=_unused,
)
def attention_decode(
    xp: Arithmetic[N, Idx],
    q: N,
    k_cache: N,
    v_cache: N,
    block_table: Idx,
    seq_lens: Idx,
    *,
    scale: float | None,
    k_scale: float,
    v_scale: float,
) -> N:
    """softmax(q k^T scale) v over the first seq_lens[b] positions; p lies in page block_table[b, p // page].

    A slot of the cache stands for its number times k_scale or v_scale.
    """
    (batch, heads, width), (pages, page, groups, _) = q.shape, k_cache.shape
    shared = heads_per_group("attention_decode", heads, groups)
    slots, seen = slots_of(xp.native, block_table, seq_lens, page)
    if pages * page == 0:  # then all sequences are empty
        slots, seen = slots[:, :0], seen[:, :0]
    group = xp.integers(range(groups))[None, :, None]
    k, v = (
        xp.where(seen[:, None, :, None], cache.reshape(pages * page, groups, width)[slots[:, None, :], group], 0.0)
        for cache in (k_cache, v_cache)
    )
    factor = score_scale(xp, width, scale)
    q = q.reshape(batch, groups, shared, width)
    scores = xp.scores(q, xp.dequantize(k, k_scale), factor)
    out, _ = xp.attend(scores, seen[:, None, None, :], xp.dequantize(v, v_scale), None)

    def unread() -> Idx:
        """Where a slot of no sequence is NaN or infinite: of a head's keys all its results, of its values their own."""
        free = _free(slots, seen, pages * page)[:, None, None]
        keys, values = (~xp.is_finite(x.reshape(pages * page, groups, width)) & free for x in (k_cache, v_cache))
        places: Idx = (keys.any(-1)[..., None] | values).any(0).repeat_interleave(shared, 0)[None]
        return places

    return xp.spilled(unread, out.reshape(batch, heads, width))
