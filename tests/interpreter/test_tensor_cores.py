"""Dots as tensor cores form them: against exact arithmetic, number by number, and through kernels and contracts."""

import math

import numpy as np
import pytest
import torch
import triton

from assay.formats.accumulator import accumulator_named
from assay.formats.devices import devices, tensor_cores_named
from assay.interpreter import faithful
from assay.interpreter.numerics.dots import matmul, operand
from assay.kernels.triton.gemm_fp8 import gemm_fp8
from assay.verify import Contract, examine
from assay.verify.errors import SettingError
from tests.interpreter import triton_kernels as kernels

DEVICES = [name for name, device in devices().items() if device.tensor_cores]


def test_infinity_and_nan_come_out_where_ieee_puts_them():
    a = np.array([[np.inf, 1], [np.inf, -np.inf], [1, 2], [0, np.nan], [3e38, 3e38]], np.float32)
    b = np.array([[1.0], [1.0]], np.float32)
    unit = accumulator_named("hopper-16bit")
    with np.errstate(all="ignore"):
        got = matmul(operand(a, "bf16"), operand(b, "bf16"), np.zeros((5, 1), np.float32), unit)
        zero = matmul(operand(a[:1], "bf16"), operand(0 * b, "bf16"), np.zeros((1, 1), np.float32), unit)
    np.testing.assert_array_equal(got[:, 0], [np.inf, np.nan, 3, np.nan, np.inf])
    assert math.isnan(zero[0, 0])


def test_a_float16_accumulator_is_rounded_to_nearest():
    a, b = np.array([[2048, 3]], np.float32), np.ones((2, 1), np.float32)
    unit = accumulator_named("hopper-16bit")
    got = matmul(operand(a, "fp16"), operand(b, "fp16"), np.zeros((1, 1), np.float16), unit)
    assert got.dtype == np.float16
    assert float(got[0, 0]) == 2052


def test_promotion_moves_sums_into_float32():
    """The mean error of e4m3 uniform on (0, 1) at 4096 terms is percents, and a hundredth of that if promoted."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 32, 4096, generator=generator).to(torch.float8_e4m3fn).float().numpy()
    exact = a.astype(np.float64) @ b.T
    left, right, zero = operand(a, "fp8e4nv"), operand(b.T, "fp8e4nv"), np.zeros((32, 32), np.float32)
    unit = accumulator_named("hopper-fp8")
    errors = [(matmul(left, right, zero, unit, promotion=p) / exact - 1).mean() for p in (0, 512, 128)]
    assert -0.08 < errors[0] < -0.05
    assert -0.01 < errors[1] < -0.002
    assert -0.001 < errors[2] < -0.0002


def gemm(a: torch.Tensor, b: torch.Tensor, *, imprecise: int | None = None, rows: int = 64, warps: int = 4):
    a, b = a.contiguous(), b.contiguous()
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n)
    grid = (triton.cdiv(m, rows), triton.cdiv(n, 16))
    kernels.gemm[grid](a, b, c, m, n, k, BM=rows, BN=16, BK=128, IMPRECISE=imprecise, num_warps=warps)
    return c


def outcome(kernel, device: str | None, accumulate: str, k: int, dtype: str = "float8_e4m3fn") -> str:
    settings = {
        "shapes": {"M": [3], "N": [5], "K": [k]},
        "out_dtype": "float32",
        "examples": 2,
        "layouts": ["contiguous"],
    }
    with faithful(device=device):
        return examine(kernel, "gemm", dtype=dtype, contract=Contract(accumulate=accumulate), **settings).outcome


def test_fp8_sums_fail_float32_on_a_hopper():
    assert outcome(gemm, "h200", "float32", 256) == "FAIL"


@pytest.mark.evidence
def test_long_fp8_sums_fail_nowhere_else():
    assert outcome(gemm, None, "float32", 256) == "PASS"
    assert outcome(gemm, "b200", "blackwell-fp8", 256) == "PASS"


@pytest.mark.evidence
def test_an_honest_kernel_keeps_the_units_contract():
    assert outcome(gemm, "h200", "hopper-fp8", 96) == "PASS"
    assert outcome(gemm, "h200", "hopper-16bit", 256, "bfloat16") == "PASS"


def uniform(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((m, k), (k, n))
    a, b = (torch.rand(*shape, generator=generator).to(torch.float8_e4m3fn) for shape in shapes)
    return a, b


def used(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, model: str) -> float:
    """The largest part of the contract's bound that a product of nonnegative numbers takes."""
    exact = a.double() @ b.double()
    return float(((c.double() - exact).abs() / exact).max()) / accumulator_named(model).gamma(a.shape[1])


def test_promotion_keeps_the_promoted_contract():
    a, b = uniform(64, 48, 2048)
    one = torch.ones(())
    with faithful(device="h200"):
        assert used(gemm_fp8(a, b, one, one), a, b, "hopper-fp8-promoted") < 0.5
        assert used(gemm(a, b, imprecise=128), a, b, "hopper-fp8-promoted") < 0.5
        assert used(gemm(a, b), a, b, "hopper-fp8-promoted") > 1
        assert used(gemm(a, b), a, b, "hopper-fp8") < 1


@pytest.mark.evidence
def test_the_bundled_product_of_fp8_does_not_claim_float32_on_a_hopper():
    with faithful(device="h200"):
        verdict = examine(
            gemm_fp8, "gemm_fp8", dtype="float8_e4m3fn", shapes={"M": [64], "N": [40], "K": [128]}, examples=2
        )
    assert verdict.outcome == "FAIL"


@pytest.mark.parametrize("setting", [{"rows": 32}, {"warps": 2}, {"imprecise": 0}], ids=str)
def test_what_the_wide_instruction_does_not_take_is_made_in_float16(setting: dict[str, int]):
    """Small tiles, too few warps, or no imprecise sums: Triton converts FP8 to float16, which loses little."""
    a, b = uniform(64, 16, 1024)
    with faithful(device="h200"):
        assert used(gemm(a, b, **setting), a, b, "hopper-16bit") < 1
        assert used(gemm(a, b), a, b, "hopper-16bit") > 100


def scaled_product(device: str | None, patterns: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    c = torch.empty(64, 64)
    with faithful(device=device):
        kernels.dot_mxfp8[(1,)](patterns, scales, patterns, scales, c, N=64)
    return c


def test_scaled_dots_meet_the_device_too():
    """Scales are powers of two: a B200 cuts what float32 keeps, an H200 multiplies in bfloat16 and cuts likewise."""
    generator = torch.Generator().manual_seed(0)
    a = (torch.randn(64, 64, generator=generator) * 4).to(torch.float8_e4m3fn)
    scales = torch.randint(110, 140, (64, 2), generator=generator, dtype=torch.uint8)
    factors = 2.0 ** (scales.double() - 127)
    left = a.double() * factors.repeat_interleave(32, 1)
    right = a.double() * factors.repeat_interleave(32, 1).T
    exact, magnitude = left @ right, left.abs() @ right.abs()
    for device, model in ((None, "float32"), ("b200", "blackwell-fp8"), ("h200", "hopper-16bit")):
        lost = (scaled_product(device, a, scales).double() - exact).abs() / magnitude
        assert float(lost.max()) <= accumulator_named(model).gamma(64)
        assert float(lost.max()) > 0


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_of_the_table_can_be_emulated(name: str):
    a = torch.ones(16, 16, dtype=torch.float16)
    with faithful(device=name.upper()):
        assert bool((gemm(a, a, rows=16) == 16).all())
    assert {unit.format.name for unit in tensor_cores_named(name).units.values()} == {"float32"}


def test_an_unknown_device_is_named_with_those_there_are():
    with pytest.raises(SettingError, match=r"'h201'; did you mean 'h20\d?'\? \(known: .*b200"), faithful(device="h201"):
        pass


def test_the_device_holds_inside_and_ends_with_its_context():
    a = (torch.arange(64 * 256).reshape(64, 256) % 7 + 0.4375).to(torch.float8_e4m3fn)
    b = a[:16].T
    with faithful():
        exact = gemm(a, b)
        with faithful(device="h200"):
            with faithful():
                hopper = gemm(a, b)
            with faithful(device="b200"):
                blackwell = gemm(a, b)
        after = gemm(a, b)
    assert torch.equal(exact, after)
    assert torch.equal(exact, blackwell)
    assert not torch.equal(exact, hopper)
