"""Judging: what the contract allows is kept, codes too, the neighbour beyond it is broken, and the ratio says which."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from assay.formats.codes import all_values
from assay.formats.format import format_named
from assay.formats.rounding import next_down, next_up, round_to, ulp_towards
from assay.golden.evaluation.golden import Golden
from assay.verify import Contract
from assay.verify.cases.case import Case
from assay.verify.comparison.judge import Judgement, Tolerance, judge, tolerance
from assay.verify.comparison.oracle import Oracle

INF, NAN = math.inf, math.nan
FORMATS = ("float32", "bfloat16", "float16", "float8_e4m3fn")
ROUNDINGS = ("nearest", "toward_zero", "stochastic")
STORES = {"nearest": ("nearest",), "toward_zero": ("toward_zero",), "stochastic": ("down", "up")}

patient = settings(deadline=None, max_examples=80)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def limits(value: float, radius: float, out: str = "bfloat16", *, own: float = 0.0, **contract: Any) -> Tolerance:
    """What is allowed of one output: ``radius`` by the contract, ``own`` the golden's."""
    golden = Golden(tensor(value), tensor(own))
    return tolerance(golden, Golden(tensor(value), tensor(radius)), format_named(out), Contract(**contract))


def judged(y: float, allowed: Tolerance) -> Judgement:
    return judge(tensor(y), allowed)


def kept(y: float, allowed: Tolerance) -> bool:
    """Whether ``y`` is kept; checks that the ratio says the same."""
    result = judged(y, allowed)
    assert bool(result.broken[0]) == (float(result.ratio[0]) > 1), (y, allowed)
    assert result.worst == float(result.ratio[0])
    return not bool(result.broken[0])


@st.composite
def problems(draw: st.DrawFn) -> tuple[float, float, str]:
    """(golden, radius, format), the golden anywhere in the format's range and often at its values or midpoints."""
    out = draw(st.sampled_from(FORMATS))
    format = format_named(out)
    exponent = draw(st.integers(max(format.min_exponent - format.precision, -60), min(format.max_exponent - 2, 60)))
    steps = draw(st.integers(0, 2**format.precision) | st.floats(0, 2**format.precision))
    halves = draw(st.sampled_from([0.0, 0.5, 0.25]))
    value = draw(st.sampled_from([1.0, -1.0])) * math.ldexp(steps + halves, exponent - format.precision)
    radius = draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]) | st.floats(0, 40)) * math.ldexp(
        1.0, exponent - format.precision
    )
    return value, radius, out


@patient
@given(problems(), st.sampled_from(ROUNDINGS), st.floats(-1, 1) | st.sampled_from([-1.0, 0.0, 1.0]))
def test_what_lies_within_the_radius_before_the_store_is_kept(
    problem: tuple[float, float, str], rounding: str, t: float
) -> None:
    """round(golden + t radius) with |t| <= 1 is kept, in every rounding and format, with a ratio of at most one."""
    value, radius, out = problem
    allowed = limits(value, radius, out, rounding=rounding)
    for mode in STORES[rounding]:
        y = float(round_to(tensor(value + t * radius), out, mode))
        assert kept(y, allowed), (y, mode)
        assert not bool(judged(y, allowed).unresolved[0])


@patient
@given(problems(), st.sampled_from(ROUNDINGS))
def test_the_neighbour_beyond_the_interval_is_broken(problem: tuple[float, float, str], rounding: str) -> None:
    value, radius, out = problem
    allowed = limits(value, radius, out, rounding=rounding)
    assert kept(float(allowed.ends.high), allowed)
    assert kept(float(allowed.ends.low), allowed)
    assert not kept(float(next_up(allowed.ends.high, out)), allowed)
    assert not kept(float(next_down(allowed.ends.low, out)), allowed)


@patient
@given(problems(), st.sampled_from(ROUNDINGS), st.integers(-6, 6))
def test_the_interval_is_no_wider_than_the_contract(
    problem: tuple[float, float, str], rounding: str, steps: int
) -> None:
    """A value that is kept differs from some number within the radius by one rounding: half a gap, or one gap."""
    value, radius, out = problem
    y = round_to(tensor(value), out)
    for _ in range(abs(steps)):
        y = next_up(y, out) if steps > 0 else next_down(y, out)
    assume(bool(y.isfinite()))
    if kept(float(y), limits(value, radius, out, rounding=rounding)):
        gap = float(y - next_down(y, out)) if float(y) > value else float(next_up(y, out) - y)
        share = 0.5 if rounding == "nearest" else 1.0
        assert abs(float(y) - value) <= (radius + share * gap) * (1 + 2.0**-40)


@patient
@given(problems())
def test_truncation_is_held_to_its_direction(problem: tuple[float, float, str]) -> None:
    value, radius, out = problem
    allowed = limits(value, radius, out, rounding="toward_zero")
    assert float(torch.maximum(allowed.ends.high, -allowed.ends.low)) <= abs(value) + radius


@patient
@given(problems(), st.integers(-3, 3))
def test_stochastic_rounding_keeps_both_neighbours_and_no_third(problem: tuple[float, float, str], steps: int) -> None:
    value, _, out = problem
    allowed = limits(value, 0.0, out, rounding="stochastic")
    below, above = (float(round_to(tensor(value), out, mode)) for mode in ("down", "up"))
    assert kept(below, allowed)
    assert kept(above, allowed)
    other = tensor(above if steps > 0 else below)
    for _ in range(abs(steps)):
        other = next_up(other, out) if steps > 0 else next_down(other, out)
    assert kept(float(other), allowed) == (steps == 0)
    if below < value < above:
        assert not all(kept(y, limits(value, 0.0, out)) for y in (below, above)), "nearest keeps only one"


@patient
@given(problems(), st.floats(0, 3), st.integers(-40, 40))
def test_a_golden_of_unknown_digits_never_breaks_an_honest_output(
    problem: tuple[float, float, str], share: float, steps: int
) -> None:
    value, radius, out = problem
    own = share * radius
    allowed = limits(value, radius, out, own=own)
    y = round_to(tensor(value), out)
    for _ in range(abs(steps)):
        y = next_up(y, out) if steps > 0 else next_down(y, out)
    assume(bool(y.isfinite()))
    result = judged(float(y), allowed)
    for truth in (value - own, value, value + own):
        if kept(float(y), limits(truth, radius, out)):
            assert not bool(result.broken[0])
        elif not bool(result.unresolved[0]):
            assert bool(result.broken[0])


@given(problems(), st.sampled_from(ROUNDINGS), st.sampled_from([0.0, 1e-3, 0.3]), st.integers(-6, 6), st.booleans())
def test_what_is_clear_without_the_ends_is_kept_by_them(
    problem: tuple[float, float, str], rounding: str, own: float, steps: int, flush: bool
) -> None:
    value, radius, out = problem
    y = float(round_to(tensor(value), out))
    for _ in range(abs(steps)):
        y = float(next_up(tensor(y), out) if steps > 0 else next_down(tensor(y), out))
    allowed = limits(value, radius, out, own=own * radius, rounding=rounding, subnormals="flush" if flush else "keep")
    gap = ulp_towards(tensor(y), allowed.golden, allowed.out)
    if allowed.is_clear((tensor(y) - allowed.golden).abs(), gap):
        assert bool(allowed.ends.sure_low <= y <= allowed.ends.sure_high)
        assert judged(y, allowed).worst <= 1


def test_a_limit_within_the_goldens_radius_is_unresolved() -> None:
    """B = 2 ulps and r = 1: two and three ulps off may be right or wrong, one is right, four is wrong."""
    ulp = 2.0**-7
    allowed = limits(1.0, 2 * ulp, own=ulp)
    seen = [judged(1 + steps * ulp, allowed) for steps in range(5)]
    assert [bool(one.unresolved[0]) for one in seen] == [False, False, True, True, False]
    assert [bool(one.broken[0]) for one in seen] == [False, False, False, False, True]


CLASSES = [
    (NAN, [NAN], [0.0, 1.0, INF, -INF]),
    (INF, [INF], [-INF, NAN, 3e38, 0.0]),
    (-INF, [-INF], [INF, NAN, -3e38, 0.0]),
    (1.0, [1.0], [NAN, INF, -INF]),
    (0.0, [0.0, -0.0], [NAN, INF, 2.0**-133]),
]


@pytest.mark.parametrize(("golden", "right", "wrong"), CLASSES, ids=[str(golden) for golden, _, _ in CLASSES])
def test_special_values_are_judged_by_class(golden: float, right: list[float], wrong: list[float]) -> None:
    allowed = limits(golden, 0.0)
    for y in right:
        assert kept(y, allowed)
        assert judged(y, allowed).worst == 0
    for y in wrong:
        assert not kept(y, allowed)
        assert judged(y, allowed).worst == INF or (math.isfinite(y) and math.isfinite(golden))


@pytest.mark.parametrize("golden", [NAN, INF, -INF])
def test_unspecified_leaves_nonfinite_elements_alone(golden: float) -> None:
    allowed = limits(golden, 0.0, nonfinite="unspecified")
    assert all(kept(y, allowed) for y in (NAN, INF, -INF, 0.0, 7.0))
    assert not bool(allowed.judged[0])
    assert not kept(NAN, limits(1.0, 0.25, nonfinite="unspecified"))


def test_an_infinite_radius_is_not_judged() -> None:
    """Where an honest kernel may overflow inside nothing is said; where the golden is infinite the class is."""
    allowed = limits(1.0, INF)
    assert not bool(allowed.judged[0])
    assert all(kept(y, allowed) for y in (NAN, INF, 1e30))
    assert bool(limits(INF, INF).judged[0])
    assert not kept(NAN, limits(INF, INF))


BEYOND = 1e6
OVERFLOWS = [
    ("float16", "inf", [INF], [65504.0, NAN, -INF, 0.0]),
    ("float16", "saturate", [65504.0], [INF, NAN, 65472.0, -65504.0]),
    ("float16", "nan", [NAN], [INF, 65504.0]),
    ("float8_e4m3fn", "saturate", [448.0], [NAN, 416.0]),
    ("float8_e4m3fn", "inf", [NAN], [448.0, 256.0]),
    ("float8_e4m3fn", "nan", [NAN], [448.0, 256.0]),
]


@pytest.mark.parametrize(("out", "overflow", "right", "wrong"), OVERFLOWS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_overflow_becomes_what_the_contract_says(
    out: str, overflow: str, right: list[float], wrong: list[float], sign: float
) -> None:
    allowed = limits(sign * BEYOND, 1.0, out, overflow=overflow)
    assert all(kept(sign * y, allowed) for y in right)
    assert [y for y in wrong if kept(sign * y, allowed)] == []


@pytest.mark.parametrize(("overflow", "other"), [("inf", INF), ("saturate", 65504.0), ("nan", NAN)])
def test_at_the_threshold_both_sides_are_kept(overflow: str, other: float) -> None:
    """65520 is where float16 overflows; within the radius of it the largest value is right as well."""
    allowed = limits(65519.5, 1.0, "float16", overflow=overflow)
    assert kept(65504.0, allowed)
    assert kept(other, allowed)
    assert not kept(65472.0, allowed)
    assert kept(NAN, allowed) == (overflow == "nan")
    assert kept(INF, allowed) == (overflow == "inf")
    far = limits(65000.0, 1.0, "float16", overflow=overflow)
    assert not kept(NAN, far)
    assert not kept(INF, far)


@pytest.mark.parametrize("overflow", ["inf", "saturate", ("nan")])
def test_an_exact_infinity_is_beyond_the_format_too(overflow: str) -> None:
    allowed = limits(INF, 0.0, "float16", overflow=overflow)
    right = {"inf": INF, "saturate": 65504.0, "nan": NAN}
    assert [name for name, y in right.items() if kept(y, allowed)] == [overflow]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_flushing_is_allowed_only_by_its_contract(sign: float) -> None:
    """A subnormal must be kept; under "flush" it may be zero, and a normal number still may not."""
    tiny = sign * 2.0**-127
    assert kept(tiny, limits(tiny, 0.0))
    assert not kept(0.0, limits(tiny, 0.0))
    assert kept(tiny, limits(tiny, 0.0, subnormals="flush"))
    assert kept(0.0, limits(tiny, 0.0, subnormals="flush"))
    assert not kept(-tiny, limits(tiny, 0.0, subnormals="flush"))
    assert not kept(0.0, limits(sign * 2.0**-126, 0.0, subnormals="flush"))
    just_below = sign * (2.0**-126 - 2.0**-150)  # rounds to the smallest normal number, but is none
    assert kept(0.0, limits(just_below, 0.0, subnormals="flush"))


def test_ties_go_to_even() -> None:
    assert kept(1.0, limits(1 + 2.0**-8, 0.0))
    assert not kept(1 + 2.0**-7, limits(1 + 2.0**-8, 0.0))
    assert kept(1 + 2.0**-6, limits(1 + 3 * 2.0**-8, 0.0))


def test_the_store_of_every_fp8_value_is_exact() -> None:
    """With nothing lost, each of e4m3's values is kept for itself, and its neighbours are not."""
    values = all_values("float8_e4m3fn")
    values = values[values.isfinite() & (values.abs() < 448)]
    zeros = torch.zeros_like(values)
    allowed = tolerance(Golden(values, zeros), Golden(values, zeros), format_named("float8_e4m3fn"), Contract())
    assert not bool(judge(values, allowed).broken.any())
    assert bool(judge(next_up(values, "float8_e4m3fn"), allowed).broken.all())
    assert bool(allowed.exact.all())


def test_the_worst_index_is_that_of_the_worst_broken_element() -> None:
    golden = torch.ones(2, 3, dtype=torch.float64)
    zero = torch.zeros_like(golden)
    allowed = tolerance(Golden(golden, zero), Golden(golden, zero + 0.01), format_named("float32"), Contract())
    y = golden.clone()
    y[0, 1], y[1, 0], y[1, 2] = 1.02, 1.5, 0.9
    result = judge(y, allowed)
    assert result.worst_index() == (1, 0)
    assert result.worst == pytest.approx(50, rel=1e-3)
    assert int(result.broken.sum()) == 3
    y[0, 0] = NAN
    assert judge(y, allowed).worst_index() == (0, 0)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 2)])
def test_any_shape_is_judged(shape: tuple[int, ...]) -> None:
    value = torch.ones(shape, dtype=torch.float64)
    allowed = tolerance(Golden(value, value * 0), Golden(value, value * 0), format_named("bfloat16"), Contract())
    assert judge(value.to(torch.bfloat16), allowed).worst == 0
    assert bool(judge(value.to(torch.bfloat16) * 2, allowed).broken.all())


CODES = ("int8", "uint8", "float8_e4m3fn")


def hull(low: float, high: float, count: int = 1) -> Golden:
    """The golden of as many codes between two."""
    return Golden(*(torch.full((count,), part, dtype=torch.float64) for part in ((low + high) / 2, (high - low) / 2)))


@pytest.mark.parametrize("rounding", ["nearest", "toward_zero", "stochastic"])
@pytest.mark.parametrize("format", CODES)
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_just_the_codes_of_the_hull_are_kept(format: str, rounding: str, data: st.DataObject) -> None:
    """Every code of the format: kept within the least and the largest, broken beside them, and never unresolved."""
    codes = all_values(format)
    codes = codes[codes.isfinite()].unique()
    place, width = data.draw(st.integers(0, len(codes) - 1)), data.draw(st.integers(0, 3))
    last = min(place + width, len(codes) - 1)
    own = data.draw(st.integers(place, last))
    contract = Contract(rounding=rounding, overflow="saturate")
    allowed = hull(float(codes[place]), float(codes[last]), len(codes))
    golden = hull(float(codes[own]), float(codes[own]), len(codes))
    judgement = judge(codes, tolerance(golden, allowed, format_named(format), contract, rounded=True))
    number = torch.arange(len(codes))
    assert torch.equal(judgement.broken, (number < place) | (number > last))
    assert torch.equal(judgement.ratio > 1, judgement.broken)
    assert not bool(judgement.unresolved.any())


def test_nan_is_no_code_of_a_number() -> None:
    """An e4m3 kernel that gives NaN breaks its contract, and one that isn't judged does not."""
    nan = torch.tensor([float("nan")])
    for radius, broken in ((0.0, True), (float("inf"), False)):
        allowed = Golden(torch.zeros(1, dtype=torch.float64), torch.full((1,), radius, dtype=torch.float64))
        limits = tolerance(hull(0, 0), allowed, format_named("float8_e4m3fn"), Contract(), rounded=True)
        assert bool(judge(nan, limits).broken) is broken


def row_kept(x: Tensor, codes: list[float], scale: float, **options: Any) -> bool:
    """Whether a kernel's int8 codes and scale of one row keep the default contract."""
    sizes = {"R": 1, "N": x.shape[1]}
    case = Case("quantize_int8", sizes, {"x": "float32"}, {"granularity": "row", **options})
    outputs = torch.tensor([codes]).to(torch.int8), torch.tensor([[scale]])
    return Oracle(Contract()).judge(case, {"x": x}, outputs).failure is None


def test_a_tie_is_free_only_where_the_scale_is_rounded() -> None:
    """2.5 and 3.5 steps: to even if the kernel's scale is one, to either side if its division was off by an ulp."""
    x, ulp = torch.tensor([[127.0, 2.5, 3.5]]), 2.0**-23
    assert row_kept(x, [127, 2, 4], 1.0)
    assert not row_kept(x, [127, 3, 4], 1.0)
    assert not row_kept(x, [127, 2, 3], 1.0)
    assert row_kept(x, [127, 3, 4], 1.0 - ulp / 2)
    assert row_kept(x, [127, 2, 3], 1.0 + ulp)
    assert not row_kept(x, [127, 4, 4], 1.0 + ulp)
    assert not row_kept(x, [127, 2, 4], 1.0 + 8 * ulp)


def test_codes_of_int4_are_judged_by_the_kernels_own_zero_point() -> None:
    x = torch.tensor([[1.0, -1.0, 0.2, -0.2]])
    case = Case("quantize_int4", {"R": 1, "N": 4}, {"x": "float32"}, {"group": 128, "symmetric": False})
    for codes, zero, right in (
        ([15, 0, 9, 5], 7, True), ([15, 0, 10, 6], 8, True), ([15, 0, 10, 6], 7, False), ([15, 1, 11, 7], 9, False),
    ):  # fmt: skip
        outputs = (
            torch.tensor([codes]).to(torch.uint8),
            torch.tensor([[2 / 15]]),
            torch.tensor([[zero]]).to(torch.uint8),
        )
        failure = Oracle(Contract()).judge(case, {"x": x}, outputs).failure
        assert (failure is None) is right
        if zero == 9:
            assert failure.output == "zero"


@pytest.mark.parametrize("scale", [0.0, 1.0, -3e38, float("nan"), float("inf")])
def test_a_group_of_zeros_has_any_finite_scale(scale: float) -> None:
    x = torch.zeros(1, 3)
    assert row_kept(x, [0, 0, 0], scale) is bool(torch.isfinite(torch.tensor(scale)))
    assert not row_kept(x, [0, 1, 0], 1.0)


def test_a_row_that_is_not_finite_may_hold_anything() -> None:
    x = torch.tensor([[127.0, float("nan"), 3.5]])
    assert row_kept(x, [5, -7, 99], float("nan"))
    assert row_kept(torch.tensor([[float("inf"), 1.0, 3.5]]), [0, 0, 0], float("inf"))
