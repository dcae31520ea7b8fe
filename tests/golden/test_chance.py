"""What chance makes of roundings: the bound holds honest float32 sums, and those that err to one side lie outside."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from assay.formats.format import format_named
from assay.golden import spec
from assay.golden.arithmetic import EVALUATION, BallArithmetic
from assay.golden.arithmetic.model import Chance
from assay.golden.evaluation.call import run
from assay.verify.contract import Contract

Array = npt.NDArray[np.float32]
U = 2.0**-24
PRECISIONS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.float8_e4m3fn: 4}
ROWS = 24


def terms(kind: str, length: int, dtype: torch.dtype) -> Array:
    """Rows of positive float32 numbers, made of inputs in ``dtype``."""
    generator = torch.Generator().manual_seed(length)
    normal = torch.randn(ROWS, length, generator=generator).to(dtype).float()
    positive = torch.rand(ROWS, length, generator=generator).to(dtype).float()
    made = {"squares": normal * normal, "squares of positive": positive * positive, "positive": positive,
            "exponentials": torch.exp(normal - normal.amax(-1, keepdim=True))}  # fmt: skip
    return made[kind].numpy()


def errors(x: Array, block: int = 0) -> npt.NDArray[np.float64]:
    """Relative errors, in units of u, of sums one after the other, or of the sums of blocks of so many."""
    parts = x.reshape(ROWS, -1, block) if block else x[:, :, None]
    sums = np.add.accumulate(np.add.accumulate(parts, -1)[..., -1], -1)[:, -1]
    exact = np.array([math.fsum(row) for row in x.tolist()])
    found: npt.NDArray[np.float64] = (sums - exact) / exact / U
    return found


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("length", [64, 1024, 16384, 65536])
@pytest.mark.parametrize("kind", ["squares", "squares of positive", "positive", "exponentials"])
def test_honest_sums_are_likely(kind: str, length: int, dtype: torch.dtype) -> None:
    """One after the other and in blocks of 16, of terms with many values and with few: half the bound at most."""
    x, bound = terms(kind, length, dtype), Chance.of(2**10, 1e-4, PRECISIONS[dtype]).sum_of(length, U) / U
    assert np.abs(errors(x)).max() < bound / 2
    assert np.abs(errors(x, 16)).max() < bound / 2


def test_the_bound_is_no_larger_than_it_must_be() -> None:
    """Of 65,536 float32 terms honest sums take a fifteenth of it or more; it is a fortieth of the worst case."""
    bound = Chance.of(2**10, 1e-4, 24).sum_of(65536, U) / U
    assert np.abs(errors(terms("exponentials", 65536, torch.float32))).max() > bound / 15
    assert bound < 65536 / 40


def test_terms_of_few_values_drift() -> None:
    """Naive sums of squares of bfloat16 numbers err alike in every row, by more than deviations alone would allow."""
    drifted = errors(terms("squares of positive", 65536, torch.bfloat16))
    assert np.abs(drifted.mean()) > 5 * drifted.std()
    assert np.abs(drifted).max() > Chance.of(2**10, 1e-4, 24).sum_of(65536, U) / U / 2


@pytest.mark.parametrize("length", [1024, 16384])
def test_sums_that_truncate_are_not_likely(length: int) -> None:
    """Partial sums cut off towards zero drift by about n u / 2: within n u, and far beyond the bound."""
    total = np.zeros(ROWS, np.float32)
    x = terms("exponentials", length, torch.float32)
    for column in x.T:
        exact = total.astype(np.float64) + column
        rounded = exact.astype(np.float32)
        total = np.where(rounded > exact, np.nextafter(rounded, np.float32(0)), rounded)
    off = np.abs(total / x.astype(np.float64).sum(-1) - 1) / U
    bound = Chance.of(2**10, 1e-4, 24).sum_of(length, U) / U
    assert off.max() < length
    assert off.min() > bound


def test_a_uniform_error_is_a_third_of_any_bounded_one() -> None:
    """sinh(t) / t <= exp(t^2 / 6), on which the constant rests."""
    t = np.linspace(1e-3, 600, 100_000)
    assert (np.log(np.sinh(t) / t) <= t * t / 6).all()


def test_the_rate_is_that_of_all_sums() -> None:
    """2 N exp(-lambda^2 / 2) is the rate; uniform errors exceed lambda sqrt(n / 3) no more often."""
    chance = Chance.of(1000, 1e-4, 24)
    assert 2 * 1000 * math.exp(-(chance.deviations**2) / 2) == pytest.approx(1e-4)
    walks = np.random.default_rng(1).uniform(-U, U, (100_000, 100)).sum(-1)
    for deviations in (1.0, 2.0, 3.0):
        bound = Chance(deviations, 60).sum_of(100, U)
        assert (np.abs(walks) > bound).mean() <= 2 * math.exp(-(deviations**2) / 2)


def test_where_nothing_is_summed_the_bound_is_that_of_one_sum() -> None:
    """A call without rows has no sums."""
    assert Chance.of(0, 1e-4, 8) == Chance.of(1, 1e-4, 8) != Chance.of(2, 1e-4, 8)


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, *, leaning: bool = False
) -> tuple[torch.Tensor, ...]:
    """Of attention, in float32; weights and the gradients of scores are rounded to q's dtype.

    ``leaning``: they err by as much, but all to the side on which the first column of the gradients grows.
    """
    dtype, scale = q.dtype, q.shape[-1] ** -0.5
    q, k, v, dout = (x.float() for x in (q, k, v, dout))

    def stored(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if not leaning:
            return x.to(dtype).float()
        return x + 0.9 * 2.0**-8 * x.abs() * other[..., 0].sign()[..., None, :]

    weights = torch.softmax(q @ k.mT * scale, -1)
    products = dout @ v.mT
    slopes = weights * (products - (weights * products).sum(-1, keepdim=True))
    return stored(slopes, k) @ k * scale, stored(slopes.mT, q) @ q * scale, stored(weights.mT, dout) @ dout


def shares(kernel: Callable[..., Any], seed: int, length: int = 384) -> list[tuple[float, float, float]]:
    """Of each gradient in bfloat16: the largest error over the probable radius, over the worst-case one, and the median
    of the former over the latter."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(1, 1, length, 16, generator=generator).bfloat16() for _ in range(4)]
    definition, options = spec("attention_backward"), {"causal": "none", "scale": None}
    worst = Contract().model(definition, format_named("bfloat16"))
    likely = replace(worst, chance=Chance.of(4096, 1e-4, format_named("bfloat16").precision))
    balls = [run(definition, BallArithmetic(model), tensors, options) for model in (EVALUATION, worst, likely)]
    found = []
    for exact, most, less, y in zip(*balls, kernel(*tensors), strict=True):
        off = (y.double() - exact.mid).abs()
        ratios = (float((off / part).max()) for part in (less.radius, most.radius))
        found.append((*ratios, float((less.radius / most.radius).median())))
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_honest_gradients_of_attention_are_likely(seed: int) -> None:
    """Each weight and each gradient of a score is rounded for itself: a fraction of the worst case, and a half at
    most."""
    for likely, _, share in shares(gradients, seed):
        assert 0.05 < likely < 0.5
        assert share < 0.5


def test_gradients_that_lean_to_one_side_are_not_likely() -> None:
    """All roundings to one side: within the worst case, and outside of the probable radius."""
    for likely, worst, _ in shares(partial(gradients, leaning=True), 1):
        assert worst < 1 < likely
