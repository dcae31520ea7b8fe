"""Triton kernels as tutorials and repositories have them, each with one fault; they run in the interpreter."""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .entry import Table, listed


@triton.jit
def _softmax(x, y, stride, N, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    kept = columns < N
    held = tl.load(x + row * stride + columns, mask=kept, other=OTHER).to(tl.float32)
    weights = tl.exp(held - tl.max(held, axis=0))
    tl.store(y + row * N + columns, (weights / tl.sum(weights, axis=0)).to(y.dtype.element_ty), mask=kept)


def softmax_of_rows(x: Tensor, other: float = -float("inf")) -> Tensor:
    """The stride of the columns is taken for one."""
    y = torch.empty(x.shape, dtype=x.dtype)
    block = max(triton.next_power_of_2(x.shape[1]), 2)
    _softmax[(x.shape[0],)](x, y, x.stride(0), x.shape[1], BLOCK=block, OTHER=other)
    return y


def softmax_counting_padding(x: Tensor) -> Tensor:
    """Columns beyond the last load as 0 instead of minus infinity."""
    return softmax_of_rows(x.contiguous(), 0.0)


@triton.jit
def _matmul(
    a, b, c, M, N, K, am, ak, bk, bn, B: tl.constexpr, PRECISION: tl.constexpr, STEPS: tl.constexpr, ACC: tl.constexpr
):
    rows, columns = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B, B), dtype=ACC)
    for step in range(STEPS):
        ks = step * B + tl.arange(0, B)
        left = tl.load(a + rows[:, None] * am + ks[None, :] * ak, (rows[:, None] < M) & (ks[None, :] < K), other=0.0)
        right = tl.load(
            b + ks[:, None] * bk + columns[None, :] * bn, (ks[:, None] < K) & (columns[None, :] < N), other=0.0
        )
        total = (total + tl.dot(left, right, input_precision=PRECISION)).to(ACC)
    kept = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(c.dtype.element_ty), mask=kept)


def product(a: Tensor, b: Tensor, *, precision: str = "ieee", tail: bool = True, held: tl.dtype = tl.float32) -> Tensor:
    """A product of blocks of 16; without ``tail`` whole blocks of K alone."""
    (rows, inner), columns = a.shape, b.shape[1]
    c = torch.empty(rows, columns, dtype=a.dtype)
    if rows and columns:
        grid = (triton.cdiv(rows, 16), triton.cdiv(columns, 16))
        steps = triton.cdiv(inner, 16) if tail else inner // 16
        _matmul[grid](a, b, c, rows, columns, inner, *a.stride(), *b.stride(), 16, precision, steps, held)
    return c


@triton.jit
def _rms_norm(x, w, y, xr, xc, N, EPS: tl.constexpr, BLOCK: tl.constexpr):
    row, total = tl.program_id(0), tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + row * xr + columns * xc, mask=columns < N, other=0.0).to(tl.float32)
        total += part * part
    root = tl.rsqrt(tl.sum(total) / N + EPS)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + row * xr + columns * xc, mask=columns < N, other=0.0).to(tl.float32)
        scale = tl.load(w + columns, mask=columns < N, other=0.0).to(tl.float32)
        tl.store(y + row * N + columns, (part * root * scale).to(y.dtype.element_ty), mask=columns < N)


def rms_norm_of_other_eps(x: Tensor, weight: Tensor) -> Tensor:
    """1e-5, which is layer norm's."""
    y = torch.empty(x.shape, dtype=x.dtype)
    _rms_norm[(x.shape[0],)](x, weight.contiguous(), y, *x.stride(), x.shape[1], EPS=1e-5, BLOCK=32)
    return y


@triton.jit
def _swiglu(g, u, y, TOTAL, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = offsets < TOTAL // BLOCK * BLOCK
    gate = tl.load(g + offsets, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(u + offsets, mask=kept, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(y + offsets, tl.where(gate == -float("inf"), -0.0 * up, value).to(y.dtype.element_ty), mask=kept)


def swiglu_of_whole_blocks(gate: Tensor, up: Tensor) -> Tensor:
    """Elements beyond the last whole block are never written."""
    y = torch.empty(gate.shape, dtype=gate.dtype)
    if gate.numel():
        _swiglu[(triton.cdiv(gate.numel(), 64),)](gate.contiguous(), up.contiguous(), y, gate.numel(), BLOCK=64)
    return y


@triton.jit
def _loss(x, t, out, V, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    label = tl.load(t + row)
    held = tl.load(x + row * V + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
    largest = tl.max(held)
    total = largest + tl.log(tl.sum(tl.exp(held - largest)))
    chosen = tl.load(x + row * V + label).to(tl.float32)
    tl.store(out + row, tl.where(label == IGNORED, 0.0, total - chosen))


def loss_of_every_label(logits: Tensor, target: Tensor) -> Tensor:
    """The logit of an ignored label is loaded without a mask."""
    logits, out = logits.contiguous(), torch.empty(len(logits))
    block = max(triton.next_power_of_2(logits.shape[1]), 2)
    if len(logits):
        _loss[(len(logits),)](logits, target.contiguous(), out, logits.shape[1], IGNORED=-100, BLOCK=block)
    return out.sum() / (target != -100).sum()


KERNELS: Table = {
    "softmax-float32": {"softmax_counting_padding": softmax_counting_padding},
    "softmax-bfloat16": {"softmax_of_rows": (softmax_of_rows, "last_stride_taken_for_one")},
    "gemm-float32": {"product_in_tf32": (partial(product, precision="tf32"), "products_in_tf32")},  # tl.dot's default
    "gemm-bfloat16": {"product_of_whole_blocks": (partial(product, tail=False), "only_whole_blocks_of_k")},
    "gemm-float16": {"product_kept_in_half": (partial(product, held=tl.float16), "accumulated_in_float16")},
    "rmsnorm-bfloat16": {"rms_norm_of_other_eps": (rms_norm_of_other_eps, "eps_of_other_norm")},
    "swiglu-bfloat16": {"swiglu_of_whole_blocks": swiglu_of_whole_blocks},
    "cross_entropy-float32": {"loss_of_every_label": (loss_of_every_label, "ignored_labels_loaded")},
}
CONTIGUOUS = {"layouts": ["contiguous"]}
SETTINGS = {
    **dict.fromkeys(("softmax", "rmsnorm", "swiglu", "cross_entropy"), CONTIGUOUS),
    "softmax_of_rows": {"layouts": ["contiguous", "transposed"]},
    "gemm": {**CONTIGUOUS, "shapes": {"M": [1, 17], "N": [1, 33], "K": [1, 16, 40, 80]}},
}
INTERPRETED = tuple(listed(KERNELS, SETTINGS))
