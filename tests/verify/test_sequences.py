"""Sequences of calls: what a kernel keeps from one call to the next, and the order of its programs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.golden.lowering import reference_spec
from assay.golden.registry import spec
from assay.interpreter import Assignment, NotInterpreted, SanitizerError, sanitized
from assay.interpreter.races import arranged
from assay.verify import Contract
from assay.verify.cases.case import Case, EarlierCall
from assay.verify.cases.sampler import Sampler
from assay.verify.cases.sequences import MANY, earlier_calls, sequence_in_words, shorter, with_sequence
from assay.verify.examination.shrink import shrink
from assay.verify.findings import Failure
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness
from tests.verify import ordered_kernels as kernels

CASE = Case("softmax", {"R": 3, "N": 5}, {"x": "float32"}, protocol="after_many")
SAMPLER = Sampler(spec("softmax"), "float32")


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


class Kept:
    """Results in buffers that are kept: ``count`` of a ring, for each of ``keys(x)``."""

    def __init__(self, count: int, key: Callable[[Tensor], Any] = lambda x: (x.shape, x.dtype)) -> None:
        self.count, self.key, self.calls = count, key, 0
        self.buffers: dict[Any, list[Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        ring = self.buffers.setdefault(self.key(x), [torch.empty_like(x) for _ in range(self.count)])
        self.calls += 1
        return ring[self.calls % self.count].copy_(softmax(x))


class Grown:
    """A workspace that only grows; once it has, an answer that was right before is not."""

    def __init__(self) -> None:
        self.size = 0

    def __call__(self, x: Tensor) -> Tensor:
        before, self.size = self.size, max(self.size, x.numel())
        return softmax(x) * (1.5 if before > x.numel() else 1.0)


class ByShape:
    """A factor that is kept by shape, though it depends on the dtype."""

    def __init__(self) -> None:
        self.factors: dict[Any, float] = {}

    def __call__(self, x: Tensor) -> Tensor:
        return softmax(x) * self.factors.setdefault(x.shape, 1 + torch.finfo(x.dtype).eps / 4)


def harness(kernel: Callable[..., Any]) -> KernelHarness:
    return KernelHarness(Call(kernel, {}), Contract(), sampler=SAMPLER)


def failure(kernel: Callable[..., Any], case: Case = CASE) -> Failure | None:
    return harness(kernel).try_case(case).failure


@pytest.mark.parametrize("count", [1, 3, 12])
def test_a_ring_of_buffers_shrinks_to_the_shortest_sequence_that_shows_it(count: int) -> None:
    found = failure(Kept(count))
    assert found is not None
    assert found.kind == "nondeterministic"
    least = shrink(found, lambda case: failure(Kept(count), case), SAMPLER, trials=60)
    assert len(least.case.before) == count
    assert "a later call changed an earlier call's result: call" in least.message
    assert Case.from_dict(least.case.as_dict()) == least.case  # and the repro line has it
    before = replace(least.case, before=least.case.before[:-1])
    assert not before.before or failure(Kept(count), before) is None


@pytest.mark.parametrize(
    ("kernel", "step"),
    [(Grown, "with"), (ByShape, "in bfloat16")],
    ids=["after_a_larger_call", "after_another_dtype"],
)
def test_state_that_other_calls_leave_is_seen(kernel: Callable[[], Callable[..., Any]], step: str) -> None:
    """The same calls in one size and dtype are right, whatever their number."""
    found = failure(kernel())
    assert found is not None
    assert step in found.message
    assert failure(kernel(), replace(CASE, before=(EarlierCall(data=1),) * MANY)) is None


@pytest.mark.parametrize("kernel", [softmax, Kept(MANY + 9)], ids=["fresh", "a_long_ring"])
def test_honest_kernels_pass(kernel: Callable[..., Any]) -> None:
    for seed in range(2):
        assert failure(kernel, replace(CASE, seed=seed)) is None


def test_views_of_inputs_may_change_with_them() -> None:
    case = Case("all_reduce", {"R": 1, "N": 5}, {"shards": "float32"}, protocol="after_many")
    assert KernelHarness(Call(lambda shards: shards[0], {}), Contract()).try_case(case).failure is None


def test_a_sequence_is_a_function_of_the_case_and_no_longer_than_before() -> None:
    drawn = with_sequence(CASE, SAMPLER, other_dtypes=True)
    assert drawn == with_sequence(CASE, SAMPLER, other_dtypes=True)
    assert len(drawn.before) == MANY == len(earlier_calls(CASE))
    kinds = {(bool(call.sizes), bool(call.dtype), call.memory, call.data > 0) for call in drawn.before}
    assert len(kinds) >= 5
    assert drawn.before[-20:] == (EarlierCall(data=1),) * 20  # as a benchmark calls it
    assert all(len(other.before) <= MANY for other in shorter(drawn))
    assert sequence_in_words(drawn.before).endswith("times other data; the judged call")


def test_an_option_that_refuses_is_left_out() -> None:
    """An earlier call in another dtype was promised to nobody."""

    def strict(x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return softmax(x)

    assert failure(strict) is None


X = torch.randn(70, 10, generator=torch.Generator().manual_seed(0)) * 100


def in_order(kernel: Callable[[Tensor], Tensor], order: int) -> Tensor:
    assignment = Assignment()
    assignment.order = order
    with sanitized([X]), assignment.current():
        return kernel(X)


def test_orders_are_permutations() -> None:
    programs = arranged((3, 2, 2), 0)
    assert arranged((3, 2, 2), 1) == programs[::-1]
    assert sorted(arranged((3, 2, 2), 5)) == programs != arranged((3, 2, 2), 5) != arranged((3, 2, 2), 6)


def test_float_atomics_depend_on_the_order_and_turns_do_not() -> None:
    atomics = [in_order(kernels.sums_by_atomics, order) for order in (0, 1, 2, 3)]
    assert not all(torch.equal(one, atomics[0]) for one in atomics)
    turns = [in_order(kernels.sums_in_turn, order) for order in (0, 1, 2, 3)]
    assert all(torch.equal(one, turns[0]) for one in turns)


def test_programs_that_wait_for_later_ones_end() -> None:
    assert torch.equal(in_order(kernels.sums_backwards, 1), in_order(kernels.sums_in_turn, 0))
    with pytest.raises(NotInterpreted, match="wait for each other"):
        in_order(kernels.sums_backwards, 0)


def column_sums(x: Tensor) -> Tensor:
    return x.float().sum(0).to(x.dtype)


def row_sums(x: Tensor) -> Tensor:
    return x.float().sum(1).to(x.dtype)


def tried(kernel: Callable[..., Any], reference: Callable[..., Any], result: str, **changes: Any) -> Failure | None:
    name = reference_spec(reference, f"x[R,N] -> y[{result}]").qualified_name
    case = Case(name, {"R": 19, "N": 10}, {"x": "float32"}, values={"x": "wide"}, **changes)
    return KernelHarness(Call(kernel, {}), Contract()).try_case(case).failure


def test_the_line_of_the_atomics_that_made_the_difference_is_named() -> None:
    found = tried(kernels.sums_by_atomics, column_sums, "N", protocol="repeat")
    assert found is not None
    assert found.kind == "nondeterministic"
    assert "tl.atomic_add at ordered_kernels.py:14" in found.message
    assert tried(kernels.sums_in_turn, column_sums, "N", protocol="repeat") is None


@pytest.mark.parametrize("memory", ["nan", "huge"])
def test_lanes_without_a_value_are_poisoned(memory: str) -> None:
    assert tried(kernels.sums_undefined, row_sums, "R", memory=memory) is not None
    assert tried(kernels.sums_undefined, row_sums, "R") is None  # Triton's zero
    assert tried(kernels.sums_masked_later, row_sums, "R", memory=memory) is None


@pytest.mark.parametrize("width", [0, 1, 4])
@pytest.mark.parametrize("other", [0.0, -0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool])
def test_a_lane_whose_value_is_given_holds_it(dtype: torch.dtype, other: float, width: int) -> None:
    """Also the one lane of a load: Triton's interpreter takes a single zero for no value."""
    x = torch.full((4,), 5, dtype=dtype)
    with sanitized([x], unloaded="huge"):
        given = kernels.without_value(x, other, width)
    right = torch.full((max(width, 1),), other).to(dtype)
    assert torch.equal(given, right)
    assert not dtype.is_floating_point or torch.equal(given.signbit(), right.signbit())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_poisoned_lane_as_an_address_is_a_finding_not_a_crash(dtype: torch.dtype) -> None:
    x, index = torch.arange(40.0), torch.tensor([3, 1, 39], dtype=dtype)
    with sanitized([x, index], unloaded="huge"):
        assert kernels.gathered(x, index, masked=True).tolist() == [3, 1, 39]
        with pytest.raises(SanitizerError, match="loads"):
            kernels.gathered(x, index, masked=False)
