"""Explain a failure: find the known faults, or the tightest looser contract, that account for the kernel's outputs.

Failures of numbers: the kernel is called on the failing case, on the same case before shrinking, and on a few ordinary
cases. A fault model explains the failure if, on all of these, every output is within the fault's own radius under the
contract, and this includes at least one element that breaks the contract of the right definition. If several fault
models do, further cases follow on which the two likeliest would give different outputs.

Ranking: a fault's room at an element is log2 of how many numbers of the output's format are within its radius. The
fault with the least mean room over the elements that break the contract comes first: it makes the most precise
prediction. A looser contract, which allows much, therefore ranks behind an altered definition that predicts the last
bits. It is reported only if the kernel's errors are distributed as the fault model's own
(`assay.verify.explanation.fault_models.error_distribution`).

Confirmation: a fault model may fit one failing case because it predicts something else that is wrong there too (one NaN
equals another, and every fault is far from a result that is far off). Before a fault is reported, the kernel is called
on fresh data: the failing case with other seeds, and ordinary calls of several distributions and sizes. Where a kernel
with the fault would break the contract, the kernel's results must be those of the fault; elsewhere they must be right.

Other failures: side effects are explained by a series of calls, bias by the direction of the errors, and a load out of
bounds by the label or the tail without which it does not occur.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, zip_longest

import torch

from assay.formats.devices import TensorCores, tensor_cores_named, tensor_cores_of_capability
from assay.formats.rounding import next_down, next_up, ulp_towards
from assay.interpreter import emulated_device, pretended
from assay.runtime.tensors import same_numbers
from assay.verify.cases.case import Case, build
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.comparison.judge import Judgement, judge
from assay.verify.comparison.oracle import one_thread
from assay.verify.comparison.result import Result
from assay.verify.contract import Contract
from assay.verify.explanation.fault_budget import FaultBudget
from assay.verify.explanation.fault_models import fault_models_of
from assay.verify.explanation.fault_models.arithmetic import arithmetics_of
from assay.verify.explanation.fault_models.error_distribution import ErrorDistribution
from assay.verify.explanation.fault_models.evaluation import kernel_of
from assay.verify.explanation.fault_models.fault_model import FaultModel, Kernel
from assay.verify.explanation.fault_models.fault_tolerance import (
    Observation,
    error_distributions_of,
    given_by,
    limits_of,
    observation_of,
)
from assay.verify.findings import Explanation, Failure
from assay.verify.harness.runner import KernelHarness

# Calls that show the fault and suffice to confirm it: with the failing sizes, and with others.
_ENOUGH_CONFIRMED = (2, 12)
_SEEDS = 3  # fresh seeds of the failing case
_LEAST = 3  # calls, even if the time is over
_KINDS = ("normal", "wide", "steep", "small", "loud", "positive", "below")  # distributions of ordinary calls
_STYLES = ("tile", "small", "tile")
_SIZES = (100, 40, 121, 24)  # sizes of one symbol: not multiples of tiles of 64, 32 and 16, and an odd one
_MOST_CONFIRMING_WORK = 2**21  # confirmation calls many cases: skip those that are not quick


def is_confirmed(
    fault: FaultModel, harness: KernelHarness, failure: Failure, first: Case, sampler: Sampler, budget: FaultBudget
) -> bool:
    """Return whether the kernel gives the fault's results wherever those are wrong, within the time budget.

    A fault that no fresh data show (one NaN, one layout) is confirmed by the failing case alone. A fault for which the
    time ran out before any call showed it is not confirmed.
    """
    shown, tried = [0, 0], 0
    for others, case in fresh_cases(failure.case, first, sampler):
        if tried >= _LEAST and budget.is_over():
            return any(shown)
        if shown[others] >= _ENOUGH_CONFIRMED[others]:
            continue
        observation = observation_of(harness, case) if fault.concerns(case) else None
        if observation is None or (fault.sometimes and not observation.breaks):
            continue
        tried += 1
        chosen = None if observation.chooses_wrongly else observation.chosen
        given = given_by(fault, case, observation.values, chosen)
        real = [not tensor.is_integer for tensor in case.signature.returns]
        wrong = observation.chooses_wrongly or any(
            bool(judge(output, limits).broken.any())
            for output, limits, judged in zip(given, observation.limits, real, strict=True)
            if judged
        )
        if not wrong and not observation.breaks:
            continue
        wrong = wrong or fault.sometimes
        limits = limits_of(fault, observation)
        silent = fault.family == "unwritten"
        if limits is None or any(
            bool((judge(output, limit).broken & (limit.judged | silent)).any())
            for output, limit in zip(observation.outputs, limits, strict=True)
        ):
            return False
        shown[others] += wrong
    return True


def fresh_cases(failing: Case, first: Case, sampler: Sampler) -> Iterator[tuple[bool, Case]]:
    """Yield the failing case with other data (False), and ordinary calls of other sizes (True)."""
    for index in range(_SEEDS):
        for case in (failing, first) if first != failing else (failing,):
            if _is_quick(case):
                yield False, replace(case, protocol="once", seed=case.seed + 31 * (index + 1))
    base = replace(first if _is_quick(first) else failing, layouts=failing.layouts)
    for pair in zip_longest(_of_one_size(base, sampler), _ordinary(failing, sampler)):
        yield from ((True, case) for case in pair if case is not None)


def _of_one_size(case: Case, sampler: Sampler) -> Iterator[Case]:
    """Yield the case with ordinary data and one free size changed."""
    for size in _SIZES:
        for symbol in sampler.free_symbols(case):
            sizes = sampler.with_size(case.sizes, symbol, size)
            other = replace(case, sizes=sizes, edits=(), origin={}, protocol="once", unused="plain")
            if sampler.fits(sizes) and _is_quick(other):
                yield with_values(other, "normal")


def _ordinary(failing: Case, sampler: Sampler) -> Iterator[Case]:
    """Yield calls with the failing case's options and layouts."""
    choose = seeded(failing.seed + 5)
    for kind in _KINDS:
        for style in _STYLES:
            drawn = sampler.case(choose, style=style, options=failing.options)
            case = replace(drawn, layouts=failing.layouts, unused="plain", protocol="once", memory=failing.memory)
            if _is_quick(case):
                yield with_values(case, kind)


def _is_quick(case: Case) -> bool:
    return case.definition.cost(case.sizes) <= _MOST_CONFIRMING_WORK


_FACTOR = 4.0  # times the contract's tolerance: the sum of several results has the errors of each
_ALIKE = 0.9  # share of the calls in the series that must agree
_SERIES = ("once", "once", "repeat", "after_other", "after_refill")  # protocols that distinguish side effects
MOST = 5  # explanations
NUMBERS = ("contract", "exact", "nonfinite", "layout", "unwritten_output")  # kinds of failures


def description_of(fault: FaultModel, contract: Contract, *, kept: bool = False) -> str:
    """Return the fault's description, its origin, and the contract that allows it (``kept``: the kernel keeps it)."""
    words = fault.description
    if fault.contract:
        fields = ", ".join(f"{name}={value!r}" for name, value in fault.loosened(contract).changed().items())
        words += f"; it keeps Contract({fields})" if kept else f"; Contract({fields}) would allow it"
    return words if fault.origin == "common slip" else f"{words} ({fault.origin})"


def explained_by_side_effects(
    harness: KernelHarness, failure: Failure, sampler: Sampler, budget: FaultBudget
) -> tuple[Explanation, ...]:
    """Return faults of side effects that fail as the kernel does, in a series of calls of two new shapes."""
    choose, cases = seeded(failure.case.seed + 2), []
    for _ in range(2):
        drawn = sampler.case(choose, style="small", options=failure.case.options)
        drawn = with_values(drawn, "normal", layouts={}, unused="plain", memory="plain")
        cases += [replace(drawn, protocol=protocol, seed=drawn.seed + index) for index, protocol in enumerate(_SERIES)]

    def results(kernel: Kernel | None, *, later: bool = False, like: list[Result] | None = None) -> list[Result]:
        """Return each call's result; ``later``: after an extra call, for faults that change with the number of calls.

        Stop when the time is over, or when the results can no longer agree with ``like``.
        """
        tried = harness
        if kernel is not None:
            tried = replace(harness, call=replace(harness.call, kernel=kernel, framework="torch"), isolation=None)
        if later:
            tried.outputs(cases[-1])
        shown: list[Result] = []
        other = 0
        for index, case in enumerate(cases):
            if budget.is_over():
                break
            shown.append(tried.try_case(case))
            if like is not None:
                other += kinds(shown[-1:]) != kinds(like[index : index + 1])
                if other > (1 - _ALIKE) * len(cases) or not _give_alike(shown[-1], like[index]):
                    break
        return shown

    seen, result = results(None), []
    wanted = kinds(seen)
    if len(wanted) < len(cases):
        return ()
    halves = wanted[: len(_SERIES)], wanted[len(_SERIES) :]
    if set(wanted) <= {"", *NUMBERS} and not any("" in half and any(half) for half in halves):
        return ()  # all calls of a shape agree: the numbers are wrong, not a side effect
    for order, fault in enumerate(fault_models_of(failure.case.spec)):
        if fault.side_effects is None or not any(wanted):
            continue
        if budget.is_over():
            break
        with budget.trying(fault):
            for later in (False, True):
                own = results(kernel_of(fault, failure.case.spec, failure.case.out_dtype), later=later, like=seen)
                given = kinds(own)
                if budget.is_over():
                    break
                if len(given) < len(wanted) or not all(map(_give_alike, own, seen)):
                    continue
                alike = sum(map(str.__eq__, given, wanted)) / len(wanted)
                if alike >= _ALIKE and set(given) == set(wanted):
                    result.append((-alike, order, fault))
                    break
    result.sort(key=lambda entry: entry[:2])
    return tuple(Explanation(s.name, description_of(s, harness.contract), 0.0) for *_, s in result[:MOST])


def kinds(results: list[Result]) -> list[str]:
    """Return the kind of each result's failure; "" for none."""
    return ["" if result.failure is None else result.failure.kind for result in results]


def _give_alike(known: Result, result: Result) -> bool:
    """Return whether a call's results agree with those of a known fault, within a right kernel's tolerance.

    Results without outputs are compared by their kinds alone, and two right results agree.
    """
    if (known.failure is None and result.failure is None) or not (known.outputs and result.outputs):
        return True
    longer = known if len(known.tolerances) > len(result.tolerances) else result
    limits = iter(longer.tolerances)
    for tensor, fault, got in zip(result.case.signature.returns, known.outputs, result.outputs, strict=True):
        limit = None if tensor.is_integer else next(limits, None)
        if limit is None or limit.definition_ends is not None:
            continue
        fault, got = fault.detach().cpu().double(), got.detach().cpu().double()
        gap = ulp_towards(fault, torch.zeros_like(fault), limit.out)
        inner = torch.where(limit.pre_store_radius.isfinite(), limit.pre_store_radius, 0.0)
        alike = ((got - fault).abs() <= _FACTOR * (inner + gap)) | (got == fault) | (got.isnan() & fault.isnan())
        if not bool((alike | ~limit.judged).all()):
            return False
    return True


def explained_by_bias(harness: KernelHarness, failure: Failure, budget: FaultBudget) -> tuple[Explanation, ...]:
    """Return fault models whose kernels show bias of the same sign in the same calls, each error within tolerance."""
    results = []
    for fault in _candidates(failure, harness):
        if fault.family not in ("store", "accumulator", "precision"):
            continue
        if budget.is_over():
            break
        with budget.trying(fault):
            if not fault.concerns(failure.case):
                continue
            kernel = kernel_of(fault, failure.case.spec, failure.case.out_dtype)
            call = replace(harness.call, kernel=kernel, framework="torch")
            seen = replace(harness, call=call, isolation=None).try_case(failure.case).failure
            if seen is not None and seen.kind == "bias" and seen.side == failure.side:
                results.append(Explanation(fault.name, description_of(fault, harness.contract), seen.ratio or 0.0))
    return tuple(results[:MOST])


_LOADED = re.compile(r"loads element (-?\d+) of ")
_OUTSIDE = re.compile(r"loads element (\d+) of \w+, out of bounds")
_FAULT = "ignored_labels_loaded"
_TILES = (16, 32, 64, 128)  # tile sizes whose tails are tried
TAIL = "tail_loaded"
"""The name of an explanation by a load that is not masked beyond the last full tile."""


def explained_by_accesses(
    harness: KernelHarness, failure: Failure, sampler: Sampler, budget: FaultBudget
) -> tuple[Explanation, ...]:
    """Explain a load out of bounds by an ignored label or a size that is not a multiple of the tile."""
    return () if budget.is_over() else _by_labels(harness, failure) or _by_tails(harness, failure, sampler, budget)


def _by_tails(
    harness: KernelHarness, failure: Failure, sampler: Sampler, budget: FaultBudget
) -> tuple[Explanation, ...]:
    """Detect a load that is not masked along a dimension.

    With a multiple of a tile the kernel must not crash; with one element more it must load out of bounds again.
    """
    case = failure.case
    if _OUTSIDE.search(failure.message) is None:
        return ()

    def tried(symbol: str, size: int) -> Failure | None:
        return harness.try_case(replace(case, sizes=sampler.with_size(case.sizes, symbol, size))).failure

    def is_inside(symbol: str, size: int) -> bool:
        again = tried(symbol, size)
        return again is None or again.kind in NUMBERS

    def is_outside(symbol: str, size: int) -> bool:
        again = tried(symbol, size)
        return again is not None and _OUTSIDE.search(again.message) is not None

    for symbol in sampler.free_symbols(case):
        size = case.sizes[symbol]
        wholes = {1 << max(size - 1, 0).bit_length(), *(-(-size // tile) * tile for tile in _TILES)}
        for whole in sorted(wholes - {size, 0}):
            if budget.is_over():
                return ()
            fits = sampler.fits(sampler.with_size(case.sizes, symbol, whole + 1))
            if fits and is_inside(symbol, whole) and is_outside(symbol, whole + 1):
                words = (
                    f"a load is not masked along {symbol}: at {symbol}={whole}, a whole tile, all is in bounds, and at "
                )
                return (Explanation(TAIL, f"{words}{symbol}={whole + 1} it is not", 0.0),)
    return ()


def _by_labels(harness: KernelHarness, failure: Failure) -> tuple[Explanation, ...]:
    """Detect a load at an ignored token's label: its index must match, and it must not occur without such labels."""
    result, case = _LOADED.search(failure.message), failure.case
    fault = next((fault for fault in fault_models_of(case.spec) if fault.name == _FAULT), None)
    if result is None or fault is None or "target" not in {tensor.name for tensor in case.signature.tensors}:
        return ()
    target = build(case).guarded["target"].tensor
    ignored = [row for row, label in enumerate(target.tolist()) if label == case.options["ignore_index"]]
    pointed = {row * case.sizes["V"] + case.options["ignore_index"] for row in ignored}
    labelled = replace(case, edits=(*case.edits, *(("target", (row,), 0.0) for row in ignored)))
    again = harness.try_case(labelled).failure
    if int(result[1]) not in pointed or (again is not None and _LOADED.search(again.message)):
        return ()
    return (Explanation(fault.name, description_of(fault, Contract()), 0.0),)


Tensor = torch.Tensor
_UNSAID = 24.0  # bits of room of an element about which a fault model says nothing


@dataclass(frozen=True)
class Fit:
    """How well a fault model fits the calls so far: elements explained and left, room in bits, the worst ratio."""

    fault: FaultModel
    order: int
    left: int = 0
    explained: int = 0
    room: tuple[float, float] = (0.0, 0.0)  # sums over the elements that break the contract, and over all
    elements: tuple[int, int] = (0, 0)
    ratio: float = 0.0

    @property
    def rank(self) -> tuple[int, ...]:
        """Return the sort key: mean room of the elements that break the contract, mean room of all, and order."""
        means = (room / max(count, 1) for room, count in zip(self.room, self.elements, strict=True))
        return (*(round(4 * mean) for mean in means), self.order)

    def on(self, observation: Observation, budget: FaultBudget) -> Fit:
        """Return the fit after one more call; a fault model that can't be evaluated on it leaves all its elements."""
        if self.fault.sometimes and not observation.breaks:
            return self
        judgements: tuple[Judgement, ...] | None = None
        with budget.trying(self.fault):
            if not self.fault.concerns(observation.case):
                return replace(self, left=self.left + observation.breaks)
            limits = limits_of(self.fault, observation)
            judgements = None if limits is None else tuple(map(judge, observation.outputs, limits))
        if judgements is None:
            return replace(self, left=self.left + max(observation.breaks, 1))
        silent = self.fault.family == "unwritten"  # the fault predicts that some elements may hold anything
        here = sum(
            int((was & ~now.broken & (now.tolerance.judged | silent)).sum())
            for was, now in zip(observation.broken, judgements, strict=True)
        )
        rooms = [_room(now) for now in judgements]
        broken = sum(float(room[was].sum()) for room, was in zip(rooms, observation.broken, strict=True))
        return replace(
            self,
            left=self.left + sum(int(now.broken.sum()) for now in judgements),
            explained=self.explained + here + observation.chooses_wrongly,
            room=(self.room[0] + broken, self.room[1] + sum(float(room.sum()) for room in rooms)),
            elements=(self.elements[0] + observation.breaks, self.elements[1] + sum(room.numel() for room in rooms)),
            ratio=max(self.ratio, *(now.worst for now in judgements)),
        )


def _room(judgement: Judgement) -> Tensor:
    """Return log2 of how many numbers of the output's format are within each element's tolerance."""
    allowed = judgement.tolerance
    golden = torch.where(allowed.golden.isfinite(), allowed.golden, 0.0)
    gap = torch.maximum(next_up(golden, allowed.out) - golden, golden - next_down(golden, allowed.out))
    span = (allowed.ends.high - allowed.ends.low) / gap.clamp(min=5e-324)
    bits = torch.log2(1 + span.nan_to_num(nan=0.0, posinf=2.0**_UNSAID)).clamp(max=_UNSAID)
    return torch.where(allowed.judged, bits, _UNSAID)


Keeps = Callable[[Contract], bool | None]

_SIDE_EFFECTS = ("nondeterministic", "batch_variant", "input_mutated", "out_of_bounds_write")
_MOST_WORK = 2**21  # most work of a case: every fault model is evaluated on it
_SHARE = 0.4  # of the time, for one explanation of all where there may be two faults
_KINDS_ASIDE = ("finite", "nonfinite")
_FEW = 6  # cases that show whether wrong elements are of two kinds
_ENOUGH = 2  # cases after which a single remaining fault model is accepted
_NEAR = (("tile", "normal"), ("tile", "steep"), ("tile", "normal"), ("small", "small"))  # size styles and distributions
_TELLING = (None, "small", "wide", "powers", "steep")  # distributions on which faults differ; None: the failure's own
_MORE = 24  # most cases that are tried to distinguish two fault models
_ELEMENTS = 128  # of ordinary calls, by which errors are compared
_LIKE = 0.125  # penalty in distance for an arithmetic that is not the fault model's own
_OTHER_OPTIONS = 7  # most other sets of options


@dataclass(frozen=True)
class Explained:
    """The known faults that account for a failure, the likeliest first, and the errors of fault models that raised."""

    explanations: tuple[Explanation, ...] = ()
    raised: tuple[str, ...] = ()


def explain(
    harness: KernelHarness,
    failure: Failure,
    first: Case,
    sampler: Sampler,
    *,
    seconds: float = 3.0,
    keeps: Keeps = lambda contract: None,
) -> Explained:
    """Return the known faults that account for a shrunk ``failure``; ``first`` is its case before shrinking.

    ``keeps`` returns whether the kernel keeps another, looser contract; None if unknown, which the explanation omits.
    ``seconds`` limits the processor time; fault models beyond it are not tried.
    """
    budget = FaultBudget(seconds)
    if failure.kind == "crash":
        return Explained(explained_by_accesses(harness, failure, sampler, budget))
    if failure.kind not in (*NUMBERS, *_SIDE_EFFECTS, "bias"):
        return Explained()
    results: tuple[Explanation, ...] = ()
    with one_thread():
        if failure.kind == "bias":
            results = explained_by_bias(harness, failure, budget)
        elif failure.kind in NUMBERS and failure.case.protocol == "once" and not _varies(harness, failure.case, budget):
            own = FaultBudget(seconds * _SHARE) if _is_mixed(harness, first, budget) else budget
            results = _explained_by_numbers(harness, failure, first, sampler, own, keeps)
            budget.failed |= own.failed
            results = results or _beside_another(harness, failure, first, sampler, budget, keeps)
        if not results and failure.kind != "bias":
            results = explained_by_side_effects(harness, failure, sampler, budget)
    return Explained(results, tuple(budget.failed.values()))


def _is_mixed(harness: KernelHarness, first: Case, budget: FaultBudget) -> bool:
    """Whether some wrong elements of the failing case before shrinking are finite, and others NaN or infinite."""
    if budget.is_over() or not _is_quick(first):
        return False
    aside = (observation_of(replace(harness, aside=kind), replace(first, protocol="once")) for kind in _KINDS_ASIDE)
    return all(seen is not None and any(bool(mask.any()) for mask in seen.aside) for seen in aside)


def _apart(harness: KernelHarness, failure: Failure) -> tuple[KernelHarness, str]:
    """Return the harness that takes wrong elements of another kind than the failure's for another fault's, and the
    words for that."""
    aside, others = ("finite", "finite") if failure.kind == "nonfinite" else ("nonfinite", "NaN and infinite")
    return replace(harness, aside=aside), f"; the {others} wrong elements beside these are another fault's"


def _beside_another(
    harness: KernelHarness, failure: Failure, first: Case, sampler: Sampler, budget: FaultBudget, keeps: Keeps
) -> tuple[Explanation, ...]:
    """Return what explains the finite wrong elements where others are NaN or infinite, or the other way round, as two
    faults of one kernel give; nothing if only one kind is wrong."""
    (apart, words), seen = _apart(harness, failure), False
    for case in islice(_cases(failure, first, sampler), _FEW):
        observation = None if budget.is_over() else observation_of(apart, case)
        seen = seen or (observation is not None and any(bool(mask.any()) for mask in observation.aside))
    if not seen:
        return ()
    found = _explained_by_numbers(apart, failure, first, sampler, budget, keeps)
    return tuple(replace(explanation, description=explanation.description + words) for explanation in found)


def _varies(harness: KernelHarness, case: Case, budget: FaultBudget) -> bool:
    """Return whether two equal calls give different bits, which no altered definition does."""
    if budget.is_over():
        return False
    once, again = harness.outputs(case), harness.outputs(case)
    return once is not None and again is not None and not all(map(same_numbers, once, again))


def _explained_by_numbers(
    harness: KernelHarness, failure: Failure, first: Case, sampler: Sampler, budget: FaultBudget, keeps: Keeps
) -> tuple[Explanation, ...]:
    """Return the fault models whose altered definitions account for the outputs of every case."""

    def confirmed(fit: Fit) -> Iterator[tuple[Fit, Explanation]]:
        """Yield the fit if fresh data confirm its fault and an examination does not refute its looser contract."""
        with budget.trying(fit.fault):
            words, is_sure = "", is_confirmed(fit.fault, harness, failure, first, sampler, budget)
            if not is_sure and not harness.aside and not budget.is_over():
                apart, words = _apart(harness, failure)
                is_sure = is_confirmed(fit.fault, apart, failure, first, sampler, budget)
            kept = keeps(fit.fault.loosened(harness.contract)) if is_sure and fit.fault.contract else None
            if is_sure and (kept is not False or not fit.fault.contract):
                words = description_of(fit.fault, harness.contract, kept=kept is True) + words
                yield fit, Explanation(fit.fault.name, words, fit.ratio)

    def ranked(fits: list[Fit], seen: list[Observation]) -> tuple[Explanation, ...]:
        """Return the likeliest confirmed altered definitions, preceded by a looser contract if that fits better."""
        altered = sorted((fit for fit in fits if fit.explained and not fit.fault.is_looser), key=lambda fit: fit.rank)
        established = [results for fit in altered[:MOST] for results in confirmed(fit)]
        ordinary = _ordinary_calls(harness, seen, first, sampler, budget)
        looser = _looser(fits, established[0][0] if established else None, ordinary, budget)
        results = [*(results for fit in looser for results in confirmed(fit)), *established]
        return tuple(explanation for _, explanation in results[:MOST])

    alive = [Fit(fault, order) for order, fault in enumerate(_candidates(failure, harness))]
    observations: list[Observation] = []
    for index, case in enumerate(_cases(failure, first, sampler)):
        if budget.is_over():
            return ranked(alive, observations) if _has_ordinary(observations) else ()
        observation = observation_of(harness, case)
        if index == 0 and (observation is None or not observation.breaks):
            return ()
        if observation is None:
            continue
        observations.append(observation)
        seen = _after(observation, alive, budget)
        alive = [fit for fit in seen if fit.left == 0]
        if not alive:
            return ()
        if index >= _ENOUGH and len(alive) == 1 and alive[0].explained:
            return ranked(alive, observations)
    distinguished, more = _distinguished(harness, alive, first, sampler, budget)
    return ranked(distinguished, observations + more)


def _has_ordinary(observations: list[Observation]) -> bool:
    return any(observation.case.seed != observations[0].case.seed for observation in observations)


def _after(observation: Observation, fits: list[Fit], budget: FaultBudget) -> list[Fit]:
    """Return the fits after one more call; once the time is over, the remaining fits are unchanged."""
    seen = []
    for fit in fits:
        if budget.is_over():
            break
        seen.append(fit.on(observation, budget))
    return seen + fits[len(seen) :]


def _distinguished(
    harness: KernelHarness, alive: list[Fit], first: Case, sampler: Sampler, budget: FaultBudget
) -> tuple[list[Fit], list[Observation]]:
    """Return the fits that remain after calls on which the two likeliest would differ, and these calls."""
    observations: list[Observation] = []
    choose = seeded(first.seed + 3)
    for index in range(_MORE):
        likeliest = _likeliest(alive)
        if len(likeliest) < 2 or budget.is_over():
            break
        case = sampler.case(choose, style=("tile", "small", "any")[index % 3], options=first.options)
        kinds = _TELLING[index // 3 % len(_TELLING)]
        case = with_values(case, kinds) if kinds else replace(case, values=first.values)
        case = replace(case, layouts=first.layouts, unused="plain", protocol="once", memory=first.memory)
        if first.definition.cost(case.sizes) > _MOST_WORK or not _differ(likeliest, case):
            continue
        observation = observation_of(harness, case)
        if observation is not None:
            observations.append(observation)
            alive = [fit for fit in _after(observation, alive, budget) if fit.left == 0]
    return alive, observations


def _likeliest(fits: list[Fit]) -> list[FaultModel]:
    """Return the two likeliest fault models, omitting looser contracts that rank behind an altered definition."""
    results = [fit.fault for fit in sorted(fits, key=lambda fit: fit.rank) if fit.explained]
    first, others = results[:1], results[1:]
    return first + [fault for fault in others if not fault.is_looser or first[0].is_looser][:1]


def _differ(faults: Sequence[FaultModel], case: Case) -> bool:
    values = {name: guarded.tensor for name, guarded in build(case).guarded.items()}
    given = (given_by(fault, case, values) for fault in faults)
    return not all(same_numbers(a, b) for a, b in zip(*given, strict=True))


def _cases(failure: Failure, first: Case, sampler: Sampler) -> Iterator[Case]:
    """Yield the failing case, the same case before shrinking, and ordinary cases with the same options."""
    memory = "nan" if failure.kind == "unwritten_output" else failure.case.memory
    definition = failure.case.definition
    yield replace(failure.case, memory=memory)
    if first != failure.case and definition.cost(first.sizes) <= _MOST_WORK:
        yield replace(first, protocol="once", memory=memory)
    choose = seeded(first.seed + 1)
    sets = [options for options in sampler.option_sets() if options != failure.case.options]
    others = sets if len(sets) <= _OTHER_OPTIONS else [choose(sets) for _ in range(_OTHER_OPTIONS)]
    near = [(style, kind, first.options) for style, kind in _NEAR[:2]]
    near += [("small", "normal", options) for options in others]
    near += [(style, kind, failure.case.options) for style, kind in _NEAR[2:]]
    for style, kind, options in near:
        drawn = sampler.case(choose, style=style, options=options)
        if definition.cost(drawn.sizes) <= _MOST_WORK:
            yield with_values(drawn, kind, layouts={}, unused="plain", protocol="once", memory=memory)


def _candidates(failure: Failure, harness: KernelHarness) -> Iterator[FaultModel]:
    """Yield the fault models to try. What the device's matrix units do comes first for a kernel on CUDA, else last."""
    on_cuda, cores = _device_of(harness)
    arithmetics = arithmetics_of(failure.case.definition, cores)
    if on_cuda:
        yield from arithmetics
    for fault in fault_models_of(failure.case.spec):
        if fault.side_effects is None and (fault.family != "unwritten" or failure.kind == "unwritten_output"):
            yield fault
    if not on_cuda:
        yield from arithmetics


def _device_of(harness: KernelHarness) -> tuple[bool, TensorCores | None]:
    """Return whether the kernel ran on CUDA, an emulated device included, and the tensor cores it has, if known."""
    device = torch.device(harness.device)
    if name := str(harness.call.pretend) or emulated_device() or pretended():
        return True, tensor_cores_named(name)
    if device.type == "cuda" and torch.version.hip is None:
        return True, tensor_cores_of_capability(*torch.cuda.get_device_capability(device))
    return False, None


def _ordinary_calls(
    harness: KernelHarness, seen: list[Observation], first: Case, sampler: Sampler, budget: FaultBudget
) -> Callable[[FaultModel], list[Observation]]:
    """Return the function that gives the calls by which a fault model's errors are compared with the kernel's.

    Cases that were searched for because they fail would bias the comparison. Of what a library does only ``sometimes``
    those count that break the contract, and calls of the ``first`` failing case with other data.
    """
    ordinary = [observation for observation in seen if observation.case.seed != seen[0].case.seed]

    @cache
    def enough() -> list[Observation]:
        """Return the ordinary calls, and further ones where those have few elements."""
        calls, choose = list(ordinary), seeded(first.seed + 9)
        for _ in range(_MORE):
            if budget.is_over() or sum(output.numel() for call in calls for output in call.outputs) >= _ELEMENTS:
                break
            drawn = sampler.case(choose, style="tile", options=first.options)
            if _is_quick(drawn):
                plain = with_values(drawn, "normal", layouts={}, unused="plain", protocol="once", memory="plain")
                calls += filter(None, [observation_of(harness, plain)])
        return calls

    @cache
    def broken() -> list[Observation]:
        calls = list(ordinary)
        for index in range(_MORE if _is_quick(first) else 0):
            if len(calls) - len(ordinary) >= _LEAST and budget.is_over():
                break
            case = replace(first, protocol="once", seed=first.seed + 37 * (index + 1))
            calls += filter(None, [observation_of(harness, case)])
        return [observation for observation in calls if observation.breaks]

    return lambda fault: broken() if fault.sometimes else enough()


def _looser(
    fits: list[Fit],
    altered: Fit | None,
    ordinary: Callable[[FaultModel], list[Observation]],
    budget: FaultBudget,
) -> list[Fit]:
    """Return the looser contracts that rank before the altered definition and whose errors are distributed like the
    kernel's: the likeliest, and others about as likely, the tightest first."""
    looser = [fit for fit in fits if fit.explained and fit.fault.is_looser and (not altered or fit.rank < altered.rank)]
    unlike = [(_unlike(fit.fault, ordinary(fit.fault), budget), fit) for fit in looser]
    least = min((distance for distance, _ in unlike), default=math.inf)
    alike = sorted((fit for distance, fit in unlike if distance <= min(1.0, least + _LIKE)), key=lambda fit: fit.rank)
    return [*{str(fit.fault.contract): fit for fit in reversed(alike)}.values()][::-1]


def _unlike(fault: FaultModel, observations: list[Observation], budget: FaultBudget) -> float:
    """Return the distance between the kernel's error distribution and the fault model's; above 1 they differ."""
    if fault.sometimes and not observations:
        return math.inf
    distributions: tuple[ErrorDistribution, ...] = ()
    for observation in observations:
        if (
            fault.concerns(observation.case)
            and not observation.chooses_wrongly
            and not (distributions and budget.is_over())
        ):
            distributions = error_distributions_of(fault, observation, distributions)
    kernel, own, *like = distributions or (ErrorDistribution(), ErrorDistribution())
    return min(kernel.distance(own), *(kernel.distance(distribution) + _LIKE for distribution in like), math.inf)
