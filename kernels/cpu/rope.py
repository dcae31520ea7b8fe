"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.kernels.cpu.compiling import compiled, composed
from assay.kernels.triton.arguments import FLOATING, check


@composed
def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """y[B,S,H,D]: the pairs (i, i + D/2) of x[B,S,H,D], or neighbours (2i, 2i + 1), turned by cos, sin[S,D/2].

    Computed in float32. Each is float32, bfloat16 or float16, not necessarily the same; the result has x's dtype.
    Raises TypeError or ValueError, naming the argument, for another dtype or shape.
    """
    check(x=(x, FLOATING, "B S H D"))
    if x.shape[3] % 2:
        raise ValueError(f"x: expected an even number of columns, got {x.shape[3]}")
    angles = f"{x.shape[1]} {x.shape[3] // 2}"
    check(x=(x, FLOATING, "B S H D"), cos=(cos, FLOATING, angles), sin=(sin, FLOATING, angles))
    return _rope(x, cos, sin, interleaved)


@compiled
def _rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    wide = x.float()
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    cosine, sine = cos.float()[:, None], sin.float()[:, None]
    turned = first * cosine - second * sine, second * cosine + first * sine
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)
