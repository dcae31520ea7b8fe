"""Explaining a failure: which known faults account for what the kernel gave, and the tightest contract that it keeps.

The kernel is called on the failing case, on the case as it was before shrinking, and on a few ordinary ones. A fault
explains it if every output lies within the fault model's own radius under the contract, on all of these cases, and some
element that breaks the contract of the right definition does so no longer. Several may: then cases follow on which the
likeliest two would give different outputs. The one that leaves an output the least room comes first (the fewest numbers
of the output's format lie within its radius, on the average element that breaks the contract), which is the likeliest
where an output is as likely to lie anywhere within. So a looser contract, which explains much, stands behind an altered
definition that predicts the output to its last bits; and it is named only if the kernel's errors are spread over
ordinary outputs as the fault model's own are (`assay.verify.explanation.fault_models.error_distribution`).

How well a fault model accounts for the calls seen so far, and how much room it leaves their outputs.

What accounts for an access out of bounds: which element it was, and what it is not without.

What accounts for a failure beside numbers: side effects and bias; and how an explanation is put into words.

Confirming a suspect: fresh data on which the known fault gives wrong numbers, and whether the kernel gives these.

A fault model that accounts for one failing case may do so because it predicts something else that is wrong there too
(NaN has one value, and a result far off is as far from everything). Before it is named, cases are looked for on which a
kernel with the fault would break the contract: the failing case with other data, and ordinary calls of several
distributions and sizes (a tail of 64 is one of 16 too, at the size that a failure was met at). On each the kernel's
results have to be those of the fault, and on the others right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from assay.formats.rounding import next_down, next_up, ulp_towards
from assay.runtime.tensors import same_numbers
from assay.verify.cases.case import Case, build
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.comparison.judge import Judgement, judge
from assay.verify.comparison.oracle import one_thread
from assay.verify.comparison.result import Result
from assay.verify.contract import Contract
from assay.verify.explanation.fault_budget import FaultBudget
from assay.verify.explanation.fault_models import fault_models_of
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

_ENOUGH_CONFIRMED = (
    2,
    12,
)  # calls in which a fault shows, and the kernel shows it: of the failing sizes, and of others
_SEEDS = 3  # of the failing case
_LEAST = 3  # calls, however little time is left
_KINDS = ("normal", "wide", "steep", "small", "loud", "positive", "below")  # distributions of ordinary calls
_STYLES = ("tile", "small", "tile")
_SIZES = (100, 40, 121, 24)  # of one symbol: beyond a tile of 64, of 32, of 16, and odd
_MOST_CONFIRMING_WORK = 2**21


def is_confirmed(
    fault: FaultModel, harness: KernelHarness, failure: Failure, first: Case, sampler: Sampler, budget: FaultBudget
) -> bool:
    """Whether the kernel gives what a kernel with this fault gives wherever that is wrong, as far as time allows.

    A fault that shows on no fresh data (of one NaN, one layout) is confirmed by the failing case alone; one for which
    time did not suffice to look isn't.
    """
    shown, tried = [0, 0], 0
    for others, case in _fresh_cases(failure.case, first, sampler):
        if tried >= _LEAST and budget.is_over():
            return any(shown)
        if shown[others] >= _ENOUGH_CONFIRMED[others]:
            continue
        observation = observation_of(harness, case) if fault.concerns(case) else None
        if observation is None:
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
        limits = limits_of(fault, observation)
        silent = fault.family == "unwritten"
        if limits is None or any(
            bool((judge(output, limit).broken & (limit.judged | silent)).any())
            for output, limit in zip(observation.outputs, limits, strict=True)
        ):
            return False
        shown[others] += wrong
    return True


def _fresh_cases(failing: Case, first: Case, sampler: Sampler) -> Iterator[tuple[bool, Case]]:
    """The failing case with other data; ordinary calls of other sizes, which are told by a True."""
    for index in range(_SEEDS):
        for case in (failing, first) if first != failing else (failing,):
            if _is_quick(case):
                yield False, replace(case, protocol="once", seed=case.seed + 31 * (index + 1))
    base = replace(first if _is_quick(first) else failing, layouts=failing.layouts)
    for pair in zip_longest(_of_one_size(base, sampler), _ordinary(failing, sampler)):
        yield from ((True, case) for case in pair if case is not None)


def _of_one_size(case: Case, sampler: Sampler) -> Iterator[Case]:
    """The case with one size another, each that may be any in turn, and ordinary data."""
    for size in _SIZES:
        for symbol in sampler.free_symbols(case):
            sizes = sampler.with_size(case.sizes, symbol, size)
            other = replace(case, sizes=sizes, edits=(), origin={}, protocol="once", unused="plain")
            if sampler.fits(sizes) and _is_quick(other):
                yield with_values(other, "normal")


def _ordinary(failing: Case, sampler: Sampler) -> Iterator[Case]:
    """Calls under the failing one's options and layouts."""
    choose = seeded(failing.seed + 5)
    for kind in _KINDS:
        for style in _STYLES:
            drawn = sampler.case(choose, style=style, options=failing.options)
            case = replace(drawn, layouts=failing.layouts, unused="plain", protocol="once", memory=failing.memory)
            if _is_quick(case):
                yield with_values(case, kind)


def _is_quick(case: Case) -> bool:
    return case.definition.cost(case.sizes) <= _MOST_CONFIRMING_WORK


_FACTOR = 4.0  # of what the contract allows: a sum of answers errs by that of each
_ALIKE = 0.9  # of the calls of the series
_SERIES = ("once", "once", "repeat", "after_other", "after_refill")  # what tells one kind of side effects from another
MOST = 5  # explanations
NUMBERS = ("contract", "exact", "nonfinite", "layout", "unwritten_output")  # kinds of failures


def described(fault: FaultModel, contract: Contract, *, kept: bool = False) -> str:
    """What is wrong, where it was seen, and the contract that allows it: one that is ``kept``, or one to be tried."""
    words = fault.description
    if fault.contract:
        fields = ", ".join(f"{name}={value!r}" for name, value in fault.loosened(contract).changed().items())
        words += f"; it keeps Contract({fields})" if kept else f"; Contract({fields}) would allow it"
    return words if fault.origin == "common slip" else f"{words} ({fault.origin})"


def explained_by_side_effects(
    harness: KernelHarness, failure: Failure, sampler: Sampler, budget: FaultBudget
) -> tuple[Explanation, ...]:
    """Faults of side effects that fail as the kernel does in a series of calls of two shapes that are new to both."""
    choose, cases = seeded(failure.case.seed + 2), []
    for _ in range(2):
        drawn = sampler.case(choose, style="small", options=failure.case.options)
        drawn = with_values(drawn, "normal", layouts={}, unused="plain", memory="plain")
        cases += [replace(drawn, protocol=protocol, seed=drawn.seed + index) for index, protocol in enumerate(_SERIES)]

    def results(kernel: Kernel | None, *, later: bool = False, like: list[Result] | None = None) -> list[Result]:
        """What each call of the series gives; ``later``: after one more call, for what changes by turns.

        The series ends where the budget is over, and where it can't be ``like`` another any more.
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
        return ()  # alike for all calls of a shape: it is the numbers that are wrong
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
    return tuple(Explanation(s.name, described(s, harness.contract), 0.0) for *_, s in result[:MOST])


def kinds(results: list[Result]) -> list[str]:
    """The kinds of failures, empty where there is none."""
    return ["" if result.failure is None else result.failure.kind for result in results]


def _give_alike(known: Result, result: Result) -> bool:
    """Whether a call gives what a kernel with a known fault gives, to within what the contract leaves a right one.

    Calls that end in no results are told by their kinds alone; and right ones are alike.
    """
    if (known.failure is None and result.failure is None) or not (known.outputs and result.outputs):
        return True
    longer = known if len(known.tolerances) > len(result.tolerances) else result
    limits = iter(longer.tolerances)
    for tensor, fault, got in zip(result.case.signature.returns, known.outputs, result.outputs, strict=True):
        limit = None if tensor.is_integer else next(limits, None)
        if limit is None or limit.codes is not None:
            continue
        fault, got = fault.detach().cpu().double(), got.detach().cpu().double()
        gap = ulp_towards(fault, torch.zeros_like(fault), limit.out)
        inner = torch.where(limit.inner.isfinite(), limit.inner, 0.0)
        alike = ((got - fault).abs() <= _FACTOR * (inner + gap)) | (got == fault) | (got.isnan() & fault.isnan())
        if not bool((alike | ~limit.judged).all()):
            return False
    return True


def explained_by_bias(harness: KernelHarness, failure: Failure, budget: FaultBudget) -> tuple[Explanation, ...]:
    """Fault models whose kernels' errors lean the same way in the same calls, though each lies within the contract."""
    results = []
    for fault in fault_models_of(failure.case.spec):
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
                results.append(Explanation(fault.name, described(fault, harness.contract), seen.ratio or 0.0))
    return tuple(results[:MOST])


_LOADED = re.compile(r"loads element (-?\d+) of ")
_OUTSIDE = re.compile(r"loads element (\d+) of \w+, out of bounds")
_FAULT = "ignored_labels_loaded"
_TILES = (16, 32, 64, 128)
TAIL = "tail_loaded"
"""The explanation's name where a load isn't masked beyond the last whole tile."""


def explained_by_accesses(
    harness: KernelHarness, failure: Failure, sampler: Sampler, budget: FaultBudget
) -> tuple[Explanation, ...]:
    """What a load out of bounds is not without: a label that is ignored, or a size that is no whole tile."""
    return () if budget.is_over() else _by_labels(harness, failure) or _by_tails(harness, failure, sampler, budget)


def _by_tails(
    harness: KernelHarness, failure: Failure, sampler: Sampler, budget: FaultBudget
) -> tuple[Explanation, ...]:
    """That a load isn't masked along a dimension: at whole tiles of it the kernel doesn't crash, at one more it loads
    out of bounds again, and all else is as it was."""
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
    """That an ignored token's label was loaded: one points there, and without one nothing is loaded out of bounds."""
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
    return (Explanation(fault.name, described(fault, Contract()), 0.0),)


Tensor = torch.Tensor
_UNSAID = 24.0  # bits of room of an element of which an explanation says nothing


@dataclass(frozen=True)
class Fit:
    """How well a fault model accounts for calls: what it explains and leaves, its room in bits, the worst ratio."""

    fault: FaultModel
    order: int
    left: int = 0
    explained: int = 0
    room: tuple[float, float] = (0.0, 0.0)  # of elements that break the contract, of all
    elements: tuple[int, int] = (0, 0)
    ratio: float = 0.0

    @property
    def rank(self) -> tuple[int, ...]:
        """The less room for the mean element that breaks the contract, then for any, the likelier; or the earlier."""
        means = (room / max(count, 1) for room, count in zip(self.room, self.elements, strict=True))
        return (*(round(4 * mean) for mean in means), self.order)

    def on(self, observation: Observation, budget: FaultBudget) -> Fit:
        """The same with one more call; a fault model that can't be evaluated on it doesn't account for it."""
        judgements: tuple[Judgement, ...] | None = None
        with budget.trying(self.fault):
            if not self.fault.concerns(observation.case):
                return replace(self, left=self.left + observation.breaks)
            limits = limits_of(self.fault, observation)
            judgements = None if limits is None else tuple(map(judge, observation.outputs, limits))
        if judgements is None:
            return replace(self, left=self.left + max(observation.breaks, 1))
        silent = self.fault.family == "unwritten"  # which says of some elements that they may be anything
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
    """Bits of room of each element: the logarithm of how many numbers of the output's format lie within."""
    allowed = judgement.tolerance
    golden = torch.where(allowed.golden.isfinite(), allowed.golden, 0.0)
    gap = torch.maximum(next_up(golden, allowed.out) - golden, golden - next_down(golden, allowed.out))
    span = (allowed.ends.high - allowed.ends.low) / gap.clamp(min=5e-324)
    bits = torch.log2(1 + span.nan_to_num(nan=0.0, posinf=2.0**_UNSAID)).clamp(max=_UNSAID)
    return torch.where(allowed.judged, bits, _UNSAID)


Keeps = Callable[[Contract], bool | None]

_SIDE_EFFECTS = ("nondeterministic", "batch_variant", "input_mutated", "out_of_bounds_write")
_MOST_WORK = 2**21  # of a case that is evaluated for every fault model
_ENOUGH = 2  # cases, after which one fault model that is left needs no more
_NEAR = (("tile", "normal"), ("tile", "steep"), ("tile", "normal"), ("small", "small"))  # sizes and distributions
_TELLING = (
    None,
    "small",
    "wide",
    "powers",
    "steep",
)  # distributions that tell fault models apart; None: that of the failure
_MORE = 24  # such cases, at most
_LIKE = 0.125  # by which an arithmetic that is not a fault model's own is further away
_OTHER_OPTIONS = 7  # sets of them


@dataclass(frozen=True)
class Explained:
    """The known faults that account for a failure, the likeliest first; and which fault models raised when asked."""

    explanations: tuple[Explanation, ...] = ()
    not_asked: tuple[str, ...] = ()


def explain(
    harness: KernelHarness,
    failure: Failure,
    first: Case,
    sampler: Sampler,
    *,
    seconds: float = 3.0,
    keeps: Keeps = lambda contract: None,
) -> Explained:
    """What accounts for a shrunk ``failure``; ``first`` is the case as it failed at first.

    ``keeps`` tells whether the kernel keeps another contract where this one is broken: None where that isn't known, and
    then it isn't said. What isn't tried within so many ``seconds`` of processor time is left out.
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
            results = _explained_by_numbers(harness, failure, first, sampler, budget, keeps)
        if not results and failure.kind != "bias":
            results = explained_by_side_effects(harness, failure, sampler, budget)
    return Explained(results, tuple(budget.failed.values()))


def _varies(harness: KernelHarness, case: Case, budget: FaultBudget) -> bool:
    """Whether the same call gives other bits the second time: no altered mathematics does."""
    if budget.is_over():
        return False
    once, again = harness.outputs(case), harness.outputs(case)
    return once is not None and again is not None and not all(map(same_numbers, once, again))


def _explained_by_numbers(
    harness: KernelHarness, failure: Failure, first: Case, sampler: Sampler, budget: FaultBudget, keeps: Keeps
) -> tuple[Explanation, ...]:
    """Fault models whose altered mathematics accounts for the outputs, case by case fewer."""

    def confirmed(fit: Fit) -> Iterator[tuple[Fit, Explanation]]:
        """A fault that fresh data confirm; a looser contract if an examination under it doesn't break it."""
        with budget.trying(fit.fault):
            if is_confirmed(fit.fault, harness, failure, first, sampler, budget):
                kept = keeps(fit.fault.loosened(harness.contract)) if fit.fault.contract else None
                if kept is not False or not fit.fault.contract:
                    words = described(fit.fault, harness.contract, kept=kept is True)
                    yield fit, Explanation(fit.fault.name, words, fit.ratio)

    def ranked(fits: list[Fit], seen: list[Observation]) -> tuple[Explanation, ...]:
        """The likeliest altered definitions that are confirmed, and before them a looser contract that fits better."""
        altered = sorted((fit for fit in fits if fit.explained and not fit.fault.contract), key=lambda fit: fit.rank)
        established = [results for fit in altered[:MOST] for results in confirmed(fit)]
        looser = _looser(fits, established[0][0] if established else None, seen, budget)
        results = [*(results for fit in looser for results in confirmed(fit)), *established]
        return tuple(explanation for _, explanation in results[:MOST])

    alive = [Fit(fault, order) for order, fault in enumerate(_candidates(failure))]
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
    """Whether there is a call with other data than the failing one's."""
    return any(observation.case.seed != observations[0].case.seed for observation in observations)


def _after(observation: Observation, fits: list[Fit], budget: FaultBudget) -> list[Fit]:
    """The fault models after one more call; those that time does not suffice for as they were."""
    seen = []
    for fit in fits:
        if budget.is_over():
            break
        seen.append(fit.on(observation, budget))
    return seen + fits[len(seen) :]


def _distinguished(
    harness: KernelHarness, alive: list[Fit], first: Case, sampler: Sampler, budget: FaultBudget
) -> tuple[list[Fit], list[Observation]]:
    """What is left of the faults after calls for which the likeliest two would give different outputs; the calls."""
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
    """The two that are to be told apart; a looser contract behind an altered definition stays behind it."""
    results = [fit.fault for fit in sorted(fits, key=lambda fit: fit.rank) if fit.explained]
    first, others = results[:1], results[1:]
    return first + [fault for fault in others if not fault.contract or first[0].contract][:1]


def _differ(faults: Sequence[FaultModel], case: Case) -> bool:
    """Whether the kernels of two fault models give different bits."""
    values = {name: guarded.tensor for name, guarded in build(case).guarded.items()}
    given = (given_by(fault, case, values) for fault in faults)
    return not all(same_numbers(a, b) for a, b in zip(*given, strict=True))


def _cases(failure: Failure, first: Case, sampler: Sampler) -> Iterator[Case]:
    """The failing case, the same before it was shrunk, and ordinary cases under the same options."""
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


def _candidates(failure: Failure) -> Iterator[FaultModel]:
    """The fault models that may account for a failure of this kind."""
    for fault in fault_models_of(failure.case.spec):
        if fault.side_effects is None and (fault.family != "unwritten" or failure.kind == "unwritten_output"):
            yield fault


def _looser(fits: list[Fit], altered: Fit | None, observations: list[Observation], budget: FaultBudget) -> list[Fit]:
    """The looser contract, or none, that fits better than the altered definition, and as errors of which they spread.

    How they spread is told by ordinary calls, not by those that were looked for because they fail.
    """
    looser = [fit for fit in fits if fit.explained and fit.fault.contract and (not altered or fit.rank < altered.rank)]
    ordinary = [observation for observation in observations if observation.case.seed != observations[0].case.seed]
    unlike = [(_unlike(fit.fault, ordinary, budget), fit) for fit in looser]
    alike = sorted((pair for pair in unlike if pair[0] <= 1), key=lambda pair: (round(16 * pair[0]), *pair[1].rank))
    return [fit for _, fit in alike[:1]]


def _unlike(fault: FaultModel, observations: list[Observation], budget: FaultBudget) -> float:
    """How unlike the kernel's errors spread in these calls; above 1 they are others than the fault model's."""
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
