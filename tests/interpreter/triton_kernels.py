"""Small Triton kernels that the tests of the interpreter launch."""

import triton
import triton.language as tl
from triton.language.extra.libdevice import rsqrt

from assay.interpreter import faithful


def run(kernel, *arguments, **constants):
    """One program of a kernel in the faithful interpreter."""
    with faithful():
        kernel[(1,)](*arguments, **constants)


@triton.jit
def cast(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


@triton.jit
def cast_toward_zero(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty, fp_downcast_rounding="rtz"))


@triton.jit
def dot(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    c = tl.dot(a, b, input_precision=PRECISION)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c.to(c_ptr.dtype.element_ty))


@triton.jit
def dot_mxfp4(a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, N: tl.constexpr):
    i, half, group = tl.arange(0, N), tl.arange(0, N // 2), tl.arange(0, N // 32)
    a = tl.load(a_ptr + i[:, None] * (N // 2) + half[None, :])
    b = tl.load(b_ptr + half[:, None] * N + i[None, :])
    a_scale = tl.load(a_scale_ptr + i[:, None] * (N // 32) + group[None, :])
    b_scale = tl.load(b_scale_ptr + i[:, None] * (N // 32) + group[None, :])
    c = tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1")
    tl.store(c_ptr + i[:, None] * N + i[None, :], c)


@triton.jit
def arithmetic(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + N + i, x - y)
    tl.store(out_ptr + 2 * N + i, x * y)
    tl.store(out_ptr + 3 * N + i, tl.maximum(x, y))
    tl.store(out_ptr + 4 * N + i, tl.where(x < y, x, -y))
    tl.store(out_ptr + 5 * N + i, tl.abs(x))


@triton.jit
def _larger_of_pairs(value, index, other, other_index):
    take = (other > value) | ((other == value) & (other_index < index))
    return tl.where(take, other, value), tl.where(take, other_index, index)


@triton.jit
def argmax(x_ptr, value_ptr, index_ptr, R: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, R), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + columns[None, :])
    value, index = tl.reduce((x, tl.broadcast_to(columns[None, :], [R, N])), 1, _larger_of_pairs)
    tl.store(value_ptr + rows, value)
    tl.store(index_ptr + rows, index)


@triton.jit
def _affine(scale, shift, next_scale, next_shift):
    return scale * next_scale, shift * next_scale + next_shift


@triton.jit
def recurrence(a_ptr, b_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    _, y = tl.associative_scan((tl.load(a_ptr + i), tl.load(b_ptr + i)), 0, _affine)
    tl.store(y_ptr + i, y)


@triton.jit
def sums(x_ptr, y_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(y_ptr, tl.sum(x))
    tl.store(y_ptr + 1, x.sum(axis=0))
    tl.store(y_ptr + 2, tl.max(x, axis=0))
    tl.store(y_ptr + 3, tl.min(x, axis=0))


@triton.jit
def normalise(x_ptr, y_ptr, n, eps, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, x * rsqrt(tl.sum(x * x, axis=0) / n + eps.to(tl.float32)), mask=i < n)


@triton.jit
def fails_in_program_two(x_ptr):
    if tl.program_id(0) == 2:
        tl.static_assert(False, "not here")


@triton.jit
def add_atomically(x_ptr, y_ptr, N: tl.constexpr):
    tl.atomic_add(y_ptr + tl.arange(0, N) % 2, tl.load(x_ptr + tl.arange(0, N)))


@triton.autotune(configs=[triton.Config({"WIDTH": width}) for width in (16, 32, 64)], key=["n"])
@triton.jit
def which_config(y_ptr, n, WIDTH: tl.constexpr):
    tl.store(y_ptr, WIDTH)


@triton.jit
def store_index(y_ptr):
    tl.store(y_ptr + tl.program_id(1), tl.program_id(1))


@triton.jit
def gemm(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IMPRECISE: tl.constexpr):
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        total = tl.dot(a, b, total, max_num_imprecise_acc=IMPRECISE)
    tl.store(c_ptr + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def dot_mxfp8(a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, N: tl.constexpr):
    i, group = tl.arange(0, N), tl.arange(0, N // 32)
    at = i[:, None] * N + i[None, :]
    a_scale = tl.load(a_scale_ptr + i[:, None] * (N // 32) + group[None, :])
    b_scale = tl.load(b_scale_ptr + i[:, None] * (N // 32) + group[None, :])
    c = tl.dot_scaled(tl.load(a_ptr + at), a_scale, "e4m3", tl.load(b_ptr + at), b_scale, "e4m3")
    tl.store(c_ptr + at, c)
