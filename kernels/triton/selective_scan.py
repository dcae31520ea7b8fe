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

from assay.kernels.triton.arguments import FLOAT32, FLOATING, check
from assay.kernels.triton.operators import custom_op

_BLOCK_D = 16
_BLOCK_L = 16


@triton.jit
def _softplus(x):
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
def _place(block, places, place: tl.constexpr):
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
    y_ptrs = y_ptr + batch * y_strides[0] + channels * y_strides[1]
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
            step = _softplus(step)
        term = step * u
        y = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
        for place in tl.static_range(BLOCK_L):
            known = (states < S) & (start + place < L)
            b = tl.load(b_ptrs + (start + place) * b_strides[2], mask=known, other=0.0).to(tl.float32)
            c = tl.load(c_ptrs + (start + place) * c_strides[2], mask=known, other=0.0).to(tl.float32)
            state = tl.exp(_place(step, block, place) * a) * state
            if place == 0:
                state = tl.where(start > 0, state, 0.0)  # an infinite decay meets nothing before the beginning
            state += _place(term, block, place) * b
            seen = tl.sum(tl.where(states < S, state * c, 0.0), axis=0, keep_dims=True)
            y = tl.where(block == place, seen, y)
        tl.store(y_ptrs + places * y_strides[2], (y + u * skip).to(y_ptr.dtype.element_ty), mask=inside)


@custom_op("assay::selective_scan", lambda u, *rest: u.new_empty(u.shape))
def _selective_scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, softplus: bool) -> Tensor:
    y = u.new_empty(u.shape)
    if y.numel():
        (batch, channels, places), states = u.shape, a.shape[1]
        strides = (u.stride(), delta.stride(), a.stride(), b.stride(), c.stride(), skip.stride(0), y.stride())
        _selective_scan_kernel[(batch * triton.cdiv(channels, _BLOCK_D),)](
            *(u, delta, a, b, c, skip, y, channels, states, places, *strides, softplus),
            *(max(triton.next_power_of_2(states), 1), _BLOCK_D, min(triton.next_power_of_2(places), _BLOCK_L)),
            num_warps=1,
        )
    return y


def selective_scan(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, *, softplus: bool = False
) -> Tensor:
    """y[B,D,L]: y_t = sum_s c_st h_st + skip u_t, with h_st = exp(delta_t a_s) h_s(t-1) + delta_t b_st u_t and h zero
    before the beginning, of each channel of u, delta[B,D,L], with a[D,S], b, c[B,S,L] and skip[D].

    Computed in float32; ``softplus``: delta is softplus of what is given. a and skip are float32, the others float32,
    bfloat16 or float16, not necessarily the same; the result has u's dtype. All states of a channel are in registers
    together: S of 16 or so. Raises TypeError or ValueError, naming the argument, for another dtype, shape or device.
    """
    check(
        u=(u, FLOATING, "B D L"),
        delta=(delta, FLOATING, "B D L"),
        a=(a, FLOAT32, "D S"),
        b=(b, FLOATING, "B S L"),
        c=(c, FLOATING, "B S L"),
        skip=(skip, FLOAT32, "D"),
    )
    return _selective_scan(u, delta, a, b, c, skip, softplus)
