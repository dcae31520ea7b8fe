"""Attention under a mask of blocks: which blocks of keys each block of queries sees, head by head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.attention import SIZES, heads_per_group, score_scale, visible_keys
from assay.golden.options import Option, choice, number
from assay.golden.registry import Fault, Reduction, define


def _signature(options: Mapping[str, Any]) -> str:
    size = options["block"]
    return (
        "q[B,H,Sq,D], k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv], "
        f"block_mask:uint8[H,ceil(Sq/{size}),ceil(Sk/{size})]=code(2) -> out[B,H,Sq,Dv]"
    )


def _all_blocks(xp: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
    return block_attention(xp, q, k, v, mask * 0 + 1, **options)


def _of_first_head(xp: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
    return block_attention(xp, q, k, v, mask[:1] + mask * 0, **options)


def _inverted(xp: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
    return block_attention(xp, q, k, v, 1 - mask, **options)


def _last_block_seen(xp: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
    """The last block of keys is seen by all."""
    if not mask.shape[2]:
        return block_attention(xp, q, k, v, mask, **options)
    last = (xp.integers(range(mask.shape[2])) == mask.shape[2] - 1)[None, None, :]
    return block_attention(xp, q, k, v, xp.native.where(last, mask * 0 + 1, mask), **options)


@define(
    "block_attention",
    _signature,
    options={
        "block": Option(16, lambda value: type(value) is int and value > 0, "a positive whole number", usual=(16, 64)),
        "causal": choice("none", "bottom_right"),
        "scale": number(None, usual=(None, 0.3)),
    },
    stages={"query": None, "scores": None, "probabilities": "input"},
    rows="B",
    columns="Dv",
    may_be_zero=(),
    work="B*H*Sq*Sk*(D+Dv)",
    sizes=SIZES,
    groups={"H": "Hkv"},
    reduction=Reduction("Sk"),
    faults=(
        "inputs_in_tf32",
        Fault("block_mask_ignored", "every block is seen", _all_blocks, "mask"),
        Fault("block_mask_of_first_head", "every head takes the mask of the first", _of_first_head, "heads",
              needs="several heads"),
        Fault("block_mask_inverted", "the blocks that are to be seen are left out, and the others seen", _inverted,
              "mask"),
        Fault("last_block_always_seen", "the last block of keys is seen whatever the mask says", _last_block_seen,
              "tail"),
        Fault("block_causal_dropped", "within its blocks a query sees later keys too",
              lambda xp, *tensors, causal, **options: block_attention(xp, *tensors, causal="none", **options), "mask"),
    ),
    exempt=("written_into_next_row",),
)  # fmt: skip
def block_attention(
    xp: Arithmetic[N, Idx], q: N, k: N, v: N, block_mask: Idx, *, block: int, causal: str, scale: float | None
) -> N:
    """softmax(q k^T scale, masked) v; query i sees key j where block_mask[h, i // block, j // block] is one.

    And, where causal, where j is not behind i, counted from the last ones. A row that sees nothing gives zero.
    """
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    shared = heads_per_group("block_attention", heads, groups)
    q = q.reshape(batch, groups, shared, queries, width)
    key, query = xp.integers(range(keys)), xp.integers(range(queries))
    seen = block_mask[:, query // block][:, :, key // block] == 1
    seen = seen & visible_keys(key[None, :] - query[:, None] - (keys - queries), causal)[None]
    scores = xp.scores(q, k[:, :, None], score_scale(xp, width, scale))
    out, _ = xp.attend(scores, seen.reshape(groups, shared, queries, keys), v[:, :, None], None)
    return out.reshape(batch, heads, queries, v.shape[-1])
