"""Which change of the definition gives the kernel's numbers: changes are tried on calls that show the fault.

A change is screened by its float64 results, and then judged in balls as a fault model is: it must account for every
wrong element of each call, of which there are two at least with different data, and predict most of them much more
closely than the right definition misses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from assay.golden.arithmetic import Real
from assay.golden.registry import Spec
from assay.verify.cases.case import Case, all_contents
from assay.verify.comparison.judge import judge
from assay.verify.explanation.experiments.changes import changes_of, roundings_of
from assay.verify.explanation.experiments.extent import Extent
from assay.verify.explanation.experiments.tracing import Change, Step, changed, steps_of
from assay.verify.explanation.experiments.whole_calls import changes_of_inputs, changes_of_options
from assay.verify.explanation.fault_budget import FaultBudget
from assay.verify.explanation.fault_models.evaluation import evaluate
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.explanation.fault_models.fault_tolerance import Observation, limits_of
from assay.verify.explanation.fault_models.single import Single
from assay.verify.findings import Explanation

Tensor = torch.Tensor
_LEAST_CALLS = 2
_LEAST_DISTINCT = 3  # wrong values: one number, or none, tells no change from another
_LEAST_BITS, _MEAN_BITS = 40.0, 0.7  # of evidence in all calls together, and on the average of their wrong elements
_MOST_BITS = 12.0
_SHARE = 0.02  # of the error that a screened change may leave
_ALIKE = 1e-9  # relative difference of two changes that are one function
_NEAREST, _NEAR_SHARE = 12, 0.9  # changes that are tried together with each other one, and the error that they leave
_PLAIN = 1  # the cost of changes that are tried in pairs
_RANKING_ELEMENTS = 256  # wrong elements of a call that tells which changes come near; of few, many do by chance
_MOST = 3  # explanations
_TELLING_ELEMENTS, _LATER = 8, 64  # wrong elements of a call that is tried first; other calls count as so much larger


@dataclass(frozen=True)
class Candidate:
    """A change of the definition, as a fault model; ``cost``: how far-fetched it is."""

    fault: FaultModel
    words: str
    cost: int
    step: Step | None = None
    change: Change | None = None


@dataclass(frozen=True)
class _Fit:
    candidate: Candidate
    order: int
    results: tuple[tuple[Tensor, ...], ...]  # of the calls, in float64
    where: str  # the wrong elements, in words, if the change would make others wrong too
    bits: float

    @property
    def rank(self) -> tuple[Any, ...]:
        return self.where != "", self.candidate.cost, -round(self.bits), self.order


class Experiments:
    """The experiments of one examination. What explains one broken aspect is tried first on the next ones.

    ``seconds`` of processor time are shared by the aspects, of which there are ``aspects``.
    """

    def __init__(self, seconds: float, aspects: int) -> None:
        self._seconds = seconds / max(aspects, 1)
        self._known: list[str] = []  # names of changes that explained an aspect

    def explained(self, observations: Sequence[Observation]) -> tuple[Explanation, ...]:
        """Return the changes of the definition that give what came in all of these calls, which show the fault."""
        budget, fits = FaultBudget(self._seconds), list[_Fit]()
        with suppress(Exception):  # whatever a changed definition does, no finding is lost by it
            fits = self._changes(observations, budget)
        self._known += [name for fit in fits[:1] for name in fit.candidate.fault.name.split("+")]
        return tuple(map(_explanation, fits[:_MOST]))

    def _changes(self, observations: Sequence[Observation], budget: FaultBudget) -> list[_Fit]:
        calls = sorted(observations, key=_price)
        if len(calls) < _LEAST_CALLS or not _is_telling(calls):
            return []
        fits: list[_Fit] = []
        candidates = sorted(_candidates(calls[0].case), key=lambda c: c.fault.name not in self._known)
        for order, candidate in enumerate(candidates):
            if budget.is_over():
                break
            with budget.trying(candidate.fault):
                fit = _fit(candidate, order, calls)
                if fit is not None and candidate.fault.name in self._known:
                    return [fit]
                if fit is not None and not any(_are_one(fit, other) for other in fits):
                    fits.append(fit)
        fits.sort(key=lambda fit: fit.rank)
        fits = [fit for fit in fits if (fit.where == "") == (fits[0].where == "")]
        return fits or self._pair(candidates, calls, budget)

    def _pair(self, candidates: Sequence[Candidate], calls: Sequence[Observation], budget: FaultBudget) -> list[_Fit]:
        """Return the first two changes that together give what came: one of those that come closest alone, and any."""
        left = {}
        if not all(bool(output[mask].isfinite().all()) for call in calls
                   for output, mask in zip(call.outputs, call.broken, strict=True)):  # fmt: skip
            return []  # NaN and infinities tell two changes from others too little
        candidates = [candidate for candidate in candidates if candidate.cost <= _PLAIN]
        most = max(calls, key=lambda call: call.breaks)
        shown = next((call for call in calls if call.breaks >= _RANKING_ELEMENTS), most)
        for candidate in candidates:
            if budget.is_over():
                break
            if not candidate.fault.emulated:
                left[candidate.fault.name] = _share_left(candidate.fault, shown)
        ranked = sorted((c for c in candidates if c.fault.name in left), key=lambda c: left[c.fault.name])
        nearest = [c for c in ranked if c.fault.name in self._known or left[c.fault.name] < _NEAR_SHARE][:_NEAREST]
        order = len(candidates)
        for first in sorted(nearest, key=lambda c: c.fault.name not in self._known):
            for second in candidates:
                if budget.is_over():
                    return []
                if second.fault.name == first.fault.name or second.fault.emulated:
                    continue
                both = _both(calls[0].case.definition, first, second)
                with budget.trying(both.fault):
                    fit = _fit(both, order, calls)
                    if fit is not None:
                        return [fit]
        return []


def _both(op: Spec, first: Candidate, second: Candidate) -> Candidate:
    """Return two changes together."""
    one, two, definition = first.fault, second.fault, None
    for candidate in (first, second):
        if candidate.step is not None and candidate.change is not None:
            whole = definition or op.definition
            definition = changed(whole, candidate.step.path, candidate.change)
    chained = {field: _chained(getattr(one, field), getattr(two, field)) for field in ("options", "inputs")}
    words = f"{first.words}, and {second.words}"
    fault = replace(
        one, name="+".join(sorted((one.name, two.name))), description=words, definition=definition, **chained
    )
    return Candidate(fault, words, first.cost + second.cost)


def _chained(one: Any, two: Any) -> Any:
    if one is None or two is None:
        return one or two
    return lambda given, case: two(one(given, case), case)


def _share_left(fault: FaultModel, call: Observation) -> float:
    """Return the mean share of the wrong elements' errors that a change leaves, or what it leaves but for one factor;
    1 if it can't be evaluated."""
    try:
        results = evaluate(fault, call.case, call.values, Real, chosen=call.chosen)
    except Exception:  # a change may make no sense in a call
        return 1.0
    if len(results) != len(call.outputs):
        return 1.0
    total, count, products = 0.0, 0, [0.0, 0.0, 0.0]
    for result, output, mask, limit in zip(results, call.outputs, call.broken, call.limits, strict=True):
        predicted, got = torch.as_tensor(result).double(), output.double()[mask].nan_to_num(0.0, 0.0, 0.0)
        if predicted.shape != output.shape:
            return 1.0
        given = predicted[mask].nan_to_num(0.0, 0.0, 0.0)
        share = (got - given).abs() / (got - limit.golden[mask]).abs()
        total += float(share.nan_to_num(nan=1.0, posinf=1.0).clamp(max=1.0).sum())
        count += int(mask.sum())
        for index, product in enumerate((got * given, got * got, given * given)):
            products[index] += float(product.sum())
    alike = abs(products[0]) / math.sqrt(products[1] * products[2]) if products[1] * products[2] > 0 else 0.0
    return min(total / max(count, 1), 1 - alike)


def _explanation(fit: _Fit) -> Explanation:
    which = f"{fit.where} the result is" if fit.where else "the result is"
    return Explanation(fit.candidate.fault.name, f"{which} what the definition gives if {fit.candidate.words}", 0.0)


def _price(call: Observation) -> float:
    """Rank calls by their cost; with few wrong elements, which many changes would give, later."""
    cost = call.case.definition.cost(call.case.sizes)
    return float(cost if call.breaks >= _TELLING_ELEMENTS else _LATER * cost)


def _is_telling(calls: Sequence[Observation]) -> bool:
    """Whether enough different numbers are wrong."""
    values: set[float] = set()
    for call in calls:
        for output, mask in zip(call.outputs, call.broken, strict=True):
            wrong = output[mask].double()
            values |= set(wrong[wrong.isfinite()].abs()[:64].tolist())
    return len(values - {0.0}) >= _LEAST_DISTINCT


def _candidates(case: Case) -> Iterator[Candidate]:
    """Yield the changes to try, the plainest first."""
    op = case.definition
    candidates: list[Candidate] = []
    for name, words, options, cost in changes_of_options(case):
        candidates.append(Candidate(FaultModel(name, "formula", words, (op.name,), options=options), words, cost))
    for number, step in enumerate(_steps(op, case), 1):
        for change in changes_of(step):
            where = f", in {step}" if step.of_reference or str(step) not in change.words else ""
            fault = FaultModel(
                f"{change.name}_{number}", "formula", change.words, (op.name,),
                definition=changed(op.definition, step.path, change.change),
            )  # fmt: skip
            candidates.append(Candidate(fault, f"{change.words}{where}", change.cost, step, change.change))
        for change in roundings_of(step):
            fault = FaultModel(
                f"{change.name}_{number}", "precision", change.words, (op.name,),
                definition=changed(op.definition, step.path, change.change), emulated=True,
            )  # fmt: skip
            candidates.append(Candidate(fault, change.words, change.cost))
    for name, words, inputs, cost in changes_of_inputs(case):
        candidates.append(Candidate(FaultModel(name, "formula", words, (op.name,), inputs=inputs), words, cost))
    yield from sorted(candidates, key=lambda candidate: candidate.cost)


def _steps(op: Spec, case: Case) -> Iterator[Step]:
    """Yield the operations of the definition in a call, evaluated as the changed ones are."""
    values, symbols = all_contents(case), tuple(sorted(case.sizes))

    def call(recording: Any) -> Any:
        return evaluate(FaultModel("steps", "formula", "", (op.name,), definition=recording), case, values, Real)

    for step in steps_of(op.definition, call):
        yield replace(step, symbols=symbols)


def _fit(candidate: Candidate, order: int, calls: Sequence[Observation]) -> _Fit | None:
    """Return how a change fits all calls; None if it doesn't."""
    results = []
    for call in calls:
        given = _predicted(candidate.fault, call)
        if given is None:
            return None
        results.append(given)
    bits, elements, extent = 0.0, 0, Extent()
    for call in calls:
        limits = limits_of(candidate.fault, call)
        if limits is None:
            return None
        judgements = [judge(output, limit) for output, limit in zip(call.outputs, limits, strict=True)]
        evidence, count = 0.0, 0
        returned = call.case.signature.returns
        for was, now, right, output, tensor in zip(
            call.broken, judgements, call.limits, call.outputs, returned, strict=True
        ):
            if bool((was & (now.broken | ~now.tolerance.judged)).any()):
                return None
            extent.add(was, now.broken & ~was, tensor.dims)
            width = ((now.tolerance.ends.high - now.tolerance.ends.low) / 2)[was]
            missed = (output.double() - right.golden).abs()[was]
            ratio = torch.log2(missed / width.clamp(min=5e-324)).nan_to_num(nan=0.0, posinf=_MOST_BITS, neginf=0.0)
            evidence += float(ratio.clamp(0.0, _MOST_BITS).sum())
            count += int(was.sum())
        bits, elements = bits + evidence, elements + count
    where = extent.in_words()
    return (
        None
        if where is None or bits < max(_LEAST_BITS, _MEAN_BITS * elements)
        else _Fit(candidate, order, tuple(results), where, bits)
    )


def _predicted(fault: FaultModel, call: Observation) -> tuple[Tensor, ...] | None:
    """Return the results in float64 (an emulated fault's in float32), if they are near all wrong elements."""
    arithmetic = Single if fault.emulated else Real
    results = evaluate(fault, call.case, call.values, arithmetic, chosen=call.chosen)
    given = []
    for result, output, mask, limit in zip(results, call.outputs, call.broken, call.limits, strict=True):
        predicted = torch.as_tensor(result).double()
        if predicted.shape != output.shape:
            return None
        got, wanted = output.double()[mask], predicted[mask]
        store = torch.where(got.isfinite(), got.abs(), 0.0) * 2.0 ** (1 - limit.out.precision)
        room = 4 * limit.pre_store_radius[mask].nan_to_num(posinf=math.inf) + store
        room = room + _SHARE * (got - limit.golden[mask]).abs()
        near = ((got - wanted).abs() <= room) | (got == wanted) | (got.isnan() & wanted.isnan())
        if not bool(near.all()):
            return None
        given.append(predicted)
    return tuple(given)


def _are_one(fit: _Fit, other: _Fit) -> bool:
    """Whether two changes give the same results in all calls."""
    for one, two in zip(fit.results, other.results, strict=True):
        for a, b in zip(one, two, strict=True):
            size = torch.maximum(a.abs(), b.abs())
            alike = ((a - b).abs() <= _ALIKE * size) | (a == b) | (a.isnan() & b.isnan())
            if not bool(alike.all()):
                return False
    return True
