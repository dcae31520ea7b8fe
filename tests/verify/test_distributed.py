"""Functions on the processes of a gloo group: every rank's result is judged, and what ends a rank is a finding."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from assay.golden.registry import spec
from assay.kernels.parallel.collectives import all_reduce
from assay.kernels.parallel.linear import row_parallel_linear
from assay.verify.cases.case import Case
from assay.verify.contract import Contract
from assay.verify.errors import SettingError
from assay.verify.examination.distributed import Group, RankError, examine_ranks, of_rank
from assay.verify.examination.procedure import examine
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness
from tests.verify import rank_functions as functions

from .examined import failure_of

FEW: dict[str, Any] = {"effort": "quick", "examples": 0, "layouts": ["contiguous"], "shrinking": False}
SHARDS: dict[str, Any] = {"shapes": {"R": [5], "N": [3]}, **FEW}
LINEAR: dict[str, Any] = {"shapes": {"M": [5], "N": [3], "K": [1, 33]}, **FEW}
SIZES = {"all_reduce": {"R": 9, "N": 64}, "linear": {"M": 5, "N": 64, "K": 33}}


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with Group(2) as group:
        yield group


def failing(function: Any, op: str, group: Group, dtype: str) -> list[int]:
    """The ranks that fail one case of ordinary numbers."""
    case = Case(op, SIZES[op], {tensor.name: dtype for tensor in spec(op).tensors})
    harnesses = [KernelHarness(Call(of_rank(function, op, group, rank), {}), Contract()) for rank in range(2)]
    return [rank for rank, harness in enumerate(harnesses) if harness.try_case(case).failure is not None]


def test_honest_functions_pass_on_every_rank(group: Group) -> None:
    """A sum over ranks and a row-parallel linear, that add in float32 and round once, by processes started once."""
    started = group.run(functions.rank_and_pid, [(), ()])
    assert [rank for rank, _ in started] == [0, 1]
    verdict = examine_ranks(row_parallel_linear, "linear", group, dtype="bfloat16", **LINEAR)
    assert verdict.outcome == "PASS", str(verdict)
    assert len(verdict.ranks) == 2
    for function in (all_reduce, functions.in_place):
        for dtype in ("float32", "bfloat16"):
            assert failing(function, "all_reduce", group, dtype) == []
    assert group.run(functions.rank_and_pid, [(), ()]) == started


def test_a_result_that_is_right_on_rank_0_alone_fails(group: Group) -> None:
    verdict = examine_ranks(functions.only_rank_0, "all_reduce", group, dtype="float32", **SHARDS)
    assert verdict.failed == (1,)
    assert verdict.outcome == "FAIL"
    assert str(verdict).startswith("FAIL: rank 1 of 2\n")


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (functions.in_input_dtype, "all_reduce"),
        (functions.average, "all_reduce"),
        (functions.partial_sums_rounded, "linear"),
        (functions.bias_on_every_rank, "linear"),
    ],
)
def test_a_faulty_sum_fails_on_every_rank(group: Group, function: Any, op: str) -> None:
    """Sums in bfloat16, a mean instead of a sum, and a bias that is counted twice."""
    assert failing(function, op, group, "bfloat16") == [0, 1]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (functions.raises_on_rank_1, "rank 1: ValueError: out of luck"),
        (functions.ends_on_rank_1, "rank 1: the process ended"),
    ],
)
def test_a_rank_that_fails_is_named_and_the_group_starts_anew(group: Group, function: Any, words: str) -> None:
    """The other rank, which waits for it in the collective, doesn't hold up the answer."""
    parts = [(torch.ones(1, 3),), (torch.ones(1, 3),)]
    with pytest.raises(RankError, match=words):
        group.run(function, parts)
    assert all(torch.equal(y, torch.full((3,), 2.0)) for y in group.run(all_reduce, parts))


def test_a_rank_that_never_joins_is_a_time_out(group: Group) -> None:
    kernel = of_rank(functions.never_joins_on_rank_1, "all_reduce", group, 0)
    group.run(functions.rank_and_pid, [(), ()])
    verdict = examine(kernel, "all_reduce", dtype="float32", timeout=1.0, **SHARDS)
    assert failure_of(verdict).kind == "timeout"
    assert [rank for rank, _ in group.run(functions.rank_and_pid, [(), ()])] == [0, 1]


def test_questions_that_cannot_be_asked(group: Group) -> None:
    """An op that isn't dealt out, a function that other processes can't import, a world of none: one clear line."""
    for words, ask in (
        (
            "expected one of 'all_reduce', 'linear'",
            lambda: examine_ranks(all_reduce, "softmax", group, dtype="float32"),
        ),
        ("at a module's top", lambda: examine_ranks(lambda shards: shards, "all_reduce", group, dtype="float32")),
        ("one for each of the 2 ranks, got 1", lambda: group.run(functions.rank_and_pid, [()])),
        ("world=0", lambda: Group(0)),
        (r"timeout=0\.0; expected seconds", lambda: Group(timeout=0.0)),
    ):
        with pytest.raises(SettingError, match=words):
            ask()


def test_a_call_by_itself_has_a_time_limit_too(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all ranks answer: those that didn't are named."""
    group.run(functions.rank_and_pid, [(), ()])
    monkeypatch.setattr(group, "timeout", 1.0)
    with pytest.raises(RankError, match=r"rank 0, 1: no answer within 1 s"):
        group.run(functions.never_joins_on_rank_1, [(torch.ones(1, 3),), (torch.ones(1, 3),)])
