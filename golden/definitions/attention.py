"""Scaled dot-product attention: dense, of packed sequences and block-sparse, its gradients, and merging of partial
results."""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.errors import ShapeError
from assay.golden.options import Option, choice, count, flag, number
from assay.golden.registry import Fault, Reduction, Tile, altered, define


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


def tile_of_queries(
    first: int, count: int, sizes: Mapping[str, int], options: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Tile | None:
    """Return the tile of some queries with the keys that they see: under a causal mask those up to the last query's.

    A causal mask is aligned at the last query, so the tile's keys end at that query's key. A "top_left" mask is aligned
    at the first query, with the same last key; but ALiBi is aligned at the last query under either.
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
    "D": (8, 16, 32, 40, 64, 72, 80, 96, 128, 192, 256),
    "Dv": (8, 16, 24, 32, 64, 72, 80, 96, 128, 256),
}
"""Head sizes: those of models, and others that are multiples of 8."""


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
    tiling={"Sq": tile_of_queries},
    reduction=Reduction("Sk", of=("v",), mean=True, under={"causal": "none", "window": None, "sinks": False}),
    faults=("inputs_in_tf32",),
    exempt=("written_into_next_row",),
)
def attention(xp: Arithmetic[N], *tensors: N, return_lse: bool, alibi: bool = False, **options: Any) -> N | tuple[N, N]:
    """softmax(q k^T scale, capped, biased, masked) v, and its log-sum-exp.

    Stages: "query", q scale as a factor of q k^T; "scores", the result of each operation on scores; "probabilities",
    the weights as a factor of the product with v.
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
        aligned = key - query - (keys - queries)  # key position minus query position, aligned at the last ones
        if slopes is not None:
            scores = xp.round(scores - slopes * xp.exact(abs(aligned)), "scores")
        ahead = key - query if causal == "top_left" else aligned
        parts.append(xp.attend(scores, visible_keys(ahead, causal, window), v, sinks))
    out = xp.concatenate([part[0] for part in parts], axis=3).reshape(batch, heads, queries, v.shape[-1])
    lse = xp.concatenate([part[1] for part in parts], axis=3).reshape(batch, heads, queries)
    return out, lse


def heads_per_group(op: str, heads: int, groups: int) -> int:
    """Return how many query heads share a key/value head; `ShapeError` unless that is an integer."""
    if groups == 0 or heads % groups:
        raise ShapeError(f"{op}: the {heads} query heads are no multiple of the {groups} key/value heads")
    return heads // groups


def score_scale(xp: Arithmetic[N], width: int, scale: float | None) -> N | float:
    """Return the factor of q k^T: ``scale``, or 1 / sqrt(width) if None."""
    return xp.constant(lambda sqrt, pi: 1 / sqrt(max(width, 1))) if scale is None else scale


def visible_keys(ahead: Idx, causal: str, window: tuple[int, int] | None = None) -> Idx:
    """Return the mask of visible keys from key position minus query position."""
    visible = (ahead <= 0) if causal != "none" else (ahead == ahead)
    if window is not None:
        visible = visible & (ahead >= -window[0]) & (ahead <= window[1])
    return visible


_BLOCKS_A_PASS = 16  # each pass over all keys adds to dk and dv: use fewer and larger passes than attention


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
    tiling={"Sq": tile_of_queries},
    gradient_of="attention",
    reduction=Reduction("Sk"),
)
def attention_backward(
    xp: Arithmetic[N], q: N, k: N, v: N, dout: N, *, causal: str, scale: float | None
) -> tuple[N, N, N]:
    """With P = softmax(q k^T scale, masked) and dS = P (dout v^T - sum P dout v^T): dS k scale, dS^T q scale, P^T dout.

    The query heads that share a key/value head are stacked as rows, so that dk and dv are sums over all of them.
    Stage "output" is the stored forward result, for kernels that compute sum P dout v^T as sum dout O. Blocks of rows
    bound the memory. A row without visible keys has a gradient of zero, and adds nothing to dk and dv.
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


def tile_of_tokens(
    first: int, count: int, sizes: Mapping[str, int], options: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Tile | None:
    """Return the tile of the tokens of one sequence, with its keys, as `tile_of_queries` of its queries."""
    if not tensors:
        return None
    queries, keys = (tensors[f"cu_seqlens_{letter}"] for letter in "qk")
    b = int((queries[:-1] <= first).sum()) - 1  # the last one that begins there or before isn't empty
    begin, end = int(queries[b]), int(queries[b + 1])
    before, length = int(keys[b]), int(keys[b + 1] - keys[b])
    sizes_of_b = {"Sq": end - begin, "Sk": length}
    tile = tile_of_queries(first - begin, min(count, end - first), sizes_of_b, options, {})
    if tile is None:
        return None
    (start, some), (_, seen) = tile.ranges["Sq"], tile.ranges.get("Sk", (0, length))
    offsets = {"cu_seqlens_q": queries.new_tensor([0, some]), "cu_seqlens_k": keys.new_tensor([0, seen])}
    return Tile({"Tq": (begin + start, some), "Tk": (before, seen), "B": (b, 1)}, tile.options, offsets)


_VARLEN: dict[str, Any] = {
    "options": {"causal": choice("none", "bottom_right"), "scale": number(None, usual=(None, 0.3))},
    "may_be_zero": ("Tq", "Tk"),
    "sizes": {"B": (1, 2, 3, 5, 8, 9, 17, 64, 129), "D": SIZES["D"]},
    "groups": {"H": "Hkv"},
    "tiling": {"Tq": tile_of_tokens},
    "grid": ("B",),
    "reduction": Reduction("Tk/B"),
}


@define(
    "attention_varlen",
    "q[Tq,H,D], k[Tk,Hkv,D], v[Tk,Hkv,D], cu_seqlens_q:int32[B+1]=offsets(Tq), cu_seqlens_k:int32[B+1]=offsets(Tk) "
    "-> out[Tq,H,D]",
    stages={"query": None, "scores": None, "probabilities": "input"},
    work="8*H*Tq*Tk*D",
    sequential_steps="H*(ceil(Tq/32)+B)",
    **_VARLEN,
    faults=("inputs_in_tf32",),
)
def attention_varlen(
    xp: Arithmetic[N, Idx], q: N, k: N, v: N, cu_seqlens_q: Idx, cu_seqlens_k: Idx, *, causal: str, scale: float | None
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


def _others(xp: Arithmetic[N, Idx], k: N, v: N, inside: slice, shared: int) -> Any:
    """Mask [1,H,D] of results that another sequence's key or value that is NaN or infinite may reach."""
    keys, values = ((~xp.is_finite(x)) for x in (k, v))
    bad: Any = keys.any(-1)[..., None] | values
    bad[inside] = False
    return bad.any(0).repeat_interleave(shared, 0)[None]


def heads_first(xp: Arithmetic[N], x: N) -> N:
    """x[S,H,D] as [1,H,S,D]."""
    length, heads, width = x.shape
    return xp.stack([x[:, head] for head in range(heads)], 0).reshape(1, heads, length, width)


@define(
    "attention_varlen_backward",
    "q[Tq,H,D], k[Tk,Hkv,D], v[Tk,Hkv,D], cu_seqlens_q:int32[B+1]=offsets(Tq), cu_seqlens_k:int32[B+1]=offsets(Tk), "
    "dout[Tq,H,D] -> dq[Tq,H,D], dk[Tk,Hkv,D], dv[Tk,Hkv,D]",
    stages={"query": None, "scores": None, "probabilities": "input", "score_gradient": "input", "output": None},
    work="128*H*Tq*Tk*D",
    sequential_steps="H*(ceil(Tq/32)+ceil(Tk/32)+2*B)",
    **_VARLEN,
    gradient_of="attention_varlen",
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

    A sequence without queries or without keys gives zero. A NaN or infinity of another sequence, times a weight of
    zero, may reach other results of its head: k and v all of dq, q and dout all of dk, q all of dv, and dout the same
    columns of dv.
    """
    heads, groups = q.shape[1], k.shape[1]
    shared = heads_per_group("attention_varlen_backward", heads, groups)
    collected: tuple[list[N], list[N], list[N]] = [q[:0]], [k[:0]], [v[:0]]
    for b in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_seqlens_q, cu_seqlens_k))
        tensors = (q[rows], k[keys], v[keys])
        if rows.start == rows.stop or keys.start == keys.stop:
            for results, x in zip(collected, tensors, strict=True):
                results.append(xp.exact(xp.native.zeros(x.shape)))
            continue
        one = [heads_first(xp, x) for x in (*tensors, dout[rows])]
        gradients = attention_backward(xp, *one, causal=causal, scale=scale)
        spilled = (
            partial(_to_queries, xp, k, v, keys, shared),
            *(partial(_to_keys, xp, q, dout, rows, shared, which) for which in ("dk", "dv")),
        )
        for results, gradient, mask in zip(collected, gradients, spilled, strict=True):
            across = range(gradient.shape[1])
            results.append(xp.spilled(mask, xp.stack([gradient[0, head] for head in across], 1)))
    dq, dk, dv = (xp.concatenate(parts) for parts in collected)
    return dq, dk, dv


def _to_queries(xp: Arithmetic[N, Idx], k: N, v: N, inside: slice, shared: int) -> Any:
    """Heads in which another sequence's key or value is NaN or infinite: [1,H,1]."""
    bad = _elsewhere(xp, inside, k) | _elsewhere(xp, inside, v)
    return bad.any(-1).repeat_interleave(shared, 0)[None, :, None]


def _to_keys(xp: Arithmetic[N, Idx], q: N, dout: N, inside: slice, shared: int, which: str) -> Any:
    """Heads of keys [1,Hkv,1] in which another sequence's query, for dk also its gradient, is NaN or infinite; with the
    columns [1,Hkv,D] of its gradient for dv."""
    queries, gradients = (
        bad.reshape(-1, shared, bad.shape[-1]).any(1)
        for bad in (_elsewhere(xp, inside, q), _elsewhere(xp, inside, dout))
    )
    if which == "dk":
        return (queries | gradients).any(-1)[None, :, None]
    return (queries.any(-1)[:, None] | gradients)[None]


def _elsewhere(xp: Arithmetic[N, Idx], inside: slice, x: N) -> Any:
    """Mask the columns [H,D] of x[T,H,D] with NaN or an infinity outside of a sequence's tokens."""
    bad: Any = ~xp.is_finite(x)
    bad[inside] = False
    return bad.any(0)


@define(
    "block_attention",
    lambda options: (
        "q[B,H,Sq,D], k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv], "
        f"block_mask:uint8[H,ceil(Sq/{options['block']}),ceil(Sk/{options['block']})]=code(2) -> out[B,H,Sq,Dv]"
    ),
    options={
        "block": count(16, usual=(16, 64)),
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
        Fault("block_mask_ignored", "every block is seen",
              altered("block_attention", block_mask=lambda block_mask: block_mask * 0 + 1), "mask"),
        Fault("block_mask_of_first_head", "every head takes the mask of the first",
              altered("block_attention", block_mask=lambda block_mask: block_mask[:1] + block_mask * 0), "heads",
              needs="several heads"),
        Fault("block_mask_inverted", "visible blocks are masked, and masked ones visible",
              altered("block_attention", block_mask=lambda block_mask: 1 - block_mask), "mask"),
        Fault("last_block_always_seen", "the last block of keys is seen whatever the mask says",
              altered("block_attention", block_mask=lambda xp, block_mask: xp.native.where(
               xp.integers(range(block_mask.shape[2])) == block_mask.shape[2] - 1, 1, block_mask)), "tail"),
        Fault("block_causal_dropped", "within its blocks a query sees later keys too",
              altered("block_attention", causal="none"), "mask"),
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


_MOST = sys.float_info.max


@define(
    "merge_states",
    "o_a[T,H,D], lse_a:float32[T,H]=lse, o_b[T,H,D], lse_b:float32[T,H]=lse -> o[T,H,D], lse:float32[T,H]",
    rows="T",
    independent=("H",),
    unused=lambda *states: {  # outputs of empty states
        name: (lse == -math.inf)[..., None].expand(o.shape)
        for name, o, lse in zip(("o_a", "o_b"), states[::2], states[1::2], strict=True)
    },
)
def merge_states(xp: Arithmetic[N, Idx], o_a: N, lse_a: N, o_b: N, lse_b: N) -> tuple[N, N]:
    """(e^lse_a o_a + e^lse_b o_b) / (e^lse_a + e^lse_b) and log(e^lse_a + e^lse_b).

    That is attention to two values; an empty state, whose lse is -inf, is not visible, and two of them see nothing.
    """
    return _merged(xp, xp.stack([o_a, o_b], 2), xp.stack([lse_a, lse_b], -1))


def _merged(xp: Arithmetic[N, Idx], values: N, lse: N) -> tuple[N, N]:
    """Merge states of outputs ``values`` [T,H,S,D] and log-sum-exps [T,H,S]."""
    tokens, heads, states, width = values.shape
    scores = lse.reshape(tokens, heads, 1, states)
    empty = xp.above(-scores, _MOST)  # NaN is not
    out, total = xp.merge(scores, ~empty, values)
    unknown = ~xp.above(-scores, -math.inf).all(-1)[..., None]  # of a log-sum-exp that is NaN or inf nothing is said
    out, total = xp.unspecified(unknown, out), xp.unspecified(unknown, total)

    def infinite() -> Idx:
        """Where a - s (a - b) takes an infinite output of a visible state from itself."""
        infinity = (xp.above(values, _MOST) | xp.above(-values, _MOST)) & ~empty.reshape(tokens, heads, states, 1)
        return infinity.any(2)[:, :, None]

    out = xp.unspecified(infinite, out)
    return out.reshape(tokens, heads, width), total.reshape(tokens, heads)


def _pairwise(xp: Any, o: Any, lse: Any) -> Any:
    """Merge states one by one, with the log-sum-exp of the last one for all so far."""
    out = o[:, 0]
    for state in range(1, o.shape[1]):
        out, _ = merge_states(xp, out, lse[:, state - 1], o[:, state], lse[:, state])
    return out


@define(
    "merge_cascade",
    "o[T,S,H,D], lse:float32[T,S,H]=lse -> merged[T,H,D], merged_lse:float32[T,H]",
    rows="T",
    independent=("H",),
    unused=lambda o, lse: {"o": (lse == -math.inf)[..., None].expand(o.shape)},
    reduction=Reduction("S"),
    faults=(
        Fault("cascade_forgets_earlier", "the running log-sum-exp is that of the last state, not of all so far",
              altered("merge_cascade", merged=_pairwise), "rescale", needs="three states"),
        Fault("last_state_left_out", "the last state is missing",
              altered("merge_cascade", o=lambda o: o[:, : max(o.shape[1] - 1, 1)],
               lse=lambda lse: lse[:, : max(lse.shape[1] - 1, 1)]), "tail", needs="two states"),
        Fault("states_averaged", "states count alike, whatever their log-sum-exps",
              altered("merge_cascade", merged=lambda xp, o: xp.sum(o, axis=1)[:, 0] / max(o.shape[1], 1)), "rescale",
              needs="two states"),
        Fault("largest_for_log_sum", "the largest log-sum-exp is returned",
              altered("merge_cascade", merged_lse=lambda xp, lse: xp.max(
               xp.stack([lse[:, state] for state in range(lse.shape[1])], -1))[..., 0]), needs="two states"),
    ),
    exempt=("tail_of_sum_dropped", "accumulated_in_bfloat16"),
)  # fmt: skip
def merge_cascade(xp: Arithmetic[N, Idx], o: N, lse: N) -> tuple[N, N]:
    """sum_s e^lse_s o_s / sum_s e^lse_s and log sum_s e^lse_s, of any number of states, at once or pair by pair.

    As `merge_states`; FlashInfer's layout (Ye et al., 2024).
    """
    states = range(o.shape[1])
    return _merged(
        xp, xp.stack([o[:, state] for state in states], 2), xp.stack([lse[:, state] for state in states], -1)
    )
