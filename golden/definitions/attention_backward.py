"""The gradient of scaled dot-product attention with grouped heads and causal masks."""

from __future__ import annotations

from typing import Any

from assay.golden.errors import ShapeError
from assay.golden.registry import choice, define, number

_BLOCKS_A_PASS = 16  # a pass over all keys costs a sum into dk and dv: fewer and larger ones than attention makes


@define(
    "attention_backward",
    "q[B,H,Sq,D], k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv], dout[B,H,Sq,Dv] -> dq[B,H,Sq,D], dk[B,Hkv,Sk,D], dv[B,Hkv,Sk,Dv]",
    options={"causal": choice("none", "bottom_right", "top_left"), "scale": number(None)},
    stages={"probabilities": "input", "score_gradient": "input", "output": None},
    rows="B",
    empty=("Sq",),
    work="16*B*H*Sq*Sk*(D+Dv)",
    sizes={
        "B": (1, 2, 3),
        "Hkv": (1, 2, 3),
        "D": (8, 16, 32, 40, 64, 80, 96, 128, 256),
        "Dv": (8, 16, 24, 32, 64, 96, 128),
    },
    multiples={"H": "Hkv"},
)
def attention_backward(
    xp: Any, q: Any, k: Any, v: Any, dout: Any, *, causal: str, scale: float | None
) -> tuple[Any, Any, Any]:
    """With P = softmax(q k^T scale, masked) and dS = P (dout v^T - sum P dout v^T): dS k scale, dS^T q scale, P^T dout.

    The query heads that share a key/value head lie below one another, so that dk and dv are sums over all of them.
    Of the stages, "output" is the forward result where a kernel takes sum P dout v^T from one that was stored.
    Blocks of rows bound the memory. A row that sees nothing gives zero, and adds nothing.
    """
    batch, heads, queries, width = q.shape
    groups, keys, width_v = k.shape[1], k.shape[2], v.shape[3]
    if groups == 0 or heads % groups:
        raise ShapeError(f"attention_backward: the {heads} query heads are no multiple of the {groups} key/value heads")
    shared = heads // groups
    q = q.reshape(batch, groups, shared, queries, width)
    dout = dout.reshape(batch, groups, shared, queries, width_v)
    factor = xp.constant(lambda sqrt, pi: 1 / sqrt(max(width, 1))) if scale is None else scale
    key = xp.integers(range(keys))[None, :]
    offset = 0 if causal == "top_left" else keys - queries
    dqs, dk, dv = [], None, None
    for first, last in xp.blocks(queries, batch * heads * keys // _BLOCKS_A_PASS):
        size = last - first
        rows, gradients = (
            part[:, :, :, first:last].reshape(batch, groups, shared * size, part.shape[-1]) for part in (q, dout)
        )
        query = xp.integers([first + row % size for row in range(shared * size)])[:, None]
        visible = (key <= query + offset) if causal != "none" else (key - query == key - query)
        scores = xp.scores(rows, k, factor)
        dq, more_k, more_v = xp.attend_backward(scores, visible, rows, k, v, gradients, factor, shared * queries)
        dqs.append(dq.reshape(batch, groups, shared, size, width))
        dk, dv = (more_k, more_v) if dk is None else (dk + more_k, dv + more_v)
    return xp.concatenate(dqs, axis=3).reshape(batch, heads, queries, width), dk, dv
