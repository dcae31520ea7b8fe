"""Whether a kernel returns what an earlier call should have: it keeps results in a buffer or a cache.

A series of calls with different data is made at sizes that an examination hardly has; the wrong elements of the last
one are compared with the goldens of the calls before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from assay.runtime.errors import AssayError
from assay.verify.cases.case import Case, EarlierCall, all_contents
from assay.verify.cases.sampler import Sampler, with_values
from assay.verify.cases.sequences import SEQUENCES, call_of, earlier_calls
from assay.verify.comparison.judge import judge
from assay.verify.comparison.oracle import Oracle
from assay.verify.explanation.fault_budget import FaultBudget
from assay.verify.findings import Fact, Failure
from assay.verify.harness.runner import KernelHarness

_BEFORE = tuple(EarlierCall(data, "other" if data % 2 else "same") for data in (1, 2, 3, 4))
"""Four draws of data, in other memory and in that of the judged call by turns."""
_SIZES = (29, 43, 53)  # a cache by shape holds nothing of these yet
_LEAST_CALLS, _LEAST_ELEMENTS = 2, 6  # wrong ones that agree: fewer may by chance
_MOST_WORK = 2**21  # of a call


def kept_from_earlier(
    harness: KernelHarness, failure: Failure, sampler: Sampler, aspect: str, budget: FaultBudget
) -> list[Fact]:
    """Return which earlier call's result a kernel returns, if it does in each series whose last call is wrong; nothing
    of ops that choose, whose goldens follow from the kernel's own choices."""
    if failure.case.definition.outputs.chosen:
        return []
    fits: list[set[int]] = []
    elements, before = 0, failure.case.before
    for case in _series(failure.case, sampler):
        if budget.is_over():
            break
        before = earlier_calls(case)
        try:
            fitting = _fitting(harness, case)
        except AssayError:  # the reference refuses these sizes or data
            continue
        if fitting is not None:
            fits.append(fitting[0])
            elements += fitting[1]
    shared = set.intersection(*fits) if len(fits) >= _LEAST_CALLS and elements >= _LEAST_ELEMENTS else set()
    if not shared:
        return []
    number = max(shared)
    which = "the call before" if number == len(before) - 1 else f"call {number + 1}, of {len(before) + 1}"
    where = "in the same memory" if before[number].memory == "same" else "in other memory"
    words = f"the wrong elements are the right ones of {which}, with other data {where} ({len(fits)} series of calls)"
    return [Fact("calls", words, aspect)]


def _series(case: Case, sampler: Sampler) -> Iterator[Case]:
    """Yield series of calls: those of the failing case or the usual ones, at other sizes and with other data."""
    if case.protocol not in SEQUENCES:
        case = replace(case, protocol="after_many", before=_BEFORE)
    if not any(call.data for call in earlier_calls(case)):
        case = replace(case, protocol="after_many", before=(EarlierCall(1), *earlier_calls(case)))
    for index, size in enumerate(_SIZES):
        sizes = dict(case.sizes)
        for symbol in sampler.free_symbols(case):
            sizes = sampler.with_size(sizes, symbol, size)
        fits = sampler.fits(sizes) and case.definition.cost(sizes) <= _MOST_WORK
        other = replace(case, sizes=sizes if fits else case.sizes, origin={}, edits=())
        yield with_values(other, "normal", seed=case.seed + 31 * (index + 1))


def _fitting(harness: KernelHarness, case: Case) -> tuple[set[int], int] | None:
    """Return which earlier calls' goldens give every wrong element of the last call, and how many elements are wrong;
    None if none is or nothing came."""
    outputs = harness.last_outputs(case)
    if outputs is None:
        return None
    oracle = Oracle(harness.contract)
    right = oracle.tolerances(case, all_contents(case))
    wrong = [judge(output, limits).broken for output, limits in zip(outputs, right, strict=True)]
    elements = sum(int(mask.sum()) for mask in wrong)
    if not elements:
        return None
    fitting = set[int]()
    for number, call in enumerate(earlier_calls(case)):
        made = call_of(case, call)
        if made == case or [made.shape(t) for t in made.signature.returns] != [tuple(o.shape) for o in outputs]:
            continue
        limits = oracle.tolerances(made, all_contents(made))
        if not any(
            bool((judge(output, limit).broken & mask).any() or (mask & ~limit.judged).any())
            for output, limit, mask in zip(outputs, limits, wrong, strict=True)
        ):
            fitting.add(number)
    return fitting, elements
