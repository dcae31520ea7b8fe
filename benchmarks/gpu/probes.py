"""Triton kernels of one operation each, for comparing a GPU with the interpreter."""

import triton
import triton.language as tl


@triton.jit
def cast(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


@triton.jit
def binary(x_ptr, y_ptr, z_ptr, OP: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    if OP == "add":
        z = x + y
    elif OP == "multiply":
        z = x * y
    elif OP == "fma":
        z = tl.fma(x, y, x)
    elif OP == "maximum":
        z = tl.maximum(x, y)
    elif OP == "divide":
        z = x / y
    else:
        tl.static_assert(OP == "div_rn")
        z = tl.div_rn(x, y)
    tl.store(z_ptr + i, z)


@triton.jit
def unary(x_ptr, y_ptr, OP: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    x = tl.load(x_ptr + i)
    if OP == "exp2":
        y = tl.exp2(x)
    elif OP == "exp":
        y = tl.exp(x)
    elif OP == "log2":
        y = tl.log2(x)
    elif OP == "rsqrt":
        y = tl.rsqrt(x)
    elif OP == "sqrt":
        y = tl.sqrt(x)
    else:
        tl.static_assert(OP == "sqrt_rn")
        y = tl.sqrt_rn(x)
    tl.store(y_ptr + i, y)


@triton.jit
def add_atomically(x_ptr, y_ptr, POSITIONS: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.atomic_add(y_ptr + i % POSITIONS, tl.load(x_ptr + i))


@triton.jit
def dot(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, input_precision=PRECISION))
