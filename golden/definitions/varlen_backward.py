"""The gradient of attention over sequences of several lengths that are laid end to end."""

from __future__ import annotations

from functools import partial
from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.attention import heads_per_group
from assay.golden.definitions.attention_backward import attention_backward
from assay.golden.definitions.varlen import SIZES, heads_first, tokens_apart
from assay.golden.options import choice, number
from assay.golden.registry import Reduction, define


@define(
    "attention_varlen_backward",
    "q[Tq,H,D], k[Tk,Hkv,D], v[Tk,Hkv,D], cu_seqlens_q:int32[B+1]=offsets(Tq), cu_seqlens_k:int32[B+1]=offsets(Tk), "
    "dout[Tq,H,D] -> dq[Tq,H,D], dk[Tk,Hkv,D], dv[Tk,Hkv,D]",
    options={"causal": choice("none", "bottom_right"), "scale": number(None, usual=(None, 0.3))},
    stages={"query": None, "scores": None, "probabilities": "input", "score_gradient": "input", "output": None},
    may_be_zero=("Tq", "Tk"),
    work="128*H*Tq*Tk*D",
    sequential_steps="H*(ceil(Tq/32)+ceil(Tk/32)+2*B)",
    sizes=SIZES,
    groups={"H": "Hkv"},
    tiling={"Tq": tokens_apart},
    grid=("B",),
    gradient_of="attention_varlen",
    reduction=Reduction("Tk/B"),
)
def attention_varlen_backward(
    xp: Arithmetic[N, Idx],
    q: N,
    k: N,
    v: N,
    cu_seqlens_q: Idx,
    cu_seqlens_k: Idx,
    dout: N,
    *,
    causal: str,
    scale: float | None,
) -> tuple[N, N, N]:
    """For each sequence b, `attention_backward` of its own queries, keys, values and gradients; stages as there.

    A sequence without queries or without keys gives zero. Where a number of another sequence is NaN or infinite,
    zero times it may reach what a kernel multiplies it with: k and v all of dq, q and dout all of dk, q all of dv, and
    dout its own columns of dv.
    """
    heads, groups = q.shape[1], k.shape[1]
    shared = heads_per_group("attention_varlen_backward", heads, groups)
    found: tuple[list[N], list[N], list[N]] = [q[:0]], [k[:0]], [v[:0]]
    for b in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_seqlens_q, cu_seqlens_k))
        own = (q[rows], k[keys], v[keys])
        if rows.start == rows.stop or keys.start == keys.stop:
            for results, x in zip(found, own, strict=True):
                results.append(xp.exact(xp.native.zeros(x.shape)))
            continue
        one = [heads_first(xp, x) for x in (*own, dout[rows])]
        gradients = attention_backward(xp, *one, causal=causal, scale=scale)
        spilled = (
            partial(_to_queries, xp, k, v, keys, shared),
            *(partial(_to_keys, xp, q, dout, rows, shared, which) for which in ("dk", "dv")),
        )
        for results, gradient, places in zip(found, gradients, spilled, strict=True):
            across = range(gradient.shape[1])
            results.append(xp.spilled(places, xp.stack([gradient[0, head] for head in across], 1)))
    dq, dk, dv = (xp.concatenate(parts) for parts in found)
    return dq, dk, dv


def _to_queries(xp: Arithmetic[N, Idx], k: N, v: N, own: slice, shared: int) -> Any:
    """Heads in which another sequence's key or value is NaN or infinite: [1,H,1]."""
    bad = _elsewhere(xp, own, k) | _elsewhere(xp, own, v)
    return bad.any(-1).repeat_interleave(shared, 0)[None, :, None]


def _to_keys(xp: Arithmetic[N, Idx], q: N, dout: N, own: slice, shared: int, which: str) -> Any:
    """Heads of keys [1,Hkv,1] in which another sequence's query, for dk also its gradient, is NaN or infinite; with the
    columns [1,Hkv,D] of its gradient for dv."""
    queries, gradients = (
        bad.reshape(-1, shared, bad.shape[-1]).any(1) for bad in (_elsewhere(xp, own, q), _elsewhere(xp, own, dout))
    )
    if which == "dk":
        return (queries | gradients).any(-1)[None, :, None]
    return (queries.any(-1)[:, None] | gradients)[None]


def _elsewhere(xp: Arithmetic[N, Idx], own: slice, x: N) -> Any:
    """Of x[T,H,D] the columns [H,D] with NaN or an infinity outside of a sequence's own places."""
    bad: Any = ~xp.is_finite(x)
    bad[own] = False
    return bad.any(0)
