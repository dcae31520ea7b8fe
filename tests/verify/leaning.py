"""Kernels whose intermediates round to nearest or, as copies with one fault, to one side."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from assay.formats.rounding import round_to

Stage = Callable[[Tensor, torch.dtype], Tensor]


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 values by way of `dtype`, rounded to nearest even."""
    return x.to(dtype).to(x.dtype)


def truncated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 values by way of `dtype`, their low bits cut off."""
    return round_to(x, dtype, "toward_zero").to(x.dtype)


def to_float32(x: Tensor, mode: str) -> Tensor:
    """Float64 values, of float32's normal range, to nearest or with the bits that float32 lacks cut off."""
    if mode == "nearest":
        return x.float().double()
    return (x.view(torch.int64) & -(1 << 29)).view(torch.float64)


def attention(stage: Stage = nearest) -> Callable[..., Tensor]:
    """softmax(q k^T / sqrt(D)) v with the probabilities of one matrix product after `stage`."""

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // max(k.shape[1], 1)
        keys, values = (x.float().repeat_interleave(groups, 1) for x in (k, v))
        scores = q.float() @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return (stage(weights, q.dtype) @ values / weights.sum(-1, keepdim=True)).to(q.dtype)

    return kernel


def gemm_int4(stage: Stage = nearest) -> Callable[..., Tensor]:
    """x ((q - z) s) with the weights after `stage`."""

    def kernel(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        codes = torch.stack([qweight & 15, qweight >> 4], 1).reshape(-1, qweight.shape[1]).float()
        group = codes.shape[0] // scales.shape[0]
        zero, scale = (part.float().repeat_interleave(group, 0) for part in (zeros, scales))
        return (x.float() @ stage((codes - zero) * scale, x.dtype)).to(x.dtype)

    return kernel


def gemm(mode: str = "nearest") -> Callable[..., Tensor]:
    """One product after another, each added to a float32 accumulator that rounds by `mode`."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
        for k in range(a.shape[1]):
            total = to_float32(total + a[:, k : k + 1].double() * b[k : k + 1].double(), mode)
        return total.to(a.dtype)

    return kernel


def summed(x: Tensor, mode: str) -> Tensor:
    """The sum along rows, [R, 1], in a float32 accumulator that rounds by `mode`."""
    total = torch.zeros(x.shape[0], dtype=torch.float64)
    for column in range(x.shape[1]):
        total = to_float32(total + x[:, column].double(), mode)
    return total[:, None].float()


def layernorm(mode: str = "nearest") -> Callable[..., Tensor]:
    """Two passes; the mean drifts where the sum that it comes from does not round to nearest."""

    def kernel(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        values = x.float()
        centred = values - summed(values, mode) / x.shape[1]
        root = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
        return (centred * root * weight.float() + bias.float()).to(x.dtype)

    return kernel


def log_softmax(ulps: float = 0.0) -> Callable[..., Tensor]:
    """x - max - log sum exp(x - max), every exponential too large by so many ulps of one."""

    def kernel(x: Tensor) -> Tensor:
        shifted = x.double() - x.double().amax(-1, keepdim=True)
        weights = (torch.exp(shifted) * (1 + ulps * 2.0**-23)).float()
        return (shifted - weights.double().sum(-1, keepdim=True).log()).to(x.dtype)

    return kernel


def gelu(ulps: float = 0.0) -> Callable[..., Tensor]:
    """x Phi(x), its error function too large by so many ulps."""

    def kernel(x: Tensor) -> Tensor:
        erf = torch.erf(x.double() * math.sqrt(0.5))
        return (0.5 * x.double() * (1 + erf * (1 + ulps * 2.0**-23))).to(x.dtype)

    return kernel
