"""The gate: a check is first shown outputs that are wrong, and one that lets them through is called vacuous."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.formats.format import Format, format_named
from assay.formats.rounding import round_to
from assay.golden.evaluation.golden import Golden
from assay.kernels.libraries.pytorch import softmax
from assay.verify import Contract
from assay.verify.comparison.judge import Tolerance, judge, tolerance
from assay.verify.comparison.statistics import least_errors
from assay.verify.examination.sensitivity import corruptions, outcomes, undetected_corruption
from tests.zoo.norms import layernorm_backward_torch
from tests.zoo.rounding import attention_backward_tf32

from .examined import fails, first, passes, quick

OUTPUTS = ("float32", "bfloat16", "float16", "float8_e4m3fn")
GENERATOR = torch.Generator().manual_seed(0)
ORDINARY = torch.randn(24, 40, generator=GENERATOR, dtype=torch.float64)


def limits(golden: Tensor, radius: Tensor | float, out: str = "bfloat16", **contract: Any) -> Tolerance:
    """What is allowed about ``golden``."""
    allowed = Golden(golden, torch.as_tensor(radius, dtype=torch.float64).expand(golden.shape))
    exact = Golden(golden, torch.zeros_like(golden))
    return tolerance(exact, allowed, format_named(out), Contract(**contract))


def passes_gate(allowed: Tolerance, out: Format) -> str | None:
    return undetected_corruption([outcomes(allowed, out)])


def right(golden: Tensor, out: str) -> Tensor:
    return round_to(golden, out)


@pytest.mark.parametrize("out", OUTPUTS)
def test_every_corruption_is_rejected_by_an_ordinary_tolerance(out: str) -> None:
    """Zeros, signs, 5 %, a row, a tile, swapped rows, a NaN and an ulp: all are wrong, and each is told apart."""
    allowed = limits(ORDINARY, 1e-3 * ORDINARY.abs(), out)
    seen = dict(corruptions(right(ORDINARY, out), allowed, format_named(out)))
    assert len(seen) == 9
    for words, wrong in seen.items():
        assert not torch.equal(wrong, right(ORDINARY, out)), words
        assert bool(judge(wrong, allowed).broken.any()), words
    assert not bool(judge(right(ORDINARY, out), allowed).broken.any())
    assert passes_gate(allowed, format_named(out)) is None


def test_rows_that_are_nearly_equal_are_not_swapped() -> None:
    """A normalised column of ones and one ulp less says nothing about a check; rows 6 % apart do."""
    nearly = torch.tensor([[1.0], [1 - 2.0**-20]], dtype=torch.float64)
    assert passes_gate(limits(nearly, 2e-6, "float32"), format_named("float32")) is None
    apart = torch.tensor([[1.0], [0.94]], dtype=torch.float64)
    allowed = limits(apart, 0.0, "float32")
    assert "two rows swapped" in dict(corruptions(right(apart, "float32"), allowed, format_named("float32")))


def test_a_corruption_changes_what_it_says_and_no_more() -> None:
    allowed = limits(ORDINARY, 0.0)
    good = right(ORDINARY, "bfloat16")
    seen = dict(corruptions(good, allowed, format_named("bfloat16")))
    different = {words: (wrong != good).sum().item() for words, wrong in seen.items()}
    assert different == {
        "all zeros": 960,
        "the sign changed": 960,
        "everything times 1.05": 960,
        "one row zero": 40,
        "one tile zero": 256,
        "two rows swapped": 80,
        "one NaN": 1,
        "one ulp above what is allowed": 1,
        "one ulp below what is allowed": 1,
    }


@pytest.mark.parametrize(
    ("radius", "words"),
    [
        (100 * ORDINARY.abs().max(), "all zeros"),
        (1.5 * ORDINARY.abs(), "all zeros"),
        (0.06 * ORDINARY.abs(), "everything times 1.05"),
        (math.inf, "anything at all: no element is judged"),
    ],
    ids=["huge", "relative", "six-percent", "infinite"],
)
def test_a_loosened_tolerance_is_reported(radius: Tensor | float, words: str) -> None:
    """The first corruption that goes through is named; a radius of 0.04 |golden| still holds."""
    assert passes_gate(limits(ORDINARY, radius), format_named("bfloat16")) == words
    assert passes_gate(limits(ORDINARY, 0.04 * ORDINARY.abs()), format_named("bfloat16")) is None


def test_a_loose_row_alone_is_reported() -> None:
    radius = 1e-3 * ORDINARY.abs()
    loud = int(ORDINARY.abs().sum(-1).argmax())
    radius[loud] = 2 * ORDINARY[loud].abs()
    assert passes_gate(limits(ORDINARY, radius), format_named("bfloat16")) == "one row zero"


@pytest.mark.parametrize(
    "golden",
    [
        torch.zeros(3, 4, dtype=torch.float64),
        torch.ones(3, 4, dtype=torch.float64),
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor([[1.0, math.nan], [math.nan, 2.0]], dtype=torch.float64),
        torch.zeros(0, 4, dtype=torch.float64),
        torch.tensor([[448.0, -448.0]], dtype=torch.float64),
    ],
    ids=["zeros", "ones", "scalar", "nan", "empty", "largest"],
)
@pytest.mark.parametrize("out", OUTPUTS)
def test_a_corruption_that_changes_nothing_is_no_loophole(golden: Tensor, out: str) -> None:
    assert passes_gate(limits(golden, 0.0, out), format_named(out)) is None


@pytest.mark.parametrize(
    ("ulps", "words"),
    [
        (2.0**16, "lets through everything times 1.05"),
        (2.0**18, "lets through all zeros"),
        (2.0**20, "lets through anything at all"),
    ],
)
def test_a_vacuous_contract_is_reported_through_examine(ulps: float, words: str) -> None:
    verdict = quick(softmax, dtype="bfloat16", contract=Contract(ulps={"exp": ulps}, rescale_every=1))
    assert (verdict.outcome, verdict.failure, verdict.passed) == ("VACUOUS", None, False)
    assert words in verdict.note


def test_a_fault_beyond_even_a_vacuous_contract_still_fails() -> None:
    """A violation is proved whatever the gate says."""
    fails(quick(lambda x: x * math.nan, dtype="bfloat16", contract=Contract(ulps={"exp": 2.0**16})))


def minimum_detectable_error(allowed: Tolerance) -> float:
    """The least of the errors that elements show."""
    return float(least_errors(allowed).min()) if allowed.golden.numel() else math.inf


def broken_by(golden: Tensor, allowed: Tolerance, gain: float, out: str, mode: str) -> bool:
    """Whether the golden times 1 + gain, stored, is rejected."""
    wrong = round_to(golden * (1 + gain), out, mode)
    return bool(judge(wrong, allowed).broken.any())


@pytest.mark.parametrize("radius", [0.0, 1e-5, 3e-2])
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sign", [1.0, -1.0, ORDINARY.sign()], ids=["positive", "negative", "both"])
@pytest.mark.parametrize("rounding", ["nearest", "toward_zero"])
def test_the_smallest_gain_is_the_threshold(out: str, radius: float, sign: Tensor | float, rounding: str) -> None:
    """A relative error just above it is rejected, one just below it goes through; and none smaller is rejected."""
    golden = sign * ORDINARY.abs()
    allowed = limits(golden, radius * golden.abs(), out, rounding=rounding)
    gain = minimum_detectable_error(allowed)
    assert broken_by(golden, allowed, gain * (1 + 1e-6) + 1e-12, out, rounding)
    assert not any(broken_by(golden, allowed, share * gain, out, rounding) for share in (0.2, 0.7, 0.9, 1 - 1e-6))


def test_the_smallest_gain_is_that_of_all_elements() -> None:
    golden = torch.tensor([[1.0, 2.0, -3.0]], dtype=torch.float64)
    allowed = limits(golden, torch.tensor([[0.1, 0.1, 0.0]], dtype=torch.float64), "float32")
    assert minimum_detectable_error(allowed) < 1e-6


def test_what_is_detectable_is_in_the_verdict() -> None:
    """About as much as the contract's radius: 2^-20 for float32, and 2^-8 where exp alone may lose that."""
    tight, loose = (
        quick(softmax, contract=contract).detectable[0] for contract in (Contract(), Contract(ulps={"exp": 2.0**15}))
    )
    passes(quick(softmax, dtype="bfloat16"))
    assert tight.length == loose.length == 8
    assert 2.0**-22 < tight.suspect <= tight.broken < 2.0**-18
    assert 2.0**-9 < loose.suspect <= loose.broken < 2.0**-5


@pytest.mark.parametrize("golden", [torch.zeros(2, 3), torch.full((2, 3), math.nan), torch.zeros(0, 3)])
def test_where_no_gain_shows_it_is_infinite(golden: Tensor) -> None:
    assert minimum_detectable_error(limits(golden.double(), 0.0)) == math.inf


def test_an_element_at_the_end_of_the_format_hides_no_gain() -> None:
    """Nothing lies beyond e4m3's 448, but the elements beside it still show."""
    golden = torch.tensor([[448.0, 1.0]], dtype=torch.float64)
    assert minimum_detectable_error(limits(golden, 0.0, "float8_e4m3fn")) == pytest.approx(2.0**-4)


def test_a_golden_without_numbers_is_passed_over() -> None:
    """Where all that is judged should be NaN, as logarithms of numbers below zero, no corruption says anything."""
    nowhere = torch.full((2, 3), math.nan, dtype=torch.float64)
    assert passes_gate(limits(nowhere, 0.0), format_named("bfloat16")) is None
    assert not bool(judge(nowhere, limits(nowhere, 0.0)).broken.any())
    assert bool(judge(torch.zeros(2, 3), limits(nowhere, 0.0)).broken.all())


def test_a_size_where_results_cancel_is_no_loophole() -> None:
    """A gradient that vanishes where a row has one or two columns doesn't make its check vacuous."""
    verdict = quick(layernorm_backward_torch, "layernorm_backward", examples=5)
    assert verdict.outcome != "VACUOUS", str(verdict)


def test_what_one_case_rejects_is_no_loophole() -> None:
    blunt = outcomes(limits(ORDINARY, 0.06 * ORDINARY.abs()), format_named("bfloat16"))
    sharp = outcomes(limits(ORDINARY, 1e-3 * ORDINARY.abs()), format_named("bfloat16"))
    assert undetected_corruption([blunt]) == undetected_corruption([blunt, blunt]) == "everything times 1.05"
    assert undetected_corruption([blunt, sharp]) is undetected_corruption([sharp]) is undetected_corruption([]) is None


def test_a_gradient_of_attention_in_tf32_can_be_judged() -> None:
    """A unit that cuts operands to TF32 passes at few columns; one that cuts three bits more is noticed."""
    sizes = {"B": [2], "Hkv": [1, 2], "H": [2], "Sq": [1, 5, 20], "Sk": [1, 5, 20], "D": [16], "Dv": [16]}
    settings: dict[str, Any] = {"shapes": sizes, "contract": "triton-default", "examples": 2}
    passes(first(attention_backward_tf32, "attention_backward", **settings))
    fails(first(partial(attention_backward_tf32, bits=16), "attention_backward", **settings))
