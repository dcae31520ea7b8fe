"""Diagnosis of failures: shrink, classify and explain each one, and find the sizes, data and contracts at which it
occurs.

In: the failures of a run and its plan. Out: the aspects of a verdict. Each step has a budget of a few seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from assay.golden.inputs.distributions import names_of
from assay.verify.cases.at_shape import PROTOCOL as AT
from assay.verify.cases.at_shape import smaller_cases
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler, real_tensors, with_values
from assay.verify.comparison.error_map import sample_of
from assay.verify.comparison.sampled import case_label
from assay.verify.contract import CHOICES, Contract
from assay.verify.examination.aspects import aspects_of
from assay.verify.examination.plan import Plan
from assay.verify.examination.repro import repro_line
from assay.verify.examination.run import Run, fixed_cases
from assay.verify.examination.shrink import is_alike, shrink
from assay.verify.examination.steps import Steps
from assay.verify.explanation.begins import beginning
from assay.verify.explanation.experiments.search import Experiments
from assay.verify.explanation.explain import Explained, explain
from assay.verify.explanation.facts import breaking_calls, further_facts, is_steady, measured_facts
from assay.verify.explanation.fault_budget import FaultBudget
from assay.verify.explanation.fault_models.fault_tolerance import Observation
from assay.verify.findings import ASPECTS, GRAVITY, Aspect, Explanation, Fact, Failure
from assay.verify.harness.compute_sanitizer import is_installed, sanitize
from assay.verify.harness.runner import KernelHarness, failure_or_suspicion

_Key = TypeVar("_Key", str, int)
# powers of two, where blocks end, their neighbours, and small odd sizes
_SIZES = (1, 2, 3, 7, 8, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 256, 257)
_LONGER = (512, 513, 1024, 2048, 2049, 4096, 8192)
_KINDS = ("normal", "positive", "integers", "powers", "small", "wide", "steep", "large_mean")
_KNOWN_SECONDS = 2.0  # for the list of sizes, and for that of data
_SECONDS_OF_CONTRACT = 4.0  # for a quick examination under another contract; the answer is "unknown" after that


class Promises:
    """Which other contracts a kernel keeps. Each is examined once at quick effort, for all broken aspects."""

    def __init__(self, plan: Plan, broken: Collection[str]) -> None:
        self._question, self._broken = plan, set(broken)
        self._known: dict[str, tuple[set[str], bool]] = {}

    def keeps(self, aspect: str, contract: Contract) -> bool | None:
        """Return True if the kernel keeps a contract, False if it breaks the aspect, None if unknown.

        It is unknown if only other aspects are broken, or if time ran out.
        """
        key = str(contract.changed())
        if key not in self._known:
            self._known[key] = self._examined(contract)
        broken, over = self._known[key]
        return False if aspect in broken else None if over or broken - self._question.settings.unpromised else True

    def _examined(self, contract: Contract) -> tuple[set[str], bool]:
        """Return the aspects broken under a contract, and whether the examination ended early."""
        plan = self._question
        changed: dict[str, Any] = {"contract": contract, "effort": "quick", "examples": None, "at": (), "goldens": None}
        settings = replace(plan.settings, **changed)
        other = replace(plan, settings=settings, harness=replace(plan.harness, contract=contract), steps=Steps())
        budget, over = FaultBudget(_SECONDS_OF_CONTRACT), False

        def progress(phase: str, done: int, of: int) -> None:
            nonlocal over
            if budget.is_over() or self._broken <= run.tally.broken:
                over = run.ended = True

        run = Run(other, progress)
        return run.execute().broken, over


def sizes_in_words(failure: Failure, plan: Plan) -> tuple[str, tuple[Fact, ...]]:
    """Return the sizes of each symbol at which the case is right and wrong, in words, and where it begins to be wrong;
    empty if it is always one of them."""
    trials = Trials(plan)
    sampler, case, words, facts = plan.sampler, failure.case, list[str](), list[Fact]()

    def sized(symbol: str, size: int, draw: int = 0) -> Case | None:
        """Return the case with ordinary data and this size; None if it isn't admitted."""
        sizes = {**case.sizes, symbol: size}
        known = sampler.shapes.get(symbol) or sampler.definition.sizes.allowed.get(symbol)
        if (known and size not in known) or not sampler.fits(sizes) or not _is_admitted(sizes, case, sampler):
            return None
        seed = case.seed + 31 * draw
        return replace(with_values(case, "normal"), sizes=sizes, edits=(), origin={}, seed=seed)

    def is_wrong(symbol: str, size: int, draw: int) -> bool | None:
        other = sized(symbol, size, draw)
        return None if other is None else trials.is_wrong(other)

    for symbol in sampler.free_symbols(case) or sampler.shapes:
        cases = {size: other for size in _candidates(plan, case, symbol) if (other := sized(symbol, size))}
        right, wrong = trials.sorted(cases)
        if right and wrong:
            named = list(map(str, right)), list(map(str, wrong))
            words.append(f"{symbol}: {_right_and_wrong(named, 'at')}")
            if rule := beginning(right, wrong, partial(is_wrong, symbol)):
                facts.append(Fact("begins", f"{symbol}: {rule}", failure.aspect))
    return "; ".join(words), tuple(facts)


def _is_admitted(sizes: Mapping[str, int], case: Case, sampler: Sampler) -> bool:
    """Whether each size is a multiple of that of which it must be one, and no less than an option requires."""
    rules = sampler.definition.sizes
    multiples, least = rules.multiples, rules.minimum
    if any(sizes.get(symbol, 0) < int(case.options[option]) for symbol, option in least.items()):
        return False
    return all(value % max(sizes.get(multiples.get(name, ""), 1), 1) == 0 for name, value in sizes.items())


def data_in_words(failure: Failure, first: Case, plan: Plan) -> str:
    """Return the distributions on which the kernel is right and wrong, in words, at the sizes of the ``first`` failing
    case."""
    case, cases = replace(failure.case, sizes=first.sizes), {}
    numbers = real_tensors(case.signature)
    for kind in _KINDS:
        if numbers and kind in names_of(numbers[0]):
            cases[kind] = with_values(case, kind, edits=(), origin={}, seed=case.seed + 1)
    result = Trials(plan).sorted(cases)
    return f"data: {_right_and_wrong(result, 'on')}" if any(result) else ""


def _candidates(plan: Plan, case: Case, symbol: str) -> Sequence[int]:
    restricted = plan.sampler.shapes.get(symbol) or plan.sampler.definition.sizes.allowed.get(symbol)
    if restricted:
        return [size for size in _SIZES if size in restricted] or list(restricted)[:8]
    size = case.sizes[symbol]
    return _SIZES if size <= _SIZES[-1] else (*_SIZES, *(longer for longer in _LONGER if longer < size), size)


def _right_and_wrong(result: tuple[list[str], list[str]], word: str) -> str:
    parts = zip(("right", "wrong"), result, strict=True)
    return ", ".join(f"{which} {word} {', '.join(names)}" for which, names in parts if names)


class Trials:
    """Tries cases until a time limit."""

    def __init__(self, plan: Plan) -> None:
        self._harness, self._budget = plan.harness, FaultBudget(_KNOWN_SECONDS)

    def is_wrong(self, case: Case) -> bool | None:
        """Return whether a case fails; None if the time is over."""
        return None if self._budget.is_over() else self._harness.try_case(case).failure is not None

    def sorted(self, cases: Mapping[_Key, Case]) -> tuple[list[_Key], list[_Key]]:
        """Return the keys of the cases that pass, and of the failing ones."""
        results: tuple[list[_Key], list[_Key]] = ([], [])
        for name, case in self._in_time(cases):
            results[self._harness.try_case(case).failure is not None].append(name)
        return results

    def _in_time(self, cases: Mapping[_Key, Case]) -> Iterator[tuple[_Key, Case]]:
        for name, case in cases.items():
            if self._budget.is_over():
                break
            yield name, case


_OF_SPECIAL_VALUES = ("nonfinite", "subnormals", "overflow", "masked_rows")  # fields of a contract
_SECONDS = 20.0  # for shrinking, shared by the broken aspects: a user waits for the report
_SECONDS_OF_CALLS = 4.0  # for the calls that experiments and facts are made of, and for what the kernel reads
_OF_EARLIER_CALLS = ("answer_kept_by_shape", "answer_kept_by_address")  # explanations by results of other calls
_ALSO_EXPLAINED = ("layouts", "determinism")  # aspects of which it is measured where they begin, though explained
_SECONDS_OF_EXPERIMENTS = 6.0  # on the definition; both are shared by the broken aspects too
_SECONDS_OF_SUSPECT = 4.0  # less, as a suspect aspect is no proof
_ACCESS = "device_access"  # the name of an explanation by compute-sanitizer
_SECONDS_OF_SANITIZER = 120.0  # programs run many times slower under it
_MOST_LOST = {"crash": 8, "timeout": 2}  # new processes for shrinking a loss; each hang takes its time limit too
_ALONE = "alone in a new process, with CUDA_LAUNCH_BLOCKING=1"
_SECONDS_OF_OTHERS, _MOST_OTHERS = 2.0, 40  # for counting cases that another contract admits


def diagnosed(aspects: Mapping[str, Aspect], plan: Plan, target: str) -> dict[str, Aspect]:
    """Return all aspects: broken ones with their failures shrunk and explained, suspect ones with theirs shrunk."""
    broken = [name for name in ASPECTS if name in aspects and aspects[name].status == "broken"]
    known = {name: aspects.get(name, Aspect()) for name in ASPECTS}
    promises, experiments = Promises(plan, broken), Experiments(_SECONDS_OF_EXPERIMENTS, len(broken))
    for name in broken:
        result = aspects[name]
        with plan.steps.step(f"explaining {name}"):
            result = _explained(name, aspects[name], plan, len(broken), promises, experiments)
        failure = result.failure
        assert failure is not None
        if failure.kind == "unwritten_output" and name != "memory":
            known[name] = Aspect(note="hidden by memory")
            if "memory" in broken:
                continue
            name = "memory"
        admitting = ""
        with plan.steps.step(f"contracts that admit {name}"):
            admitting = _admitting(name, failure, plan)
        failure = replace(failure, aspect=name, message=failure.message + admitting)
        line = repro_line(plan.settings, target, failure.case, name)
        if failure.device_lost and failure.kind == "crash" and plan.settings.shrinking and is_installed():
            words = sanitize(line, target, seconds=_SECONDS_OF_SANITIZER)
            result = replace(result, explanations=(Explanation(_ACCESS, words, 0.0), *result.explanations))
        known[name] = replace(result, failure=failure, repro=line)
    for name in [name for name in ASPECTS if known[name].status == "suspect"]:
        failure = known[name].failure
        assert failure is not None
        if plan.settings.shrinking:
            attempt = partial(failure_or_suspicion, plan.harness)
            with plan.steps.step(f"shrinking {name}"):
                failure = shrink(failure, attempt, plan.sampler, seconds=_SECONDS_OF_SUSPECT)
        line = repro_line(plan.settings, target, failure.case, name)
        known[name] = replace(known[name], failure=replace(failure, aspect=name), repro=line)
    return {name: _noted(aspect, broken) for name, aspect in _said_once(_explained_once(known)).items()}


def _noted(aspect: Aspect, broken: list[str]) -> Aspect:
    hidden = aspect.status == "not tried" and broken and not aspect.note
    return replace(aspect, note=f"hidden by {', '.join(broken)}") if hidden else aspect


def _explained(
    name: str, aspect: Aspect, plan: Plan, broken: int, promises: Promises, experiments: Experiments
) -> Aspect:
    """Return an aspect with its failure shrunk and explained; unchanged if that takes too long or isn't wanted."""
    first, harness = aspect.failure, plan.harness
    assert first is not None
    if first.case.protocol == "outside" or not plan.settings.shrinking:
        return aspect
    if (first.kind == "timeout" or first.device_lost) and harness.isolation is not None and harness.outlives_device:
        with harness.isolation.blocking():
            return replace(aspect, failure=_shrunk_in_new_processes(first, plan))
    if first.kind == "timeout" or first.device_lost:
        return aspect

    def attempt(case: Case) -> Failure | None:
        """Return the failure of a case that shows this aspect; another aspect may fail by another fault."""
        is_of_it = broken == 1 or name == "numbers" or name in aspects_of(case)
        with plan.steps.step(f"shrinking {name}"):
            return harness.try_case(plan.sampler.tied(case)).failure if is_of_it else None
        return None

    large = first if first.case.protocol == AT else None
    if large is not None:
        alike = (attempt(case) for case in smaller_cases(first.case, plan.sampler))
        small = next((result for result in alike if result is not None and is_alike(result, first)), None)
        if small is None:
            return aspect
        first = small
    failure = first
    with plan.steps.step(f"shrinking {name}"):
        failure = shrink(first, attempt, plan.sampler, seconds=_SECONDS / broken)
    with plan.steps.step(f"classifying {name}"):
        failure = _classified(failure, harness)
    explained, facts, known, again = Explained(), tuple[Fact, ...](), "", None
    calls, steady = list[Observation](), True
    with plan.steps.step(f"explaining {name}"):
        explained = explain(harness, failure, first.case, plan.sampler, keeps=partial(promises.keeps, name))
    explanations, share = explained.explanations, _SECONDS_OF_CALLS / broken
    with plan.steps.step(f"measuring facts about {name}"):
        steady = is_steady(harness, failure)
        calls = breaking_calls(harness, failure, first.case, plan.sampler, share)
        explanations = explanations or experiments.explained(calls)
        if steady:
            facts = measured_facts(harness, calls, name, is_explained=bool(explanations), seconds=share)
    is_explained = bool(explanations)
    if large is not None:
        failure = replace(failure, message=f"{failure.message}; first met at {case_label(large.case)}: {large.message}")
    with plan.steps.step(f"finding where {name} begins"):
        if steady:
            known, begins = _known(name, failure, first.case, plan, is_explained=is_explained)
            facts = (*facts, *(replace(fact, aspect=name) for fact in begins))
        if not is_explained or name in _ALSO_EXPLAINED:
            further = further_facts(
                harness, failure, first.case, plan.sampler, calls, name, is_steady=steady, seconds=share
            )
            facts = (*facts, *further)
    with plan.steps.step(f"the numbers of {name}"):
        again = sample_of(failure.case, harness.try_case(failure.case) if aspect.map is not None else None)
    return replace(
        aspect,
        failure=failure,
        explanations=explanations,
        not_asked=explained.raised,
        known=known,
        facts=facts,
        sample=again,
    )


def _shrunk_in_new_processes(first: Failure, plan: Plan) -> Failure:
    """Return the loss of a process shrunk, by few losses more, if it happens again where the case is run alone."""
    left = _MOST_LOST[first.kind]
    again = plan.harness.try_case(first.case).failure
    if again is None or not is_alike(again, first):
        happened = "it passed" if again is None else f"it gave another failure ({again.kind}: {again.message})"
        return replace(first, message=f"{first.message}; {happened} when it was run again {_ALONE}")

    def attempt(case: Case) -> Failure | None:
        nonlocal left
        if left == 0:
            return None
        failure = plan.harness.try_case(case).failure
        left -= failure is not None and (failure.device_lost or failure.kind == "timeout")
        return failure

    failure = shrink(again, attempt, plan.sampler, seconds=_SECONDS)
    return replace(failure, message=f"{failure.message}; so again {_ALONE}")


def _known(name: str, failure: Failure, first: Case, plan: Plan, *, is_explained: bool) -> tuple[str, tuple[Fact, ...]]:
    """Describe where the kernel is right: sizes for a fault of shapes; sizes and data for a failure without
    explanation; and where it begins to be wrong."""
    if failure.case.protocol != "once" or failure.kind in ("timeout", "input_mutated") or failure.device_lost:
        return "", ()
    sizes, begins = sizes_in_words(failure, plan) if name == "shapes" or not is_explained else ("", ())
    data = data_in_words(failure, first, plan) if not is_explained and failure.golden is not None else ""
    return "; ".join(filter(None, (sizes, data))), begins


def _explained_once(known: Mapping[str, Aspect]) -> dict[str, Aspect]:
    """Return the aspects with notes: if one fault explains several, the gravest keeps it and the others refer to that
    one."""
    first_with, result = dict[str, str](), dict(known)
    for name in GRAVITY:
        aspect = result.get(name, Aspect())
        if aspect.status == "broken" and aspect.explanations:
            first = first_with.setdefault(aspect.explanations[0].name, name)
            result[name] = aspect if first == name else replace(aspect, note=f"by the same fault as {first}")
    related = dict[str, str]()
    for name in GRAVITY:
        aspect = result.get(name, Aspect())
        if aspect.status == "broken" and not aspect.explanations:
            for subject in [fact.subject for fact in aspect.facts if fact.kind == "relation" and fact.is_telling]:
                if (first := related.setdefault(subject, name)) != name:
                    result[name] = replace(aspect, note=f"by the same fault as {first}")
    kept = next((name for name in GRAVITY if _keeps_results(result.get(name, Aspect()))), "")
    for name, aspect in result.items():
        if kept and name not in (kept, "conduct") and aspect.status == "broken" and not aspect.explanations:
            note = f"perhaps by the same fault as {kept}, whose results are of other calls"
            result[name] = replace(aspect, note=note, known="", facts=())
    return result


def _keeps_results(aspect: Aspect) -> bool:
    """Whether a broken aspect is explained, or measured, as results of earlier calls, which any case may meet."""
    named = any(explanation.name in _OF_EARLIER_CALLS for explanation in aspect.explanations[:1])
    return aspect.status == "broken" and (named or any(fact.kind == "calls" for fact in aspect.facts))


def _said_once(known: Mapping[str, Aspect]) -> dict[str, Aspect]:
    """Return the aspects without the facts that a graver one has too, from calls of other sizes."""
    said, result = set[tuple[str, str]](), dict(known)
    for name in GRAVITY:
        facts = result[name].facts if name in result else ()
        if facts:
            own = [fact for fact in facts if (fact.kind, fact.subject) not in said]
            said |= {(fact.kind, fact.subject) for fact in facts}
            result[name] = replace(result[name], facts=tuple(own))
    return result


def _classified(failure: Failure, harness: KernelHarness) -> Failure:
    """Return the failure as one of unwritten memory or of an ignored stride, if the wrong number comes from that."""
    if failure.kind not in ("contract", "exact", "nonfinite"):
        return failure
    if _depends_on_memory(failure, harness):  # first: what memory held may be right when it is tried again
        lines = harness.call.watch.unloaded
        lanes = f", or in lanes that a load leaves undefined (its mask false, no other: {lines})" if lines else ""
        message = f"the output holds what was in memory before the call{lanes} ({failure.message})"
        return replace(failure, kind="unwritten_output", message=message)
    if any(
        harness.try_case(failure.case).failure is None for _ in range(2)
    ):  # wrong at every so many calls, perhaps now
        return replace(failure, message=f"{failure.message}; tried again, the same case is right")
    if any(layout != "contiguous" for layout in failure.case.layouts.values()):
        near = {name: "sliced" if layout == "far" else layout for name, layout in failure.case.layouts.items()}
        if _is_right(failure.case, {}, harness):
            wrong = "wrong for this layout"
            if near != failure.case.layouts and _is_right(failure.case, near, harness):
                wrong = "wrong only where rows lie 2^30 elements apart, as by an offset that wraps around in 32 bits"
            message = f"right for contiguous inputs, {wrong} ({failure.message})"
            return replace(failure, kind="layout", message=message)
    return failure


def _admitting(name: str, failure: Failure, plan: Plan) -> str:
    """Return in words which contract field would admit the output at a NaN, an infinity or a subnormal, if one would.

    The words count how many other failing cases of this aspect it would admit.
    """
    harness, of_numbers = plan.harness, failure.kind in ("contract", "exact", "nonfinite")
    if not of_numbers or failure.case.protocol != "once" or not plan.settings.shrinking:
        return ""
    if harness.try_case(failure.case).failure is None:  # it comes and goes
        return ""
    for field in _OF_SPECIAL_VALUES:
        for value in filter(None, CHOICES[field]):
            changed: dict[str, Any] = {field: value}
            contract = replace(harness.contract, **changed)
            if (
                contract != harness.contract
                and replace(harness, contract=contract).try_case(failure.case).failure is None
            ):
                others = _others_admitted(name, failure, contract, plan)
                return f"; Contract({field}={value!r}) would admit this case{others}"
    return ""


def _others_admitted(name: str, failure: Failure, contract: Contract, plan: Plan) -> str:
    """Return in words how many of the first failing fixed cases of an aspect another contract admits."""
    harness, budget, admitted = plan.harness, FaultBudget(_SECONDS_OF_OTHERS), list[bool]()
    for case in (case for _, case in fixed_cases(plan) if case.protocol == "once" and name in aspects_of(case)):
        if len(admitted) >= _MOST_OTHERS or budget.is_over():
            break
        tied = plan.sampler.tied(case)
        if tied != failure.case and harness.try_case(tied).failure is not None:
            admitted.append(replace(harness, contract=contract).try_case(tied).failure is None)
    return f", and {sum(admitted)} of {len(admitted)} others that fail" if admitted else ""


def _is_right(case: Case, layouts: Mapping[str, str], harness: KernelHarness) -> bool:
    return harness.try_case(replace(case, layouts=layouts)).failure is None


def _depends_on_memory(failure: Failure, harness: KernelHarness) -> bool:
    """Whether the failing element depends on what fresh memory holds, and on that alone; each is tried twice."""
    seen = []
    for memory in ("nan", "nan", "huge", "huge"):
        outputs = harness.outputs(replace(failure.case, memory=memory))
        if outputs is None:
            return False
        index = [tensor.name for tensor in failure.case.signature.returns].index(failure.output)
        value = float(outputs[index][failure.index])
        seen.append("nan" if value != value else repr(value))
    return seen[0] == seen[1] != seen[2] == seen[3]
