"""The gradient of the selective scan: the recurrence the other way along the sequence.

With h_t the states, d_t the steps and r_t = exp(d_t a): the gradient of h_t is g_t = c_t dy_t + r_(t+1) g_(t+1); the
golden op has what follows from it. The scan runs again and leaves the state before each block of places: as much memory
as u in float32 takes, where there are as many states as places in a block. A program takes its blocks from the last to
the first: it goes through a block once more, leaving each place's decayed states in memory of its own (16 KiB for 16
states, which caches hold), and then back. Registers don't suffice for them: compiled without loops over places, with
the states of 16 or 8 places in a tuple, the kernel spills.

Sums over channels are left by each tile of channels, those over places by each sequence, and added up in one order,
without atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, FLOATING, check
from assay.kernels.triton.columns import add_parts
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.selective_scan_kernel import BLOCK_D, row_at, scan, sizes_of, softplus_of

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))  # never overflows, and the denominator is between one and two
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


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
    du_strides,
    SOFTPLUS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """du and ddelta, which lie alike, and parts of the sums: da[B,D,S], dskip[B,D], and db, dc[D / BLOCK_D,B,S,L]."""
    down, blocks = tl.cdiv(D, BLOCK_D), tl.cdiv(L, BLOCK_L)
    batch = (tl.program_id(0) // down).to(tl.int64)
    tile = (tl.program_id(0) % down).to(tl.int64)
    channels = (tile * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    states = tl.arange(0, BLOCK_S).to(tl.int64)[:, None]
    block, across = tl.arange(0, BLOCK_L)[:, None], tl.arange(0, BLOCK_L)[None, :]
    kept = (states < S) & (channels < D)
    a = tl.load(a_ptr + channels * a_strides[0] + states * a_strides[1], mask=kept, other=0.0)
    skip = tl.load(skip_ptr + channels * stride_skip, mask=channels < D, other=0.0)
    b_ptrs = b_ptr + batch * b_strides[0] + states * b_strides[1]
    c_ptrs = c_ptr + batch * c_strides[0] + states * c_strides[1]
    scratch_ptrs = scratch_ptr + (tl.program_id(0).to(tl.int64) * BLOCK_L * S + states) * BLOCK_D + channels % BLOCK_D
    late = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)  # what comes from the place behind
    da = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    dskip = tl.zeros([1, BLOCK_D], tl.float32)
    for done in range(blocks):
        number = blocks - 1 - done
        start = number.to(tl.int64) * BLOCK_L
        places = start + block
        inside = (places < L) & (channels < D)
        u_ptrs = u_ptr + batch * u_strides[0] + channels * u_strides[1] + places * u_strides[2]
        delta_ptrs = delta_ptr + batch * delta_strides[0] + channels * delta_strides[1] + places * delta_strides[2]
        dy_ptrs = dy_ptr + batch * dy_strides[0] + channels * dy_strides[1] + places * dy_strides[2]
        u = tl.load(u_ptrs, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(delta_ptrs, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptrs, mask=inside, other=0.0).to(tl.float32)
        step = given
        if SOFTPLUS:
            step = tl.where(places < L, softplus_of(given), 0.0)  # states neither decay nor grow behind the end
        term = step * u

        state_ptrs = states_ptr + ((batch * blocks + number) * S + states) * D + channels
        state = tl.load(state_ptrs, mask=kept, other=0.0)
        tl.debug_barrier()  # the block behind has read what is written here
        for place in range(BLOCK_L):
            known = (states < S) & (start + place < L)
            b = tl.load(b_ptrs + (start + place) * b_strides[2], mask=known, other=0.0).to(tl.float32)
            state = tl.exp(row_at(step, block, place) * a) * state
            state = tl.where(start + place > 0, state, 0.0)  # an infinite decay meets nothing before the beginning
            tl.store(scratch_ptrs + place * S * BLOCK_D, state, mask=kept)
            state += row_at(term, block, place) * b

        db = tl.zeros([BLOCK_S, BLOCK_L], tl.float32)
        dc = tl.zeros([BLOCK_S, BLOCK_L], tl.float32)
        tl.debug_barrier()
        by_input = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
        by_decay = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
        for before in range(BLOCK_L):
            place = BLOCK_L - 1 - before
            decayed = tl.load(scratch_ptrs + place * S * BLOCK_D, mask=kept, other=0.0)
            known = (states < S) & (start + place < L)
            b = tl.load(b_ptrs + (start + place) * b_strides[2], mask=known, other=0.0).to(tl.float32)
            c = tl.load(c_ptrs + (start + place) * c_strides[2], mask=known, other=0.0).to(tl.float32)
            own_step, own_dy = row_at(step, block, place), row_at(dy, block, place)
            own_term = row_at(term, block, place)
            g = late + c * own_dy
            state = decayed + own_term * b
            db = tl.where(across == place, tl.sum(g * own_term, axis=1, keep_dims=True), db)
            dc = tl.where(across == place, tl.sum(state * own_dy, axis=1, keep_dims=True), dc)
            by_input = tl.where(block == place, tl.sum(g * b, axis=0, keep_dims=True), by_input)
            lost = g * decayed
            by_decay = tl.where(block == place, tl.sum(lost * a, axis=0, keep_dims=True), by_decay)
            da += lost * own_step
            late = tl.exp(own_step * a) * g

        into = ((tile * B + batch) * S + states) * L + start + across
        known = (states < S) & (start + across < L)
        tl.store(db_ptr + into, db, mask=known)
        tl.store(dc_ptr + into, dc, mask=known)
        ddelta = by_input * u + by_decay
        if SOFTPLUS:
            ddelta *= _sigmoid(given)
        dskip += tl.sum(dy * u, axis=0, keep_dims=True)
        into = batch * du_strides[0] + channels * du_strides[1] + places * du_strides[2]
        tl.store(du_ptr + into, (step * by_input + skip * dy).to(du_ptr.dtype.element_ty), mask=inside)
        tl.store(ddelta_ptr + into, ddelta.to(ddelta_ptr.dtype.element_ty), mask=inside)
    tl.store(da_ptr + (batch * D + channels) * S + states, da, mask=kept)
    tl.store(dskip_ptr + batch * D + channels, dskip, mask=channels < D)


def _results(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, *rest: object) -> Gradients:
    given = (u, delta, a, b, c, skip)
    du, ddelta, da, db, dc, dskip = (x.new_empty(x.shape) for x in given)
    return du, ddelta, da, db, dc, dskip


@custom_op("assay::selective_scan_backward", _results)
def _selective_scan_backward(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, dy: Tensor, softplus: bool
) -> Gradients:
    du, ddelta, da, db, dc, dskip = _results(u, delta, a, b, c, skip)
    (batch, channels, places), width = u.shape, a.shape[1]
    tiles, (_, _, block) = triton.cdiv(channels, BLOCK_D), sizes_of(u, a)
    parts = [
        torch.empty((count, total.numel()), dtype=torch.float32, device=u.device)
        for count, total in ((batch if places else 0, da), (tiles, db), (tiles, dc), (batch if places else 0, dskip))
    ]
    if u.numel():
        states = u.new_empty((batch, triton.cdiv(places, block), width, channels), dtype=torch.float32)
        scratch = u.new_empty((batch, tiles, block, width, BLOCK_D), dtype=torch.float32)
        scan(u, delta, a, b, c, skip, softplus=softplus, states=states)
        strides = (*(x.stride() for x in (u, delta, a, b, c)), skip.stride(0), dy.stride(), du.stride())
        _selective_scan_backward_kernel[(batch * tiles,)](
            *(u, delta, a, b, c, skip, dy, states, scratch, du, ddelta, *parts),
            *(batch, channels, width, places, *strides, softplus, *sizes_of(u, a)),
            num_warps=1,
        )
    for part, total in zip(parts, (da, db, dc, dskip), strict=True):
        add_parts(part, total)
    return du, ddelta, da, db, dc, dskip


def selective_scan_backward(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, dy: Tensor, *, softplus: bool = False
) -> Gradients:
    """du, ddelta[B,D,L], da[D,S], db, dc[B,S,L] and dskip[D] of `selective_scan`'s tensors, from the gradient dy[B,D,L]
    of its result.

    Computed in float32 from states that are computed again. Each has the dtype of what it is the gradient of. Dtypes
    and errors as there.
    """
    check_scan(u=u, delta=delta, a=a, b=b, c=c, skip=skip, dy=dy)
    return _selective_scan_backward(u, delta, a, b, c, skip, dy, softplus)


def check_scan(**tensors: Tensor) -> None:
    """Raise TypeError or ValueError unless these are the scan's tensors, of its dtypes and shapes; dy is as u."""
    shapes = {"a": "D S", "b": "B S L", "c": "B S L", "skip": "D"}
    single = ("a", "skip")
    check(
        **{
            name: (tensor, FLOAT32 if name in single else FLOATING, shapes.get(name, "B D L"))
            for name, tensor in tensors.items()
        }
    )
