"""The kernels of the interpreter's self-tests."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

THREE = tl.constexpr(3.0)


@triton.jit
def cast(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


@triton.jit
def add(x_ptr, y_ptr, z_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(z_ptr + i, tl.load(x_ptr + i) + tl.load(y_ptr + i))


@triton.jit
def less(x_ptr, y_ptr, z_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(z_ptr + i, (tl.load(x_ptr + i) < tl.load(y_ptr + i)).to(tl.float32))


@triton.jit
def minimum(x_ptr, y_ptr, z_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(z_ptr + i, tl.minimum(tl.load(x_ptr + i), tl.load(y_ptr + i)))


@triton.jit
def fma(x_ptr, y_ptr, z_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(z_ptr + i, tl.fma(x, x, tl.load(y_ptr + i)))


@triton.jit
def dot(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), input_precision="ieee"))


@triton.jit
def dot_scaled(a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    a_scale = tl.load(a_scale_ptr + i[:, None] * (N // 32) + tl.arange(0, N // 32)[None, :])
    b_scale = tl.load(b_scale_ptr + i[:, None] * (N // 32) + tl.arange(0, N // 32)[None, :])
    c = tl.dot_scaled(tl.load(a_ptr + at), a_scale, "e4m3", tl.load(b_ptr + at), b_scale, "e4m3")
    tl.store(c_ptr + at, c)


@triton.jit
def scale(x_ptr, y_ptr, factor, nothing, flag, N: tl.constexpr):
    i = tl.arange(0, N)
    if nothing is None:
        tl.store(y_ptr + i, tl.load(x_ptr + i) * factor.to(tl.float32) * flag.to(tl.float32))


@triton.jit
def tanh(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, libdevice.tanh(tl.load(x_ptr + i)))


@triton.jit
def exp(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.exp(tl.load(x_ptr + i)))


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def product(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr, tl.reduce(tl.load(x_ptr + i), 0, _multiply))


@triton.jit
def counter(y_ptr, n):
    for i in range(n):
        tl.store(y_ptr + i, i.to(tl.float32))


@triton.jit
def running_sum(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.cumsum(tl.load(x_ptr + i), 0))


@triton.jit
def accumulate(x_ptr, y_ptr, N: tl.constexpr):
    tl.atomic_add(y_ptr + tl.arange(0, N) * 0, tl.load(x_ptr + tl.arange(0, N)))


@triton.jit
def assembled(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.inline_asm_elementwise("fma.rn.f32 $0, $1, $1, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y_ptr + i, y)


@triton.jit
def from_constant(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, THREE * tl.load(x_ptr + i))
