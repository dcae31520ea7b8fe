"""libdevice, all of it: functions against Arb, intrinsics against rational and integer arithmetic."""

import inspect
import math
import random
import re
from fractions import Fraction

import flint
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice as functions
from triton.language.extra.cuda import libdevice as source

from assay.interpreter.numerics.libdevice import libdevice
from tests.interpreter.exact_floats import FLOATS
from tests.interpreter.triton_kernels import run

DTYPES = {"int32": np.int32, "uint32": np.uint32, "int64": np.int64, "uint64": np.uint64, "fp32": np.float32}
DTYPES["fp64"] = np.float64
SIGNATURES = {
    symbol: ([DTYPES[name] for name in re.findall(r'dtype\("(\w+)"\)', arguments)], DTYPES[result])
    for arguments, symbol, result in re.findall(
        r'\(((?:core\.dtype\("\w+"\), ?)+(?:core\.dtype\("\w+"\))?)\): \("(__nv_\w+)", core\.dtype\("(\w+)"\)\)',
        inspect.getsource(source),
    )
}


def test_every_symbol_that_triton_names_is_here():
    assert len(SIGNATURES) > 300
    for symbol, (kinds, result) in SIGNATURES.items():
        arguments = [np.array([1, 2, 3, 0], kind) / (2 if kind in (np.float32, np.float64) else 1) for kind in kinds]
        arguments = [argument.astype(kind) for argument, kind in zip(arguments, kinds, strict=True)]
        with np.errstate(all="ignore"):
            found = np.asarray(libdevice(symbol)(*arguments))
        assert found.shape == (4,), symbol
        assert found.dtype.kind != "f" or result in (np.float32, np.float64), symbol
    with pytest.raises(NotImplementedError, match="__nv_no_such is not interpreted"):
        libdevice("__nv_no_such")


A = flint.arb
REAL = {
    "sinpi": (A.sin_pi, -3, 3),
    "cospi": (A.cos_pi, -3, 3),
    "erf": (A.erf, -4, 4),
    "erfc": (A.erfc, -4, 9),
    "erfcx": (lambda x: (x * x).exp() * x.erfc(), -4, 9),
    "erfinv": (A.erfinv, -0.99, 0.99),
    "erfcinv": (A.erfcinv, 1e-6, 1.99),
    "normcdf": (lambda x: (-x / A(2).sqrt()).erfc() / 2, -12, 6),
    "normcdfinv": (lambda x: -A(2).sqrt() * (2 * x).erfcinv(), 1e-6, 0.999),
    "rcbrt": (lambda x: x ** (A(-1) / 3), 0.01, 50),
    "j0": (lambda x: x.bessel_j(0), 0.1, 2),
    "j1": (lambda x: x.bessel_j(1), 0.1, 3),
    "y0": (lambda x: x.bessel_y(0), 0.1, 0.8),
    "y1": (lambda x: x.bessel_y(1), 0.1, 2),
    "cyl_bessel_i0": (lambda x: x.bessel_i(0), -9, 9),
    "cyl_bessel_i1": (lambda x: x.bessel_i(1), 0.1, 9),
    "tgamma": (A.gamma, 0.1, 30),
    "lgamma": (A.lgamma, 2.5, 50),
    "exp": (A.exp, -80, 80),
    "exp2": (lambda x: A(2) ** x, -90, 90),
    "exp10": (lambda x: A(10) ** x, -30, 30),
    "expm1": (A.expm1, -5, 5),
    "log": (A.log, 0.01, 99),
    "log1p": (A.log1p, -0.9, 99),
    "log2": (lambda x: x.log() / A(2).log(), 0.01, 0.9),
    "log10": (lambda x: x.log() / A(10).log(), 0.01, 0.9),
    "sin": (A.sin, -20, 20),
    "cos": (A.cos, -20, 20),
    "tan": (A.tan, -1.5, 1.5),
    "asin": (A.asin, -1, 1),
    "acos": (A.acos, -1, 1),
    "atan": (A.atan, -9, 9),
    "sinh": (A.sinh, -9, 9),
    "cosh": (A.cosh, -9, 9),
    "tanh": (A.tanh, -9, 9),
    "asinh": (A.asinh, -9, 9),
    "acosh": (A.acosh, 1.1, 99),
    "atanh": (A.atanh, -0.9, 0.9),
    "rsqrt": (A.rsqrt, 0.01, 99),
}


@pytest.mark.parametrize("name", REAL)
def test_functions_are_right_to_half_an_ulp(name):
    """Of a float32 the result, once rounded, is within 0.501 ulp of Arb's; of a float64 within 1e-13 of it."""
    function, low, high = REAL[name]
    draw = np.random.default_rng(0)
    wide = draw.uniform(low, high, 60)
    x = wide.astype(np.float32)
    got = np.asarray(libdevice(f"__nv_{name}f")(x)).astype(np.float32)
    exact = np.array([float(function(A(float(value))).mid()) for value in x])
    assert bool((np.abs(got - exact) <= 0.501 * np.spacing(np.abs(got)).astype(np.float64)).all())
    exact = np.array([float(function(A(float(value))).mid()) for value in wide])
    assert bool((np.abs(libdevice(f"__nv_{name}")(wide) - exact) <= 1e-13 * np.abs(exact)).all())


def test_functions_of_two_and_more_arguments():
    x, y = np.array([3.0, 0.5, 7.25, 1e200]), np.array([4.0, 2.0, 0.75, 1e200])
    two = np.full(4, 2.0)
    assert libdevice("__nv_rhypot")(x, y).tolist() == [1 / math.hypot(a, b) for a, b in zip(x, y, strict=True)]
    norms = [math.hypot(a, b, 2.0) for a, b in zip(x, y, strict=True)]
    assert np.allclose(libdevice("__nv_norm3d")(x, y, two), norms, rtol=1e-15)
    assert np.allclose(libdevice("__nv_rnorm4d")(x, y, two, two * 0) * norms, 1, rtol=1e-15)
    orders = np.array([0, 3, 12, 5], np.int32)
    at = np.array([1.5, 2.0, 40.0, 0.25])
    for name, bessel in (("jn", A.bessel_j), ("yn", A.bessel_y)):
        exact = [float(bessel(A(value), int(order)).mid()) for order, value in zip(orders, at, strict=True)]
        assert np.allclose(libdevice(f"__nv_{name}")(orders, at), exact, rtol=1e-14, atol=0)
    assert libdevice("__nv_remainder")(x, y).tolist()[:3] == [-1.0, 0.5, -0.25]
    assert libdevice("__nv_scalbnf")(np.array([1.5], np.float32), np.array([-3], np.int32)).tolist() == [0.1875]
    assert libdevice("__nv_fdim")(np.array([3.0, 1.0]), np.array([1.0, 3.0])).tolist() == [2, 0]


def test_whole_numbers_of_floats():
    x = np.array([0.49999999999999994, 0.5, -2.5, 2.0**53 + 2, -0.2])
    assert libdevice("__nv_round")(x).tolist() == [0, 1, -3, 2.0**53 + 2, 0]
    assert libdevice("__nv_llround")(x).tolist() == [0, 1, -3, 2**53 + 2, 0]
    x = np.array([1.0, 0.75, 2.0**-1074, math.inf, 0.0])
    assert libdevice("__nv_logb")(x).tolist() == [0, -1, -1074, math.inf, -math.inf]
    assert libdevice("__nv_ilogb")(x).tolist() == [0, -1, -1074, 2**31 - 1, -(2**31)]
    assert libdevice("__nv_nextafterf")(np.array([1], np.float32), np.array([2], np.float32)).tolist() == [1 + 2.0**-23]


@pytest.mark.parametrize("mode", ["rn", "rz", "rd", "ru"])
def test_conversions_are_rounded_as_their_names_say(mode):
    ptx = {"rd": "rm", "ru": "rp"}.get(mode, mode)
    draw = random.Random(0)
    for kind, dtype in (("int", np.int32), ("uint", np.uint32), ("ll", np.int64), ("ull", np.uint64)):
        limits = np.iinfo(dtype)
        whole = [draw.randint(int(limits.min), int(limits.max)) >> draw.randrange(30) for _ in range(40)] + [limits.max]
        for name, format in (("float", "f32"), ("double", "f64")):
            symbol = f"__nv_{kind}2{name}_{mode}"
            if symbol in SIGNATURES:
                got = libdevice(symbol)(np.array(whole, dtype))
                for number, value in zip(whole, got.tolist(), strict=True):
                    assert not number or value == FLOATS[format].rounded(Fraction(int(number)), ptx)
        x = np.array([2.5, -2.5, 1e30, math.nan])
        low, high = int(limits.min), int(limits.max)
        half = {"rn": (2, -2), "rz": (2, -2), "rd": (2, -3), "ru": (3, -2)}[mode]
        for name, array in (("float", x.astype(np.float32)), ("double", x)):
            top = low if low else high // 2 + 1
            unknown = 0 if name == "float" and high < 2**33 else top
            expected = [half[0], max(half[1], low), high, unknown]
            assert libdevice(f"__nv_{name}2{kind}_{mode}")(array).tolist() == expected, (name, kind)


def test_arithmetic_in_a_mode():
    x, y = np.array([1.0, -3.1, 0.1]), np.array([2.0**-60, 7.3, 0.3])
    for name, op in (
        ("add", Fraction.__add__),
        ("sub", Fraction.__sub__),
        ("mul", Fraction.__mul__),
        ("div", Fraction.__truediv__),
    ):
        for mode, ptx in (("rn", "rn"), ("rz", "rz"), ("rd", "rm"), ("ru", "rp")):
            for kind, format, dtype in (("d", "f64", np.float64), ("f", "f32", np.float32)):
                a, b = x.astype(dtype), y.astype(dtype)
                exact = [op(Fraction(float(p)), Fraction(float(q))) for p, q in zip(a, b, strict=True)]
                got = libdevice(f"__nv_{kind}{name.removeprefix('true')}_{mode}")(a, b).tolist()
                assert got == [FLOATS[format].rounded(value, ptx) for value in exact]
    (up,) = libdevice("__nv_dsqrt_ru")(np.array([2.0]))
    assert Fraction(up) ** 2 > 2 > Fraction(math.nextafter(up, 0)) ** 2
    third = libdevice("__nv_frcp_rd")(np.array([3], np.float32)).tolist()[0]
    assert third == FLOATS["f32"].rounded(Fraction(1, 3), "rm")


def test_bits():
    """Counts, high halves, averages, permutations and the words of a double are those of Python's integers."""
    draw = random.Random(1)
    x, y = ([draw.randrange(-(2**31), 2**31) for _ in range(20)] for _ in range(2))
    a, b = np.array(x, np.int32), np.array(y, np.int32)

    def found(name, *arguments):
        return libdevice(f"__nv_{name}")(*arguments).tolist()

    pairs = list(zip(x, y, strict=True))
    assert found("popc", a) == [f"{p % 2**32:b}".count("1") for p in x]
    assert found("clz", a) == [32 - (p % 2**32).bit_length() for p in x]
    assert found("ffs", a) == [(p & -p).bit_length() for p in x]
    assert found("mulhi", a, b) == [p * q >> 32 for p, q in pairs]
    assert found("umulhi", a.view(np.uint32), b.view(np.uint32)) == [(p % 2**32) * (q % 2**32) >> 32 for p, q in pairs]
    assert found("hadd", a, b) == [p + q >> 1 for p, q in pairs]
    assert found("rhadd", a, b) == [p + q + 1 >> 1 for p, q in pairs]
    assert found("brev", a) == [(int(f"{p % 2**32:032b}"[::-1], 2) + 2**31) % 2**32 - 2**31 for p in x]
    assert found("mul24", a & 0x7FFFFF, np.full_like(b, 3)) == [(p & 0x7FFFFF) * 3 for p in x]
    swap = np.full_like(a, 0x0123)
    assert found("byte_perm", a, b, swap) == [
        int.from_bytes(p.to_bytes(4, "little", signed=True), "big", signed=True) for p in x
    ]
    doubles = np.array([math.pi, -1e300])
    halves = libdevice("__nv_double2hiint")(doubles), libdevice("__nv_double2loint")(doubles)
    assert found("hiloint2double", *halves) == doubles.tolist()
    assert found("int_as_float", np.array([0x3F800000], np.int32)) == [1.0]


@triton.jit
def several(x_ptr, y_ptr, n_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, functions.normcdf(x) + functions.fma_rn(x, x, 1.0))
    tl.store(n_ptr + i, functions.float2int_rd(x) + functions.popc(i))


def test_a_kernel_calls_them():
    x = torch.tensor([-1.5, 0.0, 0.25, 3.0])
    y, n = torch.empty(4), torch.empty(4, dtype=torch.int32)
    run(several, x, y, n, N=4)
    assert torch.allclose(y, torch.special.ndtr(x) + x * x + 1)
    assert n.tolist() == [-2, 1, 1, 5]
