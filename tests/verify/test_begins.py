"""Where a failure begins: boundaries and multiples are named if the kernel has them, and else nothing is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from assay.golden import spec
from assay.verify import Contract
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.explanation.begins import beginning, beginnings, calls_in_words
from assay.verify.explanation.earlier_calls import kept_from_earlier
from assay.verify.explanation.facts import is_steady
from assay.verify.explanation.fault_budget import FaultBudget
from assay.verify.explanation.fault_models.fault_tolerance import observation_of
from assay.verify.findings import Failure
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness

SIZES = (1, 2, 3, 7, 8, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 256, 257)


@given(st.integers(1, 256), st.booleans())
def test_a_boundary_is_found_exactly(last: int, rising: bool) -> None:
    def is_wrong(size: int, draw: int = 0) -> bool:
        return (size > last) == rising

    right, wrong = ([size for size in SIZES if is_wrong(size) == it] for it in (False, True))
    first, second = ("right", "wrong") if rising else ("wrong", "right")
    assert beginning(right, wrong, is_wrong) == f"{first} up to {last}, {second} from {last + 1} on"


@pytest.mark.parametrize("step", [2, 3, 8, 16, 32])
@pytest.mark.parametrize("of_multiples", [True, False])
def test_a_rule_of_multiples_is_found(step: int, of_multiples: bool) -> None:
    sizes = [*range(1, 200, 3), *(step * k for k in range(1, 6))]
    right, wrong = ([size for size in sizes if (size % step == 0) is (of_multiples is it)] for it in (False, True))
    expected = f"wrong where it is {'a' if of_multiples else 'no'} multiple of {step}"
    assert beginning(right, wrong, lambda size, draw: None) == expected


def test_what_has_no_rule_has_no_words() -> None:
    """Scattered sizes, a boundary that other data move or that can't be reached, and a kernel that is always wrong."""
    assert beginning([1, 5, 64], [3, 8, 100], lambda size, draw: True) == ""
    assert beginning([1, 2], [64], lambda size, draw: draw == 0 and size > 9) == ""
    assert beginning([1, 2], [64], lambda size, draw: None) == ""
    assert beginning([], [1, 2], lambda size, draw: True) == ""


def at_case(
    kernel: Callable[..., Tensor], op: str = "softmax", listed: dict[str, list[Any]] | None = None, **fields: Any
) -> tuple[KernelHarness, Failure, Sampler]:
    """A harness, a failure of an ordinary case changed by the fields, and a sampler."""
    sampler = Sampler(spec(op), "float32", listed or {})
    drawn = sampler.case(seeded(1), style="tile")
    case = with_values(drawn, "normal", unused="plain", protocol="once", layouts={}, memory="plain")
    case = replace(case, **{"sizes": dict.fromkeys(case.sizes, 13), **fields})
    return (
        KernelHarness(Call(kernel, listed or {}), Contract(), sampler=sampler),
        Failure("contract", case, ""),
        sampler,
    )


def beginnings_of(*given: Any, **fields: Any) -> list[str]:
    harness, failure, sampler = at_case(*given, **fields)
    seen = observation_of(harness, failure.case)
    facts = beginnings(harness, failure, failure.case, sampler, [seen] if seen else [], "numbers", FaultBudget(30.0))
    return [fact.words for fact in facts]


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def rows_as_if_contiguous(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.as_strided(b.shape, (b.shape[1], 1), b.storage_offset())


def far_from_zero(x: Tensor) -> Tensor:
    return torch.where(x.abs().amax() > 300, 2.0, 1.0) * softmax(x)


def noisy_gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    right = torch.nn.functional.gelu(x, approximate=approximate)
    return right * 1.25 if approximate == "tanh" else right


def test_options_layouts_and_magnitudes_are_named() -> None:
    options = {"approximate": ["none", "tanh"]}
    right = beginnings_of(noisy_gelu, "gelu", options, options={"approximate": "tanh"})
    assert right == ["option approximate: right for none, wrong for tanh"]
    (words,) = beginnings_of(rows_as_if_contiguous, "gemm", layouts={"b": "transposed"})
    assert words.startswith("layout of b: right for contiguous, offset, wrong for transposed, sliced, strided")
    (words,) = beginnings_of(far_from_zero)
    found = re.search(r"normal numbers in x times a power of two: right up to 2\^(\d+), wrong from 2\^(\d+) on", words)
    assert found is not None
    assert 2.0 ** int(found[1]) * 4 < 300 < 2.0 ** int(found[2]) * 4
    assert beginnings_of(softmax) == beginnings_of(lambda x: 2 * softmax(x)) == []


INDICES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a tail": (lambda i: i >= 9, "right up to 8, wrong from 9 on"),
    "a head": (lambda i: i < 4, "wrong up to 3, right from 4 on"),
    "one in four": (lambda i: i % 4 == 3, "wrong where it is 3 more than a multiple of 4"),
    "ends": (lambda i: i >= len(i) - 2, "only the last 2 are wrong"),
    "no rule": (lambda i: (i == 2) | (i == 7) | (i == 8) | (i == 11), ""),
}


@pytest.mark.parametrize("name", INDICES)
def test_a_rule_of_indices_holds_in_all_calls(name: str) -> None:
    rule, words = INDICES[name]

    def kernel(x: Tensor) -> Tensor:
        return torch.where(rule(torch.arange(x.shape[-1])), 1.25, 1.0) * softmax(x)

    harness, failure, sampler = at_case(kernel)
    cases = [replace(failure.case, sizes={"R": 3, "N": size}) for size in (13, 16, 19)]
    calls = [seen for case in cases if (seen := observation_of(harness, case))]
    facts = beginnings(harness, failure, failure.case, sampler, calls, "numbers", FaultBudget(0.0))
    assert [fact.words for fact in facts] == ([f"index along N of y: {words}"] if words else [])


def each(step: int) -> Callable[[Tensor], Tensor]:
    """A kernel of which every so manyth call is wrong."""
    count = itertools.count(1)
    return lambda x: softmax(x) * (1.5 if next(count) % step == 0 else 1.0)


@pytest.mark.parametrize("step", [2, 3, 5])
def test_calls_of_a_series_are_counted(step: int) -> None:
    harness, failure, _ = at_case(each(step))
    words = calls_in_words(harness, failure.case, FaultBudget(30.0))
    assert words == f"calls with the same inputs: one in {step} is wrong (of 24)"
    assert calls_in_words(*at_case(softmax)[:1], failure.case, FaultBudget(30.0)) == ""
    assert not is_steady(harness, failure)
    assert is_steady(at_case(far_from_zero)[0], failure)


def lagging() -> Callable[[Tensor], Tensor]:
    """A kernel that returns what the call before of this shape computed."""
    last: dict[Any, Tensor] = {}

    def kernel(x: Tensor) -> Tensor:
        result, key = softmax(x), tuple(x.shape)
        before = last.get(key, result)
        last[key] = result
        return before.clone()

    return kernel


def by_shape() -> Callable[[Tensor], Tensor]:
    """A kernel that computes once for each shape."""
    known: dict[Any, Tensor] = {}
    return lambda x: known.setdefault(tuple(x.shape), softmax(x)).clone()


def by_address() -> Callable[[Tensor], Tensor]:
    """A kernel that computes once for each address and shape."""
    known: dict[Any, Tensor] = {}
    return lambda x: known.setdefault((x.data_ptr(), *x.shape), softmax(x)).clone()


@pytest.mark.parametrize(
    ("kernel", "protocol", "words"),
    [
        (lagging, "once", "the right ones of the call before"),
        (by_shape, "once", "the right ones of call 1, of 5"),
        (by_address, "after_refill", "the right ones of the call before, with other data in the same memory"),
    ],
)
def test_the_result_of_an_earlier_call_is_recognised(kernel: Any, protocol: str, words: str) -> None:
    harness, failure, sampler = at_case(kernel(), protocol=protocol)
    (fact,) = kept_from_earlier(harness, failure, sampler, "determinism", FaultBudget(30.0))
    assert words in fact.words
    for other in (softmax, lambda x: 2 * softmax(x)):
        assert kept_from_earlier(at_case(other)[0], failure, sampler, "determinism", FaultBudget(30.0)) == []
