"""Explanations: the true fault is named first, others are not, and an honest kernel gets none."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from assay.golden import spec, specs
from assay.verify import Contract, Verdict, examine
from assay.verify.cases.sampler import Sampler, seeded
from assay.verify.explanation.explain import Explained, explain
from assay.verify.explanation.fault_models import fault_models_of
from assay.verify.explanation.fault_models.evaluation import kernel_of
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.explanation.fault_models.fault_tolerance import limits_of, observation_of
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness
from tests.zoo.attention import attention_flash

from .examined import quick
from .explained import are_alike, explanation_of, first_named, model
from .fault_cases import pairs, sampler_of, settings_for
from .usual import only

Tensor = torch.Tensor
SAMPLE = (
    ("softmax", "maximum_in_input_dtype"),
    ("rmsnorm", "mean_subtracted"),
    ("attention", "diagonal_one_too_far"),
    ("swiglu", "gate_and_up_swapped"),
    ("moe_route", "renormalisation_dropped"),
    ("rope", "rope_sign"),
    ("softmax", "answer_kept_by_address"),
)


def examined(op: str, fault: FaultModel, **more: Any) -> Verdict:
    settings = settings_for(op, fault)
    assert settings is not None
    return examine(kernel_of(fault, op), op, effort="quick", every_aspect=False, **settings, **more)


@pytest.mark.parametrize(("op", "name"), SAMPLE)
def test_the_true_fault_is_named_first(op: str, name: str) -> None:
    assert first_named(examined(op, model(op, name))) == name


def test_faults_that_give_the_same_are_told_from_others() -> None:
    """By values on fresh cases: a tail of 16 is none of 64, and a variance of squares is one whatever it is called."""
    case = Sampler(spec("gemm"), "bfloat16").case(seeded(1), style="small")
    dropped, none = (model("gemm", name) for name in ("tail_of_sum_dropped", "only_whole_blocks_of_k"))
    assert are_alike("gemm", dropped, dropped, case)
    assert not are_alike("gemm", dropped, model("gemm", "tail_of_k_dropped_128"), case)
    assert not are_alike("gemm", none, dropped, case)
    twice = model("softmax", "answer_kept_by_shape")
    assert not are_alike("softmax", twice, model("softmax", "output_added_up"), case)


def test_what_is_told_of_a_fault_is_right_wrong_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = model("softmax", "softmax_base_2")
    assert explanation_of("softmax", fault).outcome == "right"
    others = tuple(each for each in fault_models_of("softmax") if each.name != "softmax_base_2")
    monkeypatch.setattr("assay.verify.explanation.explain.fault_models_of", lambda op: others)
    assert explanation_of("softmax", fault).outcome == "none"
    renamed = (replace(fault, name="softmax_sum_not_rescaled"),)
    monkeypatch.setattr("assay.verify.explanation.explain.fault_models_of", lambda op: renamed)
    assert explanation_of("softmax", fault).outcome == "wrong"
    monkeypatch.setattr("tests.verify.explained.kernel_of", lambda fault, op: kernel_of(None, op))
    assert explanation_of("softmax", fault).outcome == "passes"


def failing(kernel: Any, op: str, **settings: Any) -> Verdict:
    verdict = examine(kernel, op, effort="quick", examples=10, every_aspect=False, **settings)
    assert verdict.outcome == "FAIL", str(verdict)
    return verdict


def test_a_kernel_of_someone_else_is_explained() -> None:
    small = {"B": [1], "Hkv": [1], "H": [1], "Sq": range(1, 9), "Sk": range(1, 40), "D": [16], "Dv": [16]}
    settings = {"dtype": "float32", "options": {"causal": ["bottom_right"]}, "shapes": small}
    verdict = failing(lambda q, k, v, causal: attention_flash(q, k, v, causal="top_left"), "attention", **settings)
    assert verdict.explanations[0].name == "top_left_for_bottom_right"

    def unbiased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x, spread = x.float(), x.float().var(-1, keepdim=True) if x.shape[-1] > 1 else torch.zeros(len(x), 1)
        return ((x - x.mean(-1, keepdim=True)) * torch.rsqrt(spread + 1e-5) * weight + bias).to(weight.dtype)

    verdict = failing(unbiased, "layernorm", dtype="bfloat16", shapes={"N": range(2, 200)})
    assert verdict.explanations[0].name == "unbiased_variance"


def test_the_tightest_contract_that_is_kept_is_named() -> None:
    """A kernel that only sums in float16 keeps that contract, and the report says so."""

    def half(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)
        for k in range(a.shape[1]):
            total = (total.float() + a[:, k : k + 1].float() * b[k].float()).half()
        return total.to(a.dtype)

    verdict = failing(half, "gemm", dtype="float32", shapes={"K": range(1, 70)})
    assert verdict.explanations[0].name == "accumulated_in_float16"
    assert "Contract(accumulate='float16')" in str(verdict)


def sums_in_bfloat16(x: Tensor) -> Tensor:
    """Softmax whose sum is rounded to bfloat16 after each 8 terms."""
    x, total = (x.float() - x.float().amax(-1, keepdim=True)).exp(), torch.zeros(x.shape[0], 1)
    for part in x.split(8, -1):
        total = (total + part.sum(-1, keepdim=True)).bfloat16().float()
    return x / total


def test_narrow_sums_of_another_order_are_named() -> None:
    """A kernel that rounds its sum after other blocks than the fault does is told by how its errors are spread."""
    verdict = failing(sums_in_bfloat16, "softmax", dtype="float32")
    assert verdict.explanations[0].name == "accumulated_in_bfloat16"


def one_off(y: Tensor) -> Tensor:
    """One element in the whole output is off by a percent."""
    places = torch.arange(y.numel()).reshape(y.shape)
    return torch.where(places == y.numel() // 2, y * 1.01, y)


def noisy(y: Tensor) -> Tensor:
    """Each element is off by about a thousandth, whatever sum it was divided by."""
    return y * (1 + 1e-3 * torch.randn(y.shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("wrong", "dtype"),
    only(
        lambda row: (row[0] is noisy) == (row[1] == "bfloat16"),
        [(wrong, dtype) for wrong in (lambda y: y * 1.01, one_off, noisy) for dtype in ("float32", "bfloat16")],
    ),
)
def test_small_errors_are_not_taken_for_narrow_sums(wrong: Any, dtype: str) -> None:
    """Sums in bfloat16 allow them all, but spread them otherwise over the output: none is named."""
    kernel = lambda x: wrong(torch.softmax(x.float(), -1)).to(x.dtype)  # noqa: E731
    verdict = quick(kernel, dtype=dtype, examples=2, shrinking=True)
    assert verdict.explanations == ()
    assert dtype == "bfloat16" or verdict.outcome == "FAIL"


def quantised(returned: int, used: int) -> Any:
    """`quantize_int4` whose zero-points are so much too large: those that it returns, and those of its codes."""

    def kernel(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (rows, columns), groups = x.shape, -(-x.shape[1] // 128)
        parts = torch.nn.functional.pad(x.float(), (0, groups * 128 - columns)).reshape(rows, groups, 128)
        below, above = -parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = (above + below) / 15
        step = torch.where(scale == 0, 1.0, scale)
        zero = torch.round(below / step)
        codes = torch.round(parts / step[..., None]) + (zero + used).clamp(0, 15)[..., None]
        codes = codes.clamp(0, 15).reshape(rows, groups * 128)[:, :columns]
        return codes.to(torch.uint8), scale, (zero + returned).clamp(0, 15).to(torch.uint8)

    return kernel


ZERO_POINTS = [
    (1, 1, "zero_point_too_large"), (-1, -1, "zero_point_too_small"), (-1, 0, "zero_point_stored_less_one"),
    (0, 1, "zero_point_larger_in_codes"), (0, -1, "zero_point_smaller_in_codes"),
]  # fmt: skip


@pytest.mark.parametrize(("returned", "used", "name"), only(lambda row: row[1] == 0, ZERO_POINTS))
def test_zero_points_off_by_one_are_named(returned: int, used: int, name: str) -> None:
    assert failing(quantised(returned, used), "quantize_int4", dtype="bfloat16").explanations[0].name == name


@pytest.mark.parametrize(
    ("off", "name"), only(lambda row: row[0] == 1, [(1, "zero_point_one_more"), (-1, "zero_point_one_less")])
)
def test_zero_points_off_by_one_are_named_in_products(off: int, name: str) -> None:
    def kernel(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        codes = torch.stack([qweight & 15, qweight >> 4], 1).reshape(-1, qweight.shape[1])
        each = codes.shape[0] // scales.shape[0]
        points, steps = ((y.float() + more).repeat_interleave(each, 0) for y, more in ((zeros, off), (scales, 0)))
        return (x.float() @ ((codes.float() - points) * steps).to(x.dtype).float()).to(x.dtype)

    assert failing(kernel, "gemm_int4", dtype="bfloat16").explanations[0].name == name


def louder(y: Tensor) -> Tensor:
    """From the fifth column on a quarter more: right for some shapes and wrong for others, whatever came before."""
    return y * (1 + 0.25 * (torch.arange(y.shape[-1]) > 3))


@pytest.mark.parametrize("wrong", [lambda y: y * 0.75, louder, pytest.param(torch.square, marks=pytest.mark.evidence)])
def test_a_fault_that_is_none_of_the_known_is_not_explained(wrong: Any) -> None:
    verdict = failing(lambda x: wrong(torch.softmax(x.float(), -1)).to(x.dtype), "softmax", dtype="float32")
    assert verdict.explanations == ()


def test_an_honest_kernel_gets_no_explanation() -> None:
    honest = quick(lambda x: torch.softmax(x.float(), -1).to(x.dtype), dtype="bfloat16", examples=5)
    assert honest.passed
    assert honest.explanations == ()
    assert failing(lambda x: x[:, :1], "softmax", dtype="bfloat16").explanations == ()


def adding_up(x: Tensor) -> Tensor:
    """Each call gives other results than the one before."""
    adding_up.__dict__["calls"] = adding_up.__dict__.get("calls", 0) + 1
    return torch.softmax(x, -1) * adding_up.__dict__["calls"]


@pytest.mark.parametrize(("wrong", "protocol"), [(lambda x: torch.softmax(x, -1) * 2, "once"), (adding_up, "repeat")])
def test_explaining_ends_in_time(wrong: Any, protocol: str) -> None:
    """However slow the kernel, no trial of it is begun after the deadline; with no time it isn't called at all."""
    begun: list[float] = []

    def slow(x: Tensor) -> Tensor:
        begun.append(time.monotonic())
        time.sleep(0.05)
        return wrong(x)

    sampler = Sampler(spec("softmax"), "float32")
    harness = KernelHarness(Call(slow, {}), Contract())
    case = replace(sampler.case(seeded(1), style="small"), protocol=protocol)
    failure = harness.try_case(case).failure
    assert failure is not None
    begun.clear()
    assert explain(harness, failure, case, sampler, seconds=0.0) == Explained()
    assert begun == []
    over = time.monotonic() + 4 * 0.05  # on the clock
    explain(harness, failure, case, sampler, seconds=0.05)
    assert begun
    assert len([start for start in begun if start > over]) <= 2, "more than the trial under way"


def test_a_broken_fault_model_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that raises, whatever it raises, explains nothing, and is in the JSON alone; the true fault is named."""

    def fails(*_: Any) -> Any:
        return {}["no such key"]

    plain: dict[str, Any] = {"family": "formula", "description": "broken", "specs": ("softmax",)}
    broken = (
        FaultModel("raises_in_applies", **plain, applies=fails, options=lambda options, case: options),
        FaultModel("raises_in_inputs", **plain, inputs=fails),
        FaultModel("raises_in_side_effects", **plain, side_effects=fails),
        FaultModel("lacks_an_attribute", **plain, results=lambda xp, found, case: xp.no_such_operation(found)),
    )
    more = (*broken, *fault_models_of("softmax"))
    monkeypatch.setattr("assay.verify.explanation.explain.fault_models_of", lambda op: more)
    for name in ("maximum_in_input_dtype", "answer_kept_by_address"):
        verdict = examined("softmax", model("softmax", name))
        assert verdict.explanations[0].name == name
        assert any("raised KeyError" in words for words in verdict.not_asked)
        assert "raised" not in str(verdict)


@pytest.mark.evidence
@pytest.mark.parametrize("op", specs())
def test_no_fault_model_raises(op: str) -> None:
    """Over all sets of options what a fault allows can be said of the right kernel's outputs, and its kernel runs."""
    raised, observations = {}, {}
    for fault in (fault for other, fault in pairs(side_effects=False) if other == op):
        settings = settings_for(op, fault)
        sampler, listed = sampler_of(op, settings), {name: [] for name in settings["options"]}
        right, faulty = (KernelHarness(Call(kernel_of(present, op), listed), Contract()) for present in (None, fault))
        for place, options in enumerate(sampler.option_sets()):
            case = replace(sampler.case(seeded(5), style="small", options=options), protocol="once")
            if not fault.concerns(case):
                continue
            if (settings["dtype"], place) not in observations:
                observations[settings["dtype"], place] = observation_of(right, case)
            observation = observations[settings["dtype"], place]
            assert observation is not None
            try:
                limits_of(fault, observation)
            except Exception as error:
                raised[fault.name] = f"{type(error).__name__}: {error} ({case.options})"
            if faulty.outputs(case) is None and not fault.crashes:
                raised[fault.name] = f"its kernel gives no results ({case.options})"
    assert raised == {}
