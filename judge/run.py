"""The run of a judgement: the calls at each choice of sizes, and further calls that explain a failure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from assay.judge import probing
from assay.judge.problems.problem import Problem, Sizes
from assay.judge.problems.sizes import Choice
from assay.judge.solution.solution_process import SolutionError, SolutionProcess
from assay.judge.solution.trials import Observation, Trial
from assay.judge.tampering import Cheat, detected_cheats
from assay.judge.under_test import SolutionUnderTest, same_outputs
from assay.verify.comparison.result import Result
from assay.verify.contract import Contract
from assay.verify.findings import Failure

_OTHER = 2.0**15  # what fresh memory holds the second time: a number of every format of 16 bits or more
_NUMBERS = ("contract", "nonfinite", "exact")
_REFUSALS = ("ValueError", "AssertionError", "NotImplementedError")


@dataclass
class Run:
    """A judgement in progress: observations, the first failure and the number of passed calls by aspect, and cheats.

    ``refusal`` is the solution's error message if it rejects sizes other than the given ones. ``writes`` are the inputs
    that the reference itself changes, ``aliased`` those whose memory its results use.
    """

    problem: Problem
    process: SolutionProcess
    contract: Contract
    seed: int
    effort: str
    pretend: bool
    observations: list[Observation] = field(default_factory=list)
    failures: dict[str, tuple[Failure, Trial]] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    cheats: list[Cheat] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refusal: str = ""
    writes: set[int] = field(default_factory=set)
    aliased: set[int] = field(default_factory=set)

    def build(self, choice: Choice, given: Sizes) -> SolutionUnderTest:
        """Build the solution and the reference at some sizes. Raises `ProblemError` and `SolutionError`."""
        before = len(self.process.build_observations)
        under_test = SolutionUnderTest(
            self.problem, self.process, self.contract, given, choice, self.seed, self.pretend
        )
        for detected in self.process.build_observations[before:]:
            self.cheats += detected_cheats(detected, set(), building=True)
        arguments = under_test.model.instance.draw(self.seed)
        self.writes, self.aliased = under_test.model.writes_to(arguments)
        if under_test.constructed.state and not under_test.names:
            words = "the solution's parameters are none of the reference's, by name or order: both as constructed"
            self.notes += [words] if words not in self.notes else []
        return under_test

    def take(self, observation: Observation, aspects: Sequence[str]) -> Observation:
        """Record an observation for these aspects; a failure counts for the first of them."""
        self.observations.append(observation)
        self.cheats += [
            self._with_trial(cheat, observation) for cheat in detected_cheats(observation.detected, self.aliased)
        ]
        mutated = [index for index in observation.detected.get("mutated") or () if index not in self.writes]
        if mutated:
            words = f"the solution changed its argument {mutated[0]}"
            self.fail("memory", Failure("input_mutated", observation.result.case, words), observation.trial)
        failure = observation.result.failure
        if failure is None:
            for aspect in ("memory", *aspects) if not mutated else aspects:
                self.kept[aspect] = self.kept.get(aspect, 0) + 1
                self.worst[aspect] = max(self.worst.get(aspect, 0.0), observation.result.worst)
            return observation
        if failure.kind == "dtype":
            self.cheats += _narrower(failure, observation)
        self.fail(aspects[0], failure, observation.trial)
        return observation

    def fail(self, aspect: str, failure: Failure, trial: Trial) -> None:
        """Record a failure, if it is the first of its aspect."""
        self.failures.setdefault(aspect, (replace(failure, aspect=aspect), trial))

    @staticmethod
    def _with_trial(cheat: Cheat, observation: Observation) -> Cheat:
        return replace(cheat, trial=observation.trial.as_line())

    def first(self, under_test: SolutionUnderTest) -> bool:
        """Call at the small sizes: numbers, weights, amplitudes, memory, and probes if something fails.

        Returns False if the solution rejects these sizes.
        """
        seed = self.seed
        nominal = under_test.tried(under_test.trial("given", seed + 1), name="a", keep=True, pause=True)
        if self.refused(nominal, under_test):
            return False
        self.take(nominal, ["numbers"])
        if nominal.outputs:
            self._repeat(under_test, nominal)
        base = self._with_other_weights(under_test, nominal)
        base = base or self.take(
            under_test.tried(under_test.trial("given", seed + 2), name="b", keep=True), ["numbers"]
        )
        for number, (inputs, memory) in enumerate((("mixed", "quiet"), ("scaled", "objects"), ("normal", "new"))):
            observation = under_test.tried(under_test.trial(inputs, seed + 3 + number, memory), name="b")
            self._same_memory(under_test, base, observation)
            self.take(observation, ["range"])
        for extra in range({"quick": 0, "usual": 4, "thorough": 16}[self.effort]):
            inputs = ("mixed", "scaled", "normal")[extra % 3]
            self.take(under_test.tried(under_test.trial(inputs, seed + 20 + extra), name="b"), ["range"])
        if base.outputs:
            self.one_element(under_test, base)
            self.cheats += probing.ignored(under_test, base)
            self._why(under_test, base)
        return True

    def other_sizes(self, under_test: SolutionUnderTest) -> None:
        """Call at odd sizes, block edges, or sizes of which one is large."""
        base = under_test.tried(under_test.trial("given", self.seed + 7), name="b")
        if self.refused(base, under_test):
            return
        self.take(base, ["shapes"])
        if under_test.can_redraw and base.outputs:
            self._loaded(under_test)
        observation = under_test.tried(under_test.trial("mixed", self.seed + 8, "quiet"), name="b")
        self._same_memory(under_test, base, observation)
        self.take(observation, ["shapes"])
        if base.outputs:
            self.one_element(under_test, base)

    def stated_sizes(self, under_test: SolutionUnderTest, first: Observation, *, few: bool) -> None:
        """Call at stated sizes after the ``first`` call: other weights and amplitudes, single elements changed.

        ``few``: with few calls, because one takes long. If the solution takes no other sizes, all calls are made here.
        """
        if not few and self.refusal and not any(one.trial.kind == "small" and one.outputs for one in self.observations):
            self.first(under_test)
            return
        if not few:
            self.one_element(under_test, first)
        if under_test.can_redraw:
            self._loaded(under_test)
        self.take(under_test.tried(under_test.trial("mixed", self.seed + 9), name="b"), ["shapes"])

    def _loaded(self, under_test: SolutionUnderTest) -> bool:
        try:
            under_test.load_redrawn()
        except SolutionError as error:
            self.notes.append(f"other weights can't be loaded: {error}")
            return False
        return under_test.model is not under_test.constructed

    def _with_other_weights(self, under_test: SolutionUnderTest, nominal: Observation) -> Observation | None:
        """Call with weights none of which is constant; a failure with these alone is the cheat "weights-kept"."""
        if not under_test.can_redraw or not nominal.outputs or not self._loaded(under_test):
            return None
        observation = under_test.tried(under_test.trial("given", self.seed + 2), name="b", keep=True)
        if observation.failed and not nominal.failed:
            failure = observation.result.failure
            assert failure is not None
            if failure.kind in _NUMBERS:
                words = "wrong with weights that were loaded after it was constructed, none of them constant"
                self.cheats.append(Cheat("weights-kept", words, observation.trial.as_line()))
        return self.take(observation, ["numbers"])

    def _repeat(self, under_test: SolutionUnderTest, first: Observation) -> None:
        """Repeat a call with other random seeds, and check for unwritten and nondeterministic results."""
        try:
            again = under_test.process.call("a", seed=first.trial.seed + 1)
        except SolutionError as error:
            self.fail("determinism", Failure("crash", first.result.case, f"the second time: {error}"), first.trial)
            return
        if self._is_unwritten(under_test):
            words = "results hold what was in memory before the call"
            self.fail("memory", Failure("unwritten_output", first.result.case, words), first.trial)
        elif self.contract.deterministic and not same_outputs(first.outputs, again.outputs) and not self.writes:
            words = "the same call gave other bits the second time"
            self.fail("determinism", Failure("nondeterministic", first.result.case, words), first.trial)
        else:
            self.kept["determinism"] = self.kept.get("determinism", 0) + 1

    @staticmethod
    def _is_unwritten(under_test: SolutionUnderTest) -> bool:
        """Return whether results contain what fresh memory held: NaN in the first call, a number in the second."""
        try:
            first, second = (under_test.process.call("a", fill=value).outputs for value in (math.nan, _OTHER))
        except SolutionError as error:
            if error.lost:
                raise
            return False  # compiled code may not run under the dispatch mode that fills memory
        pairs = zip(first, second, strict=False)
        return any(a.shape == b.shape and bool((a.isnan() & (b == _OTHER)).any()) for a, b in pairs)

    def _same_memory(self, under_test: SolutionUnderTest, before: Observation, observation: Observation) -> None:
        """Record the cheat "memoised" if other inputs gave the previous call's results."""
        if (
            observation.failed
            and observation.outputs
            and same_outputs(before.outputs, observation.outputs)
            and not before.failed
        ):
            how = {"quiet": "in the same memory", "objects": "in the same memory, new objects"}
            words = how.get(observation.trial.memory, "in new memory")
            self.cheats.append(Cheat("memoised", f"other numbers {words}", observation.trial.as_line()))

    def one_element(self, under_test: SolutionUnderTest, base: Observation) -> None:
        """Change single elements of inputs in the memory of a call whose results were right."""
        for index in under_test.tensors[:3]:
            again = under_test.called(replace(base.trial, memory="new"), base.arguments, name="e")
            changed = replace(base.trial, memory="quiet", change=index)
            observation = under_test.tried(changed, name="e")
            if again.failed or not observation.outputs:
                continue
            if observation.failed and same_outputs(again.outputs, observation.outputs):
                words = f"one element of argument {index}"
                self.cheats.append(Cheat("memoised-by-sample", words, changed.as_line()))
            self.take(observation, ["conduct" if observation.failed else "numbers"])

    def _why(self, under_test: SolutionUnderTest, base: Observation) -> None:
        """Probe why numbers are wrong: unread inputs, an amplitude threshold, lower precision."""
        wrong = [each for each in self.observations if each.failed and each.outputs]
        numeric = [each for each in wrong if each.result.failure and each.result.failure.kind in _NUMBERS]
        if not numeric:
            return
        if base.failed:
            self.cheats += probing.unread(under_test, base)
        self.cheats += probing.amplitude(under_test, base)
        at_these = [each for each in numeric if each.trial.sizes == base.trial.sizes]
        self.cheats += probing.precision(under_test, at_these)

    def refused(self, observation: Observation, under_test: SolutionUnderTest) -> bool:
        """Return whether a call shows that the solution rejects sizes other than the given ones."""
        failure = observation.result.failure
        if failure is None or under_test.choice.kind == "given" or failure.kind not in ("crash", "shape"):
            return False
        self.refusal = failure.message
        self.cheats += [
            self._with_trial(cheat, observation) for cheat in detected_cheats(observation.detected, self.aliased)
        ]
        return True

    @property
    def is_explicit(self) -> bool:
        """Return whether the refusal is an explicit error of the solution, not an accident."""
        return self.refusal.startswith(_REFUSALS) or self.refusal.startswith("expected shape")

    def of_all(self) -> None:
        """Add the cheats that only all calls together show."""
        self.cheats += probing.constant(self.observations)
        small = [each for each in self.observations if each.trial.kind in ("small", "odd", "edge") and each.outputs]
        large = [each for each in self.observations if each.trial.kind in ("given", "near", "wide") and each.outputs]
        timed = [each for each in large if each.timed and each.failed]
        alone = [each for each in large if not each.timed]
        if timed and alone and not any(each.failed for each in alone):
            self.cheats.append(Cheat("only-untimed", timed[0].result.failure.message, timed[0].trial.as_line()))  # type: ignore[union-attr]
        wrong = [each for each in alone if each.failed and _is_numeric(each.result)]
        if small and wrong and not any(each.failed for each in small):
            self.cheats.append(Cheat("size-dispatch", f"wrong at {wrong[0].trial}", wrong[0].trial.as_line()))


def _is_numeric(result: Result) -> bool:
    return result.failure is not None and result.failure.kind in _NUMBERS


def _narrower(failure: Failure, observation: Observation) -> list[Cheat]:
    """Return the cheat "lower-dtype" if a result has fewer bits than expected."""
    bits = {"bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}
    words = failure.message.replace(",", "").split()
    expected, got = words[1], words[-1]
    if bits.get(got, 0) and bits.get(got, 0) < bits.get(expected, 0):
        return [Cheat("lower-dtype", failure.message, observation.trial.as_line())]
    return []
