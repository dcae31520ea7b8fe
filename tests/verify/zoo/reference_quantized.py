"""Quantisers, microscaled and sparse products, ragged attention, merges and sums over ranks, in float64, plainly."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantize(x: Tensor, granularity: str, largest: int) -> Outputs:
    """Quotients by the scale, before they are rounded; and the scales."""
    rows, columns = x.shape
    width = {"row": max(columns, 1), "tensor": 0, "group128": 128}[granularity]
    if not width:
        scale = x.double().abs().max() / largest if x.numel() else torch.ones((), dtype=torch.float64)
        return x.double() / scale, scale
    scales = torch.zeros(rows, -(-columns // width) if columns else 1, dtype=torch.float64)
    quotient = x.double()
    for g in range(-(-columns // width)):
        part = quotient[:, g * width : (g + 1) * width]
        scales[:, g] = part.abs().amax(dim=1) / largest
        part /= scales[:, g, None]
    return quotient, scales


def quantize_fp8(x: Tensor, granularity: str = "row") -> Outputs:
    """As torch casts."""
    quotient, scale = quantize(x, granularity, 448)
    return quotient.float().to(torch.float8_e4m3fn).double(), scale


def quantize_int8(x: Tensor, granularity: str = "row") -> Outputs:
    """Rounded to nearest even."""
    quotient, scale = quantize(x, granularity, 127)
    return quotient.round(), scale


def quantize_int4(x: Tensor, group: int = 128, symmetric: bool = False) -> Outputs:
    """Number by number."""
    groups = -(-x.shape[1] // group)
    codes = torch.zeros(x.shape, dtype=torch.float64)
    scales, zeros = (torch.zeros(x.shape[0], groups, dtype=torch.float64) for _ in range(2))
    for r, row in enumerate(x.double()):
        for g in range(groups):
            part = row[g * group : (g + 1) * group]
            low, high = min(0.0, float(part.min())), max(0.0, float(part.max()))
            scale = max(high, -low) / 7 if symmetric else (high - low) / 15
            zero = 8 if symmetric else round(-low / scale)
            scales[r, g], zeros[r, g] = scale, zero
            for place, number in enumerate(part.tolist()):
                codes[r, g * group + place] = min(15, max(0, round(number / scale) + zero))
    return codes, scales, zeros


def gemm_mxfp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Outputs:
    """Block by block."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for g in range(a.shape[1] // 32):
        k = slice(32 * g, 32 * g + 32)
        total += (a[:, k].double() * scale_a[:, g, None].double()) @ (b[k].double() * scale_b[g].double())
    return (total,)


def numbers(packed: Tensor) -> Tensor:
    """The e2m1 numbers of two nibbles a byte."""
    rows = []
    for row in packed.tolist():
        codes = [code for byte in row for code in (byte % 16, byte // 16)]
        rows.append([(-1.0 if code >= 8 else 1.0) * E2M1[code % 8] for code in codes])
    return torch.tensor(rows, dtype=torch.float64).reshape(packed.shape[0], 2 * packed.shape[1])


def gemm_nvfp4(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, global_a: Tensor, global_b: Tensor) -> Outputs:
    """Everything dequantised."""
    left, right = (
        numbers(x) * s.double().repeat_interleave(16, dim=1) * float(g)
        for x, s, g in ((a, scale_a, global_a), (b, scale_b, global_b))
    )
    return (left @ right.T,)


def gemm_2to4(values: Tensor, index: Tensor, b: Tensor) -> Outputs:
    """Value by value."""
    total = torch.zeros(values.shape[0], b.shape[1], dtype=torch.float64)
    for j in range(values.shape[1]):
        total += values[:, j, None].double() * b[4 * (j // 2) + index[:, j].long()].double()
    return (total,)


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options: Any
) -> Outputs:
    """Row by row."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    shared, scale = q.shape[1] // k.shape[1], options.get("scale") or q.shape[2] ** -0.5
    for b in range(len(cu_seqlens_q) - 1):
        first, last = int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1])
        begin, end = int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1])
        for i in range(first, last):
            stop = end if options.get("causal", "none") == "none" else min(end, end - (last - 1 - i))
            for h in range(q.shape[1] if stop > begin else 0):
                scores = k[begin:stop, h // shared].double() @ q[i, h].double() * scale
                out[i, h] = torch.softmax(scores, 0) @ v[begin:stop, h // shared].double()
    return (out,)


def merge_states(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> Outputs:
    """Head by head."""
    out, lse = torch.zeros(o_a.shape, dtype=torch.float64), torch.full(lse_a.shape, -math.inf, dtype=torch.float64)
    for t in range(o_a.shape[0]):
        for h in range(o_a.shape[1]):
            states = [
                (float(s[t, h]), o[t, h].double()) for s, o in ((lse_a, o_a), (lse_b, o_b)) if s[t, h] > -math.inf
            ]
            if states:
                largest = max(level for level, _ in states)
                total = sum(math.exp(level - largest) for level, _ in states)
                lse[t, h] = largest + math.log(total)
                out[t, h] = sum((math.exp(level - largest) / total * o for level, o in states), out[t, h])
    return out, lse


def all_reduce(shards: Tensor) -> Outputs:
    """As torch adds."""
    return (shards.double().sum(dim=0),)
