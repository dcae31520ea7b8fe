"""The numbers of the faithful interpreter against torch, bit for bit where both do the same."""

import math
from functools import cache

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from assay.formats.codes import all_values
from assay.formats.format import format_named
from assay.interpreter import faithful
from assay.precision import round_to
from tests.interpreter import triton_kernels as kernels
from tests.interpreter.triton_kernels import run

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cast(x: torch.Tensor, dtype: torch.dtype, kernel=kernels.cast) -> torch.Tensor:
    block = min(x.numel(), 2**20)
    y = torch.empty(x.shape, dtype=dtype)
    with faithful():
        kernel[(x.numel() // block,)](x, y, N=block)
    return y


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a dtype of at most 16 bits."""
    codes = torch.arange(2 ** (8 * dtype.itemsize))
    return codes.to(torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype)


@cache
def hard_float32s() -> torch.Tensor:
    """2^20 float32 values: every midpoint of every narrower format, its neighbours, and random bit patterns."""
    middles = []
    for dtype in (F16, BF16, *FP8):
        values = all_values(dtype)
        values = values[values.isfinite()].unique()
        middle = ((values[1:] + values[:-1]) / 2).float()
        assert bool((middle.double() == (values[1:] + values[:-1]) / 2).all())
        middles += [middle, middle.nextafter(torch.tensor(math.inf)), middle.nextafter(torch.tensor(-math.inf))]
    chosen = torch.cat(middles)
    generator = torch.Generator().manual_seed(0)
    rest = torch.randint(-(2**31), 2**31, (2**20 - len(chosen),), generator=generator).int().view(F32)
    return torch.cat([chosen, rest])


def expected_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch's cast; to 8 bits, where torch gives NaN or infinity beyond the largest, saturated as cvt.satfinite."""
    if dtype not in FP8:
        return x.to(dtype)
    largest = format_named(dtype).largest
    return x.float().clamp(-largest, largest).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.view(BITS[a.dtype.itemsize]) == b.view(BITS[b.dtype.itemsize])) | (
        a.double().isnan() & b.double().isnan()
    )


@pytest.mark.parametrize(
    ("source", "target"),
    [(source, target) for source in (F16, BF16) for target in (F32, F16, BF16, *FP8) if source != target]
    + [(source, target) for source in FP8 for target in (F32, F16, BF16)],
)
def test_casts_of_every_pattern_agree_with_torch(source, target):
    x = patterns(source)
    assert bool(same_bits(cast(x, target), expected_cast(x, target)).all())


@pytest.mark.parametrize("target", [F16, BF16, *FP8])
def test_casts_of_float32_agree_with_torch(target):
    x = hard_float32s()
    assert bool(same_bits(cast(x, target), expected_cast(x, target)).all())


@pytest.mark.parametrize("target", [F32, F16, BF16])
def test_casts_of_float64_round_once(target):
    step = torch.finfo(target).eps
    x = torch.tensor([1 + step / 2 + 2.0**-50, 1 + 1.5 * step - 2.0**-50, 1 + step / 2, -1e300], dtype=torch.float64)
    assert cast(x, target).double().tolist() == round_to(x, format_named(target)).tolist()


def test_rounding_toward_zero():
    x = torch.tensor([1 + 3 * 2.0**-8, -1 - 3 * 2.0**-8, 1e39, 2.0**-140], dtype=F32)
    x[2] = torch.finfo(F32).max
    exact = round_to(x, "bfloat16", mode="toward_zero")
    assert cast(x, BF16, kernels.cast_toward_zero).double().tolist() == exact.tolist()


@pytest.mark.parametrize("target", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8])
def test_floats_become_integers_toward_zero(target):
    """A float within the integer's range loses its fraction; others saturate (8 bits: at 16, the low ones kept)."""
    x = torch.tensor([1.9, -1.9, 100.5, 0.0] if target != torch.uint8 else [1.9, 200.5, 0.5, 0.0])
    assert cast(x, target).tolist() == [math.trunc(value) for value in x.tolist()]
    info = torch.iinfo(target)
    wild = torch.tensor([1e30, -math.inf, math.nan, 300.0])
    expected = {
        torch.int8: [-1, 0, 0, 44],
        torch.uint8: [255, 0, 0, 44],
        torch.int64: [info.max, info.min, info.min, 300],
    }
    assert cast(wild, target).tolist() == expected.get(target, [info.max, info.min, 0, 300])


@pytest.mark.parametrize("dtype", [F32, F16, BF16, *FP8[:2]])
@pytest.mark.parametrize("shape", [(16, 16, 32), (64, 32, 128), (32, 64, 512)])
def test_dots_are_float32_sums_of_exact_products(dtype, shape):
    """A dot lies within gamma_K sum |a||b| of the exact product, whatever the operands' format."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(k)
    a = torch.randn(m, k, generator=generator).to(dtype)
    b = (torch.randn(k, n, generator=generator) * 4).to(dtype)
    c = torch.empty(m, n)
    run(kernels.dot, a, b, c, M=m, N=n, K=k, PRECISION="ieee")
    u = 2.0**-24
    bound = (k + 1) * u / (1 - (k + 1) * u) * (a.double().abs() @ b.double().abs())
    assert bool(((c.double() - a.double() @ b.double()).abs() <= bound).all())


def test_integer_dots_are_exact():
    a, b = torch.full((16, 512), -128, dtype=torch.int8), torch.full((512, 16), -128, dtype=torch.int8)
    c = torch.empty(16, 16, dtype=torch.int32)
    run(kernels.dot, a, b, c, M=16, N=16, K=512, PRECISION="ieee")
    assert bool((c == 512 * 128 * 128).all())


def test_float32_dots_are_tf32_unless_the_kernel_says_otherwise():
    """A float32 dot cuts its operands to 10 bits, as on a GPU by default, but not with input_precision="ieee"."""
    a, b = torch.eye(16) * (1 + 2.0**-12), torch.eye(16)
    results = []
    for precision in ("ieee", "tf32", None):
        c = torch.empty(16, 16)
        run(kernels.dot, a, b, c, M=16, N=16, K=16, PRECISION=precision)
        results.append(float(c[0, 0]))
    assert results == [1 + 2.0**-12, 1.0, 1.0]


def test_scaled_dots_of_four_bits():
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.cat([values, -values])
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(0, 16, (2, 64, 64), generator=generator)
    a_scale, b_scale = torch.randint(120, 134, (2, 64, 2), generator=generator)
    c = torch.empty(64, 64)
    with faithful():
        kernels.dot_mxfp4[(1,)](
            (a[:, ::2] | a[:, 1::2] << 4).to(torch.uint8),
            a_scale.to(torch.uint8),
            (b[::2] | b[1::2] << 4).to(torch.uint8),
            b_scale.to(torch.uint8),
            c,
            N=64,
        )
    left = values[a] * (2.0 ** (a_scale.double() - 127)).repeat_interleave(32, 1)
    right = values[b] * (2.0 ** (b_scale.double() - 127)).repeat_interleave(32, 1).T
    bound = 66 * 2.0**-24 * (left.abs() @ right.abs())
    assert bool(((c.double() - left @ right).abs() <= bound).all())


@given(st.integers(0, 2**32 - 1), st.sampled_from([F32, F16, BF16]))
@settings(max_examples=40, deadline=None)
def test_arithmetic_rounds_once(seed, dtype):
    """+, -, *, max, <, unary minus and abs give the correctly rounded result in the operands' format."""
    generator = torch.Generator().manual_seed(seed)
    bits = 8 * dtype.itemsize
    x, y = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (2, 64), generator=generator)
    x, y = x.to(BITS[dtype.itemsize]).view(dtype), y.to(BITS[dtype.itemsize]).view(dtype)
    out = torch.empty(6, 64, dtype=dtype)
    run(kernels.arithmetic, x, y, out, N=64)
    a, b = x.double(), y.double()
    name = format_named(dtype)
    exact = [round_to(a + b, name), round_to(a - b, name), round_to(a * b, name), torch.fmax(a, b)]
    exact += [torch.where(a < b, a, -b), a.abs()]
    got = out.double()
    if dtype == F32:  # float64 holds no float32 sum exactly; torch's own float32 does it right
        exact[:3] = [(x + y).double(), (x - y).double(), (x * y).double()]
    assert bool(((got == torch.stack(exact)) | (got.isnan() & torch.stack(exact).isnan())).all())


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_atomic_additions_of_16_bit_floats(dtype):
    """atomic_add adds numbers, not patterns, also where several lanes meet at one address."""
    x, y = torch.tensor([1.5, 2.0, 0.25, 4.0], dtype=dtype), torch.tensor([1.0, -1.0], dtype=dtype)
    run(kernels.add_atomically, x, y, N=4)
    assert y.tolist() == [2.75, 5.0]


def test_reductions_take_any_combining_function():
    x = torch.randint(0, 5, (16, 64), generator=torch.Generator().manual_seed(0)).float()
    value, index = torch.empty(16), torch.empty(16, dtype=torch.int32)
    run(kernels.argmax, x, value, index, R=16, N=64)
    assert value.tolist() == x.amax(1).tolist()
    assert index.tolist() == [row.index(max(row)) for row in x.tolist()]


def test_scans_keep_the_order_of_their_elements():
    a = torch.tensor([1.0, 2, 3, 0.5, 1, 2, 0, 3])
    b = torch.tensor([1.0, 0, 2, 4, 1, 1, 5, 2])
    y = torch.empty(8)
    run(kernels.recurrence, a, b, y, N=8)
    state, expected = 0.0, []
    for scale, shift in zip(a.tolist(), b.tolist(), strict=True):
        state = state * scale + shift
        expected.append(state)
    assert y.tolist() == expected


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_sums_and_extremes(dtype):
    x, y = torch.arange(-8, 24).to(dtype), torch.empty(4, dtype=dtype)
    run(kernels.sums, x, y, N=32)
    assert y.tolist() == [240, 240, 23, -8]
    x[5] = math.nan
    run(kernels.sums, x, y, N=32)
    assert np.isnan(y[:2].float().numpy()).all()
    assert y[2:].tolist() == [23, -8]
