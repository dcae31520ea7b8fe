"""Faulty products of matrices, of quantised, microscaled and sparse ones, and faulty mixtures of experts."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import Faulty, planted, planter
from .honest import HONEST
from .honest_elementwise import silu_values
from .honest_gemm import gemm
from .honest_microscaling import SparseSteps, Steps, places_of, spread, value_of_e2m1
from .honest_moe import Stage, hidden_of, moe_route, round_hidden
from .honest_quantized import column_blocks, gemm_int4_rounded_weights, group_of, round_weights, unpack
from .numerics import load, round_bits, round_via, rounded_to, store_via_12_bits

plant = planter(HONEST)
FP8_BLOCK = "gemm_fp8_promoted-float8_e4m3fn"


def gemm_splits_add_to_rounded_output(a: Tensor, b: Tensor) -> Tensor:
    """Split-K whose second half is added to an output that the first half already rounded."""
    middle = a.shape[1] // 2
    first = gemm(a[:, :middle], b[:middle])
    return (load(first) + load(a[:, middle:]) @ load(b[middle:])).to(a.dtype)


def dot_14_bits(left: Tensor, right: Tensor) -> Tensor:
    """A tensor core that keeps 14 bits after each 32 places of K, never promoted."""
    total = torch.zeros(left.shape[0], right.shape[1])
    for start in range(0, left.shape[1], 32):
        total = round_bits(total + left[:, start : start + 32] @ right[start : start + 32], 14)
    return total


def gemm_fp8_14_bits(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str = "tensor") -> Tensor:
    """The 14-bit accumulator runs over the whole of K."""
    return (dot_14_bits(load(a), load(b)) * load(scale_a) * load(scale_b)).to(torch.bfloat16)


def gemm_int8_short_accumulator(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The accumulator wraps at 16 bits."""
    wrapped = (a.int() @ b.int()).to(torch.int16).float()
    return (wrapped * load(scale_a) * load(scale_b)).to(torch.bfloat16)


def group_shifted(rows: int, groups: int) -> Tensor:
    """Row k takes the group of row k + 1."""
    return ((torch.arange(rows) + 1) // (rows // groups)).clamp(max=groups - 1)


def int4_partial_sums(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, *, packing: str = "plain") -> Tensor:
    """The sum of each group is rounded to x's dtype before it is added."""
    if x.shape[1] == 0:
        return gemm_int4_rounded_weights(x, qweight, scales, zeros, packing=packing)
    codes, zero_points = unpack(qweight, zeros, packing)
    group, width = group_of(x.shape[1], scales.shape[0]), x.shape[1] // scales.shape[0]
    weight = round_weights((codes - zero_points[group]) * load(scales)[group], x.dtype)
    total = torch.zeros(x.shape[0], scales.shape[1])
    for start in range(0, x.shape[1], width):
        part = load(x[:, start : start + width]) @ weight[start : start + width]
        total = total + rounded_to(x.dtype, part)
    return total.to(x.dtype)


def bias_126(scale: Tensor) -> Tensor:
    """The exponent's bias is one too small."""
    return load(scale) * 2


def linear_code(scale: Tensor) -> Tensor:
    """The code is taken for the scale itself."""
    return scale.contiguous().view(torch.uint8).float()


def code_zero_is_zero(scale: Tensor) -> Tensor:
    """Codes are moved into a float32's exponent: zero becomes the number zero."""
    exponent = scale.contiguous().view(torch.uint8).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def clamped(least: float, most: float, scale: Tensor) -> Tensor:
    """Scales beyond a range are taken for its ends."""
    return scale.clamp(least, most)


def viewed(scale: Tensor) -> Tensor:
    """The scales are read in the transposed order."""
    return scale.T.contiguous().reshape(scale.shape)


def shifted_block(scale: Tensor, block: int) -> Tensor:
    """Blocks begin one place early."""
    return spread(scale, block).roll(-1, dims=1)


def one_less(count: int) -> int:
    """The last block is left out."""
    return count - 1


def unsigned(x: Tensor) -> Tensor:
    """The sign is lost."""
    return load(x).abs()


def split_halves(packed: Tensor) -> Tensor:
    """Low nibbles are taken for the first half of K."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def five_at_last(codes: Tensor) -> Tensor:
    """The largest code stands for five."""
    numbers = value_of_e2m1(codes)
    return torch.where(numbers.abs() == 6, numbers * 5 / 6, numbers)


def counted_from_one(index: Tensor) -> Tensor:
    """Places are counted from one."""
    return places_of((index.int() - 1) % 4)


def from_behind(index: Tensor) -> Tensor:
    """Places are counted from a group's end."""
    return places_of(3 - index.int())


def group_of_next(index: Tensor) -> Tensor:
    """Groups lie one further on, the last at the front."""
    return (places_of(index) + 4) % (2 * index.shape[1])


def first_value_only(values: Tensor) -> Tensor:
    """The second value of each group is dropped."""
    return torch.where(torch.arange(values.shape[1]) % 2 == 0, values, 0.0)


def route_ids_sorted(logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The ids are put in order, the weights aren't."""
    weights, ids = moe_route(logits, **options)
    return weights, ids.sort(dim=1).values


def moe_never_written_expert(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Outputs of all experts stand in one buffer whose unrouted rows are never written, and take part with weight 0."""
    experts = w_gate_up.shape[0]
    buffer = torch.empty(experts, *x.shape)
    share = torch.zeros(experts, x.shape[0])
    for expert in range(experts):
        token = torch.nonzero((ids == expert).any(dim=1))[:, 0]
        hidden = hidden_of(load(x[token]) @ load(w_gate_up[expert]).T, x.dtype, round_hidden)
        buffer[expert, token] = hidden @ load(w_down[expert]).T
        share[expert] = (load(weights) * (ids == expert)).sum(dim=1)
    return (buffer * share[:, :, None]).sum(dim=0).to(x.dtype)


def hidden_rounded_twice(projected: Tensor, dtype: torch.dtype, stage: Stage) -> Tensor:
    """silu(gate) is rounded, and so is its product with up."""
    middle = projected.shape[-1] // 2
    return stage(stage(silu_values(projected[..., :middle]), dtype) * projected[..., middle:], dtype)


def projection_rounded(projected: Tensor, dtype: torch.dtype, stage: Stage) -> Tensor:
    """gate and up are rounded before the activation."""
    return hidden_of(round_via(dtype)(projected), dtype, stage)


MX_FAULTS: dict[str, tuple[str, Steps]] = {
    "bias_126": ("", Steps(scale=bias_126)),
    "linear_scale": ("", Steps(scale=linear_code)),
    "code_zero": ("", Steps(scale=code_zero_is_zero)),
    "scale_b_viewed": ("", Steps(scale_b=viewed)),
    "scale_a_clamped": ("", Steps(scale_a=partial(clamped, 2.0**-15, 2.0**15))),
    "blocks_shifted": ("", Steps(spread=shifted_block)),
    "unsigned": ("", Steps(value=unsigned)),
}
NV_FAULTS: dict[str, tuple[str, Steps]] = {
    "nibbles_in_halves": ("", Steps(unpack=split_halves)),
    "five_at_last": ("", Steps(number=five_at_last)),
    "scale_a_viewed": ("", Steps(scale_a=viewed)),
    "scale_a_at_most_240": ("", Steps(scale_a=partial(clamped, -240.0, 240.0))),
    "scale_b_unsigned": ("", Steps(scale_b=torch.abs)),
}
SPARSE_FAULTS: dict[str, tuple[str, SparseSteps]] = {
    "counted_from_one": ("-float32", SparseSteps(places=counted_from_one)),
    "from_behind": ("-float16", SparseSteps(places=from_behind)),
    "group_of_next": ("-bfloat16", SparseSteps(places=group_of_next)),
    "first_value_only": ("-float16", SparseSteps(values=first_value_only)),
}
UNWRITTEN = ("unwritten_output", "contract", "exact", "nonfinite", "nondeterministic")
IN_14_BITS = {"block": 32, "accumulator_stage": partial(round_bits, bits=14)}

FAULTY_PRODUCTS: tuple[Faulty, ...] = (
    *(plant("gemm_14_bit_accumulator", f"gemm_blocked-{dtype}", **IN_14_BITS) for dtype in ("float32", "bfloat16")),
    plant("gemm_rounds_via_12_bits", "gemm-bfloat16", store=store_via_12_bits),
    plant("gemm_splits_add_to_rounded_output", "gemm_split_k-bfloat16", gemm_splits_add_to_rounded_output),
    plant("gemm_fp8_scale_of_64", FP8_BLOCK, spread=partial(column_blocks, block=64)),
    plant("gemm_fp8_14_bit_blocks", FP8_BLOCK, dot=dot_14_bits),
    plant("gemm_fp8_14_bits", "gemm_fp8_scaled_after-float8_e4m3fn", gemm_fp8_14_bits),
    plant("gemm_int8_short_accumulator", "gemm_int8", gemm_int8_short_accumulator),
    plant("gemm_int4_group_shifted", "gemm_int4-bfloat16", grouped=group_shifted),
    plant("gemm_int4_partial_sums", "gemm_int4_rounded_weights-bfloat16", int4_partial_sums),
    *planted(plant, "gemm_mxfp8", "steps", MX_FAULTS),
    plant("gemm_mxfp8_last_block_dropped", "gemm_mxfp8_by_blocks", steps=Steps(blocks=one_less)),
    *planted(plant, "gemm_nvfp4", "steps", NV_FAULTS),
    *planted(plant, "gemm_2to4", "steps", SPARSE_FAULTS),
    plant("moe_route_ids_sorted", "moe_route-bfloat16", route_ids_sorted),
    plant("moe_never_written_expert", "moe_by_expert_rounded-bfloat16", moe_never_written_expert, UNWRITTEN),
    plant("moe_hidden_rounded_twice", "moe_by_expert_rounded-bfloat16", hidden=hidden_rounded_twice),
    plant("moe_projection_rounded", "moe_by_expert_rounded-bfloat16", hidden=projection_rounded),
)
