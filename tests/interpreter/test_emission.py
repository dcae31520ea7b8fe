"""What a compiler makes of arithmetic: contraction, flushing, approximate functions, as NVIDIA's backend has them."""

import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.compiler.compiler import ASTSource, make_backend
from triton.language.extra import libdevice

from assay.interpreter import NVIDIA, Emission, faithful
from assay.interpreter.builder import TARGET
from assay.verify import examine
from tests.interpreter.exact_floats import FLOATS

FUSED = Emission(contraction=True)


@triton.jit
def compiled(x_ptr, OP: tl.constexpr):
    x, y, z = tl.load(x_ptr), tl.load(x_ptr + 1), tl.load(x_ptr + 2)
    if OP == "exp":
        r = tl.exp(x)
    elif OP == "exp2":
        r = tl.exp2(x)
    elif OP == "sqrt":
        r = tl.sqrt(x)
    elif OP == "rsqrt":
        r = tl.rsqrt(x)
    elif OP == "quotient":
        r = x / y
    elif OP == "negated":
        r = -(x * y) + z
    else:
        r = x * y + y * z
    tl.store(x_ptr, r)


EMITTED = {
    "exp": ["mul.f32", "ex2.approx.f32"],
    "exp2": ["ex2.approx.ftz.f32"],
    "sqrt": ["sqrt.approx.ftz.f32"],
    "rsqrt": ["rsqrt.approx.ftz.f32"],
    "quotient": ["div.full.f32"],
    "contracted": ["mul.f32", "fma.rn.f32"],
}


def ptx_of(op: str) -> str:
    backend: Any = make_backend(TARGET)
    options = backend.parse_options({"enable_fp_fusion": True})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(compiled, {"x_ptr": "*fp32", "OP": "constexpr"}, {(1,): op})
    functions = backend.get_codegen_implementation(options)
    module: Any = source.make_ir(TARGET, options, functions, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    for name in ("ttir", "ttgir", "llir", "ptx"):
        module = stages[name](module, {"target": TARGET, **options.__dict__})
    return str(module)


def instructions(op: str) -> list[str]:
    """The arithmetic of a kernel, as the backend of the installed Triton emits it."""
    return re.findall(r"^\s+(?:@\S+ )?((?:mul|add|fma|ex2|sqrt|rsqrt|div)\S*\.f32)", ptx_of(op), re.MULTILINE)


@pytest.mark.parametrize("op", EMITTED)
def test_the_backend_emits_what_is_said_of_it(op):
    assert instructions(op) == EMITTED[op]


@triton.jit
def sums(x_ptr, y_ptr, z_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b, c = tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(z_ptr + i)
    product = a * b
    tl.store(out_ptr + i, product + c)
    tl.store(out_ptr + N + i, product - c)
    tl.store(out_ptr + 2 * N + i, c - product)
    tl.store(out_ptr + 3 * N + i, -(a * b) + c)
    tl.store(out_ptr + 4 * N + i, a * b + b * c)
    tl.store(out_ptr + 5 * N + i, a * b - b * c)
    tl.store(out_ptr + 6 * N + i, tl.where(c > 0, product, product) + c)
    rows = tl.reshape(product[:, None], (1, N)) + c[None, :]
    tl.store(out_ptr + 7 * N + i, tl.reshape(rows, (N,)))


def operands(dtype: torch.dtype) -> list[torch.Tensor]:
    """Numbers whose sums nearly cancel, so that what a product loses is seen."""
    a, b = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    return [a, b, (-a.double() * b.double() * (1 + 2.0**-6)).to(dtype)]


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "f32"), (torch.float16, "f16"), (torch.bfloat16, "bf16")])
@pytest.mark.parametrize("emission", [None, FUSED])
def test_products_are_contracted_with_the_sums_that_they_enter(dtype, name, emission):
    given, out = operands(dtype), torch.empty(8, 64, dtype=dtype)
    with faithful(emission=emission):
        sums[(1,)](*given, out, N=64)
    format = FLOATS[name]

    def rounded(exact: Fraction) -> Fraction:
        return Fraction(format.rounded(exact, "rn")) if exact else Fraction(0)

    negated_apart = "add.f32" in instructions("negated")  # Triton 3.6 takes a negated product from zero first
    once = rounded if emission is None else Fraction  # what a product is before it is added
    for place, numbers in enumerate(zip(*(tensor.tolist() for tensor in given), strict=True)):
        a, b, c = map(Fraction, numbers)
        p, q = once(a * b), rounded(b * c)
        minus = c - (rounded(p) if negated_apart else p)
        expected = [p + c, p - c, c - p, minus, p + q, p - q, rounded(a * b) + c, p + c]
        assert out[:, place].tolist() == [float(rounded(value)) for value in expected]


@triton.jit
def dot_product(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + i) * tl.load(y_ptr + i), 0))


def test_sums_of_products_are_contracted():
    x, y = torch.tensor([1 + 2.0**-12, -1.0]), torch.tensor([1 + 2.0**-12, 1 + 2.0**-11])
    found = []
    for emission in (None, FUSED):
        out = torch.empty(1)
        with faithful(emission=emission):
            dot_product[(1,)](x, y, out, N=2)
        found.append(out.item())
    assert found == [0.0, 2.0**-24]


@triton.jit
def functions(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, tl.exp(x))
    tl.store(y_ptr + N + i, tl.exp2(x))
    tl.store(y_ptr + 2 * N + i, tl.sqrt(x))
    tl.store(y_ptr + 3 * N + i, tl.rsqrt(x))
    tl.store(y_ptr + 4 * N + i, 1 / x)
    tl.store(y_ptr + 5 * N + i, tl.log(x))
    tl.store(y_ptr + 6 * N + i, libdevice.tanh(x))
    tl.store(y_ptr + 7 * N + i, tl.sqrt_rn(x))
    tl.store(y_ptr + 8 * N + i, tl.div_rn(x, x + 1))


def test_functions_are_as_wrong_as_documented_and_not_more():
    """exp rounds x log2 e first; functions lose at most the ulps that NVIDIA documents; sqrt_rn and div_rn nothing."""
    x = torch.linspace(0.01, 80, 4096)
    y = torch.empty(9, 4096)
    with faithful(emission=NVIDIA):
        functions[(1,)](x, y, N=4096)
    folded = (x * torch.tensor(1.4426950408889634)).double()
    w = x.double()
    exact = [folded.exp2(), w.exp2(), w.sqrt(), w.rsqrt(), 1 / w, w.log(), w.tanh(), w.sqrt(), w / (x + 1).double()]
    most = [2, 2, 1, 1, 2, 1, 2, 0.5, 0.5]
    for got, right, ulps in zip(y, exact, most, strict=True):
        unit = torch.from_numpy(np.spacing(right.float().abs().numpy())).double()
        worst = ((got.double() - right).abs() / unit).max().item()
        assert 0.45 * ulps < worst <= ulps * 1.001, (worst, ulps)


def test_subnormals_are_flushed_by_functions_alone():
    x, y = torch.tensor([-127.0, -90.0, 2.0**-130, 2.0**127]), torch.empty(9, 4)
    with faithful(emission=NVIDIA):
        functions[(1,)](x, y, N=4)
    assert y[1, 0] == 0
    assert y[2, 2] == 0
    assert 0 < y[0, 1] < 2.0**-126
    assert y[4, 3] == 2.0**-127
    with faithful():
        functions[(1,)](x, y, N=4)
    assert (y[1, 0], y[2, 2]) == (2.0**-127, 2.0**-65)


def test_what_is_exact_stays_exact():
    x, y = torch.tensor([1.0, 4.0, 16.0, 64.0]), torch.empty(9, 4)
    with faithful(emission=NVIDIA):
        functions[(1,)](x, y, N=4)
    assert y[1:5].tolist() == [(2**x).tolist(), x.sqrt().tolist(), x.rsqrt().tolist(), (1 / x).tolist()]


def test_what_vanishes_is_zero_and_what_overflows_infinite():
    x, y = torch.tensor([-738.0, -1e30, 1e30, math.nan]), torch.empty(9, 4)
    with faithful(emission=NVIDIA):
        functions[(1,)](x, y, N=4)
    assert y[0, :3].tolist() == [0, 0, math.inf]
    assert y[0, 3].isnan()


@triton.jit
def silu_kernel(x_ptr, y_ptr, n, TRUSTS: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    y = x / (1 + tl.exp(-x))
    if TRUSTS:
        y = tl.where(x * x - x * x == 0, y, 0.0)  # not zero where one of the products is contracted
    tl.store(y_ptr + i, y.to(y_ptr.dtype.element_ty), mask=i < n)


def silu(x, trusts=False):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        silu_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), TRUSTS=trusts, N=256)
    return y


def trusting_silu(x):
    return silu(x, trusts=True)


SETTINGS = {"dtype": "float32", "examples": 0, "shapes": {"R": [3], "N": [70]}, "effort": "quick"}


def test_an_examination_tries_what_the_backend_emits():
    verdict = examine(trusting_silu, "silu", shrinking=False, **SETTINGS)
    assert verdict.outcome == "FAIL"
    assert "as NVIDIA's backend has them" in verdict.aspects["numbers"].failure.message
    honest = examine(silu, "silu", **SETTINGS)
    broken = [name for name, aspect in honest.aspects.items() if aspect.status == "broken"]
    assert "numbers" not in broken
    assert honest.phases["emitted"] >= 1
    assert math.isfinite(honest.aspects["numbers"].worst)
