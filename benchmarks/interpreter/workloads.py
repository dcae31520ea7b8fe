"""Kernels that either interpreter runs, in formats that the plain one gets right or at least through."""

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + i, mask=i < N, other=-float("inf"))
    weights = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * N + i, weights / tl.sum(weights, axis=0), mask=i < N)


@triton.jit
def _matmul(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(c_ptr + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _quantize(x_ptr, y_ptr, scale_ptr, N, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + i, mask=i < N, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), axis=0) / 448.0
    tl.store(y_ptr + row * N + i, (x / scale).to(tl.float8e4nv), mask=i < N)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _larger(value, index, other, other_index):
    take = other > value
    return tl.where(take, other, value), tl.where(take, other_index, index)


@triton.jit
def _argmax(x_ptr, y_ptr, N: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, N)
    _, index = tl.reduce((tl.load(x_ptr + row * N + i), i), 0, _larger)
    tl.store(y_ptr + row, index)


def _run_softmax() -> None:
    x = torch.randn(256, 1000)
    _softmax[(256,)](x, torch.empty_like(x), 1000, BLOCK=1024)


def _run_matmul(dtype: torch.dtype, size: int, block: int) -> None:
    a, b = torch.randn(2, size, size).to(dtype)
    grid = (triton.cdiv(size, block), triton.cdiv(size, block))
    _matmul[grid](a, b, torch.empty(size, size), size, size, size, BLOCK=block)


def _run_quantize() -> None:
    x = torch.randn(256, 1000).bfloat16()
    _quantize[(256,)](x, torch.empty(256, 1000, dtype=torch.float8_e4m3fn), torch.empty(256), 1000, BLOCK=1024)


def _run_argmax() -> None:
    _argmax[(16,)](torch.randn(16, 64), torch.empty(16, dtype=torch.int32), N=64)


WORKLOADS = {
    "softmax float32 256x1000": _run_softmax,
    "matmul float32 300^3, tile 64": lambda: _run_matmul(torch.float32, 300, 64),
    "matmul float16 300^3, tile 64": lambda: _run_matmul(torch.float16, 300, 64),
    "matmul bfloat16 300^3, tile 64": lambda: _run_matmul(torch.bfloat16, 300, 64),
    "matmul float16 512^3, tile 128": lambda: _run_matmul(torch.float16, 512, 128),
    "bfloat16 to e4m3 256x1000": _run_quantize,
    "argmax by tl.reduce 16x64": _run_argmax,
}
