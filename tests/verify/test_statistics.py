"""The test of bias, of stages too, with its rate of false alarms; error growth; significant bits."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from assay.formats.format import format_named
from assay.formats.rounding import round_to
from assay.golden import spec, specs
from assay.golden.inputs.distributions import GENERAL
from assay.golden.registry import define
from assay.kernels.libraries.pytorch import layer_norm, rms_norm, softmax
from assay.verify import Contract, examine
from assay.verify.cases.case import Case
from assay.verify.comparison.bias import MARGIN, RATE, UNITS, WEIGHTS, Score, scores, stage_roundings
from assay.verify.examination.phases import bias_cases
from assay.verify.examination.plan import Plan, make_plan
from assay.verify.examination.repro import repro_line, run_line
from assay.verify.findings import Failure
from assay.verify.fingerprint.error_growth import growth, reduced
from assay.verify.fingerprint.subject import Unseen
from assay.verify.fingerprint.values import significant_bits, summary
from assay.verify.settings import Settings
from tests.zoo.merging import all_reduce
from tests.zoo.products import gemm_blocked

from . import insides, leaning
from .examined import failure_of

Kernel = Callable[..., Any]


def plan_for(kernel: Kernel, op: str, dtype: str, **settings: Any) -> Plan:
    """What `examine` would ask of a kernel."""
    return make_plan(
        kernel, Settings(op, dtype, **{name: value for name, value in settings.items() if value is not None})
    )


SMALL: dict[str, dict[str, Any]] = {
    "gemm": {"M": [40], "N": [40], "K": [96]},
    "all_reduce": {"R": [16], "N": [128]},
    "gemm_int4": {"M": [24], "N": [24]},
    "attention": {"B": [1], "Hkv": [1], "H": [1], "Sq": [16], "Sk": [48], "D": [16], "Dv": [16]},
    "layernorm": {"R": [16], "N": [128]},
}
"""Sizes at which calls are cheap."""


def leaning_of(kernel: Kernel, op: str, dtype: str, **settings: Any) -> Failure | None:
    """What the phase of bias finds in a kernel."""
    plan = plan_for(kernel, op, dtype, **settings)
    failures = (plan.harness.try_case(case).failure for case in bias_cases(plan.sampler))
    return next((failure for failure in failures if failure is not None), None)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


blocked = partial(gemm_blocked, block=32)
HONEST: dict[str, tuple[Kernel, str, str]] = {
    "gemm-blocked-float32": (blocked, "gemm", "float32"),
    "gemm-blocked-float16": (blocked, "gemm", "float16"),
    "gemm-torch-float32": (torch.mm, "gemm", "float32"),
    "gemm-sequential-float32": (leaning.gemm(), "gemm", "float32"),
    "all-reduce-float32": (all_reduce, "all_reduce", "float32"),
    "softmax-torch-float32": (softmax, "softmax", "float32"),
    "log-softmax-float32": (leaning.log_softmax(), "log_softmax", "float32"),
    "layer-norm-torch-float32": (layer_norm, "layernorm", "float32"),
    "layer-norm-float32": (leaning.layernorm(), "layernorm", "float32"),
    "rms-norm-torch-float16": (rms_norm, "rmsnorm", "float16"),
    "attention-torch-bfloat16": (attention, "attention", "bfloat16"),
    "attention-rounded-bfloat16": (leaning.attention(), "attention", "bfloat16"),
    "attention-rounded-float16": (leaning.attention(), "attention", "float16"),
    "gemm-int4-rounded-bfloat16": (leaning.gemm_int4(), "gemm_int4", "bfloat16"),
    "gemm-int4-rounded-float16": (leaning.gemm_int4(), "gemm_int4", "float16"),
}

LEANING: dict[str, tuple[Kernel, str, str]] = {
    "gemm-int4-weights-truncated-bfloat16": (leaning.gemm_int4(leaning.truncated), "gemm_int4", "bfloat16"),
    "gemm-int4-weights-truncated-float16": (leaning.gemm_int4(leaning.truncated), "gemm_int4", "float16"),
    "gemm-accumulator-truncating-float16": (leaning.gemm("toward_zero"), "gemm", "float16"),
    "layer-norm-mean-drifting-float32": (leaning.layernorm("toward_zero"), "layernorm", "float32"),
}
"""Kernels each of whose elements lies within its radius, on the cases of the phase."""

AVERAGED = {"M": [24], "N": [24], "K": [256]}
"""Weights enough that no processor's order of sums puts one element beyond its radius."""


@pytest.mark.parametrize("name", HONEST)
def test_honest_kernels_do_not_lean(name: str) -> None:
    assert leaning_of(*HONEST[name]) is None


@pytest.mark.parametrize("name", LEANING)
def test_errors_to_one_side_are_caught(name: str) -> None:
    kernel, op, dtype = LEANING[name]
    shapes = {"gemm": {"M": [96], "N": [96], "K": [160]}, "gemm_int4": AVERAGED}.get(op) or SMALL[op]
    failure = leaning_of(kernel, op, dtype, shapes=shapes)
    assert failure.kind == "bias"
    assert f"in {UNITS} of {UNITS} calls" in failure.message


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_with_truncated_probabilities_does_not_pass(dtype: str) -> None:
    failure = leaning_of(leaning.attention(leaning.truncated), "attention", dtype, shapes=SMALL["attention"])
    assert failure.kind in ("contract", "bias")


def test_an_error_that_the_contract_grants_is_no_bias() -> None:
    assert leaning_of(leaning.log_softmax(2.0), "log_softmax", "float32") is None
    assert leaning_of(leaning.log_softmax(-2.0), "log_softmax", "float32") is None


def test_a_truncating_accumulator_may_be_granted() -> None:
    kernel = leaning.gemm("toward_zero")
    assert leaning_of(kernel, "gemm", "float16", contract=Contract(accumulate="hopper-16bit")) is None


def test_a_bias_is_seen_again_by_its_repro_line(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(leaning.gemm_int4(leaning.truncated), "gemm_int4", "bfloat16", shapes=AVERAGED)
    case = next(iter(bias_cases(plan.sampler)))
    assert case.protocol == "bias"
    line = repro_line(plan.settings, "", case)
    monkeypatch.setattr(
        "assay.verify.examination.repro.load_target", lambda target: leaning.gemm_int4(leaning.truncated)
    )
    again = run_line(line, "any:thing").failure
    assert again.kind == "bias"


@pytest.mark.evidence
def test_examine_says_bias() -> None:
    verdict = examine(leaning.gemm_int4(leaning.truncated), "gemm_int4", dtype="bfloat16", examples=0)
    assert verdict.outcome == "FAIL"
    assert failure_of(verdict).kind == "bias"
    assert verdict.worst <= 1


@given(total=st.floats(-1e3, 1e3), free=st.floats(0, 1e3))
def test_a_statistic_leans_only_beyond_what_is_free(total: float, free: float) -> None:
    side = Score("y", "mean", total, free, 10).side
    assert side == (0 if abs(total) <= MARGIN * free else math.copysign(1, total))


@pytest.mark.parametrize("distribution", GENERAL)
def test_the_correctly_rounded_result_has_no_bias(distribution: str) -> None:
    """Where every result is the exact one's rounding nothing leans, whatever the numbers: that is the null."""

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return round_to(a.double() @ b.double(), "bfloat16").to(torch.bfloat16)

    plan = plan_for(kernel, "gemm", "bfloat16")
    base = next(iter(bias_cases(plan.sampler)))
    case = replace(base, protocol="once", values=dict.fromkeys(base.values, distribution))
    result = plan.harness.try_case(case)
    found = scores(result, Contract(), plan.harness.oracle.evaluate_in)
    assert found is not None
    assert all(abs(score.total) <= 1e-3 * score.elements for score in found)


def exceedances(plan: Plan, units: int) -> Iterator[tuple[Case, str, int, int]]:
    """Of each series, statistic and side: how many of ``units`` calls with fresh data lie beyond the margin."""
    harness = plan.harness
    for case in bias_cases(plan.sampler):
        counts: dict[tuple[str, int], int] = {}
        for unit in range(units):
            single = replace(case, protocol="once", seed=case.seed + 1_000_003 * (unit + 1))
            for score in scores(harness.try_case(single), harness.contract, harness.oracle.evaluate_in) or ():
                for side in (-1, 1):
                    name = (f"{score.result} {score.statistic}", side)
                    counts[name] = counts.get(name, 0) + (score.side == side)
        for (name, side), count in counts.items():
            yield case, name, side, count


def upper_limit(count: int, of: int) -> float:
    """The probability above which so few would be seen with less than 0.1 %, by Chernoff's bound n KL(k/n, p)."""
    share, low, high = count / of, count / of, 1.0
    for _ in range(60):
        p = (low + high) / 2
        terms = ((share, p), (1 - share, 1 - p))
        apart = sum(part * math.log(part / chance) for part, chance in terms if part and chance)
        low, high = (low, p) if of * apart > math.log(1000) else (p, high)
    return high


@pytest.mark.evidence
@pytest.mark.parametrize("name", HONEST)
def test_the_rate_of_false_alarms_is_below_what_is_stated(name: str) -> None:
    """An honest call exceeds on a given side in at most 55 %: 48 questions at that rate, 32 calls each, are below 1e-6.

    The upper limit at 99.9 %, on small sizes, where calls are cheap and statistics widest.
    """
    kernel, op, dtype = HONEST[name]
    units = 1500
    for case, statistic, side, count in exceedances(plan_for(kernel, op, dtype, shapes=SMALL.get(op)), units):
        limit = upper_limit(count, units)
        print(f"{name}: {statistic} {side:+d}: {count} of {units}, at most {limit:.3f} ({case.values})")
        assert 48 * limit**UNITS <= RATE


@pytest.mark.parametrize("op", specs())
def test_the_dimension_of_growth_is_one_that_is_summed(op: str) -> None:
    """Its symbol is the op's own; ops that sum nothing, or over lengths that no one symbol is, have none."""
    symbol, summed, symbols = reduced(spec(op)), spec(op).reduction, spec(op).signature().symbols
    assert symbol == (summed.over if summed and summed.over in symbols else None)
    expected = {
        "softmax": "N",
        "layernorm": "N",
        "gemm": "K",
        "gemm_int4": "K",
        "attention": "Sk",
        "attention_backward": "Sk",
        "cross_entropy": "V",
        "all_reduce": "R",
        "attention_decode": None,
        "attention_varlen": None,
        "moe": None,
        "rope": None,
        "gelu": None,
    }
    assert symbol == expected.get(op, symbol)


def test_error_grows_as_the_order_of_the_sum_makes_it() -> None:
    orders = {"truncating": insides.gemm(add=insides.cut_to(24)), "pairwise": insides.gemm(insides.pairwise)}
    orders["sequential"] = insides.gemm()
    found = {}
    for name, kernel in orders.items():
        plan = plan_for(kernel, "gemm", "float32")
        fit = growth(plan.harness, plan.sampler, lengths=(32, 64, 128, 256, 512))
        assert fit.low <= fit.exponent <= fit.high
        found[name] = fit.exponent
    assert 0.8 < found["truncating"] < 1.2
    assert 0.25 < found["sequential"] < 0.75
    assert abs(found["pairwise"]) < 0.25


@given(exact=st.floats(1e-3, 1e3), bits=st.integers(1, 20))
def test_significant_bits_are_counted(exact: float, bits: int) -> None:
    """A result off by 2^-s of itself has s significant bits, a right one all that the format has."""
    value = torch.tensor([exact, exact], dtype=torch.float64)
    got = value * torch.tensor([1 + 2.0**-bits, 1.0], dtype=torch.float64)
    found = significant_bits(got, value, format_named("float32"))
    assert math.isclose(float(found[0]), bits, abs_tol=1e-6)
    assert float(found[1]) == 24


def test_results_that_are_zero_have_no_significant_bits() -> None:
    none = significant_bits(torch.zeros(3), torch.zeros(3), format_named("float32"))
    assert bool(none.isnan().all())
    with pytest.raises(Unseen):
        summary(none, format_named("float32"))


CONTRACT = Contract(nonfinite="unspecified", stages={"inner": "input"})
NEXT = 1 + 2.0**-12
INNER: dict[str, tuple[Callable[..., Any], Kernel]] = {
    "silu": (lambda xp, x: xp.gate_mul(x, xp.sigmoid(x)), torch.nn.functional.silu),
    "gelu": (
        lambda xp, x: xp.gate_mul(x, (xp.erf(x * xp.constant(lambda root, pi: 1 / root(2)), absolute=True) + 1) * 0.5),
        torch.nn.functional.gelu,
    ),
    "exp": (lambda xp, x: xp.exp(x), torch.exp),
    "sigmoid": (lambda xp, x: xp.sigmoid(x), torch.sigmoid),
    "tanh": (lambda xp, x: xp.tanh(x), torch.tanh),
    "third": (lambda xp, x: x / 3.0, lambda x: x / 3),
    "square": (lambda xp, x: x * x, torch.square),
    "just below": (lambda xp, x: x * (2 - NEXT), lambda x: x * (2 - NEXT)),
    "just above": (lambda xp, x: x * NEXT, lambda x: x * NEXT),
}
"""The function whose value is the stage of an op, and torch's; the stage is then multiplied."""


def op_of(name: str) -> str:
    """The op that multiplies the rounded function of one tensor by another."""
    inner, op = INNER[name][0], f"staged_{name.replace(' ', '_')}"

    @define(op, "x[R,N], up[R,N] -> y[R,N]", stages={"inner": None}, rows="R", columns="N", public=False)
    def definition(xp: Any, x: Any, up: Any) -> Any:
        return xp.round(inner(xp, x), "inner") * up

    return op


def kernel_of(name: str, inner: str | None = "nearest", store: str = "nearest") -> Kernel:
    """The op's kernel, with its stage and its store rounded in these modes; None: the stage is left as it is."""

    def kernel(x: Tensor, up: Tensor) -> Tensor:
        value = INNER[name][1](x.float())
        value = value if inner is None else round_to(value, x.dtype, inner).float()
        return round_to(value * up.float(), x.dtype, store).to(x.dtype)

    return kernel


def staged_bias(kernel: Kernel, op: str, dtype: str = "bfloat16") -> Failure | None:
    return leaning_of(kernel, op, dtype, contract=CONTRACT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", INNER)
def test_a_stage_rounded_to_nearest_or_not_at_all_does_not_lean(name: str, dtype: str) -> None:
    op = op_of(name)
    assert staged_bias(kernel_of(name), op, dtype) is None
    assert staged_bias(kernel_of(name, None), op, dtype) is None


@pytest.mark.parametrize("name", [name for name in INNER if not name.startswith("just")])
def test_a_truncated_stage_or_store_is_still_found(name: str) -> None:
    op = op_of(name)
    for planted in ({"inner": "toward_zero"}, {"store": "toward_zero"}):
        failure = staged_bias(kernel_of(name, **planted), op)
        assert failure.kind in ("contract", "bias")


def test_a_truncated_stage_within_the_radius_is_found_by_its_bias() -> None:
    op = op_of("third")

    def kernel(x: Tensor, up: Tensor) -> Tensor:
        held = round_to(x.float() / 3, "bfloat16", "toward_zero").float()
        return (round_to(x.float() / 3 * 0.5, "bfloat16").float() * up.float() + held * 0.5 * up.float()).to(x.dtype)

    failure = staged_bias(kernel, op)
    assert failure.kind == "bias"
    assert failure.side in ("downward", "toward zero")


def test_part_of_a_stage_rounded_does_not_lean() -> None:
    op = op_of("silu")

    def kernel(x: Tensor, up: Tensor) -> Tensor:
        value = torch.nn.functional.silu(x.float())
        value[::2] = value[::2].to(x.dtype).float()
        return (value * up.float()).to(x.dtype)

    assert staged_bias(kernel, op) is None


@define("by_logarithm", "x[R,N] -> y[R,N]", rows="R", columns="N", public=False)
def by_logarithm(xp: Any, x: Any) -> Any:
    """|x| by way of two functions: of every eighth float16 number bfloat16 has a midpoint."""
    return xp.exp(xp.log(xp.abs(x)))


def test_results_that_crowd_at_midpoints_do_not_lean() -> None:
    """Errors of a float32 ulp that decide to which side a midpoint is stored are the contract's own."""

    def kernel(x: Tensor) -> Tensor:
        return (torch.exp(torch.log(x.float().abs())) * (1 - 2.0**-23)).to(torch.bfloat16)

    settings = {"contract": Contract(nonfinite="unspecified"), "out_dtype": "bfloat16"}
    assert leaning_of(kernel, "by_logarithm", "float16", **settings) is None


def test_attention_with_equal_scores_does_not_lean() -> None:
    """Probabilities just below one are all rounded up before the division; it is the kernel's to choose the place."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        groups = q.shape[1] // max(k.shape[1], 1)
        keys, values = (x.float().repeat_interleave(groups, 1) for x in (k, v))
        scores = q.float() @ keys.transpose(-1, -2) * scale
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return weights.to(q.dtype).float() @ values / weights.sum(-1, keepdim=True)

    shapes = {"B": [1], "Hkv": [1], "H": [1], "Sq": [16], "Sk": [48], "D": [16], "Dv": [16]}
    settings = {"shapes": shapes, "options": {"scale": [2.0**-10]}, "contract": Contract(), "out_dtype": "float32"}
    assert leaning_of(kernel, "attention", "bfloat16", **settings) is None


def test_ways_are_those_of_the_stages_that_round() -> None:
    """Each combination of stages coarser than the arithmetic, attention's weights in three ways; no more than that."""

    def count(stages: dict[str, str]) -> int:
        model = Contract().model(definition, format_named("bfloat16"))
        return len(list(stage_roundings(replace(model, stages={name: format_named(f) for name, f in stages.items()}))))

    definition = make_plan(kernel_of("exp"), Settings(op_of("exp"), "bfloat16")).sampler.definition
    assert count({}) == count({"a": "float32"}) == 0
    assert count({"a": "bfloat16"}) == 1
    assert count({"a": "bfloat16", "b": "float16"}) == 3
    assert count({"probabilities": "bfloat16"}) == len(WEIGHTS)
    assert count(dict.fromkeys("abcde", "bfloat16")) == 6


def test_the_gated_activation_that_was_reported_passes() -> None:
    """silu rounded to bfloat16, times up: what Hugging Face's eager code does, under the contract that says so."""
    assert examine(kernel_of("silu"), op_of("silu"), dtype="bfloat16", effort="quick", contract=CONTRACT).passed
