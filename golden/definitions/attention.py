"""Scaled dot-product attention with grouped heads, masks, softcap, ALiBi and sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.errors import ShapeError
from assay.golden.options import Option, choice, flag, number
from assay.golden.registry import Reduction, Tile, define


def _signature(options: Mapping[str, Any]) -> str:
    keywords = (", *slopes:float32[H]=slope" if options["alibi"] else "") + (
        ", *sinks:float32[H]" if options["sinks"] else ""
    )
    lse = ", lse:float32[B,H,Sq]" if options["return_lse"] else ""
    return f"q[B,H,Sq,D], k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv]{keywords} -> out[B,H,Sq,Dv]{lse}"


def _is_window(value: Any) -> bool:
    return value is None or (
        isinstance(value, (tuple, list)) and len(value) == 2 and all(type(side) is int and side >= 0 for side in value)
    )


def queries_apart(
    first: int, count: int, sizes: Mapping[str, int], options: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Tile | None:
    """Of any queries the keys that they see: under a causal mask those up to the last one's own.

    Masks count keys from the last query's place, so behind that key none may be left, and it stands last; counted from
    the first place ("top_left") it is the same key, but ALiBi counts from the last all the same.
    """
    causal, last = options["causal"], first + count
    biased = bool(options.get("alibi"))
    anywhere = causal == "none" and not options.get("window") and not biased
    if anywhere or (first == 0 and not biased if causal == "top_left" else last == sizes["Sq"]):
        return Tile({"Sq": (first, count)}, options)
    keys = last if causal == "top_left" else last + sizes["Sk"] - sizes["Sq"]
    shifted = causal == "top_left" and biased and sizes["Sk"] != sizes["Sq"]
    if causal == "none" or shifted or not 0 < keys <= sizes["Sk"]:
        return None
    return Tile({"Sq": (first, count), "Sk": (0, keys)}, {**options, "causal": "bottom_right"})


SIZES = {
    "B": (1, 2, 3),
    "Hkv": (1, 2, 3),
    "D": (8, 16, 32, 40, 64, 72, 80, 96, 128, 256),
    "Dv": (8, 16, 24, 32, 64, 96, 128),
}


@define(
    "attention",
    _signature,
    options={
        "causal": choice("none", "bottom_right", "top_left"),
        "scale": number(None, usual=(None, 0.3)),
        "window": Option(None, _is_window, "None or (left, right), two whole numbers", usual=(None, (7, 3))),
        "softcap": number(None, positive=True, usual=(None, 2.0)),
        "alibi": flag(),
        "sinks": flag(tensor=True),
        "return_lse": flag(),
    },
    stages={"query": None, "scores": None, "probabilities": "input"},
    rows="B",
    columns="Dv",
    may_be_zero=("Sq",),
    work="B*H*Sq*Sk*(D+Dv)",
    sequential_steps="B*H*ceil(Sq/32)*ceil(Sk/256)",
    sizes=SIZES,
    groups={"H": "Hkv"},
    tiling={"Sq": queries_apart},
    reduction=Reduction("Sk", of=("v",), mean=True, under={"causal": "none", "window": None, "sinks": False}),
    faults=("inputs_in_tf32",),
    exempt=("written_into_next_row",),
)
def attention(xp: Arithmetic[N], *tensors: N, return_lse: bool, alibi: bool = False, **options: Any) -> N | tuple[N, N]:
    """softmax(q k^T scale, capped, biased, masked) v, and its log-sum-exp.

    Stages: "query", q scale as it is multiplied with k; "scores", what each operation on them gives; "probabilities",
    the weights as they are multiplied with v.
    """
    out, lse = attend_heads(xp, *tensors, **options)
    return (out, lse) if return_lse else out


def attend_heads(
    xp: Arithmetic[N, Idx],
    q: N,
    k: N,
    v: N,
    slopes: N | None = None,
    sinks: N | None = None,
    *,
    causal: str,
    scale: float | None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
) -> tuple[N, N]:
    """Attention of q[B,H,Sq,D] to k[B,Hkv,Sk,D] and v[B,Hkv,Sk,Dv]: out[B,H,Sq,Dv] and its log-sum-exp [B,H,Sq]."""
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    shared = heads_per_group("attention", heads, groups)
    q = q.reshape(batch, groups, shared, queries, width)
    k, v = k[:, :, None], v[:, :, None]
    factor = score_scale(xp, width, scale)
    if slopes is not None:
        slopes = slopes.reshape(1, groups, shared, 1, 1)
    if sinks is not None:
        sinks = sinks.reshape(1, groups, shared, 1, 1)
    parts = []
    for first, last in xp.blocks(queries, batch * heads * keys):
        scores = xp.scores(q[:, :, :, first:last], k, factor)
        if softcap is not None:
            scores = xp.softcap(scores, softcap)
        key, query = xp.integers(range(keys))[None, :], xp.integers(range(first, last))[:, None]
        aligned = key - query - (keys - queries)  # how far the key lies behind the query, counted from the last ones
        if slopes is not None:
            scores = xp.round(scores - slopes * xp.exact(abs(aligned)), "scores")
        ahead = key - query if causal == "top_left" else aligned
        parts.append(xp.attend(scores, visible_keys(ahead, causal, window), v, sinks))
    out = xp.concatenate([part[0] for part in parts], axis=3).reshape(batch, heads, queries, v.shape[-1])
    lse = xp.concatenate([part[1] for part in parts], axis=3).reshape(batch, heads, queries)
    return out, lse


def heads_per_group(op: str, heads: int, groups: int) -> int:
    """How many query heads share a key/value head; `ShapeError` where that is no whole number."""
    if groups == 0 or heads % groups:
        raise ShapeError(f"{op}: the {heads} query heads are no multiple of the {groups} key/value heads")
    return heads // groups


def score_scale(xp: Arithmetic[N], width: int, scale: float | None) -> N | float:
    """The factor of q k^T: ``scale``, or 1 / sqrt(width) where none is given."""
    return xp.constant(lambda sqrt, pi: 1 / sqrt(max(width, 1))) if scale is None else scale


def visible_keys(ahead: Idx, causal: str, window: tuple[int, int] | None = None) -> Idx:
    """Which keys a query sees, by how far they lie ahead of it."""
    visible = (ahead <= 0) if causal != "none" else (ahead == ahead)
    if window is not None:
        visible = visible & (ahead >= -window[0]) & (ahead <= window[1])
    return visible
