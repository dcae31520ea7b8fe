"""The gradient of scaled dot-product attention with grouped heads and causal masks."""

from __future__ import annotations

import functools
import operator

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.definitions.attention import SIZES, heads_per_group, queries_apart, score_scale, visible_keys
from assay.golden.options import choice, number
from assay.golden.registry import Reduction, define

_BLOCKS_A_PASS = 16  # a pass over all keys costs a sum into dk and dv: fewer and larger ones than attention makes


@define(
    "attention_backward",
    "q[B,H,Sq,D], k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv], dout[B,H,Sq,Dv] -> dq[B,H,Sq,D], dk[B,Hkv,Sk,D], dv[B,Hkv,Sk,Dv]",
    options={"causal": choice("none", "bottom_right", "top_left"), "scale": number(None, usual=(None, 0.3))},
    stages={"query": None, "scores": None, "probabilities": "input", "score_gradient": "input", "output": None},
    rows="B",
    may_be_zero=("Sq",),
    work="16*B*H*Sq*Sk*(D+Dv)",
    sequential_steps="B*H*(ceil(Sq/32)+ceil(Sk/32))",
    sizes=SIZES,
    groups={"H": "Hkv"},
    tiling={"Sq": queries_apart},
    gradient_of="attention",
    reduction=Reduction("Sk"),
)
def attention_backward(
    xp: Arithmetic[N], q: N, k: N, v: N, dout: N, *, causal: str, scale: float | None
) -> tuple[N, N, N]:
    """With P = softmax(q k^T scale, masked) and dS = P (dout v^T - sum P dout v^T): dS k scale, dS^T q scale, P^T dout.

    The query heads that share a key/value head lie below one another, so that dk and dv are sums over all of them.
    Of the stages, "output" is the forward result where a kernel takes sum P dout v^T from one that was stored.
    Blocks of rows bound the memory. A row that sees nothing gives zero, and adds nothing.
    """
    batch, heads, queries, width = q.shape
    groups, keys, width_v = k.shape[1], k.shape[2], v.shape[3]
    shared = heads_per_group("attention_backward", heads, groups)
    q = q.reshape(batch, groups, shared, queries, width)
    dout = dout.reshape(batch, groups, shared, queries, width_v)
    factor = score_scale(xp, width, scale)
    key = xp.integers(range(keys))[None, :]
    offset = 0 if causal == "top_left" else keys - queries
    dqs, dks, dvs = [], [], []
    for first, last in xp.blocks(queries, batch * heads * keys // _BLOCKS_A_PASS):
        size = last - first
        rows, gradients = (
            part[:, :, :, first:last].reshape(batch, groups, shared * size, part.shape[-1]) for part in (q, dout)
        )
        query = xp.integers([first + row % size for row in range(shared * size)])[:, None]
        visible = visible_keys(key - query - offset, causal)
        scores = xp.scores(rows, k, factor)
        dq, dk, dv = xp.attend_backward(scores, visible, rows, k, v, gradients, factor, shared * queries)
        dqs.append(dq.reshape(batch, groups, shared, size, width))
        dks.append(dk)
        dvs.append(dv)
    dq = xp.concatenate(dqs, axis=3).reshape(batch, heads, queries, width)
    return dq, functools.reduce(operator.add, dks), functools.reduce(operator.add, dvs)
