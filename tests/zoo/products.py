"""Products of matrices: plain, quantised, microscaled and sparse ones, mixtures of experts; and with one fault each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from assay.verify import Contract

from .entry import ALL, WRONG, honest, planter
from .functions import sigmoid, silu_values
from .numerics import (
    E2M1,
    Stage,
    Store,
    bfloat16_out,
    in_float32,
    keep,
    load,
    round_bits,
    rounded_to,
    store_via_12_bits,
    to_bfloat16,
)

Dot = Callable[[Tensor, Tensor], Tensor]
BLOCK = 128
AWQ_NIBBLE_OF_COLUMN = [0, 4, 1, 5, 2, 6, 3, 7]  # the inverse of the stored order 0 2 4 6 1 3 5 7


@in_float32
def gemm(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def in_blocks(left: Tensor, right: Tensor, block: int, dot: Dot = torch.matmul, stage: Stage = keep) -> Tensor:
    """A loop over blocks of K that adds to one accumulator, which passes through ``stage``."""
    total = torch.zeros(left.shape[0], right.shape[1])
    for start in range(0, left.shape[1], block):
        total = stage(total + dot(left[:, start : start + block], right[start : start + block]))
    return total


@in_float32
def gemm_blocked(a: Tensor, b: Tensor, *, block: int = 64, accumulator_stage: Stage = keep) -> Tensor:
    return in_blocks(a, b, block, stage=accumulator_stage)


@in_float32
def gemm_split_k(a: Tensor, b: Tensor, *, splits: int = 4) -> Tensor:
    """K cut into a few parts, each with an accumulator of its own, added at the end."""
    return in_blocks(a, b, max(1, -(-a.shape[1] // splits)))


@in_float32
def gemm_reversed(a: Tensor, b: Tensor) -> Tensor:
    """One outer product after another, from the last column of a to the first."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in reversed(range(a.shape[1])):
        total.addcmul_(a[:, k : k + 1], b[k : k + 1])
    return total


@in_float32
def linear_bias_first(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The accumulator starts with the bias."""
    total = bias.repeat(x.shape[0], 1)
    for start in range(0, x.shape[1], 64):
        total = total + x[:, start : start + 64] @ weight[:, start : start + 64].T
    return total


def column_blocks(scale: Tensor, columns: int, block: int = BLOCK) -> Tensor:
    """A scale per block of columns repeated for each of `columns`."""
    index = (torch.arange(columns) // block).clamp(max=max(scale.shape[-1] - 1, 0))
    return scale[..., index]


@bfloat16_out
def gemm_fp8_scaled_after(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str = "tensor", dot: Dot = torch.matmul
) -> Tensor:
    """One float32 product of the codes, then the scales; for scales that don't change along K."""
    return dot(a, b) * scale_a * scale_b


@bfloat16_out
def gemm_fp8_dequantised(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str = "tensor"
) -> Tensor:
    """Both operands are multiplied by their scales in float32 first."""
    if granularity == "block":
        scale_a = column_blocks(scale_a, a.shape[1])
        scale_b = column_blocks(scale_b[torch.arange(b.shape[0]) // BLOCK], b.shape[1])
    return (a * scale_a) @ (b * scale_b)


@bfloat16_out
def gemm_fp8_promoted(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    granularity: str = "tensor",
    spread: Callable[[Tensor, int], Tensor] = column_blocks,
    dot: Dot = torch.matmul,
) -> Tensor:
    """A product for each 128 columns of a, added to a float32 accumulator; block scales are applied on the way."""
    if granularity != "block":
        return in_blocks(a, b, BLOCK, dot) * scale_a * scale_b
    total = torch.zeros(a.shape[0], b.shape[1])
    for number, start in enumerate(range(0, a.shape[1], BLOCK)):
        part = dot(a[:, start : start + BLOCK], b[start : start + BLOCK])
        total = total + part * scale_a[:, number, None] * spread(scale_b[number], b.shape[1])
    return total


def gemm_int8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, narrow: torch.dtype = torch.int32) -> Tensor:
    """Exact int32 accumulation, then the scales."""
    total = (a.int() @ b.int()).to(narrow).float()
    return (total * load(scale_a) * load(scale_b)).to(torch.bfloat16)


def gemm_int8_in_float32(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Float32 accumulation, which rounds beyond 2^24."""
    return (load(a) @ load(b) * load(scale_a) * load(scale_b)).to(torch.bfloat16)


def gemm_int8_dequantised(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Scales first."""
    return ((load(a) * load(scale_a)) @ (load(b) * load(scale_b))).to(torch.bfloat16)


def nibbles(packed: Tensor, count: int) -> Tensor:
    """Each word's nibbles from the lowest up, along a new last dimension; the mask undoes the sign's extension."""
    return (packed.int().unsqueeze(-1) >> (4 * torch.arange(count, dtype=torch.int32))) & 15


def unpack(qweight: Tensor, zeros: Tensor, packing: str) -> tuple[Tensor, Tensor]:
    """Codes [K,N] and zero-points [K/g,N]."""
    if packing == "awq":
        codes, points = (nibbles(x, 8)[..., AWQ_NIBBLE_OF_COLUMN].flatten(1) for x in (qweight, zeros))
        return codes, points
    codes = nibbles(qweight, 8 if packing == "gptq" else 2).transpose(1, 2).reshape(-1, qweight.shape[1])
    return codes, nibbles(zeros, 8).flatten(1) + 1 if packing == "gptq" else zeros.int()


def group_of(rows: int, groups: int) -> Tensor:
    """The group of each of K rows."""
    return torch.arange(rows) // (rows // groups)


def gemm_int4(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    *,
    packing: str = "plain",
    weight_stage: Callable[[torch.dtype, Tensor], Tensor] = lambda dtype, weight: weight,
    grouped: Callable[[int, int], Tensor] = group_of,
    rounded_groups: bool = False,
) -> Tensor:
    """x @ ((q - z) * s), the weights unpacked to float32; ``rounded_groups``: each group's sum in x's dtype."""
    if x.shape[1] == 0:
        return torch.zeros(x.shape[0], scales.shape[1], dtype=x.dtype)
    codes, zero_points = unpack(qweight, zeros, packing)
    group = grouped(x.shape[1], scales.shape[0])
    weight = weight_stage(x.dtype, (codes - zero_points[group]) * load(scales)[group])
    if not rounded_groups:
        return (load(x) @ weight).to(x.dtype)
    width = x.shape[1] // scales.shape[0]
    return in_blocks(load(x), weight, width, lambda a, b: rounded_to(x.dtype, a @ b)).to(x.dtype)


def gemm_int4_grouped(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, *, packing: str = "plain") -> Tensor:
    """One product of codes for each group, scaled after; only for float16, where x * 15 can't overflow float32."""
    total = torch.zeros(x.shape[0], scales.shape[1])
    if x.shape[1]:
        codes, zero_points = unpack(qweight, zeros, packing)
        width = x.shape[1] // scales.shape[0]
        for group, start in enumerate(range(0, x.shape[1], width)):
            columns = slice(start, start + width)
            centred = (codes[columns] - zero_points[group]).float()
            total = total + load(x[:, columns]) @ centred * load(scales[group])
    return total.to(x.dtype)


def spread(scale: Tensor, block: int) -> Tensor:
    """Each scale of the last axis for as many neighbours."""
    return scale.repeat_interleave(block, dim=-1)


def unpack_pairs(packed: Tensor) -> Tensor:
    """Codes [rows, K]: the low nibble is that of the even column."""
    return nibbles(packed, 2).flatten(1)


def microscaled(
    left: Tensor,
    right: Tensor,
    scales: tuple[Tensor, Tensor],
    block: int,
    blocks: Callable[[int], int] | None,
    spread: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """left[M,K] right[N,K]^T: both times their scales first, or a product of codes for each of ``blocks`` along K."""
    if blocks is None:
        left, right = (x * spread(s, block)[:, : x.shape[1]] for x, s in zip((left, right), scales, strict=True))
        return left @ right.T
    total = torch.zeros(left.shape[0], right.shape[0])
    for number in range(blocks(scales[0].shape[1])):
        columns = slice(number * block, (number + 1) * block)
        part = left[:, columns] @ right[:, columns].T
        total = total + part * (scales[0][:, number, None] * scales[1][:, number])
    return total


def gemm_mxfp8(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    value: Stage = load,
    scale: Stage = load,
    stage_a: Stage = keep,
    stage_b: Stage = keep,
    blocks: Callable[[int], int] | None = None,
    spread: Callable[[Tensor, int], Tensor] = spread,
) -> Tensor:
    """(a scale_a) (b scale_b)."""
    scales = stage_a(scale(scale_a)), stage_b(scale(scale_b).T.contiguous())
    return microscaled(value(a), value(b).T.contiguous(), scales, 32, blocks, spread).to(torch.bfloat16)


def gemm_mxfp8_in_bfloat16(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Numbers times their scales are numbers of bfloat16, as its tensor cores take them."""
    left, right = to_bfloat16(load(a) * spread(load(scale_a), 32)), to_bfloat16(load(b).T * spread(load(scale_b).T, 32))
    return (left @ right.T).to(torch.bfloat16)


def gemm_nvfp4(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    global_a: Tensor,
    global_b: Tensor,
    *,
    unpack: Stage = unpack_pairs,
    number: Stage = lambda codes: E2M1[codes.long()],
    stage_a: Stage = keep,
    stage_b: Stage = keep,
    blocks: Callable[[int], int] | None = None,
    early: bool = False,
) -> Tensor:
    """Codes times the scales of their blocks; the result times both multipliers, or the scales ``early``."""
    scales = stage_a(load(scale_a)), stage_b(load(scale_b))
    if early:
        scales = scales[0] * global_a, scales[1] * global_b
    total = microscaled(number(unpack(a)), number(unpack(b)), scales, 16, blocks, spread)
    return (total if early else total * (global_a * global_b)).to(torch.bfloat16)


def rows_of(index: Tensor) -> Tensor:
    """The row of b that each stored value meets."""
    return torch.arange(index.shape[1]) // 2 * 4 + index.long()


def filled_in(values: Tensor, rows: Tensor, b: Tensor) -> Tensor:
    """A dense product, zeros put where nothing is stored."""
    return torch.zeros(values.shape[0], b.shape[0]).scatter_add_(1, rows, values) @ b


def gathered(values: Tensor, rows: Tensor, b: Tensor) -> Tensor:
    """For each row of values its rows of b."""
    return torch.stack([row @ b[index] for row, index in zip(values, rows, strict=True)])


def in_slices(values: Tensor, rows: Tensor, b: Tensor, width: int = 32) -> Tensor:
    """A dense product for each slice of K, added to a float32 accumulator."""
    total = torch.zeros(values.shape[0], b.shape[1])
    for start in range(0, b.shape[0], width):
        stored = slice(start // 2, (start + width) // 2)
        total = total + filled_in(values[:, stored], rows[:, stored] - start, b[start : start + width])
    return total


def gemm_2to4(
    values: Tensor,
    index: Tensor,
    b: Tensor,
    *,
    rows: Stage = rows_of,
    kept: Stage = keep,
    product: Callable[[Tensor, Tensor, Tensor], Tensor] = filled_in,
) -> Tensor:
    """The product of a two-to-four sparse matrix."""
    if not values.shape[0]:
        return torch.zeros(0, b.shape[1], dtype=values.dtype)
    return product(kept(load(values)), rows(index), load(b)).to(values.dtype)


def shared_sigmoid(values: Tensor, renormalize: bool) -> Tensor:
    """Sigmoids that are divided by their sum may share a factor: without it all scores could underflow to zero."""
    if not renormalize:
        return sigmoid(values)
    shift = values.amax(dim=1, keepdim=True).clamp(max=0.0)
    return torch.exp(values.clamp(max=0.0) - shift) / (1.0 + torch.exp(-values.abs()))


def moe_route(
    logits: Tensor, *, top_k: int = 2, renormalize: bool = True, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """Scores of all experts, then the largest of them, divided by their sum where asked."""
    values = load(logits)
    scores = torch.softmax(values, dim=1) if scoring == "softmax" else shared_sigmoid(values, renormalize)
    weights, ids = torch.topk(scores, top_k, dim=1)
    return weights / weights.sum(dim=1, keepdim=True) if renormalize else weights, ids.to(torch.int32)


def moe_route_by_logits(
    logits: Tensor, *, top_k: int = 2, renormalize: bool = True, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """The largest logits first; renormalised softmax then needs only these."""
    values = load(logits)
    chosen, ids = torch.topk(values, top_k, dim=1)
    if scoring == "sigmoid":
        weights = shared_sigmoid(chosen, renormalize)
        weights = weights / weights.sum(dim=1, keepdim=True) if renormalize else weights
    elif renormalize:
        weights = torch.softmax(chosen, dim=1)
    else:
        maximum = values.amax(dim=1, keepdim=True)
        weights = torch.exp(chosen - maximum) / torch.exp(values - maximum).sum(dim=1, keepdim=True)
    return weights, ids.to(torch.int32)


def keep_hidden(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """The hidden activation stays in float32."""
    return hidden


def round_hidden(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """The hidden activation rounded to the input dtype, which the default contract allows."""
    return rounded_to(dtype, hidden)


def hidden_of(projected: Tensor, dtype: torch.dtype, stage: Store) -> Tensor:
    """silu(gate) * up, gate in the first half of the last dimension."""
    gate, up = projected.chunk(2, dim=-1)
    return stage(silu_values(gate) * up, dtype)


def moe_by_expert(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    hidden: Callable[[Tensor, torch.dtype, Store], Tensor] = hidden_of,
    stage: Store = keep_hidden,
) -> Tensor:
    """For each expert the tokens routed to it, a token twice where it names the expert twice."""
    total = torch.zeros(x.shape)
    for expert in range(w_gate_up.shape[0]):
        token, choice = torch.nonzero(ids == expert, as_tuple=True)
        if len(token) == 0:
            continue
        activation = hidden(load(x[token]) @ load(w_gate_up[expert]).T, x.dtype, stage)
        out = activation @ load(w_down[expert]).T
        total.index_add_(0, token, out * load(weights[token, choice])[:, None])
    return total.to(x.dtype)


moe_by_expert_rounded = partial(moe_by_expert, stage=round_hidden)


def moe_by_pair(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Both matrices gathered for each pair of token and expert, a few tokens at a time."""
    total = torch.zeros(x.shape)
    for tokens in torch.arange(x.shape[0]).split(8):
        for choice in range(ids.shape[1]):
            expert = ids[tokens, choice].long()
            projected = load(w_gate_up[expert]) @ load(x[tokens])[:, :, None]
            activation = hidden_of(projected.squeeze(-1), x.dtype, keep_hidden)
            out = (load(w_down[expert]) @ activation[:, :, None]).squeeze(-1)
            total[tokens] += out * load(weights[tokens, choice])[:, None]
    return total.to(x.dtype)


FP8, FIXED = ("float8_e4m3fn",), ("",)
BLOCKS: dict[str, Any] = {"granularity": ["tensor", "row", "block"]}
ROUTES: dict[str, Any] = {
    "options": {"top_k": [1, 2, 4], "renormalize": [True, False], "scoring": ["softmax", "sigmoid"]},
    "shapes": {"E": [4, 8, 13, 60, 128]},
}
HONEST = (
    *honest(
        "gemm",
        ("", gemm),
        ("_blocked", gemm_blocked),
        ("_blocked_128", partial(gemm_blocked, block=128)),
        ("_split_k", gemm_split_k),
        ("_reversed", gemm_reversed),
    ),
    # The bias is added in float32, before the one rounding.
    *honest(
        "linear", ("", in_float32(lambda x, weight, bias: x @ weight.T + bias)), ("_bias_first", linear_bias_first)
    ),
    *honest(
        "gemm_fp8",
        ("_scaled_after", gemm_fp8_scaled_after, (*FP8, "float8_e5m2")),
        options={"granularity": ["tensor", "row"]},
    ),
    *honest(
        "gemm_fp8", ("_dequantised", gemm_fp8_dequantised, FP8), ("_promoted", gemm_fp8_promoted, FP8), options=BLOCKS
    ),
    *honest(
        "gemm_int8",
        ("", gemm_int8, FIXED),
        ("_in_float32", gemm_int8_in_float32, FIXED),
        ("_dequantised", gemm_int8_dequantised, FIXED),
    ),
    *honest(
        "gemm_int4",
        ("", gemm_int4),
        ("_rounded_weights", partial(gemm_int4, weight_stage=rounded_to)),
        ("_grouped", gemm_int4_grouped, ("float16",)),
        options={"packing": ["plain", "awq", "gptq"]},
    ),
    *honest(
        "gemm_mxfp8",
        ("", gemm_mxfp8, FIXED),
        ("_by_blocks", partial(gemm_mxfp8, blocks=int), FIXED),
    ),
    # A small scale makes its operands subnormal in bfloat16, which then have fewer digits than e4m3's four.
    *honest("gemm_mxfp8", ("_in_bfloat16", gemm_mxfp8_in_bfloat16, FIXED), contract=Contract(subnormals="flush")),
    *honest(
        "gemm_nvfp4",
        ("", gemm_nvfp4, FIXED),
        ("_by_blocks", partial(gemm_nvfp4, blocks=int), FIXED),
        ("_early", partial(gemm_nvfp4, early=True), FIXED),
    ),
    *honest(
        "gemm_2to4",
        ("", gemm_2to4),
        ("_gathered", partial(gemm_2to4, product=gathered)),
        ("_in_slices", partial(gemm_2to4, product=in_slices)),
    ),
    *honest("moe_route", ("", moe_route), ("_by_logits", moe_route_by_logits), **ROUTES),
    *honest(
        "moe",
        ("_by_expert", moe_by_expert),
        ("_by_expert_rounded", moe_by_expert_rounded, ALL[1:]),
        ("_by_pair", moe_by_pair, ALL[:2]),
    ),
)
plant = planter(HONEST)


def gemm_splits_add_to_rounded_output(a: Tensor, b: Tensor) -> Tensor:
    """Split-K whose second half is added to an output that the first half already rounded."""
    middle = a.shape[1] // 2
    return (load(gemm(a[:, :middle], b[:middle])) + load(a[:, middle:]) @ load(b[middle:])).to(a.dtype)


# A tensor core that keeps 14 bits after each 32 columns of a, never promoted.
dot_14_bits = partial(in_blocks, block=32, stage=partial(round_bits, bits=14))


def gemm_int8_short_accumulator(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The accumulator wraps at 16 bits."""
    return gemm_int8(a, b, scale_a, scale_b, narrow=torch.int16)


def code_zero_is_zero(scale: Tensor) -> Tensor:
    """Codes are moved into a float32's exponent: zero becomes the number zero."""
    exponent = scale.contiguous().view(torch.uint8).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def viewed(scale: Tensor) -> Tensor:
    """The scales are read in the transposed order."""
    return scale.T.contiguous().reshape(scale.shape)


def five_at_last(codes: Tensor) -> Tensor:
    """The largest code is read as five."""
    numbers = E2M1[codes.long()]
    return torch.where(numbers.abs() == 6, numbers * 5 / 6, numbers)


def route_ids_sorted(logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The ids are put in order, the weights aren't."""
    weights, ids = moe_route(logits, **options)
    return weights, ids.sort(dim=1).values


def moe_never_written_expert(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Outputs of all experts are in one buffer whose unrouted rows are never written, and take part with weight 0."""
    experts = w_gate_up.shape[0]
    buffer = torch.empty(experts, *x.shape)
    share = torch.zeros(experts, x.shape[0])
    for expert in range(experts):
        token = torch.nonzero((ids == expert).any(dim=1))[:, 0]
        hidden = hidden_of(load(x[token]) @ load(w_gate_up[expert]).T, x.dtype, round_hidden)
        buffer[expert, token] = hidden @ load(w_down[expert]).T
        share[expert] = (load(weights) * (ids == expert)).sum(dim=1)
    return (buffer * share[:, :, None]).sum(dim=0).to(x.dtype)


def hidden_rounded_twice(projected: Tensor, dtype: torch.dtype, stage: Store) -> Tensor:
    """silu(gate) is rounded, and so is its product with up."""
    gate, up = projected.chunk(2, dim=-1)
    return stage(stage(silu_values(gate), dtype) * up, dtype)


def projection_rounded(projected: Tensor, dtype: torch.dtype, stage: Store) -> Tensor:
    """gate and up are rounded before the activation."""
    return hidden_of(rounded_to(dtype, projected), dtype, stage)


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemm_rounds_via_12_bits": ("gemm-bfloat16", {"store": store_via_12_bits}),
    "gemm_fp8_scale_of_64": ("gemm_fp8_promoted-float8_e4m3fn", {"spread": partial(column_blocks, block=64)}),
    "gemm_fp8_14_bit_blocks": ("gemm_fp8_promoted-float8_e4m3fn", {"dot": dot_14_bits}),
    "gemm_fp8_14_bits": ("gemm_fp8_scaled_after-float8_e4m3fn", {"dot": dot_14_bits}),
    # Row k takes the group of row k + 1.
    "gemm_int4_group_shifted": (
        "gemm_int4-bfloat16",
        {"grouped": lambda rows, groups: ((torch.arange(rows) + 1) // (rows // groups)).clamp(max=groups - 1)},
    ),
    "gemm_int4_partial_sums": ("gemm_int4_rounded_weights-bfloat16", {"rounded_groups": True}),
    # e8m0: the exponent's bias one too small; the code as the scale itself; code zero as zero; a range of 2^15.
    "gemm_mxfp8_bias_126": ("gemm_mxfp8", {"scale": lambda scale: load(scale) * 2}),
    "gemm_mxfp8_linear_scale": ("gemm_mxfp8", {"scale": lambda scale: scale.contiguous().view(torch.uint8).float()}),
    "gemm_mxfp8_code_zero": ("gemm_mxfp8", {"scale": code_zero_is_zero}),
    "gemm_mxfp8_scale_b_viewed": ("gemm_mxfp8", {"stage_b": viewed}),
    "gemm_mxfp8_scale_a_clamped": ("gemm_mxfp8", {"stage_a": lambda scale: scale.clamp(2.0**-15, 2.0**15)}),
    "gemm_mxfp8_blocks_shifted": ("gemm_mxfp8", {"spread": lambda scale, block: spread(scale, block).roll(-1, dims=1)}),
    "gemm_mxfp8_unsigned": ("gemm_mxfp8", {"value": lambda x: load(x).abs()}),
    "gemm_mxfp8_last_block_dropped": ("gemm_mxfp8_by_blocks", {"blocks": lambda count: count - 1}),
    # Low nibbles are taken for the first half of K.
    "gemm_nvfp4_nibbles_in_halves": (
        "gemm_nvfp4",
        {"unpack": lambda packed: torch.cat([packed & 15, packed >> 4], dim=1)},
    ),
    "gemm_nvfp4_five_at_last": ("gemm_nvfp4", {"number": five_at_last}),
    "gemm_nvfp4_scale_a_viewed": ("gemm_nvfp4", {"stage_a": viewed}),
    "gemm_nvfp4_scale_a_at_most_240": ("gemm_nvfp4", {"stage_a": lambda scale: scale.clamp(-240.0, 240.0)}),
    "gemm_nvfp4_scale_b_unsigned": ("gemm_nvfp4", {"stage_b": torch.abs}),
    # Rows are counted from one, from a group's end; groups lie one further on, the last at the front.
    "gemm_2to4_counted_from_one": ("gemm_2to4-float32", {"rows": lambda index: rows_of((index.int() - 1) % 4)}),
    "gemm_2to4_from_behind": ("gemm_2to4-float16", {"rows": lambda index: rows_of(3 - index.int())}),
    "gemm_2to4_group_of_next": (
        "gemm_2to4-bfloat16",
        {"rows": lambda index: (rows_of(index) + 4) % (2 * index.shape[1])},
    ),
    # The second value of each group is dropped.
    "gemm_2to4_first_value_only": (
        "gemm_2to4-float16",
        {"kept": lambda values: torch.where(torch.arange(values.shape[1]) % 2 == 0, values, 0.0)},
    ),
    "moe_hidden_rounded_twice": ("moe_by_expert_rounded-bfloat16", {"hidden": hidden_rounded_twice}),
    "moe_projection_rounded": ("moe_by_expert_rounded-bfloat16", {"hidden": projection_rounded}),
}
"""Faults, their twins, and the part that each replaces."""

IN_14_BITS: dict[str, Any] = {"block": 32, "accumulator_stage": partial(round_bits, bits=14)}
FAULTY = (
    *(plant(name, twin, **parts) for name, (twin, parts) in PARTS.items()),
    *(plant("gemm_14_bit_accumulator", f"gemm_blocked-{dtype}", **IN_14_BITS) for dtype in ALL[:2]),
    plant("gemm_splits_add_to_rounded_output", "gemm_split_k-bfloat16", gemm_splits_add_to_rounded_output),
    plant("gemm_int8_short_accumulator", "gemm_int8", gemm_int8_short_accumulator),
    plant("moe_route_ids_sorted", "moe_route-bfloat16", route_ids_sorted),
    plant(
        "moe_never_written_expert",
        "moe_by_expert_rounded-bfloat16",
        moe_never_written_expert,
        ("unwritten_output", *WRONG, "nondeterministic"),
    ),
)
