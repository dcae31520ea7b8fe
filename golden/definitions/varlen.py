"""Attention over sequences of several lengths that are laid end to end."""

from __future__ import annotations

from typing import Any

from assay.golden.definitions.attention import attention
from assay.golden.errors import ShapeError
from assay.golden.registry import choice, define, number


@define(
    "attention_varlen",
    "q[Tq,H,D], k[Tk,Hkv,D], v[Tk,Hkv,D], cu_seqlens_q:int32[B+1]=offsets(Tq), cu_seqlens_k:int32[B+1]=offsets(Tk) "
    "-> out[Tq,H,D]",
    options={"causal": choice("none", "bottom_right"), "scale": number(None)},
    stages={"probabilities": "input"},
    empty=("Tq", "Tk"),
    work="8*H*Tq*Tk*D",
    sizes={"B": (1, 2, 3, 5, 8, 9, 17), "Hkv": (1, 2, 3), "D": (8, 16, 32, 40, 64, 80, 128, 256)},
    multiples={"H": "Hkv"},
)
def attention_varlen(
    xp: Any, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *, causal: str, scale: float | None
) -> Any:
    """For each sequence b, attention of q[cu_q[b]:cu_q[b+1]] to k, v[cu_k[b]:cu_k[b+1]], aligned at its own end."""
    heads, groups = q.shape[1], k.shape[1]
    if groups == 0 or heads % groups:
        raise ShapeError(f"attention_varlen: the {heads} query heads are no multiple of the {groups} key/value heads")
    parts = [q[:0]]
    for b in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_seqlens_q, cu_seqlens_k))
        if rows.start == rows.stop:
            continue
        one = [_heads_first(xp, x[part]) for x, part in ((q, rows), (k, keys), (v, keys))]
        out = attention(xp, *one, causal=causal, scale=scale, window=None, softcap=None, return_lse=False)
        parts.append(xp.stack([out[0, head] for head in range(heads)], 1))
    return xp.concatenate(parts)


def _heads_first(xp: Any, x: Any) -> Any:
    """x[S,H,D] as [1,H,S,D]."""
    length, heads, width = x.shape
    return xp.stack([x[:, head] for head in range(heads)], 0).reshape(1, heads, length, width)
