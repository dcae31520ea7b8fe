"""Selective scan of state-space models (Gu & Dao, *Mamba*, arXiv:2312.00752), and its gradients.

With dt_t = delta_t or softplus(delta_t), for each channel and its S states:

    h_t = exp(dt_t a) h_(t-1) + dt_t b_t u_t        y_t = sum(c_t h_t) + skip u_t

The scan is sequential in t, not a tree of pairs (decay, term). Both meet the error bound: either way a term is rounded
once for each later decay, and the tree only saves additions. But a tree multiplies decays by one another, and their
product underflows long before the state does: exp(-60) exp(-60) is zero in float32, and times an infinite state NaN,
where the recurrence says infinity. The sequential scan multiplies no two decays.

A program is one warp, whose registers hold all S states of BLOCK_D channels. u, delta and y are loaded and stored in
chunks of BLOCK_L time steps.

The backward pass runs the recurrence of g_t, the gradient of h_t, from the end:

    g_t = c_t dy_t + exp(dt_(t+1) a) g_(t+1)

The forward scan runs again and saves the state before each chunk, which takes the memory of u in float32 if S is
BLOCK_L. Each program then takes its chunks from last to first: it recomputes the chunk's decayed states, stores them in
a scratch buffer of its own (16 KiB for S = 16, which stays in the cache), and goes back through them. Registers don't
suffice: with the states of 16 or even 8 steps in a tuple and the loops unrolled, the kernel spills. Sums over channels
and over sequences are split reductions without atomics (`sum_partials`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, FLOATING, check
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.reduction import sum_partials
from assay.kernels.triton.replay import replayed

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_BLOCK_D = 16
_BLOCK_L = 16


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log1p(w) with w = exp(-|x|), and log1p(w) = 2 atanh(s) with s = w / (2 + w) <= 1/3.

    The series of atanh, s + s^3/3 + s^5/5 + ..., is truncated at a relative error below 2e-9.
    """
    w = tl.exp(-tl.abs(x))
    s = w / (2.0 + w)
    square = s * s
    series = tl.full(x.shape, 1.0 / 15.0, tl.float32)
    for odd in tl.static_range(13, 0, -2):
        series = series * square + 1.0 / odd
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))  # never overflows, and the denominator is between one and two
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


@triton.jit
def _row(chunk, offs_t, t):
    """Row t of a chunk [BLOCK_L, BLOCK_D], as [1, BLOCK_D]."""
    return tl.sum(tl.where(offs_t == t, chunk, 0.0), axis=0, keep_dims=True)


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
    """y[B,D,L], if given, and states[B,cdiv(L,BLOCK_L),S,D], if given: the state before each chunk."""
    num_pid_d = tl.cdiv(D, BLOCK_D)
    batch = (tl.program_id(0) // num_pid_d).to(tl.int64)
    channels = ((tl.program_id(0) % num_pid_d).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    offs_s = tl.arange(0, BLOCK_S).to(tl.int64)[:, None]
    offs_t = tl.arange(0, BLOCK_L)[:, None]
    u_ptrs = u_ptr + batch * u_strides[0] + channels * u_strides[1]
    delta_ptrs = delta_ptr + batch * delta_strides[0] + channels * delta_strides[1]
    b_ptrs = b_ptr + batch * b_strides[0] + offs_s * b_strides[1]
    c_ptrs = c_ptr + batch * c_strides[0] + offs_s * c_strides[1]
    mask_sd = (offs_s < S) & (channels < D)
    a = tl.load(a_ptr + channels * a_strides[0] + offs_s * a_strides[1], mask=mask_sd, other=0.0)
    skip = tl.load(skip_ptr + channels * stride_skip, mask=channels < D, other=0.0)
    state = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in range(0, L, BLOCK_L):
        steps = start + offs_t.to(tl.int64)
        mask_td = (steps < L) & (channels < D)
        u = tl.load(u_ptrs + steps * u_strides[2], mask=mask_td, other=0.0).to(tl.float32)
        dt = tl.load(delta_ptrs + steps * delta_strides[2], mask=mask_td, other=0.0).to(tl.float32)
        if SOFTPLUS:
            dt = _softplus(dt)
        dt_u = dt * u
        if states_ptr is not None:
            states_ptrs = states_ptr + ((batch * tl.cdiv(L, BLOCK_L) + start // BLOCK_L) * S + offs_s) * D + channels
            tl.store(states_ptrs, state, mask=mask_sd)
        y = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
        for t in tl.static_range(BLOCK_L):  # unrolled: which registers hold row t is known at compile time
            mask_s = (offs_s < S) & (start + t < L)
            b = tl.load(b_ptrs + (start + t) * b_strides[2], mask=mask_s, other=0.0).to(tl.float32)
            state = tl.exp(_row(dt, offs_t, t) * a) * state
            if t == 0:
                state = tl.where(start > 0, state, 0.0)  # an infinite decay times the initial zero would be NaN
            state += _row(dt_u, offs_t, t) * b
            if y_ptr is not None:
                c = tl.load(c_ptrs + (start + t) * c_strides[2], mask=mask_s, other=0.0).to(tl.float32)
                y_t = tl.sum(tl.where(offs_s < S, state * c, 0.0), axis=0, keep_dims=True)
                y = tl.where(offs_t == t, y_t, y)
        if y_ptr is not None:
            y_ptrs = y_ptr + batch * y_strides[0] + channels * y_strides[1] + steps * y_strides[2]
            tl.store(y_ptrs, (y + u * skip).to(y_ptr.dtype.element_ty), mask=mask_td)


@triton.jit
def _selective_scan_backward_kernel(
    u_ptr,
    delta_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    skip_ptr,
    dy_ptr,
    states_ptr,
    scratch_ptr,
    du_ptr,
    ddelta_ptr,
    da_ptr,
    db_ptr,
    dc_ptr,
    dskip_ptr,
    B,
    D,
    S,
    L,
    u_strides,
    delta_strides,
    a_strides,
    b_strides,
    c_strides,
    stride_skip,
    dy_strides,
    du_strides,  # and those of ddelta
    SOFTPLUS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """du, ddelta, and partial sums: da[B,D,S] and dskip[B,D] by sequence, db and dc[D/BLOCK_D,B,S,L] by channels."""
    num_pid_d, num_chunks = tl.cdiv(D, BLOCK_D), tl.cdiv(L, BLOCK_L)
    batch = (tl.program_id(0) // num_pid_d).to(tl.int64)
    pid_d = (tl.program_id(0) % num_pid_d).to(tl.int64)
    channels = (pid_d * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    offs_s = tl.arange(0, BLOCK_S).to(tl.int64)[:, None]
    offs_t, offs_t_row = tl.arange(0, BLOCK_L)[:, None], tl.arange(0, BLOCK_L)[None, :]
    mask_sd = (offs_s < S) & (channels < D)
    a = tl.load(a_ptr + channels * a_strides[0] + offs_s * a_strides[1], mask=mask_sd, other=0.0)
    skip = tl.load(skip_ptr + channels * stride_skip, mask=channels < D, other=0.0)
    b_ptrs = b_ptr + batch * b_strides[0] + offs_s * b_strides[1]
    c_ptrs = c_ptr + batch * c_strides[0] + offs_s * c_strides[1]
    scratch_ptrs = scratch_ptr + (tl.program_id(0).to(tl.int64) * BLOCK_L * S + offs_s) * BLOCK_D + channels % BLOCK_D
    carry = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)  # exp(dt_(t+1) a) g_(t+1)
    da = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    dskip = tl.zeros([1, BLOCK_D], tl.float32)
    for chunks_done in range(num_chunks):
        chunk = num_chunks - 1 - chunks_done
        start = chunk.to(tl.int64) * BLOCK_L
        steps = start + offs_t
        mask_td = (steps < L) & (channels < D)
        u_ptrs = u_ptr + batch * u_strides[0] + channels * u_strides[1] + steps * u_strides[2]
        delta_ptrs = delta_ptr + batch * delta_strides[0] + channels * delta_strides[1] + steps * delta_strides[2]
        dy_ptrs = dy_ptr + batch * dy_strides[0] + channels * dy_strides[1] + steps * dy_strides[2]
        u = tl.load(u_ptrs, mask=mask_td, other=0.0).to(tl.float32)
        delta = tl.load(delta_ptrs, mask=mask_td, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptrs, mask=mask_td, other=0.0).to(tl.float32)
        dt = delta
        if SOFTPLUS:
            dt = tl.where(steps < L, _softplus(delta), 0.0)  # beyond L nothing decays: softplus(0) is not 0
        dt_u = dt * u

        state_ptrs = states_ptr + ((batch * num_chunks + chunk) * S + offs_s) * D + channels
        state = tl.load(state_ptrs, mask=mask_sd, other=0.0)
        tl.debug_barrier()  # the later chunk has read the scratch buffer that is overwritten here
        for t in range(BLOCK_L):
            mask_s = (offs_s < S) & (start + t < L)
            b = tl.load(b_ptrs + (start + t) * b_strides[2], mask=mask_s, other=0.0).to(tl.float32)
            state = tl.exp(_row(dt, offs_t, t) * a) * state
            state = tl.where(start + t > 0, state, 0.0)  # an infinite decay times the initial zero would be NaN
            tl.store(scratch_ptrs + t * S * BLOCK_D, state, mask=mask_sd)
            state += _row(dt_u, offs_t, t) * b

        db = tl.zeros([BLOCK_S, BLOCK_L], tl.float32)
        dc = tl.zeros([BLOCK_S, BLOCK_L], tl.float32)
        tl.debug_barrier()
        g_b = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)  # sum over states of g_t b_t
        g_decayed_a = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)  # and of g_t exp(dt_t a) h_(t-1) a
        for steps_done in range(BLOCK_L):
            t = BLOCK_L - 1 - steps_done
            decayed = tl.load(scratch_ptrs + t * S * BLOCK_D, mask=mask_sd, other=0.0)
            mask_s = (offs_s < S) & (start + t < L)
            b = tl.load(b_ptrs + (start + t) * b_strides[2], mask=mask_s, other=0.0).to(tl.float32)
            c = tl.load(c_ptrs + (start + t) * c_strides[2], mask=mask_s, other=0.0).to(tl.float32)
            dt_t, dy_t = _row(dt, offs_t, t), _row(dy, offs_t, t)
            dt_u_t = _row(dt_u, offs_t, t)
            g = carry + c * dy_t
            state = decayed + dt_u_t * b
            db = tl.where(offs_t_row == t, tl.sum(g * dt_u_t, axis=1, keep_dims=True), db)
            dc = tl.where(offs_t_row == t, tl.sum(state * dy_t, axis=1, keep_dims=True), dc)
            g_b = tl.where(offs_t == t, tl.sum(g * b, axis=0, keep_dims=True), g_b)
            g_decayed = g * decayed
            g_decayed_a = tl.where(offs_t == t, tl.sum(g_decayed * a, axis=0, keep_dims=True), g_decayed_a)
            da += g_decayed * dt_t
            carry = tl.exp(dt_t * a) * g

        offsets = ((pid_d * B + batch) * S + offs_s) * L + start + offs_t_row
        mask_st = (offs_s < S) & (start + offs_t_row < L)
        tl.store(db_ptr + offsets, db, mask=mask_st)
        tl.store(dc_ptr + offsets, dc, mask=mask_st)
        ddelta = g_b * u + g_decayed_a
        if SOFTPLUS:
            ddelta *= _sigmoid(delta)
        dskip += tl.sum(dy * u, axis=0, keep_dims=True)
        offsets = batch * du_strides[0] + channels * du_strides[1] + steps * du_strides[2]
        tl.store(du_ptr + offsets, (dt * g_b + skip * dy).to(du_ptr.dtype.element_ty), mask=mask_td)
        tl.store(ddelta_ptr + offsets, ddelta.to(ddelta_ptr.dtype.element_ty), mask=mask_td)
    tl.store(da_ptr + (batch * D + channels) * S + offs_s, da, mask=mask_sd)
    tl.store(dskip_ptr + batch * D + channels, dskip, mask=channels < D)


def _block_sizes(u: Tensor, a: Tensor) -> tuple[int, int, int]:
    """Return BLOCK_S, BLOCK_D and BLOCK_L, the last no longer than a short sequence needs."""
    steps, states = u.shape[2], a.shape[1]
    return max(triton.next_power_of_2(states), 1), _BLOCK_D, min(triton.next_power_of_2(steps), _BLOCK_L)


def _scan(*tensors: Tensor, softplus: bool, y: Tensor | None = None, states: Tensor | None = None) -> None:
    """Scan u, delta, a, b, c and skip, none of them empty, and write y, the states before each chunk, or both."""
    u, _, a, *_ = tensors
    batch, channels, steps = u.shape
    strides = (*(x.stride() for x in tensors[:5]), tensors[5].stride(0), (u if y is None else y).stride())
    _selective_scan_kernel[(batch * triton.cdiv(channels, _BLOCK_D),)](
        *(*tensors, y, states, channels, a.shape[1], steps, *strides, softplus, *_block_sizes(u, a)),
        num_warps=1,
    )


@custom_op("assay::selective_scan", lambda u, *rest: u.new_empty(u.shape))
def _selective_scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, softplus: bool) -> Tensor:
    y = u.new_empty(u.shape)
    if y.numel():
        _scan(u, delta, a, b, c, skip, softplus=softplus, y=y)
    return y


def _empty_gradients(*arguments: Any) -> Gradients:
    du, ddelta, da, db, dc, dskip = (x.new_empty(x.shape) for x in arguments[:6])
    return du, ddelta, da, db, dc, dskip


@custom_op("assay::selective_scan_backward", _empty_gradients)
def _selective_scan_backward(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, dy: Tensor, softplus: bool
) -> Gradients:
    du, ddelta, da, db, dc, dskip = _empty_gradients(u, delta, a, b, c, skip)
    (batch, channels, steps), states_per_channel = u.shape, a.shape[1]
    tiles, block_sizes = triton.cdiv(channels, _BLOCK_D), _block_sizes(u, a)
    sequences, totals = batch if steps else 0, (da, db, dc, dskip)
    partials = [
        torch.empty((count, total.numel()), dtype=torch.float32, device=u.device)
        for count, total in zip((sequences, tiles, tiles, sequences), totals, strict=True)
    ]
    if u.numel():
        block_l = block_sizes[2]
        states = u.new_empty((batch, triton.cdiv(steps, block_l), states_per_channel, channels), dtype=torch.float32)
        scratch = u.new_empty((batch, tiles, block_l, states_per_channel, _BLOCK_D), dtype=torch.float32)
        _scan(u, delta, a, b, c, skip, softplus=softplus, states=states)
        strides = (*(x.stride() for x in (u, delta, a, b, c)), skip.stride(0), dy.stride(), du.stride())
        _selective_scan_backward_kernel[(batch * tiles,)](
            *(u, delta, a, b, c, skip, dy, states, scratch, du, ddelta, *partials),
            *(batch, channels, states_per_channel, steps, *strides, softplus, *block_sizes),
            num_warps=1,
        )
    for partial, total in zip(partials, totals, strict=True):
        sum_partials(partial, total)
    return du, ddelta, da, db, dc, dskip


differentiate(
    "assay::selective_scan",
    lambda saved, dy: _selective_scan_backward(
        saved.u, saved.delta, saved.a, saved.b, saved.c, saved.skip, dy, saved.softplus
    ),
    saves="u delta a b c skip",
)


@replayed
def selective_scan(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, *, softplus: bool = False
) -> Tensor:
    """Return y[B,D,L]: y_t = sum_s c_st h_st + skip u_t, with h_st = exp(delta_t a_s) h_s(t-1) + delta_t b_st u_t.

    h is zero before the first step; u and delta are [B,D,L], a[D,S], b and c [B,S,L], skip[D]. ``softplus`` replaces
    delta by softplus(delta). Computed in float32. a and skip are float32, the others float32, bfloat16 or float16, not
    necessarily the same; the result has u's dtype. All states of a channel are in registers together: S of 16 or so.
    Raises TypeError or ValueError, naming the argument, for another dtype, shape or device.
    """
    _check(u=u, delta=delta, a=a, b=b, c=c, skip=skip)
    return _selective_scan(u, delta, a, b, c, skip, softplus)


@replayed
def selective_scan_backward(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, dy: Tensor, *, softplus: bool = False
) -> Gradients:
    """Return du, ddelta[B,D,L], da[D,S], db, dc[B,S,L] and dskip[D] of `selective_scan`, from its tensors and dy.

    dy[B,D,L] is the gradient of its result. Computed in float32, from states that are recomputed. Each gradient has the
    dtype of its tensor. Dtypes and errors as in `selective_scan`.
    """
    _check(u=u, delta=delta, a=a, b=b, c=c, skip=skip, dy=dy)
    return _selective_scan_backward(u, delta, a, b, c, skip, dy, softplus)


def _check(**tensors: Tensor) -> None:
    shapes = {"a": "D S", "b": "B S L", "c": "B S L", "skip": "D"}
    check(
        **{
            name: (tensor, FLOAT32 if name in ("a", "skip") else FLOATING, shapes.get(name, "B D L"))
            for name, tensor in tensors.items()
        }
    )
