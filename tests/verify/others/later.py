"""Kernels written after the explanations had been mended by the others: a sample that shaped none of them."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .attention import SMALL, heads, whole
from .entry import Other
from .products import in_chunks, weights


def softmax_scaled(x: Tensor) -> Tensor:
    """exp2 of what was never multiplied by log2 e."""
    y = x.float() - x.float().amax(-1, keepdim=True)
    return (torch.exp2(y) / torch.exp2(y).sum(-1, keepdim=True)).to(x.dtype)


def softmax_padded(x: Tensor) -> Tensor:
    """Padded with zeros to a multiple of 16."""
    y = functional.pad(x.float(), (0, -x.shape[1] % 16))
    return torch.softmax(y, -1)[:, : x.shape[1]].to(x.dtype)


def softmax_last_unnormalised(x: Tensor) -> Tensor:
    """The last column is left out of the sum."""
    e = torch.exp(x.float() - x.float().amax(-1, keepdim=True))
    return (e / e[:, : max(x.shape[1] - 1, 1)].sum(-1, keepdim=True)).to(x.dtype)


def log_softmax_in_bits(x: Tensor) -> Tensor:
    """log2."""
    return (torch.log_softmax(x.float(), -1) / math.log(2)).to(x.dtype)


def log_softmax_of_total(x: Tensor) -> Tensor:
    """The logarithm of the sum is left out."""
    return (x.float() - x.float().amax(-1, keepdim=True)).to(x.dtype)


def layer_norm_without_mean(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x is never centred, its variance is."""
    y = x.float()
    root = torch.rsqrt(y.var(-1, keepdim=True, correction=0) + 1e-5)
    return (y * root * weight.float() + bias.float()).to(x.dtype)


def layer_norm_of_first_row(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The mean of the first row."""
    y = x.float()
    centred = y - y.mean(-1, keepdim=True)[:1] if len(y) else y
    root = torch.rsqrt(y.var(-1, keepdim=True, correction=0) + 1e-5)
    return (centred * root * weight.float() + bias.float()).to(x.dtype)


def rms_norm_over_one_less(x: Tensor, weight: Tensor) -> Tensor:
    """Divided by N - 1."""
    y = x.float()
    root = torch.rsqrt(y.square().sum(-1, keepdim=True) / max(x.shape[1] - 1, 1) + 1e-6)
    return (y * root * weight.float()).to(x.dtype)


def rms_norm_without_root(x: Tensor, weight: Tensor) -> Tensor:
    """Divided by the mean square."""
    y = x.float()
    return (y / (y.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)


def rms_norm_centred(x: Tensor, weight: Tensor) -> Tensor:
    """As a layer norm without bias."""
    y = x.float()
    return functional.layer_norm(y, (x.shape[1],), weight.float(), None, 1e-6).to(x.dtype)


def l2_norm_of_mean(x: Tensor) -> Tensor:
    """As an RMS norm."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def silu_twice(x: Tensor) -> Tensor:
    """silu(silu(x))."""
    return functional.silu(functional.silu(x.float())).to(x.dtype)


def silu_as_sigmoid(x: Tensor) -> Tensor:
    """The factor x is forgotten."""
    return torch.sigmoid(x.float()).to(x.dtype)


def gelu_without_half(x: Tensor) -> Tensor:
    """No 1/2."""
    return (2 * functional.gelu(x.float())).to(x.dtype)


def gelu_as_relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return torch.relu(x.float()).to(x.dtype)


def swish_of_up(gate: Tensor, up: Tensor) -> Tensor:
    """silu of both."""
    return (functional.silu(gate.float()) * functional.silu(up.float())).to(gate.dtype)


def rotary_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turned the other way."""
    a, b = x.float().chunk(2, -1)
    c, s = cos.float()[:, None], sin.float()[:, None]
    return torch.cat([a * c + b * s, b * c - a * s], -1).to(x.dtype)


def rotary_next(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each place takes the angle of the next."""
    a, b = x.float().chunk(2, -1)
    c, s = (y.float().roll(-1, 0)[:, None] for y in (cos, sin))
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)


def gemm_split(a: Tensor, b: Tensor) -> Tensor:
    """The second half of a long K is lost."""
    inner = a.shape[1] // 2 if a.shape[1] >= 64 else a.shape[1]
    return (a[:, :inner].float() @ b[:inner].float()).to(a.dtype)


def gemm_every_other_rounded(a: Tensor, b: Tensor) -> Tensor:
    """Sums of 64 terms in bfloat16."""
    return in_chunks(a, b, 64, dtype=torch.bfloat16).to(a.dtype)


def gemm_of_bfloat16(a: Tensor, b: Tensor) -> Tensor:
    """Float32 inputs go in as bfloat16."""
    return a.bfloat16().float() @ b.bfloat16().float()


def gemm_truncated(a: Tensor, b: Tensor) -> Tensor:
    """The store cuts the low 16 bits."""
    return ((a.float() @ b.float()).view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


def int4_signed(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Zero-points are taken to be 8."""
    return (x.float() @ weights(qweight, scales, torch.full_like(zeros, 8))).to(x.dtype)


def int8_first_row(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Every row takes the first row's scale."""
    return ((a.double() @ b.double()).float() * scale_a[:1] * scale_b).bfloat16()


def keys_without_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last key is never seen."""
    keys = max(k.shape[2] - 1, 1)
    return whole(q, k[:, :, :keys], v[:, :, :keys])


def keys_without_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first key is never seen."""
    return whole(q, k[:, :, 1:], v[:, :, 1:]) if k.shape[2] > 1 else whole(q, k, v)


def keys_reversed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Values are read from the end."""
    return whole(q, k, v.flip(2))


def weights_squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Probabilities are normalised by the root of the sum of squares."""
    scores = q.float() @ heads(q, k).mT * q.shape[-1] ** -0.5
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (p / p.square().sum(-1, keepdim=True).sqrt() @ heads(q, v)).to(q.dtype)


def causal_ignored(q: Tensor, k: Tensor, v: Tensor, causal: str = "bottom_right") -> Tensor:
    """No mask."""
    return whole(q, k, v)


def causal_hidden(q: Tensor, k: Tensor, v: Tensor, causal: str = "bottom_right") -> Tensor:
    """A query doesn't see its own key."""
    return whole(q, k, v, lambda i, j, rows, keys: j < i + keys - rows)


def loss_of_label_before(logits: Tensor, target: Tensor) -> Tensor:
    """Labels count from one."""
    return functional.cross_entropy(logits.float(), torch.where(target > 0, target - 1, target))


def loss_in_bits(logits: Tensor, target: Tensor) -> Tensor:
    """Log2."""
    return functional.cross_entropy(logits.float(), target) / math.log(2)


def loss_squared(logits: Tensor, target: Tensor) -> Tensor:
    """The mean of squares."""
    loss = functional.cross_entropy(logits.float(), target, reduction="none")
    return loss.square().sum() / (target != -100).sum()


def fp8_over_128(x: Tensor) -> tuple[Tensor, Tensor]:
    """amax / 224."""
    scale = x.float().abs().amax(1, keepdim=True) / 224
    y = x.float() / torch.where(scale == 0, 1.0, scale)
    return y.clamp(-448, 448).to(torch.float8_e4m3fn), scale


def cumsum_backwards(x: Tensor) -> Tensor:
    """From the end."""
    return x.float().flip(-1).cumsum(-1).flip(-1).to(x.dtype)


_CAUSAL: dict[str, Any] = SMALL | {"options": {"causal": ["bottom_right"]}}

LATER = (
    Other("softmax_scaled", softmax_scaled, "softmax", "bfloat16", ("softmax_base_2",)),
    Other("softmax_padded", softmax_padded, "softmax", "float32", ("softmax_padding_not_masked",)),
    Other("softmax_last_unnormalised", softmax_last_unnormalised, "softmax", "bfloat16"),
    Other("log_softmax_in_bits", log_softmax_in_bits, "log_softmax", "bfloat16", ("logarithm_in_base_2",)),
    Other("log_softmax_of_total", log_softmax_of_total, "log_softmax", "float32"),
    Other("layer_norm_without_mean", layer_norm_without_mean, "layernorm", "bfloat16", ("mean_kept",)),
    Other("layer_norm_of_first_row", layer_norm_of_first_row, "layernorm", "bfloat16"),
    Other("rms_norm_over_one_less", rms_norm_over_one_less, "rmsnorm", "float32"),
    Other("rms_norm_without_root", rms_norm_without_root, "rmsnorm", "bfloat16", ("rms_root_dropped",)),
    Other("rms_norm_centred", rms_norm_centred, "rmsnorm", "bfloat16", ("mean_subtracted",)),
    Other("l2_norm_of_mean", l2_norm_of_mean, "l2norm", "bfloat16", ("l2norm_of_mean",)),
    Other("silu_twice", silu_twice, "silu", "bfloat16"),
    Other("silu_as_sigmoid", silu_as_sigmoid, "silu", "bfloat16", ("silu_factor_dropped",)),
    Other("gelu_without_half", gelu_without_half, "gelu", "bfloat16", ("gelu_half_dropped",)),
    Other("gelu_as_relu", gelu_as_relu, "gelu", "bfloat16"),
    Other("swish_of_up", swish_of_up, "swiglu", "bfloat16"),
    Other("rotary_back", rotary_back, "rope", "float16", ("rope_sign",)),
    Other("rotary_next", rotary_next, "rope", "bfloat16"),
    Other("gemm_split", gemm_split, "gemm", "float16", ("split_lost",)),
    Other("gemm_every_other_rounded", gemm_every_other_rounded, "gemm", "float32", ("accumulated_in_bfloat16",)),
    Other("gemm_of_bfloat16", gemm_of_bfloat16, "gemm", "float32", ("inputs_in_bfloat16",)),
    Other("gemm_truncated", gemm_truncated, "gemm", "bfloat16", ("truncating_store",)),
    Other("int4_signed", int4_signed, "gemm_int4", "bfloat16", ("zero_point_eight",)),
    Other("int8_first_row", int8_first_row, "gemm_int8", None, ("row_scale_of_first",)),
    Other("keys_without_last", keys_without_last, "attention", "bfloat16", ("last_key_dropped",), SMALL),
    Other("keys_without_first", keys_without_first, "attention", "bfloat16", ("first_key_dropped",), SMALL),
    Other("keys_reversed", keys_reversed, "attention", "bfloat16", (), SMALL),
    Other("weights_squared", weights_squared, "attention", "bfloat16", (), SMALL),
    Other("causal_ignored", causal_ignored, "attention", "float16", ("causal_mask_ignored",), _CAUSAL),
    Other("causal_hidden", causal_hidden, "attention", "bfloat16", ("diagonal_one_short",), _CAUSAL),
    Other("loss_of_label_before", loss_of_label_before, "cross_entropy", "bfloat16", ("label_one_less",)),
    Other("loss_in_bits", loss_in_bits, "cross_entropy", "float32", ("loss_in_base_2",)),
    Other("loss_squared", loss_squared, "cross_entropy", "bfloat16"),
    Other("fp8_over_128", fp8_over_128, "quantize_fp8", "bfloat16", ("scale_of_224",)),
    Other("cumsum_backwards", cumsum_backwards, "cumsum", "bfloat16", ("cumsum_direction",)),
)
