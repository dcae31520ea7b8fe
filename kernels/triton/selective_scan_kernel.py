"""Selective scan of state-space models (Gu & Dao, *Mamba*, 2023): a linear recurrence along a sequence, place by place.

In sequence, not as a tree of pairs (decay, term). Both keep the contract's error: a term is rounded once for each decay
behind it either way, and the tree only saves additions. But a tree multiplies decays by one another first, and their
product vanishes long before the state does: exp(-60) exp(-60) is zero in float32, and times an infinite state NaN,
where the recurrence says infinity. The sequence multiplies no two decays.

A program is one warp, whose registers hold all states of its channels. What belongs to channels is loaded and stored in
blocks of places, side by side; which registers hold a place of a block is known at compile time, so that taking it out
costs next to nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_D = 16
BLOCK_L = 16


@triton.jit
def softplus_of(x):
    """log(1 + exp(x)) = max(x, 0) + log1p(w) with w = exp(-|x|), and log1p(w) = 2 atanh(s) with s = w / (2 + w) <= 1/3.

    Of atanh's series s + s^3/3 + s^5/5 + ... what is left out is below 2e-9 of it.
    """
    w = tl.exp(-tl.abs(x))
    s = w / (2.0 + w)
    square = s * s
    series = tl.full(x.shape, 1.0 / 15.0, tl.float32)
    for odd in tl.static_range(13, 0, -2):
        series = series * square + 1.0 / odd
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def row_at(block, places, place):
    """The row of a block [BLOCK_L, BLOCK_D] at a place, [1, BLOCK_D]."""
    return tl.sum(tl.where(places == place, block, 0.0), axis=0, keep_dims=True)


@triton.jit
def _selective_scan_kernel(
    u_ptr,
    delta_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    skip_ptr,
    y_ptr,
    states_ptr,
    D,
    S,
    L,
    u_strides,
    delta_strides,
    a_strides,
    b_strides,
    c_strides,
    stride_skip,
    y_strides,
    SOFTPLUS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    down = tl.cdiv(D, BLOCK_D)
    batch = (tl.program_id(0) // down).to(tl.int64)
    channels = ((tl.program_id(0) % down).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    states = tl.arange(0, BLOCK_S).to(tl.int64)[:, None]
    block = tl.arange(0, BLOCK_L)[:, None]
    u_ptrs = u_ptr + batch * u_strides[0] + channels * u_strides[1]
    delta_ptrs = delta_ptr + batch * delta_strides[0] + channels * delta_strides[1]
    b_ptrs = b_ptr + batch * b_strides[0] + states * b_strides[1]
    c_ptrs = c_ptr + batch * c_strides[0] + states * c_strides[1]
    kept = (states < S) & (channels < D)
    a = tl.load(a_ptr + channels * a_strides[0] + states * a_strides[1], mask=kept, other=0.0)
    skip = tl.load(skip_ptr + channels * stride_skip, mask=channels < D, other=0.0)
    state = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in range(0, L, BLOCK_L):
        places = start + block.to(tl.int64)
        inside = (places < L) & (channels < D)
        u = tl.load(u_ptrs + places * u_strides[2], mask=inside, other=0.0).to(tl.float32)
        step = tl.load(delta_ptrs + places * delta_strides[2], mask=inside, other=0.0).to(tl.float32)
        if SOFTPLUS:
            step = softplus_of(step)
        term = step * u
        if states_ptr is not None:
            into = states_ptr + ((batch * tl.cdiv(L, BLOCK_L) + start // BLOCK_L) * S + states) * D + channels
            tl.store(into, state, mask=kept)
        y = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
        for place in tl.static_range(BLOCK_L):
            known = (states < S) & (start + place < L)
            b = tl.load(b_ptrs + (start + place) * b_strides[2], mask=known, other=0.0).to(tl.float32)
            state = tl.exp(row_at(step, block, place) * a) * state
            if place == 0:
                state = tl.where(start > 0, state, 0.0)  # an infinite decay meets nothing before the beginning
            state += row_at(term, block, place) * b
            if y_ptr is not None:
                c = tl.load(c_ptrs + (start + place) * c_strides[2], mask=known, other=0.0).to(tl.float32)
                seen = tl.sum(tl.where(states < S, state * c, 0.0), axis=0, keep_dims=True)
                y = tl.where(block == place, seen, y)
        if y_ptr is not None:
            into = y_ptr + batch * y_strides[0] + channels * y_strides[1] + places * y_strides[2]
            tl.store(into, (y + u * skip).to(y_ptr.dtype.element_ty), mask=inside)


def sizes_of(u: Tensor, a: Tensor) -> tuple[int, int, int]:
    """Of a program's states, channels and places: compiled for each, so that few of a short sequence are idle."""
    places, states = u.shape[2], a.shape[1]
    return max(triton.next_power_of_2(states), 1), BLOCK_D, min(triton.next_power_of_2(places), BLOCK_L)


def scan(*tensors: Tensor, softplus: bool, y: Tensor | None = None, states: Tensor | None = None) -> None:
    """Of u, delta, a, b, c and skip, in which there are elements, write into y[B,D,L] the scan, and into states
    float32[B,ceil(L/block),S,D], contiguous, the state before each block of places."""
    u, a = tensors[0], tensors[2]
    (batch, channels, places), width = u.shape, a.shape[1]
    strides = (*(x.stride() for x in tensors[:5]), tensors[5].stride(0), (u if y is None else y).stride())
    _selective_scan_kernel[(batch * triton.cdiv(channels, BLOCK_D),)](
        *(*tensors, y, states, channels, width, places, *strides, softplus, *sizes_of(u, a)),
        num_warps=1,
    )
