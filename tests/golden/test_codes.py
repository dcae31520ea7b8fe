"""Discontinuous results: the set of codes that a quantiser may give, and which choices are admissible."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.formats.codes import all_values
from assay.formats.format import format_named
from assay.formats.rounding import round_to
from assay.golden import admissible, evaluate, spec
from assay.golden.arithmetic import BallArithmetic
from assay.golden.arithmetic.arbitrary_precision import nearest_code
from assay.golden.errors import InputError, OptionError
from assay.golden.evaluation.call import run
from assay.golden.evaluation.golden import golden_of
from assay.verify.contract import Contract

Tensor = torch.Tensor
INF = math.inf
QUANTISERS = {"quantize_fp8": (448, "float8_e4m3fn"), "quantize_int8": (127, "int8")}


def several(op: str, x: Tensor, **options: Any) -> tuple[Any, ...]:
    found = evaluate(op, x, **options)
    assert isinstance(found, tuple)
    return found


def codes_within(golden: Any, format: str) -> list[list[float]]:
    """For each element the codes of a format that lie within value +- radius."""
    codes = all_values(format)
    codes = codes[codes.isfinite()].unique()
    flat = zip(golden.value.reshape(-1), golden.radius.reshape(-1), strict=True)
    return [codes[(codes - value).abs() <= radius].tolist() for value, radius in flat]


@settings(deadline=None, max_examples=300)
@given(st.fractions(-500, 500), st.sampled_from(["float8_e4m3fn", "int8", "uint4", "float4_e2m1fn", "float8_e5m2"]))
def test_exact_rounding_of_fractions(value: Fraction, format: str) -> None:
    """No code of the format lies nearer; on a tie the even one is taken, as `round_to` does."""
    target = format_named(format)
    codes = [Fraction(code) for code in all_values(format).tolist() if math.isfinite(code)]
    nearest = nearest_code(value, target)
    assert nearest in codes
    assert abs(nearest - value) == min(abs(code - value) for code in codes)
    if Fraction(float(value)) == value:
        assert float(nearest) == float(round_to(torch.tensor(float(value)), format, overflow="saturate"))


@pytest.mark.parametrize("op", QUANTISERS)
@pytest.mark.parametrize("power", [0, -5, 9])
def test_a_tie_under_an_exact_scale_goes_to_the_even_code(op: str, power: int) -> None:
    """The scale being a power of two, every midpoint has one code, the even one, by float64 and by Arb."""
    largest, format = QUANTISERS[op]
    codes = all_values(format)
    codes = codes[codes.isfinite() & (codes.abs() <= largest)].unique()
    middles = (codes[:-1] + codes[1:]) / 2
    x = torch.cat([middles, torch.tensor([float(largest)])])[None] * 2.0**power
    expected = round_to(x * 2.0**-power, format)
    for digits in (None, 25):
        golden, scale = several(op, x, digits=digits)
        assert torch.equal(golden.value, expected)
        assert not bool(golden.radius.any())
        assert (float(scale.value), float(scale.radius)) == (2.0**power, 0)


@pytest.mark.parametrize("digits", [None, 25])
def test_a_tie_under_an_inexact_scale_has_two_codes(digits: int | None) -> None:
    """1 / (2 / 127) is 63.5: the two neighbours are the codes within the ball, and no others."""
    golden, _ = several("quantize_int8", torch.tensor([[2.0, 1.0, -1.0, 0.5]]), digits=digits)
    assert codes_within(golden, "int8") == [[127], [63, 64], [-64, -63], [32]]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(QUANTISERS)), st.booleans())
def test_codes_are_what_the_interface_says(seed: int, op: str, narrow: bool) -> None:
    """round(x largest / amax) in exact fractions lies among the golden's codes; where radius is zero it is the one."""
    largest, format = QUANTISERS[op]
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((3, 20)) * 10.0 ** rng.integers(-6, 6)).float()
    x = x.bfloat16().float() if narrow else x
    golden, scale = several(op, x)
    for row, (numbers, value, radius) in enumerate(zip(x.tolist(), golden.value, golden.radius, strict=True)):
        amax = max(Fraction(abs(number)) for number in numbers)
        assert abs(Fraction(float(scale.value[row])) - amax / largest) <= Fraction(float(scale.radius[row]))
        for number, code, width in zip(numbers, value.tolist(), radius.tolist(), strict=True):
            exact = float(nearest_code(Fraction(number) * largest / amax, format_named(format)))
            assert abs(exact - code) <= width


@pytest.mark.parametrize(("granularity", "shape"), [("row", (4, 1)), ("tensor", ()), ("group128", (4, 3))])
def test_groups_of_fp8(granularity: str, shape: tuple[int, ...]) -> None:
    """Scales per row, of the whole, and per 128 neighbours, the tail among them; each group by itself."""
    x = torch.from_numpy(np.random.default_rng(2).standard_normal((4, 300))).float()
    codes, scale = several("quantize_fp8", x, granularity=granularity)
    assert tuple(scale.value.shape) == shape
    for r in range(4):
        for g, part in enumerate(x[r].split(128) if granularity == "group128" else [x[r]]):
            amax = (x if granularity == "tensor" else part).abs().max().double()
            place = () if not shape else (r, g)
            assert float(scale.value[place]) == pytest.approx(float(amax) / 448, rel=1e-15)
            own = codes.value[r, g * 128 : g * 128 + len(part)]
            assert float((own - part.double() * 448 / amax).abs().max()) <= 16


def int4_by_hand(row: list[float], symmetric: bool) -> tuple[list[int], Fraction, int]:
    """The interface's text, in fractions."""
    numbers = [Fraction(number) for number in row]
    low, high = min(0, *numbers), max(0, *numbers)
    scale = max(high, -low) / 7 if symmetric else (high - low) / 15
    zero = 8 if symmetric else round(-low / scale)
    return [min(15, max(0, round(number / scale) + zero)) for number in numbers], scale, zero


@pytest.mark.parametrize("symmetric", [False, True])
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_int4_is_what_the_interface_says(symmetric: bool, seed: int) -> None:
    """Groups of 7 and a tail, of both signs and of one: codes, scales and zero-points by hand lie in the goldens."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((1, 17)) + rng.choice([0, 3, -3])).float()
    golden = several("quantize_int4", x, group=7, symmetric=symmetric)
    codes, scale, zero = golden
    for g, part in enumerate(x[0].split(7)):
        by_hand = int4_by_hand(part.tolist(), symmetric)
        assert abs(float(by_hand[1]) - float(scale.value[0, g])) <= 1e-14 * float(by_hand[1])
        assert abs(by_hand[2] - float(zero.value[0, g])) <= float(zero.radius[0, g])
        own, radius = codes.value[0, 7 * g : 7 * g + 7], codes.radius[0, 7 * g : 7 * g + 7]
        assert bool(((own - torch.tensor(by_hand[0])).abs() <= radius).all())


def test_codes_follow_the_zero_point_that_was_chosen() -> None:
    """-1 and 1: the zero-point is 7 or 8, and the codes are judged by the one given; a mixture of both is wrong."""
    x = torch.tensor([[1.0, -1.0, 0.2, -0.2]])
    _, _, zero = several("quantize_int4", x)
    assert codes_within(zero, "uint4") == [[7, 8]]
    for point, codes, right in (
        (7, [15, 0, 9, 5], [True, True, True, True]),
        (8, [15, 0, 10, 6], [True, True, True, True]),
        (7, [15, 0, 10, 5], [True, True, False, True]),
        (8, [15, 0, 9, 5], [True, True, False, False]),
    ):
        chosen = {"codes": torch.tensor([codes]), "zero": torch.tensor([[point]])}
        masks = admissible("quantize_int4", x, chosen=chosen)
        assert masks["zero"].tolist() == [[True]]
        assert masks["codes"].tolist() == [right]
    assert admissible("quantize_int4", x, chosen={"zero": torch.tensor([[9]])})["zero"].tolist() == [[False]]


def test_a_group_of_zeros() -> None:
    """Codes zero, in int4 the zero-point; the scale is zero, and under a contract any finite number."""
    x = torch.zeros(2, 5)
    assert all(not bool(part.value.any() | part.radius.any()) for part in several("quantize_int8", x))
    codes, _, zero = several("quantize_int4", x, symmetric=True)
    assert codes.value.unique().tolist() == zero.value.unique().tolist() == [8]
    model = Contract().model(spec("quantize_int8"), format_named("float32"))
    codes, scale = map(golden_of, run(spec("quantize_int8"), BallArithmetic(model), [x], {}))
    assert not bool(codes.radius.any())
    assert float(scale.radius.min()) >= format_named("float32").largest


@pytest.mark.parametrize("op", ["quantize_fp8", "quantize_int8", "quantize_int4"])
@pytest.mark.parametrize("value", [math.nan, INF, -INF])
def test_nothing_is_said_of_a_group_that_is_not_finite(op: str, value: float) -> None:
    """The row with it certifies nothing, and under a contract is not judged; the others are as they were."""
    x = torch.tensor([[1.0, 2.0, 3.5], [4.0, value, 1.0], [1.0, 2.0, 3.5]])
    codes = several(op, x)[0]
    assert bool(codes.radius[1].isinf().all())
    assert torch.equal(codes.value[0], codes.value[2])
    model = Contract().model(spec(op), format_named("float32"))
    for part in run(spec(op), BallArithmetic(model), [x], {}):
        golden = golden_of(part)
        assert bool(golden.radius[1].isinf().all())
        assert bool(golden.radius[0].isfinite().all())


def test_admissible_codes() -> None:
    """Both neighbours at a midpoint, one code elsewhere, and only codes of the right shape and name."""
    x = torch.tensor([[2.0, 1.0, -1.0, 0.5]])
    for middle, right in ((63, True), (64, True), (62, False), (65, False)):
        mask = admissible("quantize_int8", x, chosen=torch.tensor([[127, middle, -64, 32]]))
        assert mask.tolist() == [[True, right, True, True]]
    fp8 = several("quantize_fp8", x)[0].value.float().to(torch.float8_e4m3fn)
    assert bool(admissible("quantize_fp8", x, chosen=fp8).all())
    with pytest.raises(InputError, match="has shape"):
        admissible("quantize_int8", x, chosen=torch.zeros(3, 4))
    with pytest.raises(OptionError, match="unknown result 'kodes'"):
        admissible("quantize_int8", x, chosen={"kodes": x})
    with pytest.raises(OptionError, match="no result that is a choice"):
        admissible("softmax", x, chosen=x)


def test_what_was_chosen_has_the_names_and_shapes_of_results() -> None:
    """A scale or zero-point of another shape, and a name that is no choice, are one clear line each."""
    x, codes = torch.randn(2, 4), torch.zeros(2, 4)
    with pytest.raises(InputError, match=r"chosen scale has shape \(3,\), expected \(2, 1\)"):
        admissible("quantize_fp8", x, chosen={"codes": codes, "scale": torch.ones(3)})
    with pytest.raises(InputError, match="chosen zero has shape"):
        admissible("quantize_int4", x, chosen={"codes": codes, "zero": torch.ones(2)})
    with pytest.raises(OptionError, match="weights is no choice; expected ids"):
        admissible("moe_route", x, chosen={"weights": torch.ones(2, 2)})
    with pytest.raises(OptionError, match="expected chosen codes, got scale"):
        admissible("quantize_fp8", x, chosen={"scale": torch.ones(2, 1)})


def test_admissible_experts() -> None:
    """Any of equal experts, the largest first; not one that is beaten, named twice, or not there."""
    logits = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    for ids, right in (
        ([0, 1], [True, True]), ([0, 2], [True, True]), ([2, 0], [False, True]), ([1, 2], [True, True]),
        ([0, 3], [True, False]), ([0, 0], [False, False]), ([0, 4], [True, False]),
    ):  # fmt: skip
        expected = right if ids != [1, 2] else [False, False]
        assert admissible("moe_route", logits, chosen=torch.tensor([ids])).tolist() == [expected]
