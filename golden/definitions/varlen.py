"""Attention over sequences of several lengths that are laid end to end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.attention import attend_heads, heads_per_group, queries_apart
from assay.golden.options import choice, number
from assay.golden.registry import Reduction, Tile, define

SIZES = {"B": (1, 2, 3, 5, 8, 9, 17), "Hkv": (1, 2, 3), "D": (8, 16, 32, 40, 64, 80, 128, 256)}


def tokens_apart(
    first: int, count: int, sizes: Mapping[str, int], options: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Tile | None:
    """Of neighbouring tokens those of one sequence, with its keys, as `queries_apart` says of its queries."""
    if not tensors:
        return None
    queries, keys = (tensors[f"cu_seqlens_{letter}"] for letter in "qk")
    b = int((queries[:-1] <= first).sum()) - 1  # the last one that begins there or before isn't empty
    begin, end = int(queries[b]), int(queries[b + 1])
    before, length = int(keys[b]), int(keys[b + 1] - keys[b])
    own = {"Sq": end - begin, "Sk": length}
    found = queries_apart(first - begin, min(count, end - first), own, options, {})
    if found is None:
        return None
    (start, some), (_, seen) = found.ranges["Sq"], found.ranges.get("Sk", (0, length))
    offsets = {"cu_seqlens_q": queries.new_tensor([0, some]), "cu_seqlens_k": keys.new_tensor([0, seen])}
    return Tile({"Tq": (begin + start, some), "Tk": (before, seen), "B": (b, 1)}, found.options, offsets)


@define(
    "attention_varlen",
    "q[Tq,H,D], k[Tk,Hkv,D], v[Tk,Hkv,D], cu_seqlens_q:int32[B+1]=offsets(Tq), cu_seqlens_k:int32[B+1]=offsets(Tk) "
    "-> out[Tq,H,D]",
    options={"causal": choice("none", "bottom_right"), "scale": number(None, usual=(None, 0.3))},
    stages={"query": None, "scores": None, "probabilities": "input"},
    may_be_zero=("Tq", "Tk"),
    work="8*H*Tq*Tk*D",
    sequential_steps="H*(ceil(Tq/32)+B)",
    sizes=SIZES,
    groups={"H": "Hkv"},
    tiling={"Tq": tokens_apart},
    grid=("B",),
    reduction=Reduction("Tk/B"),
    faults=("inputs_in_tf32",),
)
def attention_varlen(
    xp: Arithmetic[N, Idx],
    q: N,
    k: N,
    v: N,
    cu_seqlens_q: Idx,
    cu_seqlens_k: Idx,
    *,
    causal: str,
    scale: float | None,
) -> N:
    """For each sequence b, attention of q[cu_q[b]:cu_q[b+1]] to k, v[cu_k[b]:cu_k[b+1]], aligned at its own end."""
    heads, groups = q.shape[1], k.shape[1]
    heads_per_group("attention_varlen", heads, groups)
    parts = [q[:0]]
    for b in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_seqlens_q, cu_seqlens_k))
        if rows.start == rows.stop:
            continue
        one = [heads_first(xp, x[part]) for x, part in ((q, rows), (k, keys), (v, keys))]
        out, _ = attend_heads(xp, *one, causal=causal, scale=scale)
        others = partial(_others, xp, k, v, keys, heads // groups)
        parts.append(xp.spilled(others, xp.stack([out[0, head] for head in range(heads)], 1)))
    return xp.concatenate(parts)


def _others(xp: Arithmetic[N, Idx], k: N, v: N, own: slice, shared: int) -> Any:
    """Where another sequence's key or value is NaN or infinite: [1,H,D]."""
    keys, values = ((~xp.is_finite(x)) for x in (k, v))
    bad: Any = keys.any(-1)[..., None] | values
    bad[own] = False
    return bad.any(0).repeat_interleave(shared, 0)[None]


def heads_first(xp: Arithmetic[N], x: N) -> N:
    """x[S,H,D] as [1,H,S,D]."""
    length, heads, width = x.shape
    return xp.stack([x[:, head] for head in range(heads)], 0).reshape(1, heads, length, width)
