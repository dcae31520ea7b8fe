"""Attention of one new token per sequence over a paged KV cache, and multi-head latent attention (MLA)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.attention import SIZES, heads_per_group, score_scale
from assay.golden.options import flag, number
from assay.golden.registry import Fault, Reduction, altered, define


def slots_and_mask(native: ModuleType, block_table: Idx, seq_lens: Idx, page: int) -> tuple[Idx, Idx]:
    """Return the cache slot of each position of each sequence, and whether there is such a position, [B,L]."""
    position = native.arange(block_table.shape[1] * page)
    seen = position[None, :] < seq_lens[:, None]
    slots = block_table[:, position // max(page, 1)] * page + position[None, :] % max(page, 1)
    return native.where(seen, slots, 0), seen


def _free(slots: Any, seen: Any, total: int) -> Any:
    free = torch.ones(total, dtype=torch.bool)
    free[slots[seen & (slots >= 0) & (slots < total)]] = False
    return free


def unused_slots(block_table: torch.Tensor, seq_lens: torch.Tensor, **caches: torch.Tensor) -> dict[str, torch.Tensor]:
    """Slots that no sequence has a position in, and the table's entries behind the last page of each sequence."""
    pages, page = next(iter(caches.values())).shape[:2]
    slots, seen = slots_and_mask(torch, block_table.to(torch.int64), seq_lens, page)
    free = _free(slots, seen, pages * page).reshape(pages, page)
    first = torch.arange(block_table.shape[1]) * page
    return {
        **{name: free[(..., *(None,) * (x.dim() - 2))].expand(x.shape) for name, x in caches.items()},
        "block_table": first[None, :] >= seq_lens[:, None],
    }


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
    sequential_steps="B*Hkv*max_pages",
    sizes={"D": SIZES["D"]},
    groups={"H": "Hkv"},
    gathered=("P",),
    grid=("B", "P"),
    reduction=Reduction("max_pages*page"),
    faults=("inputs_in_tf32",),
    unused=lambda q, k_cache, v_cache, *used: unused_slots(*used, k_cache=k_cache, v_cache=v_cache),
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
    """softmax(q k^T scale) v over the first seq_lens[b] positions; position p is in page block_table[b, p // page].

    A slot of the cache represents its number times k_scale or v_scale.
    """
    (batch, heads, width), (pages, page, groups, _) = q.shape, k_cache.shape
    shared = heads_per_group("attention_decode", heads, groups)
    slots, seen = slots_and_mask(xp.native, block_table, seq_lens, page)
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
        """Mask what an unused slot that is NaN or infinite may reach: its key all results of the head, its value a
        column."""
        free = _free(slots, seen, pages * page)[:, None, None]
        keys, values = (~xp.is_finite(x.reshape(pages * page, groups, width)) & free for x in (k_cache, v_cache))
        mask: Idx = (keys.any(-1)[..., None] | values).any(0).repeat_interleave(shared, 0)[None]
        return mask

    return xp.spilled(unread, out.reshape(batch, heads, width))


@define(
    "mla_decode",
    lambda options: (
        "q[B,H,D], q_rope[B,H,Dr], cache[P,page,D], rope_cache[P,page,Dr], block_table:int32[B,max_pages]=index(P), "
        f"seq_lens:int32[B]=length(max_pages*page) -> out[B,H,D]{', lse:float32[B,H]' if options['return_lse'] else ''}"
    ),
    options={"scale": number(None, usual=(None, 0.3)), "return_lse": flag()},
    stages={"probabilities": "input", "query": None, "scores": None},
    rows="B",
    work="16*B*H*max_pages*page*(D+Dr)",
    sequential_steps="B*ceil(H/16)*max_pages",
    sizes={"D": (16, 32, 64, 128, 256, 512), "Dr": (8, 16, 32, 64)},  # of latent vectors and their positions
    independent=("H",),
    gathered=("P",),
    grid=("B", "P"),
    unused=lambda q, q_rope, cache, rope_cache, *used: unused_slots(*used, cache=cache, rope_cache=rope_cache),
    reduction=Reduction("max_pages*page"),
    faults=(
        "inputs_in_tf32",
        Fault("rope_part_left_out", "the scores leave out the part with positions",
              altered("mla_decode", q_rope=lambda q_rope: q_rope * 0.0)),
        Fault("latent_part_left_out", "the scores are of the part with positions alone",
              altered("mla_decode", q=lambda q: q * 0.0)),
        Fault("scale_of_latent_alone", "the scale is 1 / sqrt of the latent columns alone",
              altered("mla_decode", scale=lambda q, scale: q.shape[-1] ** -0.5 if scale is None else 1.0), "scale"),
        Fault("last_position_left_out", "the last position of each sequence is not seen",
              altered("mla_decode", seq_lens=lambda xp, seq_lens: seq_lens - xp.integers(seq_lens > 1)), "mask",
              needs="sequences of two or more"),
    ),
    exempt=("columns_beyond_tile_zero",),
)  # fmt: skip
def mla_decode(
    xp: Arithmetic[N, Idx],
    q: N,
    q_rope: N,
    cache: N,
    rope_cache: N,
    block_table: Idx,
    seq_lens: Idx,
    *,
    scale: float | None,
    return_lse: bool,
) -> N | tuple[N, N]:
    """softmax((q c^T + q_rope r^T) scale) c over the first seq_lens[b] positions, and its log-sum-exp.

    c and r are the rows of the two caches. Absorbed form (DeepSeek-V2, 2024): the latent vectors are keys and values
    of every head, and ``scale`` is 1 / sqrt(D + Dr) where left out. Position p is in page
    block_table[b, p // page].
    """
    pages, page = cache.shape[:2]
    slots, seen = slots_and_mask(xp.native, block_table, seq_lens, page)
    if pages * page == 0:  # then all sequences are empty
        slots, seen = slots[:, :0], seen[:, :0]
    latent, rope = (
        xp.where(seen[..., None], part.reshape(pages * page, part.shape[2])[slots], 0.0) for part in (cache, rope_cache)
    )
    keys, queries = xp.concatenate([latent, rope], -1), xp.concatenate([q, q_rope], -1)
    scores = xp.scores(queries, keys, score_scale(xp, q.shape[-1] + q_rope.shape[-1], scale))
    out, lse = xp.attend(scores, seen[:, None, :], latent, None)
    return (out, lse[..., 0]) if return_lse else out
