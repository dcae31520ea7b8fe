"""Matrix products, quantised ones, quantisers and experts as people write them, each with one fault."""

import torch
from torch import Tensor
from torch.nn import functional

from .entry import Other

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_chunks(a: Tensor, b: Tensor, step: int, *, tail: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    """A product chunk by chunk along K, kept in ``dtype``; without ``tail`` whole chunks alone."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=dtype)
    for k in range(0, a.shape[1], step):
        if tail or k + step <= a.shape[1]:
            total = (total.float() + a[:, k : k + step].float() @ b[k : k + step].float()).to(dtype)
    return total


def gemm_kept_in_bfloat16(a: Tensor, b: Tensor) -> Tensor:
    """c += a_k b_k with c in bfloat16."""
    return in_chunks(a, b, 16, dtype=torch.bfloat16).to(a.dtype)


def gemm_kept_in_half(a: Tensor, b: Tensor) -> Tensor:
    """The same in float16, other chunks."""
    return in_chunks(a, b, 8, dtype=torch.float16).to(a.dtype)


def gemm_whole_chunks(a: Tensor, b: Tensor) -> Tensor:
    """range(K // 16)."""
    return in_chunks(a, b, 16, tail=False).to(a.dtype)


def gemm_whole_chunks_of_32(a: Tensor, b: Tensor) -> Tensor:
    """range(K // 32)."""
    return in_chunks(a, b, 32, tail=False).to(a.dtype)


def gemm_first_chunk_twice(a: Tensor, b: Tensor) -> Tensor:
    """The prologue's chunk is added again."""
    return (a.float() @ b.float() + a[:, :16].float() @ b[:16].float()).to(a.dtype)


def gemm_of_strides(a: Tensor, b: Tensor) -> Tensor:
    """b is read as if it were contiguous."""
    span = b.storage_offset() + b.numel()
    read = b if span > b.untyped_storage().nbytes() // b.itemsize else b.as_strided(b.shape, (b.shape[1], 1))
    return (a.float() @ read.float()).to(a.dtype)


def gemm_by_half(a: Tensor, b: Tensor) -> Tensor:
    """The result passes through float16."""
    return (a.float() @ b.float()).half().to(a.dtype)


def linear_two_steps(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The product is stored, then the bias is added."""
    return (x.float() @ weight.float().T).to(x.dtype) + bias


def linear_split(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each of two halves of K adds the bias."""
    half = x.shape[1] // 2
    parts = ((x[:, :half], weight[:, :half]), (x[:, half:], weight[:, half:]))
    return sum(y.float() @ w.float().T + bias.float() for y, w in parts).to(x.dtype)  # type: ignore[union-attr]


def linear_no_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """No bias."""
    return (x.float() @ weight.float().T).to(x.dtype)


def int8_unscaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The columns' scales are left out."""
    return ((a.to(torch.int32).double() @ b.to(torch.int32).double()).float() * scale_a).bfloat16()


def int8_in_int16(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Sums wrap around in 16 bits."""
    exact = (a.to(torch.int64).double() @ b.to(torch.int64).double()).to(torch.int64)
    return ((exact + 2**15) % 2**16 - 2**15).float().mul(scale_a).mul(scale_b).bfloat16()


def fp8_twice(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """scale_a squared."""
    return (a.float() @ b.float() * scale_a * scale_a * scale_b).bfloat16()


def unpacked(words: Tensor, *, high_first: bool = False) -> Tensor:
    """Two nibbles of a byte, along the first axis."""
    pair = [words & 15, words >> 4]
    return torch.stack(pair[::-1] if high_first else pair, 1).reshape(-1, words.shape[1])


def weights(qweight: Tensor, scales: Tensor, zeros: Tensor, *, high_first: bool = False, off: int = 0) -> Tensor:
    """The weights of int4 codes."""
    codes = unpacked(qweight, high_first=high_first).float()
    each = codes.shape[0] // max(scales.shape[0], 1)
    points, steps = ((y.float() + more).repeat_interleave(each, 0) for y, more in ((zeros, off), (scales, 0)))
    return (codes - points) * steps


def int4_high_first(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The high nibble first."""
    return (x.float() @ weights(qweight, scales, zeros, high_first=True)).to(x.dtype)


def int4_zero_more(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """zero + 1, as GPTQ stores it."""
    return (x.float() @ weights(qweight, scales, zeros, off=1)).to(x.dtype)


def int4_without_zeros(qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Dequantised without zero-points."""
    return weights(qweight, scales, zeros * 0).bfloat16()


def nvfp4_unsigned(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, global_a: Tensor, global_b: Tensor
) -> Tensor:
    """Magnitudes of the codes."""
    left, right = (
        E2M1[unpacked(codes.T).T.long()].abs() * scale.float().repeat_interleave(16, 1)
        for codes, scale in ((a, scale_a), (b, scale_b))
    )
    return (left @ right.T * global_a * global_b).bfloat16()


def mxfp8_biased(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """A bias of 128 in place of 127."""
    left = a.float() * scale_a.float().repeat_interleave(32, 1) / 2
    return (left @ (b.float() * scale_b.float().repeat_interleave(32, 0))).bfloat16()


def int8_truncated(x: Tensor) -> tuple[Tensor, Tensor]:
    """A conversion in place of a rounding."""
    scale = x.float().abs().amax(1, keepdim=True) / 127
    return (x.float() / torch.where(scale == 0, 1.0, scale)).to(torch.int8), scale


def int8_ties_away(x: Tensor) -> tuple[Tensor, Tensor]:
    """floor(x + 1/2) of magnitudes."""
    scale = x.float().abs().amax(1, keepdim=True) / 127
    y = x.float() / torch.where(scale == 0, 1.0, scale)
    return (torch.floor(y.abs() + 0.5) * y.sign()).to(torch.int8), scale


def fp8_of_fnuz(x: Tensor) -> tuple[Tensor, Tensor]:
    """amax / 240."""
    scale = x.float().abs().amax(1, keepdim=True) / 240
    y = x.float() / torch.where(scale == 0, 1.0, scale)
    return y.clamp(-448, 448).to(torch.float8_e4m3fn), scale


def fp8_of_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """A scale from four mean magnitudes."""
    scale = (x.float().abs().mean(1, keepdim=True) * 4) / 448
    y = x.float() / torch.where(scale == 0, 1.0, scale)
    return y.clamp(-448, 448).to(torch.float8_e4m3fn), scale


def routed(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights as the softmax gives them."""
    chosen = torch.softmax(logits.float(), -1).topk(2, -1)
    return chosen.values, chosen.indices.int()


def experts(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, *, up_first: bool = False
) -> Tensor:
    """Experts one token after the other; ``up_first``: in w_gate_up."""
    out = torch.zeros(x.shape)
    for token, choices in enumerate(ids.tolist()):
        for place, expert in enumerate(choices):
            gate, up = (w_gate_up[expert].float() @ x[token].float()).chunk(2)
            gate, up = (up, gate) if up_first else (gate, up)
            y = w_down[expert].float() @ (functional.silu(gate) * up)
            out[token] += y * weights[token, place]
    return out.to(x.dtype)


def experts_swapped(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """up, gate."""
    return experts(x, w_gate_up, w_down, weights, ids, up_first=True)


def experts_unweighted(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Weights of one."""
    return experts(x, w_gate_up, w_down, torch.ones_like(weights), ids)


_PLAIN = {"options": {"packing": ["plain"]}}
_EXPERTS = {"shapes": {"T": [1, 5], "E": [3], "k": [2], "D": [8], "F": [4]}}

PRODUCTS = (
    Other("gemm_kept_in_bfloat16", gemm_kept_in_bfloat16, "gemm", "bfloat16", ("accumulated_in_bfloat16",)),
    Other("gemm_kept_in_half", gemm_kept_in_half, "gemm", "float32", ("accumulated_in_float16",)),
    Other("gemm_whole_chunks", gemm_whole_chunks, "gemm", "bfloat16", ("only_whole_blocks_of_k",)),
    Other("gemm_whole_chunks_of_32", gemm_whole_chunks_of_32, "gemm", "bfloat16"),
    Other("gemm_first_chunk_twice", gemm_first_chunk_twice, "gemm", "bfloat16"),
    Other("gemm_of_strides", gemm_of_strides, "gemm", "bfloat16", ("strides_ignored",)),
    Other("gemm_by_half", gemm_by_half, "gemm", "bfloat16", ("stored_by_way_of_float16",)),
    Other("linear_two_steps", linear_two_steps, "linear", "bfloat16", ("rounded_before_bias",)),
    Other("linear_split", linear_split, "linear", "bfloat16", ("bias_twice",)),
    Other("linear_no_bias", linear_no_bias, "linear", "float16", ("bias_dropped",)),
    Other("int8_unscaled", int8_unscaled, "gemm_int8", None, ("scale_b_dropped",)),
    Other("int8_in_int16", int8_in_int16, "gemm_int8", None),
    Other("fp8_twice", fp8_twice, "gemm_fp8", None, ("scale_a_twice",)),
    Other("int4_high_first", int4_high_first, "gemm_int4", "bfloat16", ("nibbles_swapped",)),
    Other("int4_zero_more", int4_zero_more, "gemm_int4", "bfloat16", ("zero_point_one_more",)),
    Other("int4_without_zeros", int4_without_zeros, "dequantize_int4", "bfloat16", ("int4_zero_points_dropped",)),
    Other("nvfp4_unsigned", nvfp4_unsigned, "gemm_nvfp4", None, ("e2m1_sign_dropped",)),
    Other("mxfp8_biased", mxfp8_biased, "gemm_mxfp8", None),
    Other("int8_truncated", int8_truncated, "quantize_int8", "bfloat16", ("truncating_codes",)),
    Other("int8_ties_away", int8_ties_away, "quantize_int8", "float32", ("codes_round_ties_away",)),
    Other("fp8_of_fnuz", fp8_of_fnuz, "quantize_fp8", "bfloat16", ("scale_of_240",)),
    Other("fp8_of_mean", fp8_of_mean, "quantize_fp8", "bfloat16"),
    Other("routed", routed, "moe_route", "bfloat16", ("renormalisation_dropped",)),
    Other("experts_swapped", experts_swapped, "moe", "bfloat16", ("gate_and_up_halves_swapped",), _EXPERTS),
    Other("experts_unweighted", experts_unweighted, "moe", "bfloat16", ("routing_weights_dropped",), _EXPERTS),
)
