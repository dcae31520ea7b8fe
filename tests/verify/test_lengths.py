"""Long sums: faults that begin at some length are found, and honest orders of summation are not suspect."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.golden import spec
from assay.golden.arithmetic import Real
from assay.golden.evaluation.call import run
from assay.verify import Verdict, examine
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler, with_values
from assay.verify.contract import Contract
from assay.verify.examination.phases import length_cases, length_of
from assay.verify.examination.plan import make_plan
from assay.verify.examination.run import Run
from assay.verify.findings import Detectable
from assay.verify.report.summary import line_of
from assay.verify.settings import Settings

from .examined import failure_of
from .usual import by_turns, only

Kernel = Callable[..., Tensor]
Total = Callable[[Tensor], Tensor]


def pairwise(x: Tensor) -> Tensor:
    """The sum along the last axis by halves, in float32."""
    while x.shape[-1] > 1:
        even = x[..., : x.shape[-1] // 2 * 2]
        x = torch.cat([even[..., ::2] + even[..., 1::2], x[..., even.shape[-1] :]], -1)
    return x.sum(-1)


def sequential(x: Tensor) -> Tensor:
    """The sum along the last axis one after the other, in float32."""
    return torch.from_numpy(x.numpy().cumsum(-1)[..., -1]) if x.shape[-1] else x.sum(-1)


def truncating(x: Tensor) -> Tensor:
    """The same with every partial sum cut off towards zero, as a matrix unit does."""
    total = torch.zeros(x.shape[:-1])
    for part in x.unbind(-1):
        exact = total.double() + part.double()
        rounded = exact.float()
        total = torch.where(rounded.double().abs() > exact.abs(), torch.nextafter(rounded, torch.zeros(())), rounded)
    return total


def exponentials(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit of each row, and the exponentials of what the rest lie below it."""
    values = x.float()
    largest = values.amax(-1, keepdim=True)
    return largest, torch.exp(values - largest)


def softmax(x: Tensor, total: Total = pairwise) -> Tensor:
    _, weights = exponentials(x)
    return (weights / total(weights).unsqueeze(-1)).to(x.dtype)


def softmax_online(x: Tensor, total: Total = pairwise, block: int = 16) -> Tensor:
    """By a running maximum and sum of exponentials, rescaled at every block."""
    values = x.float()
    largest, sums = torch.full((*x.shape[:-1], 1), -math.inf), torch.zeros(*x.shape[:-1], 1)
    for part in values.split(block, -1):
        new = torch.maximum(largest, part.amax(-1, keepdim=True))
        sums = sums * torch.exp(largest - new) + total(torch.exp(part - new)).unsqueeze(-1)
        largest = new
    return (torch.exp(values - largest) / sums).to(x.dtype)


def logsumexp(x: Tensor, total: Total = pairwise) -> Tensor:
    largest, weights = exponentials(x)
    return (largest[..., 0] + torch.log(total(weights))).to(x.dtype)


def cross_entropy(logits: Tensor, target: Tensor, total: Total = pairwise) -> Tensor:
    largest, weights = exponentials(logits)
    picked = logits.float().gather(-1, target.clamp(min=0)[:, None])[:, 0]
    losses = torch.log(total(weights)) - (picked - largest[:, 0])
    kept = target != -100
    return torch.where(kept, losses, 0.0).sum() / kept.sum()


def rmsnorm(x: Tensor, weight: Tensor, total: Total = pairwise) -> Tensor:
    values = x.float()
    mean = total(values * values).unsqueeze(-1) / x.shape[-1]
    return (values * torch.rsqrt(mean + 1e-6) * weight.float()).to(x.dtype)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, total: Total = pairwise) -> Tensor:
    values = x.float()
    centred = values - total(values).unsqueeze(-1) / x.shape[-1]
    variance = total(centred * centred).unsqueeze(-1) / x.shape[-1]
    return (centred * torch.rsqrt(variance + 1e-5) * weight.float() + bias.float()).to(x.dtype)


def gemm(a: Tensor, b: Tensor, total: Total = pairwise) -> Tensor:
    return total(a.float()[:, None, :] * b.float().T[None].contiguous()).to(a.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, total: Total = pairwise) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    k, v = (part.float().repeat_interleave(shared, 1) for part in (k, v))
    weights = exponentials(q.float() @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]))[1]
    out = total(weights[..., None, :] * v.transpose(-1, -2)[:, :, None].contiguous())
    return (out / total(weights).unsqueeze(-1)).to(q.dtype)


OPS: dict[str, Kernel] = {
    "softmax": softmax,
    "logsumexp": logsumexp,
    "cross_entropy": cross_entropy,
    "rmsnorm": rmsnorm,
    "layernorm": layernorm,
    "gemm": gemm,
    "attention": attention,
}


HIDDEN = {"bias", "range"}
"""Aspects in which a fault of long sums shows too: in series of calls, and where numbers have a large mean."""


def looked_at(kernel: Kernel, op: str, dtype: str, contract: Contract | None = None) -> Run:
    """The course of an examination that tries growing lengths alone."""
    settings = Settings(op, dtype=dtype, contract=contract or Contract(), examples=0)
    run = Run(make_plan(kernel, settings), lambda phase, done, of: None)
    run.execute(("lengths",))
    return run


def found(kernel: Kernel, op: str, dtype: str) -> set[str]:
    """The aspects that it finds broken or suspect."""
    tally = looked_at(kernel, op, dtype).tally
    return {name for name, aspect in tally.aspects.items() if aspect.status in ("broken", "suspect")}


def off_from(op: str, least: int, size: float) -> Kernel:
    """The op's kernel, whose results have a relative error where a sum has so many terms."""

    def kernel(*tensors: Tensor) -> Tensor:
        terms = tensors[1].shape[2] if op == "attention" else tensors[0].shape[-1]
        y = OPS[op](*tensors)
        return (y.float() * (1 + size)).to(y.dtype) if terms >= least else y

    return kernel


@pytest.mark.parametrize(("op", "least"), by_turns(OPS, [512, 2048, 8192]))
def test_a_fault_of_long_sums_alone_is_found(op: str, least: int) -> None:
    assert found(off_from(op, least, 1e-4), op, "float32") - HIDDEN == {"shapes"}


@pytest.mark.parametrize("size", [pytest.param(1e-3, marks=pytest.mark.evidence), 1e-2])
def test_a_larger_fault_of_long_sums_is_found(size: float) -> None:
    """An attention off by more from 2,048 keys on."""
    assert found(off_from("attention", 2048, size), "attention", "float32") - HIDDEN == {"shapes"}


@pytest.mark.parametrize("op", only(lambda op: op in ("softmax", "gemm", "attention"), OPS))
def test_a_fault_of_long_sums_is_found_behind_a_coarse_store(op: str) -> None:
    """An output off by 1e-2 from 8,192 terms on, in bfloat16 too."""
    assert found(off_from(op, 8192, 1e-2), op, "bfloat16") - HIDDEN == {"shapes"}


@pytest.mark.parametrize(("op", "dtype"), by_turns(OPS, ["float32", "bfloat16"]))
def test_honest_sums_one_after_the_other_are_not_suspect(op: str, dtype: str) -> None:
    """Naive sums of up to 65,536 terms, which drift where the terms have few bits."""
    assert found(partial(OPS[op], total=sequential), op, dtype) == set()


@pytest.mark.parametrize("op", only(lambda op: op in ("softmax", "gemm", "attention"), OPS))
def test_honest_sums_by_halves_are_not_suspect(op: str) -> None:
    assert found(partial(OPS[op], total=pairwise), op, "float16") == set()


@pytest.mark.parametrize(("block", "dtype"), by_turns([16, 128], ["float32", "bfloat16"]))
def test_honest_blocks_are_not_suspect(block: int, dtype: str) -> None:
    """An online softmax whose sum is rescaled at every block of 16 or 128 columns."""
    assert found(partial(softmax_online, total=sequential, block=block), "softmax", dtype) == set()


def test_a_sum_that_truncates_is_suspect() -> None:
    assert found(partial(softmax, total=truncating), "softmax", "float32")


def test_a_suspect_kernel_is_warned_of_in_words() -> None:
    verdict = examine(off_from("softmax", 2048, 1e-4), "softmax", dtype="float32", examples=0)
    assert verdict.outcome == "WARN"
    assert verdict.aspects["shapes"].status == "suspect"
    failure = failure_of(verdict)
    assert failure.case.sizes["N"] == 2048
    assert "within what the contract's worst case allows, but up to" in failure.message
    assert '"N":2048' in verdict.repro
    assert Verdict.from_dict(verdict.as_dict()) == verdict


def test_every_length_tells_what_it_notices() -> None:
    """From 8 to 65,536 terms, the worst case grows as n and what is likely as its square root."""
    rows = looked_at(softmax, "softmax", "float32").detectable
    assert [row.length for row in rows] == [8, 128, 1024, 4096, 16384, 65536]
    first, last = rows[2], rows[-1]
    assert 32 < last.broken / first.broken < 128
    assert 4 < last.suspect / first.suspect < 16
    assert all(row.suspect <= row.broken for row in rows)


@pytest.mark.parametrize(
    ("op", "shapes", "lengths"),
    [
        ("softmax", {"N": range(1, 200)}, [8, 128, 199]),
        ("softmax", {"N": [256]}, [256]),
        ("attention_decode", {}, [8, 126, 1023, 4095, 16383]),
        ("gemm_int4", {}, [128, 1024, 4096, 16384, 65536]),
        ("attention_varlen", {"B": [5]}, [8, 128, 1024]),
        ("silu", {}, [8, 128, 1024, 4096, 16384, 65536]),
    ],
)
def test_lengths_are_those_that_shapes_admit(op: str, shapes: dict[str, Any], lengths: list[int]) -> None:
    sampler = Sampler(spec(op), "bfloat16", shapes=shapes)
    assert [length for length, _ in length_cases(sampler)] == lengths


def test_the_length_of_sequences_is_their_mean() -> None:
    """Rounded up, where their number doesn't divide the terms."""
    case = Sampler(spec("attention_varlen"), "float32").case(lambda values: values[0], style="small")
    sizes = {"B": 2, "Tq": 3, "H": 1, "Hkv": 1, "D": 8}
    assert [length_of(replace(case, sizes={**sizes, "Tk": keys})) for keys in (0, 6, 7)] == [0, 3, 4]


def test_a_quick_effort_has_a_second_length_though_the_next_is_too_long() -> None:
    """A delta rule over 1,024 positions is more work than a case may be; one over 128 isn't."""
    sampler = Sampler(spec("gated_delta_rule"), "bfloat16")
    assert [length for length, _ in length_cases(sampler, quick=True)] == [8, 128]


def product(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).to(a.dtype)


def test_a_length_of_which_a_check_says_nothing_is_vacuous() -> None:
    """A sum in bfloat16 may be off by n 2^-8: by 3 % of 8 terms, by more than the sum of 1,024."""
    loose: dict[str, Any] = {"dtype": "float32", "effort": "quick", "contract": Contract(accumulate="bfloat16")}
    loose |= {"shrinking": False, "examples": 0}
    verdict = examine(product, "gemm", shapes={"K": [8, 200]}, **loose)
    assert [(level.length, level.vacuous) for level in verdict.detectable] == [(8, False), (200, True)]
    assert verdict.outcome == "PASS"
    assert str(verdict).startswith("PASS, vacuous at 200 terms or more  ")
    assert [level["vacuous"] for level in json.loads(verdict.to_json())["detectable"]] == [False, True]
    verdict = examine(product, "gemm", shapes={"K": [200]}, **loose)
    assert verdict.outcome == "VACUOUS", str(verdict)
    assert str(verdict).startswith("VACUOUS  ")
    assert not examine(lambda a, b: product(a, b) * 1.2, "gemm", shapes={"K": [8, 200]}, **loose).passed


def test_every_report_of_a_verdict_names_its_vacuous_lengths() -> None:
    """A reference's too; beside PASS in text and in pytest's line, and as a reason in tables, pages and JSON."""
    loose: dict[str, Any] = {"dtype": "float32", "effort": "quick", "contract": Contract(accumulate="bfloat16")}
    loose |= {"shrinking": False, "examples": 0, "tensors": "a[M,K], b[K,N] -> y[M,N]", "shapes": {"K": [8, 200]}}
    verdict = examine(product, product, **loose)
    assert (verdict.outcome, verdict.vacuous) == ("PASS", "200 terms or more")
    assert re.fullmatch(r"at 200 terms or more an error of \d+% of the whole output passes unseen", verdict.note)
    assert line_of(verdict).words == json.loads(verdict.to_json())["note"] == verdict.note
    assert Verdict.from_dict(verdict.as_dict()).vacuous == verdict.vacuous


def test_a_longer_case_of_another_phase_may_be_vacuous_too() -> None:
    """The lengths tried end at 8; whole tiles have 64 and more terms, of which the worst case says nothing."""
    loose: dict[str, Any] = {"dtype": "float32", "contract": Contract(accumulate="bfloat16")}
    plan = make_plan(product, Settings("gemm", effort="quick", examples=0, shapes={"K": [8, 500]}, **loose))
    run = Run(plan, lambda *_: None)
    run.attempt("aligned", ordinary(plan.sampler, K=8))
    assert run.hollow == []
    run.attempt("aligned", ordinary(plan.sampler, K=500))
    (level,) = run.hollow
    assert (level.length, level.vacuous) == (500, True)
    run.detectable = [Detectable(8, 0.03, 0.03), Detectable(200, 2.0, 1.0, vacuous=True)]
    assert [level.length for level in run.levels] == [8, 200, 500]
    run.detectable = [
        Detectable(1024, 0.03, 0.03)
    ]  # a longer one says something: the other was an accident of its data
    assert [level.length for level in run.levels] == [1024]


def ordinary(sampler: Sampler, **sizes: int) -> Case:
    """A case of positive numbers with these sizes, the others 7."""
    case = sampler.case(lambda values: values[0], style="small")
    return with_values(case, "positive", sizes={"M": 7, "N": 7, **sizes}, layouts={}, protocol="once", memory="plain")


def test_gaps_between_numbers_of_a_narrow_format_make_no_length_vacuous() -> None:
    """Numbers of float8_e5m2 are up to a fourth of themselves apart."""

    def total(x: Tensor) -> Tensor:
        return x.float().sum(-1).to(torch.float8_e5m2)

    verdict = examine(total, total, tensors="x[T,D] -> y:float8_e5m2[T]", dtype="float32", effort="quick", examples=0)
    assert max(level.broken for level in verdict.detectable) > 0.1
    assert (verdict.outcome, verdict.vacuous) == ("PASS", "")


def test_a_delta_rule_with_a_decay_too_strong_is_suspect_at_length() -> None:
    """In bfloat16 the worst case of 65 positions is larger than the output; independent roundings are a tenth of it."""

    def rule(q: Any, k: Any, v: Any, gate: Any, beta: Any, *, normalized: bool, stronger: float) -> Tensor:
        options = {"scale": None, "normalized": normalized}
        (y,) = run(spec("gated_delta_rule"), Real(), (q, k, v, stronger * gate, beta), options)
        return y.to(q.dtype)

    asked: dict[str, Any] = {"dtype": "bfloat16", "effort": "quick", "options": {"normalized": [True]}, "examples": 0}
    asked |= {"shrinking": False, "shapes": {"T": [8, 65]}}
    honest = examine(partial(rule, stronger=1.0), "gated_delta_rule", **asked)
    assert honest.outcome == "PASS", str(honest)
    assert [level.length for level in honest.detectable] == [8, 65]
    assert honest.detectable[1].broken > 1 > 10 * honest.detectable[1].suspect
    assert examine(partial(rule, stronger=1.5), "gated_delta_rule", **asked).outcome in ("WARN", "FAIL")
