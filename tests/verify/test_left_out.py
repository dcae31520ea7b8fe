"""Nothing is silently left out: overflow inside, poisoned memory, threads, unjudged outputs, the order of choices."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.golden import admissible
from assay.kernels.libraries.pytorch import softmax
from assay.verify import Contract, examine
from assay.verify.cases.case import Case, all_contents
from assay.verify.comparison.oracle import BEYOND, OPEN, Oracle
from assay.verify.comparison.result import Result
from assay.verify.examination.run import Tally

from .examined import fails, failure_of, quick

HUGE = Case(
    "rmsnorm",
    {"R": 4, "N": 8},
    {"x": "float32", "weight": "float32"},
    {"eps": 1e-6, "offset": 0.0},
    {"x": "near_overflow", "weight": "normal"},
    seed=3,
)


def ratios(y: Tensor) -> tuple[int, int]:
    """How many elements are judged, and how many are wrong."""
    result = Oracle(Contract()).judge(HUGE, all_contents(HUGE), (y,))
    return result.judged, 0 if result.failure is None else result.failure.violations


def exact() -> Tensor:
    x, weight = (value.double() for value in all_contents(HUGE).values())
    return (x / x.square().mean(-1, keepdim=True).sqrt() * weight).float()


def test_what_overflows_inside_may_be_nan_or_infinite_or_follow_from_it() -> None:
    """The sum of squares is infinite in float32, whose reciprocal root is zero; and who avoids it is right too.

    No other number is: neither one beside the right one nor one that no infinity leads to.
    """
    assert ratios(exact()) == (32, 0)
    for number in (float("nan"), float("inf"), -float("inf"), 0.0):
        assert ratios(torch.full((4, 8), number)) == (32, 0)
    for factor in (1.01, -1.0, 0.5):
        assert ratios(factor * exact()) == (32, 32)


def test_a_sum_of_squares_may_overflow_whose_mean_does_not() -> None:
    values = {"x": torch.tensor([[-2.3779e19, -1e-4, 1.11e11]]), "weight": torch.ones(3), "bias": torch.full((3,), 0.5)}
    case = Case("layernorm", {"R": 1, "N": 3}, dict.fromkeys(values, "float32"), {"eps": 1e-5}, seed=0)
    x = values["x"].double()
    exact = (x - x.mean()) / x.std(correction=0) + 0.5

    def failed(y: Tensor) -> bool:
        return Oracle(Contract()).judge(case, values, (y.float(),)).failure is not None

    assert not failed(exact)
    assert not failed(torch.full_like(exact, 0.5))
    assert failed(torch.full_like(exact, 0.25))


def reads_what_it_never_wrote(x: Tensor) -> Tensor:
    fresh = torch.empty(1 << 24)  # so large that it comes from the system, as zeros
    if bool(fresh[0].isnan()):
        raise RuntimeError("a row that is no number")
    return softmax(x)


@pytest.mark.parametrize("isolate", [False, True])
def test_a_crash_that_only_poisoned_memory_provokes_is_one_of_memory(isolate: bool) -> None:
    verdict = examine(
        reads_what_it_never_wrote, "softmax", dtype="bfloat16", effort="quick", isolate=isolate, every_aspect=False
    )
    assert verdict.outcome == "FAIL"
    failure = verdict.aspects["memory"].failure
    assert failure.kind == "crash"
    assert failure.message.startswith(
        "only where fresh memory holds NaN (or 0 and 1, of integers): RuntimeError: a row"
    )


def test_a_dispatchers_own_refusal_of_poisoned_memory_is_none() -> None:
    def refuses(x: Tensor) -> Tensor:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise NotImplementedError("this compiler takes no tensors under a __torch_dispatch__ mode")
        return softmax(x)

    assert quick(refuses, dtype="bfloat16").passed


def test_a_crash_in_ordinary_memory_too_is_not_one_of_memory() -> None:
    def crashes(x: Tensor) -> Tensor:
        if x.shape[0] > 3:
            raise RuntimeError("too many rows")
        return softmax(x)

    verdict = fails(quick(crashes, dtype="bfloat16"))
    assert verdict.aspects["memory"].failure is None


@pytest.mark.parametrize(("isolate", "unlimited"), [(False, True), (True, False)])
def test_a_verdict_says_where_no_time_limit_could_act(isolate: bool, unlimited: bool) -> None:
    asked = partial(quick, softmax, dtype="bfloat16", isolate=isolate, layouts=["contiguous"], shapes={"N": [5, 16]})
    with ThreadPoolExecutor(1) as pool:
        found = [pool.submit(asked).result(), asked()]
    assert [verdict.unlimited for verdict in found] == [unlimited, False]
    assert ["no limit" in str(verdict) for verdict in found] == [unlimited, False]
    assert all(verdict.passed for verdict in found)


def test_an_output_that_is_mostly_unjudged_is_mistrusted() -> None:
    """With the reasons counted; exactly half of it is enough, and one large case is one among the others."""

    def case(judged: int, left: int, reason: str = OPEN) -> Tally:
        left_out = Counter({("y", reason): left}) if left else Counter[tuple[str, str]]()
        return Tally.of("fuzz", Result(HUGE, judged_of=Counter(y=judged, lse=9), left_out=left_out), ())

    assert case(6, 6).mostly_left_out == ""
    more = case(6, 7) + case(0, 1, BEYOND)
    assert more.mostly_left_out == f"8 of 14 elements of y were not judged: 7 {OPEN}, 1 {BEYOND}"
    assert (case(0, 8193) + case(4, 0)).mostly_left_out == ""
    zeros, others = Result(HUGE, judged=8193, nonzero=0), Result(HUGE, judged=4, nonzero=3)
    assert (Tally.of("fuzz", zeros, ()) + Tally.of("fuzz", others, ())).nonzero == 0.75


def test_a_contract_that_judges_little_is_mistrusted() -> None:
    asked: dict[str, Any] = {"dtype": "bfloat16", "effort": "quick", "examples": 0, "shapes": {"N": [4096]}}
    assert examine(softmax, "softmax", **asked).passed
    verdict = examine(softmax, "softmax", contract=Contract(accumulate="bfloat16", compute="bfloat16"), **asked)
    assert verdict.outcome in ("MISTRUSTED", "VACUOUS"), str(verdict)
    assert sum(verdict.left_out.values()) == verdict.unjudged


def test_a_kernel_of_which_zeros_are_expected_is_mistrusted() -> None:
    def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(logits, target, **options)

    verdict = examine(cross_entropy, "cross_entropy", dtype="float32", examples=0, shapes={"V": [1]})
    assert verdict.outcome == "MISTRUSTED"
    assert "other than zero" in str(verdict)


def route(logits: Tensor, *, top_k: int) -> tuple[Tensor, Tensor]:
    scores, ids = torch.topk(torch.softmax(logits.float(), -1), top_k)
    return scores / scores.sum(-1, keepdim=True), ids.to(torch.int32)


def route_by_id(logits: Tensor, *, top_k: int) -> tuple[Tensor, Tensor]:
    """The right experts with their weights, in the order of their numbers."""
    weights, ids = route(logits, top_k=top_k)
    ids, order = ids.sort(-1)
    return weights.gather(-1, order), ids


def test_the_order_of_experts_is_judged() -> None:
    asked: dict[str, Any] = {"options": {"top_k": [2, 4]}, "examples": 20}
    assert quick(route, "moe_route", "bfloat16", **asked).passed
    assert failure_of(quick(route_by_id, "moe_route", "bfloat16", **asked)).output == "ids"


def test_experts_that_tie_have_no_order() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0]])
    for ids, right in (([0, 1], [1, 1]), ([1, 0], [1, 1]), ([2, 0], [0, 1]), ([0, 2], [1, 0])):
        mask = admissible("moe_route", logits, chosen=torch.tensor([ids]), top_k=2)
        assert mask.tolist() == [[bool(each) for each in right]]


def test_what_is_allowed_is_told_where_the_right_number_lies() -> None:
    failure = Oracle(Contract()).judge(HUGE, all_contents(HUGE), (exact() * 1e6,)).failure
    got, golden, radius = (part or 0.0 for part in (failure.got, failure.golden, failure.radius))
    assert 0 < radius < 1e-5 * abs(golden)
    assert failure.ratio == abs(got - golden) / radius
