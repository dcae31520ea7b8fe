"""What a block can be put through: scans, sorts, gathers, histograms, atomics, descriptors, in every float format."""

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from assay.interpreter import NotInterpreted, SanitizerError, faithful, sanitized
from tests.interpreter.triton_kernels import run

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
floats = pytest.mark.parametrize("dtype", FLOATS)


def halves(*shape: int, seed: int = 0) -> torch.Tensor:
    """Multiples of a half from -3/2 to 3/2: small sums of them are exact in every format."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)) / 2


@triton.jit
def _affine(a, b):
    return a * 0.5 + b


@triton.jit
def scans(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, tl.cumsum(x, 0))
    tl.store(y_ptr + N + i, tl.cumsum(x, 0, reverse=True))
    tl.store(y_ptr + 2 * N + i, tl.cumprod(x, 0))
    tl.store(y_ptr + 3 * N + i, tl.sort(x))
    tl.store(y_ptr + 4 * N + i, tl.sort(x, descending=True))
    tl.store(y_ptr + 5 * N + i, tl.gather(x, N - 1 - i, 0))


@floats
def test_scans_sorts_and_gathers(dtype):
    x, y = halves(16).to(dtype), torch.empty(6, 16, dtype=dtype)
    run(scans, x, y, N=16)
    w = x.double()
    expected = [
        w.cumsum(0),
        w.flip(0).cumsum(0).flip(0),
        w.cumprod(0),
        w.sort().values,
        w.sort().values.flip(0),
        w.flip(0),
    ]
    assert y.double().tolist() == torch.stack(expected).tolist()


@triton.jit
def rows_and_columns(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.cumsum(x, 1))
    tl.store(y_ptr + N * N + at, tl.cumsum(x, 0, reverse=True))
    tl.store(y_ptr + 2 * N * N + at, tl.associative_scan(x, 0, _affine))


@floats
def test_scans_of_matrices(dtype):
    x, y = halves(8, 8).to(dtype), torch.empty(3, 8, 8, dtype=dtype)
    run(rows_and_columns, x, y, N=8)
    w = x.double()
    assert y[:2].double().tolist() == [w.cumsum(1).tolist(), w.flip(0).cumsum(0).flip(0).tolist()]
    assert y[2, 1].double().tolist() == (w[0] / 2 + w[1]).tolist()


@triton.jit
def places(x_ptr, y_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(y_ptr, tl.argmax(x, 0))
    tl.store(y_ptr + 1, tl.argmin(x, 0))
    _, at = tl.max(x, 0, return_indices=True)
    tl.store(y_ptr + 2, at)


@floats
def test_the_first_of_equal_extremes_is_found(dtype):
    x, y = torch.tensor([1, 5, 2, 5, -3, 0, -3, 1]).to(dtype), torch.empty(3, dtype=torch.int32)
    run(places, x, y, N=8)
    assert y.tolist() == [1, 4, 1]


@triton.jit
def histograms(x_ptr, y_ptr, N: tl.constexpr, BINS: tl.constexpr):
    i, bins = tl.arange(0, N), tl.arange(0, BINS)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + bins, tl.histogram(x, BINS))
    tl.store(y_ptr + BINS + bins, tl.histogram(x, BINS, mask=i % 2 == 0))


def test_histograms():
    x = torch.randint(-3, 12, (32,), generator=torch.Generator().manual_seed(0)).int()
    y = torch.empty(2, 8, dtype=torch.int32)
    run(histograms, x, y, N=32, BINS=8)
    assert y.tolist() == [[part.tolist().count(bin) for bin in range(8)] for part in (x, x[::2])]


@triton.jit
def gathers_beyond(x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x_ptr + i, tl.gather(tl.load(x_ptr + i), i + 1, 0))


def test_a_gather_beyond_its_block_is_the_kernels_fault():
    with faithful(), pytest.raises(InterpreterError, match=r"IndexError.*index 8"):
        gathers_beyond[(1,)](torch.ones(8), N=8)


@triton.jit
def atomics(x_ptr, y_ptr, old_ptr, N: tl.constexpr, EXCHANGE: tl.constexpr, APART: tl.constexpr):
    i = tl.arange(0, N)
    at = i if APART else i % 2
    if EXCHANGE:
        tl.store(old_ptr + i, tl.atomic_xchg(y_ptr + at, tl.load(x_ptr + i)))
    else:
        tl.store(old_ptr + i, tl.atomic_add(y_ptr + at, tl.load(x_ptr + i), mask=i > 0))


@floats
@pytest.mark.parametrize("apart", [False, True])
def test_atomic_additions_give_what_was_there(dtype, apart):
    x, y, old = halves(8).to(dtype), torch.full((8,), 0.5, dtype=dtype), torch.empty(8, dtype=dtype)
    run(atomics, x, y, old, N=8, EXCHANGE=False, APART=apart)
    memory, seen = [0.5] * 8, []
    for i, value in enumerate(x.tolist()):
        at = i if apart else i % 2
        seen.append(memory[at] if i else 0.0)
        memory[at] += value if i else 0
    assert (y.tolist(), old.tolist()[1:]) == (memory, seen[1:])


def test_floats_are_exchanged():
    x, y, old = halves(8), torch.full((2,), 9.0), torch.empty(8)
    run(atomics, x, y, old, N=8, EXCHANGE=True, APART=False)
    assert y.tolist() == x.tolist()[-2:]
    assert old.tolist() == [9.0, 9.0, *x.tolist()[:-2]]


def test_atomic_additions_of_halves_are_checked():
    x, y = torch.ones(8, dtype=torch.bfloat16), torch.zeros(7, dtype=torch.bfloat16)
    with sanitized(), pytest.raises(SanitizerError, match="element 7 of y_ptr"):
        atomics[(1,)](x, y, torch.empty_like(x), N=8, EXCHANGE=False, APART=True)


@triton.jit
def described(x_ptr, y_ptr, M, N, OP: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [16, 32])
    y = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [16, 32])
    block = x.load([16, 32])
    if OP == "store":
        y.store([16, 32], block * block)
    elif OP == "add":
        y.atomic_add([16, 32], block)
    elif OP == "max":
        y.atomic_max([16, 32], block)
    elif OP == "min":
        y.atomic_min([16, 32], block)


@floats
@pytest.mark.parametrize("op", ["store", "add", "max", "min"])
def test_descriptors(dtype, op):
    if dtype == torch.float32 and op in ("max", "min"):
        return  # which Triton lacks
    x, y = (2 * halves(24, 40)).to(dtype), torch.ones(24, 40, dtype=dtype)
    run(described, x, y, 24, 40, OP=op)
    expected, block = torch.ones(24, 40), x[16:, 32:].float()
    combined = {"store": block * block, "add": 1 + block, "max": block.clamp(min=1), "min": block.clamp(max=1)}
    expected[16:, 32:] = combined[op]
    assert y.float().tolist() == expected.tolist()


@triton.jit
def gathered_rows(x_ptr, rows_ptr, y_ptr, M, N):
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [1, 32])
    y = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [1, 32])
    rows = tl.load(rows_ptr + tl.arange(0, 8))
    y.scatter(x.gather(rows, 0) * 2, rows, 0)


@floats
def test_descriptors_gather_and_scatter(dtype):
    x, y = halves(24, 40).to(dtype), torch.zeros(24, 40, dtype=dtype)
    rows = [3, 1, 7, 23, 2, 30, 11, 5]
    run(gathered_rows, x, torch.tensor(rows, dtype=torch.int32), y, 24, 40)
    expected = torch.zeros(24, 40)
    for row in rows:
        if row < 24:
            expected[row, :32] = 2 * x[row, :32].float()
    assert y.float().tolist() == expected.tolist()


@triton.jit
def _steps(x, y):
    if x > 0:
        return x * y, x
    else:
        return -x, y


@triton.jit
def maps(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    first, second = tl.map_elementwise(_steps, x, x + 1)
    tl.store(y_ptr + i, first)
    tl.store(y_ptr + N + i, second)


@floats
@pytest.mark.skipif(not hasattr(tl, "map_elementwise"), reason="Triton has no map_elementwise")
def test_a_function_of_scalars_branches_for_each_element(dtype):
    x, y = halves(8).to(dtype), torch.empty(2, 8, dtype=dtype)
    run(maps, x, y, N=8)
    ways = [(v * (v + 1), v) if v > 0 else (-v, v + 1) for v in x.tolist()]
    assert y.tolist() == [list(column) for column in zip(*ways, strict=True)]


@triton.jit
def scaled(a, a_scale, b, b_scale, c, A: tl.constexpr, B: tl.constexpr, AK: tl.constexpr, BK: tl.constexpr):
    i, group = tl.arange(0, 32), tl.arange(0, 2)
    left = tl.load(a + i[:, None] * AK + tl.arange(0, AK)[None, :])
    right = tl.load(b + tl.arange(0, BK)[:, None] * 32 + i[None, :])
    if A != "bf16" and A != "fp16":
        a_scale = tl.load(a_scale + i[:, None] * 2 + group[None, :])
    else:
        a_scale = None
    if B != "bf16" and B != "fp16":
        b_scale = tl.load(b_scale + i[:, None] * 2 + group[None, :])
    else:
        b_scale = None
    tl.store(c + i[:, None] * 32 + i[None, :], tl.dot_scaled(left, a_scale, A, right, b_scale, B))


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
WIDE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16}


def operand(format: str, shape: tuple[int, int], axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An operand as the kernel takes it, and its numbers: pairs of e2m1 are packed along K, the low nibble first."""
    if format != "e2m1":
        x = torch.randn(shape, generator=torch.Generator().manual_seed(axis)).to(WIDE[format])
        return x, x.double()
    codes = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(axis))
    low, high = (codes[:, ::2], codes[:, 1::2]) if axis == 1 else (codes[::2], codes[1::2])
    return (low | high << 4).to(torch.uint8).contiguous(), E2M1[codes]


@pytest.mark.parametrize(("left", "right"), list(itertools.product(["e2m1", *WIDE], repeat=2)))
def test_scaled_dots_of_every_pair_of_formats(left, right):
    """A scaled dot lies within gamma_K sum |a||b| of the exact one, for every pair of formats that Triton has."""
    if {left, right} == {"bf16", "fp16"}:
        return  # which Triton multiplies in one of them
    a, exact_a = operand(left, (32, 64), 1)
    b, exact_b = operand(right, (64, 32), 0)
    scales = torch.randint(122, 131, (2, 32, 2), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    c = torch.empty(32, 32)
    run(scaled, a, scales[0], b, scales[1], c, A=left, B=right, AK=a.shape[1], BK=b.shape[0])
    powers = 2.0 ** (scales.double() - 127)
    if left not in ("bf16", "fp16"):
        exact_a = exact_a * powers[0].repeat_interleave(32, 1)
    if right not in ("bf16", "fp16"):
        exact_b = exact_b * powers[1].repeat_interleave(32, 1).T
    bound = 65 * 2.0**-24 / (1 - 65 * 2.0**-24) * (exact_a.abs() @ exact_b.abs())
    assert bool(((c.double() - exact_a @ exact_b).abs() <= bound).all())
    assert math.isfinite(float(c.sum()))


HERE = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
here = pytest.mark.skipif(not HERE, reason="this Triton has no block pointers")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]


@triton.jit
def doubled(x_ptr, y_ptr, M, N, stride, PADDING: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (M, N), (stride, 1), (0, 0), (16, 16), (1, 0))
    y = tl.make_block_ptr(y_ptr, (32, 32), (32, 1), (0, 0), (16, 16), (1, 0))
    x, y = tl.advance(x, (16, 0)), tl.advance(y, (16, 0))
    for _ in range(2):
        block = tl.load(x, boundary_check=(0, 1), padding_option=PADDING)
        tl.store(y, (2 * block.to(tl.float32)).to(y_ptr.dtype.element_ty), boundary_check=(0, 1))
        x, y = tl.advance(x, (0, 16)), tl.advance(y, (0, 16))


@here
@pytest.mark.parametrize("padding", ["zero", "nan"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_padded_and_move_on(dtype, padding):
    x = (torch.arange(20 * 24).reshape(20, 24) % 7 - 3).to(dtype)
    y = torch.full((32, 32), 0.5).to(dtype)
    run(doubled, x, y, 20, 24, 24, PADDING=padding)
    expected = torch.full((32, 32), 0.5)
    expected[16:] = 0.0 if padding == "zero" else math.nan
    expected[16:20, :24] = 2 * x[16:].float()
    got = y.float()
    assert bool(((got == expected) | (got.isnan() & expected.isnan())).all())


@triton.jit
def unchecked(x_ptr, y_ptr, M, N):
    x = tl.make_block_ptr(x_ptr, (M, N), (N, 1), (0, 0), (16, 16), (1, 0))
    y = tl.make_block_ptr(y_ptr, (16, 16), (16, 1), (0, 0), (16, 16), (1, 0))
    tl.store(y, tl.load(x))


@here
def test_a_block_without_a_check_is_sanitized():
    with sanitized(), pytest.raises(SanitizerError, match="x_ptr"):
        unchecked[(1,)](torch.ones(10, 16), torch.ones(16, 16), 10, 16)


@pytest.mark.skipif(HERE, reason="this Triton has block pointers")
def test_where_triton_has_none_its_own_words_say_so():
    with pytest.raises(NotInterpreted, match=rf"^Triton {triton.__version__} can't do this: Block pointers have been"):
        run(unchecked, torch.ones(10, 16), torch.ones(16, 16), 10, 16)
