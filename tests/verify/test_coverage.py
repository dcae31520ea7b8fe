"""Coverage: the factors of an examination, the pairs of them that cases cover, and cases that cover more."""

import json
import math
import re
from collections.abc import Callable
from itertools import islice, product
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

from assay.golden import spec, specs
from assay.kernels.libraries.pytorch import softmax
from assay.verify import Verdict, examine
from assay.verify.cases.factors import Covering, Factors, size_class
from assay.verify.cases.sampler import Sampler, seeded
from assay.verify.examination import run
from assay.verify.examination.phases import covering_cases, triple_cases
from assay.verify.report.schema import schema

from .examined import fails, quick
from .usual import each_third


def sampler(op: str, **fields: Any) -> Sampler:
    """A sampler of an op over all its usual options."""
    settings = spec(op).default_settings
    dtype = settings["dtype"] or "float8_e4m3fn"
    return Sampler(spec(op), dtype, **{"options": settings["options"], **fields})


def test_sizes_have_classes_by_magnitude_and_tile() -> None:
    """Each size has one; the largest is open."""
    classes = [size_class(size) for size in (1, 2, 8, 9, 16, 33, 64, 65, 512, 513, 4096, 4097, 32769)]
    assert classes[0] == "1"
    assert classes[1] == classes[2] == "2 to 8"
    assert (classes[3], classes[4]) == ("9 to 64", "9 to 64 in whole tiles")
    assert classes[-1] == classes[-2] == "over 4,096"


@pytest.mark.parametrize("op", specs())
def test_planned_cases_cover_more_pairs_than_drawn_ones(op: str) -> None:
    """All that they cover can be covered, and every case is within the limits of the sampler."""
    chosen, choose = sampler(op), seeded(0)
    factors = Factors(chosen)
    planned = list(covering_cases(Factors(chosen), (), 16))
    drawn = [chosen.case(choose) for _ in planned]
    (covered, feasible), (others, _) = (Covering(factors, cases).pairs for cases in (planned, drawn))
    assert len(planned) == 12
    assert others < covered <= feasible
    assert all(chosen.fits(case.sizes, case.signature) for case in planned)
    for case in planned:
        numbers = list(factors.levels_of(case))
        together = all(factors.feasible[one] >> other & 1 for one in numbers for other in numbers if one != other)
        assert together, f"{case} is thought to be impossible"


def test_the_same_seed_gives_the_same_planned_cases() -> None:
    first, again, other = (list(covering_cases(Factors(sampler("attention", seed=seed)), (), 8)) for seed in (3, 3, 4))
    assert first == again != other


def test_planned_cases_do_not_repeat_what_is_covered() -> None:
    """The second half covers pairs that the first half left."""
    chosen = sampler("rmsnorm")
    factors, first = Factors(chosen), list(covering_cases(Factors(chosen), (), 40))
    second = list(covering_cases(Factors(chosen), first, 40))
    assert Covering(factors, [*first, *second]).pairs[0] > 1.3 * Covering(factors, first).pairs[0]


def test_triples_are_covered_where_they_are_wanted() -> None:
    """Of a size, a distribution and an option: more of them, at the price of hardly any pairs."""
    chosen = sampler("cross_entropy")
    counts = []
    for triples in (False, True):
        cases = list(covering_cases(Factors(chosen), (), 200, triples=triples))
        covering = Covering(Factors(chosen), cases, triples=True)
        counts.append((covering.pairs[0], *covering.triples))
    (pairs, without, feasible), (others, covered, _) = counts
    assert others > 0.97 * pairs
    assert 1.1 * without < covered <= feasible
    assert f"of {feasible:,} triples of a size, a distribution and an option {feasible - covered:,} left" in (
        covering.left_out
    )


@pytest.mark.parametrize("op", each_third(op for op in specs() if spec(op).default_settings["options"]))
def test_every_triple_has_a_case(op: str) -> None:
    """Also counted by hand, from the cases alone: each size class with each kind of numbers and each option's value."""
    chosen = sampler(op)
    factors = Factors(chosen)
    cases = list(islice(triple_cases(factors, ()), 300))
    covering = Covering(factors, cases, triples=True)
    covered, feasible = covering.triples
    assert all(chosen.fits(case.sizes, case.signature) for case in cases)
    assert covered > 0.9 * feasible or len(cases) == 300  # a size may be possible only as no planned case has it
    by_hand = set()
    for case in cases:
        numbers = [*factors.levels_of(case)]
        kinds = [
            [each for each in numbers if mask >> each & 1] for mask in (factors.sizes, factors.options, factors.values)
        ]
        by_hand |= {*product(*kinds)}
    possible = {(s, o, v) for s, o, some in factors.triples() for v in range(some.bit_length()) if some >> v & 1}
    assert len(by_hand & possible) == covered > 0
    assert len(possible) == feasible


def test_what_no_case_can_have_is_no_triple() -> None:
    """One of a single expert can't choose two, whatever the logits."""
    factors = Factors(sampler("moe_route", options={"top_k": [1, 2], "scoring": ["softmax", "sigmoid"]}))
    assert len(list(triple_cases(factors, ()))) > 50
    names = list(factors.levels)
    assert {(names[size], names[option]) for size, option in factors.impossible} == {
        (("size of E", "1"), ("option top_k", "2"))
    }


def test_a_thorough_effort_leaves_no_triple(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of one size class, kind of numbers and option is found; usual has no such phase."""
    monkeypatch.setattr(run, "PHASES", tuple(each for each in run.PHASES if each[0] == "triples"))
    monkeypatch.setattr(run.Run, "allowance", lambda *_: 60.0)

    def right(x: Tensor, approximate: str = "none") -> Tensor:
        return torch.nn.functional.gelu(x, approximate=approximate)

    def wrong(x: Tensor, approximate: str = "none") -> Tensor:
        is_wrong = approximate == "tanh" and x.shape[-1] > 512 and x.abs().max() < 0.1
        return right(x, approximate) * (1 + is_wrong)

    asked: dict[str, Any] = {"dtype": "float32", "contract": "torch", "shrinking": False}
    asked |= {"options": {"approximate": ["none", "tanh"]}}
    assert examine(wrong, "gelu", effort="thorough", **asked).outcome == "FAIL"
    verdict = examine(right, "gelu", effort="thorough", **asked)
    assert verdict.passed, str(verdict)
    assert verdict.phases["triples"] > 100
    assert "triples" not in verdict.coverage.left_out
    assert "triples" not in examine(wrong, "gelu", effort="usual", **asked).phases


def test_what_no_case_can_have_is_not_missed() -> None:
    """By restrictions, by multiples, and because it is too large; few sizes are covered completely."""
    narrow = sampler("softmax", shapes={"R": [3], "N": [64, 128]}, layouts=["contiguous"], options={})
    cases = list(covering_cases(Factors(narrow), (), 120))
    covered, feasible = Covering(Factors(narrow), cases).pairs
    assert covered == feasible > 0
    groups = Factors(sampler("gemm_int4"))  # K is a multiple of g, which is 32 or more
    assert not groups.feasible[groups.levels["size of K", "1"]]
    large = Factors(sampler("gemm"))
    one, other = (large.levels[f"size of {symbol}", "over 4,096"] for symbol in "MN")
    assert large.feasible[one]
    assert not large.feasible[one] >> other & 1
    optional = Factors(sampler("attention"))  # slopes come with alibi=True alone
    absent, slopes = optional.levels["option alibi", "False"], optional.levels["values of slopes", "plain"]
    assert not optional.feasible[absent] >> slopes & 1


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    return examine(softmax, "softmax", dtype="bfloat16", effort="quick")


def test_a_verdict_has_its_coverage(verdict: Verdict) -> None:
    """As a number, in words, on the card and in JSON."""
    assert 0.3 < verdict.coverage < 1
    assert f"{verdict.coverage:.2f}" == f"{float(verdict.coverage):.2f}"
    assert "N > 16,384, R and N > 300 at once: not tried" in verdict.coverage.left_out
    assert f"covered     {verdict.coverage:.0%} of the pairs" in str(verdict)
    content = json.loads(verdict.to_json())
    jsonschema.validate(content, json.loads(json.dumps(schema())))
    assert math.isclose(content["coverage"], verdict.coverage)
    assert Verdict.from_dict(content).coverage == verdict.coverage


def test_more_effort_covers_more(verdict: Verdict) -> None:
    usual = examine(softmax, "softmax", dtype="bfloat16", shapes={"R": [1, 5, 33], "N": range(1, 600)})
    assert usual.coverage > 0.8 > verdict.coverage
    assert "R >" not in usual.coverage.left_out
    assert "elements" not in usual.coverage.left_out


def test_the_largest_tensor_is_told(verdict: Verdict) -> None:
    """What offsets of 32 bits would need is far beyond it."""
    (most,) = re.findall(r"^tensors > ([\d,]+) elements, ", verdict.coverage.left_out)
    assert 2**16 < int(most.replace(",", "")) < 2**31


def one_pass(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The variance of long rows as the mean square less the squared mean, as a kernel of one pass has it."""
    z = x.double() if x.shape[1] < 1024 else x.float()
    mean = z.mean(1, keepdim=True)
    variance = (
        (z * z).mean(1, keepdim=True) - mean * mean if x.shape[1] >= 1024 else z.var(1, correction=0, keepdim=True)
    )
    return ((z - mean) / (variance + 1e-5).sqrt() * weight + bias).to(x.dtype)


def bucket(a: Tensor, b: Tensor) -> Tensor:
    """A product that is 6 % off for M from 513 to 1024 only."""
    out = a.float() @ b.float()
    return (out * 1.06 if 512 < a.shape[0] <= 1024 else out).to(a.dtype)


def far_heads(*tensors: Tensor) -> Tensor:
    """Heads from the 65th on are those 64 before."""
    from assay.verify.explanation.fault_models.evaluation import kernel_of

    out: Tensor = kernel_of(None, "mla_decode")(*tensors)
    return torch.cat([out[:, :64], out[:, : max(out.shape[1] - 64, 0)]], 1)


def long_scan(u: Tensor, *others: Tensor) -> Tensor:
    """A scan that begins anew after 4,096 positions."""
    from assay.verify.explanation.fault_models.evaluation import kernel_of

    delta, a, b, c, skip = others
    parts = range(0, u.shape[2], 4096)
    cut = ([x[:, :, first : first + 4096] for x in (u, delta, b, c)] for first in parts)
    return torch.cat([kernel_of(None, "selective_scan")(x, d, a, y, z, skip) for x, d, y, z in cut], 2)


@pytest.mark.parametrize(
    ("kernel", "op"),
    [(one_pass, "layernorm"), (bucket, "gemm"), (far_heads, "mla_decode"), (long_scan, "selective_scan")],
)
def test_a_fault_of_large_sizes_or_rare_pairs_is_found(kernel: Callable[..., Any], op: str) -> None:
    """Each shows only beyond the sizes that the op's lists once had, or for one distribution on long rows."""
    fails(examine(kernel, op, dtype="float32", shrinking=False, every_aspect=False))


def clamped(x: Tensor, dy: Tensor, eps: float = 1e-6, clamp: str = "sum") -> Tensor:
    """The gradient of rows whose norm is below the clamp is that of others."""
    squares = x.pow(2).sum(-1, keepdim=True)
    scale = (squares + eps).rsqrt() if clamp == "sum" else 1 / squares.sqrt().clamp(min=eps)
    return scale * (dy - x * scale * scale * (x * dy).sum(-1, keepdim=True))


def test_a_fault_of_rows_about_an_epsilon_is_found() -> None:
    settings: dict[str, Any] = {"options": {"clamp": ["maximum"]}, "examples": 0, "every_aspect": False}
    verdict = quick(clamped, "l2norm_backward", "float32", **settings)
    fails(verdict)
    assert verdict.failure is not None
    assert "faint" in verdict.failure.case.values.values()


def late(u: Tensor, delta: Tensor, *others: Tensor, softplus: bool) -> Tensor:
    """Steps from 5 on are taken for their own softplus, which is 0.13 % more."""
    from assay.verify.explanation.fault_models.evaluation import kernel_of

    step = torch.where(delta > 5, delta, torch.nn.functional.softplus(delta)) if softplus else delta
    result: Tensor = kernel_of(None, "selective_scan")(u, step, *others, softplus=False)
    return result


def test_a_softplus_that_ends_early_is_found() -> None:
    few = {"B": [1, 2], "D": [1, 3], "L": [1, 9], "S": [1, 4]}
    settings: dict[str, Any] = {"options": {"softplus": [True]}, "examples": 0, "every_aspect": False}
    fails(quick(late, "selective_scan", "float32", shapes=few, **settings))


def test_a_softplus_that_loses_small_steps_is_found() -> None:
    def scan(u: Tensor, delta: Tensor, *others: Tensor, softplus: bool) -> Tensor:
        from assay.verify.explanation.fault_models.evaluation import kernel_of

        step = (1 + delta.exp()).log() if softplus else delta
        result: Tensor = kernel_of(None, "selective_scan")(u, step, *others, softplus=False)
        return result

    settings: dict[str, Any] = {"options": {"softplus": [True]}, "effort": "usual", "examples": 60}
    few = {"B": [1, 2], "D": [1, 3], "L": [1, 9, 40], "S": [1, 4]}
    fails(quick(scan, "selective_scan", "float32", shapes=few, every_aspect=False, **settings))
