"""Self-tests of an interpreter of Triton kernels: small kernels whose right results are known without it.

Run as a module under TRITON_INTERPRET=1 it tries Triton's own interpreter and prints what is wrong as JSON; under
`faithful` the same checks are what this one's word rests on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from assay.formats.rounding import round_to
from assay.interpreter import self_test_kernels as kernels


@dataclass(frozen=True)
class Check:
    """A claim about the interpreter, and how to try it; ``wrong()`` says what is wrong, "" for nothing."""

    claim: str
    wrong: Callable[[], str]


def self_test() -> dict[str, str]:
    """What is wrong with the interpreter in force, by claim; "" where the claim holds."""
    results = {}
    for check in CHECKS:
        try:
            results[check.claim] = check.wrong()
        except Exception as error:
            results[check.claim] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return results


def _difference(got: torch.Tensor, expected: torch.Tensor) -> str:
    got, expected = got.double().reshape(-1), expected.double().reshape(-1)
    wrong = ~((got == expected) | (got.isnan() & expected.isnan()))
    if not wrong.any():
        return ""
    first = int(wrong.nonzero()[0])
    return f"{expected[first].item():.9g} came out as {got[first].item():.9g}, one of {int(wrong.sum())} wrong"


def _elementwise(
    kernel: Any, source: torch.dtype, target: torch.dtype, inputs: list[list[float]], expected: list[float]
) -> Callable[[], str]:
    def wrong() -> str:
        tensors = [torch.tensor(values, dtype=source) for values in inputs]
        out = torch.empty(len(expected), dtype=target)
        kernel[(1,)](*tensors, out, N=len(inputs[0]))
        return _difference(out, torch.tensor(expected, dtype=torch.float64))

    return wrong


def _cast(source: torch.dtype, target: torch.dtype, values: list[float], expected: list[float]) -> Callable[[], str]:
    return _elementwise(kernels.cast, source, target, [values], expected)


def _kept(source: torch.dtype, target: torch.dtype, values: list[float]) -> Callable[[], str]:
    return _cast(source, target, values, values)


def _dot_check(dtype: torch.dtype, out: torch.dtype) -> Callable[[], str]:
    def wrong() -> str:
        whole = torch.arange(32 * 32).reshape(32, 32)
        a, b = (whole * 7 % 9 - 4).to(dtype), (whole * 5 % 11 - 5).to(dtype)
        c = torch.empty(32, 32, dtype=out)
        kernels.dot[(1,)](a, b, c, N=32)
        return _difference(c, a.double() @ b.double())

    return wrong


def _dot_scaled_check() -> str:
    whole = torch.arange(32 * 32).reshape(32, 32)
    a, b = (whole * 7 % 9 - 4).to(torch.float8_e4m3fn), (whole * 5 % 11 - 5).to(torch.float8_e4m3fn)
    a_scale, b_scale = (torch.arange(32).reshape(32, 1) % 5 + offset for offset in (126, 127))
    c = torch.empty(32, 32)
    kernels.dot_scaled[(1,)](a, a_scale.to(torch.uint8), b, b_scale.to(torch.uint8), c, N=32)
    left, right = a.double() * 2.0 ** (a_scale - 127), b.double() * 2.0 ** (b_scale.T - 127)
    return _difference(c, left @ right)


def _arguments_check() -> str:
    x, y = torch.ones(4), torch.zeros(4)
    kernels.scale[(1,)](x, y, 0.1, None, True, N=4)
    return _difference(y, torch.full((4,), 0.1))


def _exp_check() -> str:
    x, y = torch.linspace(-87, 88, 1024), torch.empty(1024)
    kernels.exp[(1,)](x, y, N=1024)
    exact = x.double().exp()
    error = ((y.double() - exact) / torch.finfo(torch.float32).eps / exact).abs().max().item()
    return "" if error <= 2 else f"wrong by {error:.3g} ulp"


def _tanh_check() -> str:
    x, y = torch.linspace(-4, 4, 64), torch.empty(64)
    kernels.tanh[(1,)](x, y, N=64)
    return _difference(y, round_to(x.double().tanh(), "float32"))


def _counter_check() -> str:
    y = torch.full((4,), -1.0)
    kernels.counter[(1,)](y, 4)
    return _difference(y, torch.arange(4))


def _atomic_check() -> str:
    y = torch.ones(1, dtype=torch.bfloat16)
    kernels.accumulate[(1,)](torch.tensor([1.5, 2, 4, 8], dtype=torch.bfloat16), y, N=4)
    return _difference(y, torch.tensor([16.5]))


_f32, _f16, _bf16 = torch.float32, torch.float16, torch.bfloat16
_e4m3, _e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
_inf, _nan = math.inf, math.nan
_TO_BF16 = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-7 - 2.0**-20, 3.4e38, _inf, _nan, 2.0**-133 * 1.5, -0.0]
_AS_BF16 = [1, 1 + 2.0**-6, 1 + 2.0**-7, _inf, _inf, _nan, 2.0**-132, -0.0]
_TO_E4M3, _AS_E4M3 = [17, 19, 1000, _nan], [16, 20, 448, _nan]
_TO_E4M3_TOO = [-1000, _inf, 2.0**-10, 3 * 2.0**-10, 1.0]
_AS_E4M3_TOO = [-448, 448, 0, 2.0**-8, 1]
_TO_E5M2 = [9, 11, 1e6, -_inf, _nan, 2.0**-17, 3 * 2.0**-17, 1.125]
_AS_E5M2 = [8, 12, 57344, -57344, _nan, 0, 2.0**-15, 1]
_TO_INT32, _AS_INT32 = [1e10, -1e10, _nan, -1.75], [2.0**31 - 1, -(2.0**31), 0, -1]
_add, _less, _minimum, _product = kernels.add, kernels.less, kernels.minimum, kernels.product

CHECKS = (
    Check("float32 to bfloat16 rounds to nearest even", _cast(_f32, _bf16, _TO_BF16, _AS_BF16)),
    Check("bfloat16 to float32 keeps every value", _kept(_bf16, _f32, [1.5, -_inf, _nan, 2.0**-133])),
    Check(
        "float32 to e4m3 rounds to nearest even and saturates",
        _cast(_f32, _e4m3, _TO_E4M3[:3] + _TO_E4M3_TOO, _AS_E4M3[:3] + _AS_E4M3_TOO),
    ),
    Check("float32 to e4m3 keeps NaN", _kept(_f32, _e4m3, [_nan, 1.0])),
    Check("float32 to e5m2 rounds to nearest even and saturates", _cast(_f32, _e5m2, _TO_E5M2, _AS_E5M2)),
    Check("float16 to e4m3 rounds to nearest even and saturates", _cast(_f16, _e4m3, _TO_E4M3, _AS_E4M3)),
    Check("bfloat16 to e4m3 rounds to nearest even and saturates", _cast(_bf16, _e4m3, _TO_E4M3, _AS_E4M3)),
    Check("e4m3 to bfloat16 keeps every value", _kept(_e4m3, _bf16, [448, 2.0**-9, _nan, -1.75])),
    Check("e5m2 to float32 keeps every value", _kept(_e5m2, _f32, [57344, 2.0**-16, _inf, _nan])),
    Check("float to integer saturates", _cast(_f32, torch.int32, _TO_INT32, _AS_INT32)),
    Check("bfloat16 numbers are added", _elementwise(_add, _bf16, _bf16, [[1.5, 256], [2.25, 1]], [3.75, 256])),
    Check("bfloat16 numbers are compared", _elementwise(_less, _bf16, _f32, [[-1, 1], [1, -1]], [1, 0])),
    Check(
        "the minimum of a number and NaN is the number",
        _elementwise(_minimum, _f32, _f32, [[_nan, 1], [2, _nan]], [2, 1]),
    ),
    Check(
        "fma rounds once",
        _elementwise(kernels.fma, _f32, _f32, [[1 + 2.0**-12] * 2, [-1 - 2.0**-11] * 2], [2.0**-24] * 2),
    ),
    Check("a reduction takes any combining function", _elementwise(_product, _f32, _f32, [[1.5, 2, 3, 4]], [36])),
    Check("float32 dots", _dot_check(_f32, _f32)),
    Check("float16 dots", _dot_check(_f16, _f32)),
    Check("bfloat16 dots", _dot_check(_bf16, _f32)),
    Check("e4m3 dots", _dot_check(_e4m3, _f32)),
    Check("e5m2 dots", _dot_check(_e5m2, _f32)),
    Check("int8 dots", _dot_check(torch.int8, torch.int32)),
    Check("scaled dots", _dot_scaled_check),
    Check("float, None and bool arguments are typed as in a launch", _arguments_check),
    Check("the variable of a loop is a tensor", _counter_check),
    Check("exp is within two ulps", _exp_check),
    Check("functions of libdevice", _tanh_check),
    Check(
        "bfloat16 numbers are summed up one after the other",
        _elementwise(kernels.running_sum, _bf16, _bf16, [[1.5, 2, 4, 256]], [1.5, 3.5, 7.5, 264]),
    ),
    Check("atomics add bfloat16 numbers", _atomic_check),
    Check("inline assembly", _elementwise(kernels.assembled, _f32, _f32, [[1.5, -2.0]], [3.75, 2.0])),
    Check(
        "a global constant multiplies a block",
        _elementwise(kernels.from_constant, _f32, _f32, [[1.5, -2.0]], [4.5, -6.0]),
    ),
)

if __name__ == "__main__":
    print(json.dumps(self_test()))
