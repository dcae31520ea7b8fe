"""Attention: whole rows, online over blocks of keys, keys split among workers, paged, ragged, and its gradient.

Below the honest kernels their faults, each of which replaces one part of one of them.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from assay.verify import Contract

from .entry import ALL, WRONG, Entry, honest, planter
from .numerics import (
    LOG2_E,
    Kernel,
    Stage,
    keep,
    load,
    nan_to_zero,
    nonzero,
    peak,
    round_via,
    shift_of,
    to_bfloat16,
    to_float16,
)

Result = Tensor | tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]
Window = tuple[int, int] | None
Block = tuple[Tensor, Tensor, Tensor]
State = tuple[Tensor, Tensor]


def visible_keys(queries: int, keys: int, causal: str, window: Window = None) -> Tensor:
    """Which key each query may see, bool [Sq,Sk]."""
    offset = 0 if causal == "top_left" else keys - queries
    distance = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - offset
    see = torch.ones(queries, keys, dtype=torch.bool)
    if causal != "none":
        see &= distance <= 0
    if window is not None:
        see &= (distance >= -window[0]) & (distance <= window[1])
    return see


def kv_head_of(heads: int, kv_heads: int) -> Tensor:
    """The key/value head of each query head: neighbours share one."""
    return torch.arange(heads) // max(1, heads // max(1, kv_heads))


def alibi_bias(slopes: Tensor, queries: int, keys: int) -> Tensor:
    """-slope * distance, [H,Sq,Sk]."""
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)[None, :]
    return -load(slopes)[:, None, None] * distance.abs()


def weighted_sum(weights: Tensor, values: Tensor, see: Tensor) -> Tensor:
    """weights [..,S,L] @ values [..,L,D], to which what is not seen adds nothing, NaN included."""
    finite = values.isfinite()
    total = weights @ torch.where(finite, values, 0.0)
    for key in torch.nonzero(~finite.all(dim=-1).flatten(0, -2).all(dim=0))[:, 0].tolist():
        row = values[..., key, None, :]
        term = torch.where(row.isfinite(), 0.0, weights[..., key, None] * row)
        total = total + torch.where(see[:, key, None], term, 0.0)
    return total


def online(blocks: Iterable[Block], out: Tensor, stage: Stage = keep, running: Stage = keep) -> tuple[Tensor, ...]:
    """Blocks of masked scores, values and mask: unnormalised output, sum and maximum, rescaled as the maximum grows.

    ``out`` are the zeros to begin with, ``stage`` is what weights pass through on their way to the values, ``running``
    what the output does after each block.
    """
    maximum = torch.full((*out.shape[:-1], 1), -math.inf)
    total = torch.zeros_like(maximum)
    for scores, values, see in blocks:
        new = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        weights, decay = (torch.exp2((x - shift_of(new)) * LOG2_E) for x in (scores, maximum))
        total = total * decay + weights.sum(dim=-1, keepdim=True)
        out = running(out * decay + weighted_sum(stage(weights), values, see))
        maximum = new
    return out, total, maximum


class Problem:
    """What the kernels hold after their loads: float32 operands, one key head per query head, mask and bias."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: str = "none",
        scale: float | None = None,
        window: Window = None,
        softcap: float | None = None,
        alibi: bool = False,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        round_probabilities: bool = False,
        visible: Callable[[int, int, str, Window], Tensor] = visible_keys,
        bias: Callable[[Tensor, int, int], Tensor] = alibi_bias,
        returned_lse: Stage = keep,
    ) -> None:
        heads = kv_head_of(q.shape[1], k.shape[1])
        self.dtype, self.softcap, self.return_lse, self.returned_lse = q.dtype, softcap, return_lse, returned_lse
        self.q, self.k, self.v = load(q), load(k)[:, heads], load(v)[:, heads]
        self.keys = k.shape[2]
        self.scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
        self.see = visible(q.shape[2], self.keys, causal, window)
        self.bias = bias(slopes, q.shape[2], self.keys) if alibi and slopes is not None else None
        # One more logit per head, -inf where there are no sinks.
        one = torch.full((*q.shape[:3], 1), -math.inf)
        self.sink = one if sinks is None else load(sinks).view(1, -1, 1, 1).expand_as(one)
        self.stage = round_via(q.dtype) if round_probabilities else keep

    def block(self, start: int, stop: int) -> Block:
        """Masked scores [B,H,Sq,stop-start] of the keys from `start` to `stop`, their values and their mask."""
        keys = slice(start, stop)
        see = self.see[:, keys]
        scores = self.q @ self.k[:, :, keys].transpose(-1, -2) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + self.bias[:, :, keys]
        return scores.masked_fill(~see, -math.inf), self.v[:, :, keys], see

    def finish(self, out: Tensor, lse: Tensor) -> Result:
        """The stores: a row that sees no key is zero."""
        stored = torch.where(self.see.any(dim=1, keepdim=True), out, 0.0).to(self.dtype)
        return (stored, self.returned_lse(lse.squeeze(-1))) if self.return_lse else stored


def attention_rows(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    """Whole rows of scores, normalised before the product with the values."""
    problem = Problem(q, k, v, **options)
    scores, values, see = problem.block(0, problem.keys)
    shift = shift_of(peak(torch.cat([scores, problem.sink], dim=-1)))
    weights = torch.exp(scores - shift)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(problem.sink - shift)
    return problem.finish(weighted_sum(problem.stage(weights / total), values, see), shift + torch.log(total))


def attention_flash(
    q: Tensor, k: Tensor, v: Tensor, *, block: int = 64, running_output: Stage = keep, **options: Any
) -> Result:
    """Blocks of keys: running maximum, running sum, unnormalised output rescaled whenever the maximum grows."""
    problem = Problem(q, k, v, **options)
    blocks = (problem.block(start, start + block) for start in range(0, problem.keys, block))
    out, total, maximum = online(blocks, torch.zeros(*q.shape[:3], v.shape[3]), problem.stage, running_output)
    shift = shift_of(torch.maximum(maximum, problem.sink))
    last, sink = (torch.exp2((x - shift) * LOG2_E) for x in (maximum, problem.sink))
    total = total * last + sink
    return problem.finish(out * last / total, shift + torch.log(total))


def attention_split(
    q: Tensor, k: Tensor, v: Tensor, *, splits: int = 3, partial_lse: Stage = keep, **options: Any
) -> Result:
    """Keys split among workers; their normalised outputs are merged by lse, a sink counting as one more worker."""
    problem = Problem(q, k, v, **options)
    outputs, lses = [torch.zeros(*q.shape[:3], v.shape[3])], [problem.sink]
    width = max(1, -(-problem.keys // splits))
    for start in range(0, problem.keys, width):
        scores, values, see = problem.block(start, start + width)
        shift = shift_of(peak(scores))
        weights = torch.exp(scores - shift)
        total = weights.sum(dim=-1, keepdim=True)
        out = weighted_sum(problem.stage(weights), values, see)
        outputs.append(torch.where(total == 0, 0.0, out / total))
        lses.append(partial_lse(shift + torch.log(total)))
    lse = torch.stack(lses)
    shift = shift_of(lse.amax(dim=0))
    weights = torch.exp(lse - shift)
    total = weights.sum(dim=0)
    return problem.finish((weights * torch.stack(outputs)).sum(dim=0) / total, shift + torch.log(total))


def sum_of_group(gradient: Tensor, groups: int) -> Tensor:
    """[B,H,S,D] to [B,Hkv,S,D]: the heads that share a key/value head added up."""
    return gradient.unflatten(1, (groups, gradient.shape[1] // groups)).sum(dim=2)


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    round_stages: bool = False,
    block: int = 0,
    group: Callable[[Tensor, int], Tensor] = sum_of_group,
    delta: Callable[[Tensor, Tensor], Tensor] = lambda dout, out: (dout * out).sum(dim=-1, keepdim=True),
    scale_k: Callable[[Tensor, float], Tensor] = lambda gradient, scale: gradient * scale,
    accumulator: Stage = keep,
    over_rows: Callable[[Tensor, Tensor, Tensor], Tensor] = weighted_sum,
) -> Gradients:
    """dq, dk and dv, over blocks of keys where ``block`` is given; ``round_stages``: P and dS in the input dtype."""
    dtype, groups = q.dtype, k.shape[1]
    heads = kv_head_of(q.shape[1], groups)
    keys = k.shape[2]
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    see = visible_keys(q.shape[2], keys, causal)
    rows, gradient = load(q), load(dout)
    all_k, all_v = load(k)[:, heads], load(v)[:, heads]
    stored = round_via(dtype) if round_stages else keep

    scores = (rows @ all_k.transpose(-1, -2) * factor).masked_fill(~see, -math.inf)
    shift = shift_of(peak(scores))
    total = torch.exp2((scores - shift) * LOG2_E).sum(dim=-1, keepdim=True)
    weights = torch.where(see, torch.exp(scores - (shift + torch.log(nonzero(total)))), 0.0)
    deltas = delta(gradient, weighted_sum(stored(weights), all_v, see))

    dq, dk, dv = torch.zeros(rows.shape), torch.zeros(all_k.shape), torch.zeros(all_v.shape)
    step = block or max(keys, 1)
    for start in range(0, keys, step):
        part = slice(start, start + step)
        seen, p = see[:, part], weights[..., part]
        products = gradient @ all_v[:, :, part].transpose(-1, -2)
        slopes = stored(torch.where(seen, p * (products - deltas), 0.0))
        dq = accumulator(dq + weighted_sum(slopes, all_k[:, :, part], seen))
        dk[:, :, part] = over_rows(slopes.transpose(-1, -2), rows, seen.T)
        dv[:, :, part] = over_rows(stored(p).transpose(-1, -2), gradient, seen.T)
    return (dq * factor).to(dtype), group(scale_k(dk, factor), groups).to(dtype), group(dv, groups).to(dtype)


def attention_backward_by_autograd(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: str = "none", scale: float | None = None
) -> Gradients:
    """PyTorch's autograd of whole rows in float32, in which NaN behind the mask meets weights of zero."""
    see = visible_keys(q.shape[2], k.shape[2], causal)
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    heads = kv_head_of(q.shape[1], k.shape[1])
    with torch.enable_grad():
        leaves = [load(part).requires_grad_() for part in (q, k, v)]
        scores = (leaves[0] @ leaves[1][:, heads].transpose(-1, -2) * factor).masked_fill(~see, -math.inf)
        blind = ~see.any(dim=1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(~see, 0.0)
        found = torch.autograd.grad(weights @ leaves[2][:, heads], leaves, load(dout))
    return found[0].to(q.dtype), found[1].to(q.dtype), found[2].to(q.dtype)


def zero_stale(values: Tensor, see: Tensor) -> Tensor:
    """Values with what lies behind the last token zero: a weight of zero would keep NaN."""
    return torch.where(see[:, None], values, 0.0)


def merge_by_lse(states: list[State]) -> Tensor:
    """The output of all parts of the keys; one without keys, with an lse of -inf, has no share; all such give zero."""
    outs, lses = (torch.stack(part) for part in zip(*states, strict=True))
    weights = torch.exp(lses - shift_of(lses.amax(dim=0)))
    return (weights * outs).sum(dim=0) / nonzero(weights.sum(dim=0))


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    round_probabilities: bool = False,
    splits: int = 1,
    used: Callable[[int, int], int] = lambda length, page: -(-length // page),
    seen: Callable[[int, int, int], Tensor] = lambda length, start, page: start + torch.arange(page) < length,
    values: Callable[[Tensor, Tensor], Tensor] = zero_stale,
    codes: Stage = load,
    factor: Callable[[float, float], float] = lambda scale, k_scale: scale * k_scale,
    running_output: Stage = keep,
    partial_lse: Stage = keep,
    merge: Callable[[list[State]], Tensor] = merge_by_lse,
) -> Tensor:
    """Paged attention of one query per sequence, in one part or in several that are merged by their lse."""
    grown = factor(1.0 / math.sqrt(q.shape[2]) if scale is None else scale, k_scale)
    heads, page = kv_head_of(q.shape[1], k_cache.shape[2]), k_cache.shape[1]
    stage = round_via(q.dtype) if round_probabilities else keep
    everything = torch.ones(1, page, dtype=torch.bool)

    def block(b: int, index: int, length: int) -> Block:
        """Scores and values of a page, what lies behind the last token taken out of both."""
        number = int(block_table[b, index])
        k, v = (codes(cache[number])[:, heads].transpose(0, 1) for cache in (k_cache, v_cache))
        see = seen(length, index * page, page)
        scores = load(q[b])[:, None] @ k.transpose(1, 2) * grown
        return scores.masked_fill(~see, -math.inf), values(v, see), everything

    outs = []
    for b, length in enumerate(seq_lens.tolist()):
        pages = used(length, page)
        share = max(1, -(-pages // splits))
        states = []
        for part in range(splits):
            blocks = (block(b, index, length) for index in range(pages)[part * share : (part + 1) * share])
            out, total, maximum = online(blocks, torch.zeros(q.shape[1], 1, q.shape[2]), stage, running_output)
            lse = partial_lse(shift_of(maximum) + torch.log(total))
            states.append(((out / nonzero(total))[:, 0], lse[:, 0]))
        outs.append((states[0][0] if splits == 1 else merge(states)) * v_scale)
    return torch.stack(outs).to(q.dtype) if outs else torch.zeros_like(q)


def dequantized_first(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *pages: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    **options: Any,
) -> Tensor:
    """The scales are applied to keys and values as they are loaded, in float32."""
    return decode(q, load(k_cache) * k_scale, load(v_cache) * v_scale, *pages, **options)


def bounds(cu_seqlens: Tensor, b: int) -> tuple[int, int]:
    """Where sequence b begins and ends."""
    return int(cu_seqlens[b]), int(cu_seqlens[b + 1])


def ahead_of(queries: int, keys: int, totals: tuple[int, int]) -> Tensor:
    """How far each key of a sequence lies ahead of each query, both counted from the sequence's end."""
    return torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - (keys - queries)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    block: int = 0,
    key_bounds: Callable[[Tensor, int], tuple[int, int]] = bounds,
    count: Callable[[Tensor], int] = lambda cu_seqlens: len(cu_seqlens) - 1,
    ahead: Callable[[int, int, tuple[int, int]], Tensor] = ahead_of,
    score_stage: Stage = keep,
    stage: Stage = keep,
) -> Tensor:
    """Sequence by sequence: whole rows, or blocks of keys with a running maximum."""
    heads = kv_head_of(q.shape[1], k.shape[1])
    queries, keys, values = load(q).transpose(0, 1), load(k).transpose(0, 1)[heads], load(v).transpose(0, 1)[heads]
    factor = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    out = torch.zeros(queries.shape)
    for b in range(count(cu_seqlens_q)):
        rows, columns = slice(*bounds(cu_seqlens_q, b)), slice(*key_bounds(cu_seqlens_k, b))
        if rows.start >= rows.stop or columns.start >= columns.stop:
            continue
        scores, own = score_stage(queries[:, rows] @ keys[:, columns].transpose(1, 2) * factor), values[:, columns]
        see = ahead(scores.shape[1], scores.shape[2], (q.shape[0], k.shape[0])) <= 0
        see = see if causal != "none" else torch.ones_like(see)
        scores = scores.masked_fill(~see, -math.inf)
        if block:
            parts = (slice(start, start + block) for start in range(0, scores.shape[-1], block))
            blocks = ((scores[..., part], own[:, part], see[:, part]) for part in parts)
            found, total, _ = online(blocks, torch.zeros(*scores.shape[:-1], own.shape[-1]), stage)
        else:
            weights = torch.exp(scores - shift_of(peak(scores)))
            found, total = weighted_sum(stage(weights), own, see), weights.sum(dim=-1, keepdim=True)
        out[:, rows] = found / nonzero(total)
    return out.transpose(0, 1).contiguous().to(q.dtype)


def attention_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
) -> Tensor:
    """All queries against all keys, what belongs to another sequence masked."""
    token = [torch.arange(x.shape[0]) for x in (q, k)]
    of, ends = [], []
    for index, cu in zip(token, (cu_seqlens_q, cu_seqlens_k), strict=True):
        of.append((index[:, None] >= cu[None, 1:]).sum(dim=1))
        ends.append(cu[1:][of[-1]].long() if len(index) else index)
    see = of[0][:, None] == of[1][None, :]
    if causal != "none":
        see &= (token[1] - ends[1])[None, :] <= (token[0] - ends[0])[:, None]
    heads = kv_head_of(q.shape[1], k.shape[1])
    queries, keys, values = load(q).transpose(0, 1), load(k).transpose(0, 1)[heads], load(v).transpose(0, 1)[heads]
    out = torch.zeros(queries.shape)
    scores = queries @ keys.transpose(1, 2) * (1 / math.sqrt(q.shape[2]) if scale is None else scale)
    scores = scores.masked_fill(~see, -math.inf)
    weights = torch.exp(scores - shift_of(peak(scores)))
    total = weights.sum(dim=-1, keepdim=True)
    for b in range(len(cu_seqlens_q) - 1 if k.shape[0] else 0):
        rows, columns = slice(*bounds(cu_seqlens_q, b)), slice(*bounds(cu_seqlens_k, b))
        mixed = weighted_sum(weights[:, rows, columns], values[:, columns], see[rows, columns])
        out[:, rows] = mixed / nonzero(total[:, rows])
    return out.transpose(0, 1).contiguous().to(q.dtype)


HALF = ALL[1:]
MASKS: dict[str, Any] = {"causal": ["none", "bottom_right", "top_left"]}
CAUSAL: dict[str, Any] = {"causal": ["bottom_right", "top_left"]}
WINDOWS = {**MASKS, "window": [(0, 0), (16, 0), (5, 7)]}
LSE = {**MASKS, "return_lse": [True]}
EVERYTHING = {
    **MASKS,
    "scale": [None, 0.25],
    "window": [None, (16, 0), (5, 7)],
    "softcap": [None, 30.0],
    "alibi": [False, True],
    "sinks": [False, True],
}
TABLE: tuple[tuple[str, Kernel, tuple[str, ...], dict[str, Any]], ...] = (
    ("_rows", attention_rows, ALL, EVERYTHING),
    ("_rows_rounded", partial(attention_rows, round_probabilities=True), HALF, MASKS),
    ("_rows_lse", attention_rows, ALL[:1], LSE),
    ("_flash", attention_flash, ALL, MASKS),
    ("_flash_everything", attention_flash, ALL, EVERYTHING),
    ("_flash_rounded", partial(attention_flash, round_probabilities=True), HALF, EVERYTHING),
    ("_flash_causal", attention_flash, ALL, CAUSAL),
    ("_flash_window", attention_flash, ALL, WINDOWS),
    ("_flash_softcap", attention_flash, ALL, {**CAUSAL, "softcap": [2.0]}),
    ("_flash_alibi", attention_flash, ALL, {**MASKS, "alibi": [True]}),
    ("_flash_sinks", attention_flash, ALL, {"sinks": [True]}),
    ("_flash_lse", attention_flash, ALL, LSE),
    ("_split", attention_split, ALL, MASKS),
    ("_split_rounded", partial(attention_split, round_probabilities=True), HALF, EVERYTHING),
    ("_split_lse", attention_split, ALL, LSE),
)
"""Kernels of attention with their dtypes and the options that they are examined under."""

FLASH_BACKWARD = partial(attention_backward, block=32, round_stages=True)
# A weight of zero meets NaN as well.
DENSE_BACKWARD = partial(attention_backward, over_rows=lambda weights, values, see: weights @ values)
BACKWARD: dict[str, Any] = {"options": MASKS, "shapes": {"D": [8, 16, 64], "Dv": [8, 24, 64]}}
SCALES = {"causal": ["none", "bottom_right"], "scale": [None, 0.25]}
DECODE = {"scale": [None, 0.25], "k_scale": [1.0, 0.3], "v_scale": [1.0, 1.7]}
DECODE_HEADS = {"D": [8, 40, 64]}
rounded, split = partial(decode, round_probabilities=True), partial(decode, splits=3)
CACHES = (
    ("", "bfloat16", "float8_e4m3fn", rounded),
    ("", "float32", "float8_e5m2", decode),
    ("_split", "float16", "float8_e4m3fn", split),
    ("_dequantized", "bfloat16", "float8_e5m2", dequantized_first),
)
"""Kernels of caches in another dtype than the query's."""

HONEST = (
    *(
        entry
        for suffix, kernel, dtypes, options in TABLE
        for entry in honest("attention", (suffix, kernel, dtypes), options=options, shapes={"D": [1, 8, 33, 64, 128]})
    ),
    *honest("attention_backward", ("", attention_backward), ("_dense_over_rows", DENSE_BACKWARD, ALL[:2]), **BACKWARD),
    *honest("attention_backward", ("_flash", FLASH_BACKWARD), **{**BACKWARD, "options": SCALES}),
    *honest(
        "attention_backward",
        ("_by_autograd", attention_backward_by_autograd, ALL[:2]),
        **BACKWARD,
        contract=Contract(nonfinite="unspecified"),
    ),
    *honest(
        "attention_decode",
        ("", decode),
        ("_rounded", rounded, HALF),
        ("_split", split),
        ("_dequantized", dequantized_first),
        options=DECODE,
        shapes=DECODE_HEADS,
    ),
    *(
        Entry(
            f"attention_decode{suffix}-{dtype}-{cache}",
            "attention_decode",
            kernel,
            {
                "dtype": {"q": dtype, "k_cache": cache, "v_cache": cache},
                "options": {"k_scale": [0.05, 0.02], "v_scale": [0.11, 1.0]},
                "shapes": DECODE_HEADS,
            },
        )
        for suffix, dtype, cache, kernel in CACHES
    ),
    *honest(
        "attention_varlen",
        ("", attention_varlen),
        ("_in_blocks", partial(attention_varlen, block=16)),
        ("_masked", attention_masked),
        *(
            ("_rounded", partial(attention_varlen, block=32, stage=round_via(getattr(torch, dtype))), (dtype,))
            for dtype in HALF
        ),
        options=SCALES,
        shapes={"D": [8, 40]},
    ),
)
plant = planter(HONEST)


def window_right_wider(queries: int, keys: int, causal: str, window: Window) -> Tensor:
    """The window reaches one key further to the right."""
    return visible_keys(queries, keys, causal, None if window is None else (window[0], window[1] + 1))


def alibi_top_left(slopes: Tensor, queries: int, keys: int) -> Tensor:
    """The distance is counted from i instead of i + Sk - Sq."""
    distance = torch.arange(queries)[:, None] - torch.arange(keys)[None, :]
    return -slopes.float()[:, None, None] * distance.abs()


def to_base_two(lse: Tensor) -> Tensor:
    return lse * LOG2_E


def nan_swallowed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return nan_to_zero(attention_flash(q, k, v, **options))


def delta_of_first_half(dout: Tensor, out: Tensor) -> Tensor:
    """delta from the first half of the head only."""
    return (dout * out)[..., : (dout.shape[-1] + 1) // 2].sum(dim=-1, keepdim=True)


def dq_and_dk_swapped(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> Gradients:
    """Where shapes allow it, dq and dk change places."""
    dq, dk, dv = attention_backward(q, k, v, dout, **options)
    return (dk, dq, dv) if dq.shape == dk.shape else (dq, dk, dv)


def stale_kept(values: Tensor, see: Tensor) -> Tensor:
    """Values behind the last token are multiplied by their weight of zero."""
    return values


def as_other_float8(codes: Tensor) -> Tensor:
    """Codes of one 8-bit format are read as if they were of the other."""
    other = torch.float8_e5m2 if codes.dtype == torch.float8_e4m3fn else torch.float8_e4m3fn
    return load(codes.view(other))


def merge_evenly(states: list[State]) -> Tensor:
    """Every part that has keys counts the same."""
    outs, lses = (torch.stack(part) for part in zip(*states, strict=True))
    some = lses.isfinite()
    return (outs * some).sum(dim=0) / some.sum(dim=0).clamp(min=1)


def strides_ignored(q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Tensor, **options: Any) -> Tensor:
    """The cache is read as if it were contiguous."""
    caches = [x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()) for x in (k_cache, v_cache)]
    return decode(q, *caches, *others, **options)


def one_key_more(cu_seqlens: Tensor, b: int) -> tuple[int, int]:
    """The first key of the next sequence takes part."""
    first, last = bounds(cu_seqlens, b)
    return first, min(last + 1, int(cu_seqlens[-1]))


def first_512_keys(cu_seqlens: Tensor, b: int) -> tuple[int, int]:
    """Keys beyond a sequence's 512th are never visited."""
    first, last = bounds(cu_seqlens, b)
    return first, min(last, first + 512)


def per_batch(queries: int, keys: int, totals: tuple[int, int]) -> Tensor:
    """The causal mask is aligned by the totals of the batch."""
    return torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - (totals[1] - totals[0])


FP8, E5M2 = "attention_decode-bfloat16-float8_e4m3fn", "attention_decode-float32-float8_e5m2"
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention_window_right_wider": ("attention_flash_window-bfloat16", {"visible": window_right_wider}),
    "attention_alibi_top_left": ("attention_flash_alibi-float32", {"bias": alibi_top_left}),
    "attention_output_in_float16": ("attention_flash-bfloat16", {"running_output": to_float16}),
    "attention_returns_lse_in_bfloat16": ("attention_flash_lse-float32", {"returned_lse": to_bfloat16}),
    "attention_merges_lse_in_bfloat16": ("attention_split-float32", {"partial_lse": to_bfloat16}),
    "attention_merges_lse_in_base_two": ("attention_split-bfloat16", {"partial_lse": to_base_two}),
    "attention_backward_mean_of_group": (
        "attention_backward-float16",
        {"group": lambda x, groups: sum_of_group(x, groups) / (x.shape[1] // groups)},
    ),
    "attention_backward_group_in_bfloat16": (
        "attention_backward-float32",
        {"group": lambda x, groups: sum_of_group(to_bfloat16(x), groups)},
    ),
    "attention_backward_delta_of_half": ("attention_backward-bfloat16", {"delta": delta_of_first_half}),
    "attention_backward_delta_added": (
        "attention_backward-float16",
        {"delta": lambda dout, out: -(dout * out).sum(dim=-1, keepdim=True)},
    ),
    "attention_backward_dk_unscaled": ("attention_backward-bfloat16", {"scale_k": lambda gradient, scale: gradient}),
    "attention_backward_dq_in_bfloat16": ("attention_backward_flash-float32", {"accumulator": to_bfloat16}),
    "decode_whole_pages": (
        "attention_decode-bfloat16",
        {"seen": lambda length, start, page: torch.ones(page, dtype=torch.bool)},
    ),
    "decode_stale_values": ("attention_decode-bfloat16", {"values": stale_kept}),
    "decode_stale_values_of_fp8": (FP8, {"values": stale_kept}),
    "decode_k_scale_twice": (E5M2, {"factor": lambda scale, k_scale: scale * k_scale * k_scale}),
    "decode_other_float8": (FP8, {"codes": as_other_float8}),
    "decode_other_float8_e5m2": (E5M2, {"codes": as_other_float8}),
    "decode_merges_evenly": ("attention_decode_split-bfloat16", {"merge": merge_evenly}),
    "decode_last_state_lost": (
        "attention_decode_split-float16",
        {"merge": lambda states: merge_by_lse(states[:-1])},
    ),
    "decode_merges_lse_in_base_two": ("attention_decode_split-bfloat16", {"partial_lse": to_base_two}),
    "decode_merges_lse_in_bfloat16": ("attention_decode_split-float32", {"partial_lse": to_bfloat16}),
    "decode_output_in_float16": ("attention_decode-float16", {"running_output": to_float16}),
    "attention_varlen_one_key_more": ("attention_varlen-bfloat16", {"key_bounds": one_key_more}),
    "attention_varlen_next_sequence": (
        "attention_varlen-bfloat16",
        {"key_bounds": lambda cu, b: bounds(cu, min(b + 1, len(cu) - 2))},
    ),
    "attention_varlen_512_keys": ("attention_varlen-bfloat16", {"key_bounds": first_512_keys}),
    "attention_varlen_aligned_per_batch": ("attention_varlen-bfloat16", {"ahead": per_batch}),
    "attention_varlen_last_sequence_dropped": (
        "attention_varlen-bfloat16",
        {"count": lambda cu_seqlens: len(cu_seqlens) - 2},
    ),
    "attention_varlen_float16_scores": ("attention_varlen-float32", {"score_stage": to_float16}),
}
"""Faults, their twins, and the part that each replaces."""

FAULTY = (
    *(plant(name, twin, **parts) for name, (twin, parts) in PARTS.items()),
    plant("attention_nan_swallowed", "attention_flash-float32", nan_swallowed),
    plant("attention_backward_swapped", "attention_backward-bfloat16", dq_and_dk_swapped),
    # A full last page is followed by one more.
    plant(
        "decode_next_page_early",
        "attention_decode-bfloat16",
        kinds=("crash", "nonfinite"),
        used=lambda length, page: length // page + 1,
    ),
    plant("decode_strides_ignored", "attention_decode-bfloat16", strides_ignored, ("layout", *WRONG)),
)
