"""Explanations: the true fault is named first, others are not, and an honest kernel gets none."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from assay.golden import spec, specs
from assay.verify import Contract, Verdict, examine
from assay.verify.calls import Call
from assay.verify.explain import explain, limits_of, scene_of
from assay.verify.inputs.sampler import Sampler, seeded
from assay.verify.suspects import suspects_of
from assay.verify.suspects.evaluation import kernel_of
from assay.verify.suspects.suspect import Suspect
from assay.verify.trial import Bench

from .suspicion import pairs, sampler_of, settings_for

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


def first_explanation(op: str, suspect: Suspect, examples: int = 5) -> str:
    """What an examination of the suspect's kernel names first; empty where it passes or names nothing."""
    settings = settings_for(op, suspect)
    assert settings is not None
    verdict = examine(kernel_of(suspect, op), op, examples=examples, **settings)
    return verdict.explanations[0].name if verdict.explanations else ""


def named(op: str, name: str) -> Suspect:
    """A suspect by its name."""
    return next(suspect for suspect in suspects_of(op) if suspect.name == name)


@pytest.mark.parametrize(("op", "name"), SAMPLE)
def test_the_true_fault_is_named_first(op: str, name: str) -> None:
    """A sample of suspects, each run as a kernel, shrunk and explained."""
    assert first_explanation(op, named(op, name)) == name


@pytest.mark.evidence
@pytest.mark.parametrize("op", specs())
def test_the_true_fault_is_named_first_in_nine_of_ten(op: str) -> None:
    """All suspects of a spec; those that an examination does not catch are another test's."""
    of_spec = [suspect for other, suspect in pairs() if other == op]
    found = {suspect.name: first_explanation(op, suspect, examples=30) for suspect in of_spec}
    wrong = {name: first for name, first in found.items() if first != name}
    assert len(wrong) <= 0.1 * len(found), wrong


def failing(kernel: Any, op: str, **settings: Any) -> Verdict:
    """The verdict on a kernel that must fail."""
    verdict = examine(kernel, op, examples=10, **settings)
    assert verdict.outcome == "FAIL", str(verdict)
    return verdict


def top_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's causal attention, whose mask is aligned at the first keys, taken for the other."""
    if 0 in q.shape:
        return torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return (torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ v.float()).to(q.dtype)


def test_a_kernel_of_someone_else_is_explained() -> None:
    """Kernels that no suspect was made of: torch's own functions, used in a wrong way."""
    verdict = failing(
        lambda q, k, v, causal: top_left(q, k, v), "attention", dtype="float32", options={"causal": ["bottom_right"]}
    )
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


def louder(y: Tensor) -> Tensor:
    """From the fifth column on a quarter more: right for some shapes and wrong for others, whatever came before."""
    return y * (1 + 0.25 * (torch.arange(y.shape[-1]) > 3))


@pytest.mark.parametrize("wrong", [lambda y: y * 0.75, lambda y: y + 0.01, lambda y: y * y, louder])
def test_a_fault_that_is_none_of_the_known_is_not_explained(wrong: Any) -> None:
    """No explanation is better than a wrong one."""
    verdict = failing(lambda x: wrong(torch.softmax(x.float(), -1)).to(x.dtype), "softmax", dtype="float32")
    assert verdict.explanations == ()


def test_an_honest_kernel_gets_no_explanation() -> None:
    """Nothing is explained where nothing failed, nor where a failure is no matter of known faults."""
    honest = examine(lambda x: torch.softmax(x.float(), -1).to(x.dtype), "softmax", dtype="bfloat16", examples=5)
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
    bench = Bench(Call(slow, {}), Contract())
    case = replace(sampler.case(seeded(1), style="small"), protocol=protocol)
    failure = bench.try_case(case).failure
    assert failure is not None
    begun.clear()
    assert explain(bench, failure, case, sampler, seconds=0.0) == ()
    assert begun == []
    over = time.monotonic() + 4 * 0.05  # on the clock
    explain(bench, failure, case, sampler, seconds=0.05)
    assert begun
    assert len([start for start in begun if start > over]) <= 2, "more than the trial under way"


def test_a_broken_suspect_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that raises, whatever it raises, explains nothing; the true fault is named all the same."""

    def fails(*_: Any) -> Any:
        return {}["no such key"]

    plain: dict[str, Any] = {"family": "formula", "description": "broken", "specs": ("softmax",)}
    broken = (
        Suspect("raises_in_applies", **plain, applies=fails, options=lambda options, case: options),
        Suspect("raises_in_inputs", **plain, inputs=fails),
        Suspect("raises_in_conduct", **plain, conduct=fails),
        Suspect("lacks_an_attribute", **plain, results=lambda xp, found, case: xp.no_such_operation(found)),
    )
    for module in ("explain", "accounts"):
        monkeypatch.setattr(f"assay.verify.{module}.suspects_of", lambda op: (*broken, *suspects_of(op)))
    for name in ("maximum_in_input_dtype", "answer_kept_by_address"):
        assert first_explanation("softmax", named("softmax", name)) == name


@pytest.mark.evidence
@pytest.mark.parametrize("op", specs())
def test_no_suspect_raises(op: str) -> None:
    """Over all sets of options what a suspect allows can be said of the right kernel's outputs, and its kernel runs."""
    raised, scenes = {}, {}
    for suspect in (suspect for other, suspect in pairs(conduct=False) if other == op):
        settings = settings_for(op, suspect)
        assert settings is not None
        sampler, listed = sampler_of(op, settings), {name: [] for name in settings["options"]}
        right, faulty = (Bench(Call(kernel_of(fault, op), listed), Contract()) for fault in (None, suspect))
        for place, options in enumerate(sampler.option_sets()):
            case = replace(sampler.case(seeded(5), style="small", options=options), protocol="once")
            if not suspect.concerns(case):
                continue
            if (settings["dtype"], place) not in scenes:
                scenes[settings["dtype"], place] = scene_of(right, case)
            scene = scenes[settings["dtype"], place]
            assert scene is not None
            try:
                limits_of(suspect, scene)
            except Exception as error:
                raised[suspect.name] = f"{type(error).__name__}: {error} ({case.options})"
            if faulty.outputs(case) is None and not suspect.crashes:
                raised[suspect.name] = f"its kernel gives no results ({case.options})"
    assert raised == {}
