"""Launches that a GPU's compiler makes something bad of, each beside one that it makes something good of."""

import torch
import triton
import triton.language as tl


@triton.jit
def _product(a_ptr, b_ptr, c_ptr, M, N, K, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    rows = (tl.program_id(0) * A + tl.arange(0, A))[:, None]
    columns = (tl.program_id(1) * B + tl.arange(0, B))[None, :]
    inner = tl.arange(0, C)
    acc = tl.zeros([A, B], tl.float32)
    for start in range(0, K, C):
        a = tl.load(a_ptr + rows * K + start + inner[None, :], mask=rows < M, other=0.0)
        b = tl.load(b_ptr + (start + inner[:, None]) * N + columns)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(c_ptr + rows * N + columns, acc.to(c_ptr.dtype.element_ty), mask=rows < M)


def _gemm(a, b, height=64, width=64, depth=32, precision="ieee", **options):
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(m, height), n // width)
    _product[grid](a, b, c, m, n, k, height, width, depth, precision, **options)
    return c


def exact_gemm(a, b):
    """Products as float32 has them, in tiles that fit."""
    return _gemm(a, b)


def tf32_gemm(a, b):
    """Float32 products that lose 13 bits."""
    return _gemm(a, b, precision="tf32")


def large_gemm(a, b):
    """Tiles of three stages that no block has the shared memory for."""
    return _gemm(a, b, 128, 128, 256, num_warps=8, num_stages=3)


def fp8_gemm(a, b, scale_a, scale_b, **options):
    """The product of the codes; b as it lies."""
    return _gemm(a, b)


def tall_gemm(a, b):
    """Tiles of 128 rows, however few there are."""
    return _gemm(a, b, height=128)


@triton.jit
def _rows(x_ptr, y_ptr, N, STEP: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * N
    x = tl.load(x_ptr + row + columns * STEP, mask=columns * STEP < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row + columns * STEP, tl.softmax(x).to(y_ptr.dtype.element_ty), mask=columns * STEP < N)


def softmax(x):
    """A row in the registers of enough threads."""
    y = torch.empty_like(x)
    _rows[(x.shape[0],)](x, y, x.shape[1], 1, triton.next_power_of_2(x.shape[1]), num_warps=8)
    return y


def spilling_softmax(x):
    """A row in the registers of too few threads."""
    y = torch.empty_like(x)
    _rows[(x.shape[0],)](x, y, x.shape[1], 1, triton.next_power_of_2(x.shape[1]), num_warps=2)
    return y


def striding_softmax(x):
    """Every third element, so that none is beside another."""
    y = torch.empty_like(x)
    _rows[(x.shape[0],)](x, y, x.shape[1], 3, triton.next_power_of_2(x.shape[1]), num_warps=8)
    return y


def softmax_of_a_count(x):
    """As many rows as a kernel has counted; then an error, as of a result that isn't there."""
    count = torch.empty(4096, dtype=torch.int64, device=x.device)
    _rows[(1,)](x, count, x.shape[1], 1, 1024, num_warps=8)
    y = x.new_empty(int(count[-1]), x.shape[1])
    _rows[(y.shape[0],)](x, y, x.shape[1], 1, triton.next_power_of_2(x.shape[1]), num_warps=8)
    raise RuntimeError("no rows")


@triton.autotune(configs=[triton.Config({"BLOCK": size}) for size in (256, 512)], key=["N"])
@triton.jit
def _triangle(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(program + 1):
        total += tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(y_ptr + program * BLOCK + tl.arange(0, BLOCK), total)


def triangle(x):
    """The n-th program adds n + 1 blocks."""
    y = torch.empty_like(x)
    _triangle[lambda meta: (x.numel() // meta["BLOCK"],)](x, y, x.numel())
    return y


_few = triton.autotune(
    configs=_triangle.configs,
    key=["N"],
    prune_configs_by={"early_config_prune": lambda configs, arguments, **_: configs[1:]},
)(_triangle.fn)


def few(x):
    """As `triangle`, but its tuner leaves the first configuration out."""
    y = torch.empty_like(x)
    _few[lambda meta: (x.numel() // meta["BLOCK"],)](x, y, x.numel())
    return y


@triton.jit
def _as_said(x_ptr, count_ptr, y_ptr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.load(count_ptr)):
        total += tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.arange(0, BLOCK), total)


def as_said(x):
    """It adds as many blocks as a tensor says."""
    y = torch.empty_like(x)
    _as_said[(1,)](x, torch.ones(1, dtype=torch.int32, device=x.device), y, 128)
    return y


@triton.jit
def _early(x_ptr, stop_ptr, y_ptr, BLOCK: tl.constexpr):
    if tl.program_id(0) == 0:
        return
    if tl.load(stop_ptr) == 1:
        return
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, tl.load(x_ptr + places))


def early(x):
    """The first program returns at once, and the others where a tensor says so."""
    y = torch.empty_like(x)
    _early[(x.numel() // 512,)](x, torch.ones(1, dtype=torch.int32, device=x.device), y, 512)
    return y


@triton.jit
def _three(x):
    return x + tl.arange(0, 3)


@triton.jit
def _refused(x_ptr, y_ptr):
    tl.store(y_ptr, _three(tl.load(x_ptr)))


def refused(x):
    """The compiler refuses it."""
    y = torch.empty_like(x)
    _refused[(1,)](x, y)
    return y


def untouched(x):
    """It launches nothing."""
    return x * 2


def vector():
    """Arguments of `triangle`."""
    return (torch.zeros(2048, device="cuda"),)


def matrices():
    """Arguments of a product, with a keyword."""
    return (torch.zeros(64, 64, device="cuda"),), {"b": torch.zeros(64, 64, device="cuda")}
