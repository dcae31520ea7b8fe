"""The course of a judgement: sizes in turn, the calls that show most at each, and what is asked of a failure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from assay.judge import probing
from assay.judge.bench import Bench, same_outputs
from assay.judge.conduct import Cheat, noticed
from assay.judge.problems.problem import Problem, Sizes
from assay.judge.problems.sizes import Choice
from assay.judge.solution.solution_process import SolutionError, SolutionProcess
from assay.judge.solution.trials import Seen, Trial
from assay.verify.comparison.result import Result
from assay.verify.contract import Contract
from assay.verify.findings import Failure

_OTHER = 2.0**15  # what fresh memory holds the second time; a number of any format
_NUMBERS = ("contract", "nonfinite", "exact")
_REFUSALS = ("ValueError", "AssertionError", "NotImplementedError")


@dataclass
class Course:
    """A judgement under way: all that was seen, by aspect what fails, and the cheats.

    ``follows`` tells whether the solution can be called at sizes other than the given ones; ``refusal`` what it says
    where it can't. ``writes`` are the inputs that the reference itself changes, ``aliased`` those that its results lie
    in.
    """

    problem: Problem
    process: SolutionProcess
    contract: Contract
    seed: int
    effort: str
    pretend: bool
    seen: list[Seen] = field(default_factory=list)
    failures: dict[str, tuple[Failure, Trial]] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    cheats: list[Cheat] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refusal: str = ""
    writes: set[int] = field(default_factory=set)
    aliased: set[int] = field(default_factory=set)

    def bench(self, choice: Choice, given: Sizes) -> Bench:
        """Solution and reference at some sizes. Raises `ProblemError` and `SolutionError`."""
        before = len(self.process.build_observations)
        bench = Bench(self.problem, self.process, self.contract, given, choice, self.seed, self.pretend)
        for told in self.process.build_observations[before:]:
            self.cheats += noticed(told, set(), building=True)
        arguments = bench.meaning.instance.draw(self.seed)
        self.writes, self.aliased = bench.meaning.writes_to(arguments)
        if bench.made.state and not bench.names:
            words = "the solution's parameters are none of the reference's, by name or order: both as constructed"
            self.notes += [words] if words not in self.notes else []
        return bench

    def take(self, seen: Seen, aspects: Sequence[str]) -> Seen:
        """Count what was seen for these aspects; the first failure is put down to the first of them."""
        self.seen.append(seen)
        self.cheats += [self._with_trial(cheat, seen) for cheat in noticed(seen.noticed, self.aliased)]
        mutated = [index for index in seen.noticed.get("mutated") or () if index not in self.writes]
        if mutated:
            words = f"the solution changed its argument {mutated[0]}"
            self.fail("memory", Failure("input_mutated", seen.result.case, words), seen.trial)
        failure = seen.result.failure
        if failure is None:
            for aspect in ("memory", *aspects) if not mutated else aspects:
                self.kept[aspect] = self.kept.get(aspect, 0) + 1
                self.worst[aspect] = max(self.worst.get(aspect, 0.0), seen.result.worst)
            return seen
        if failure.kind == "dtype":
            self.cheats += _narrower(failure, seen)
        self.fail(aspects[0], failure, seen.trial)
        return seen

    def fail(self, aspect: str, failure: Failure, trial: Trial) -> None:
        """Keep the first failure of an aspect."""
        self.failures.setdefault(aspect, (replace(failure, aspect=aspect), trial))

    @staticmethod
    def _with_trial(cheat: Cheat, seen: Seen) -> Cheat:
        return replace(cheat, trial=seen.trial.as_line())

    def first(self, bench: Bench) -> bool:
        """Calls at the small sizes: numbers, weights, amplitudes, memory, and probes where something fails.

        False where the solution doesn't take these sizes.
        """
        seed = self.seed
        nominal = bench.tried(bench.trial("given", seed + 1), name="a", keep=True, pause=True)
        if self.refused(nominal, bench):
            return False
        self.take(nominal, ["numbers"])
        if nominal.outputs:
            self._repeat(bench, nominal)
        base = self._with_other_weights(bench, nominal)
        base = base or self.take(bench.tried(bench.trial("given", seed + 2), name="b", keep=True), ["numbers"])
        for number, (inputs, memory) in enumerate((("mixed", "quiet"), ("scaled", "objects"), ("normal", "new"))):
            seen = bench.tried(bench.trial(inputs, seed + 3 + number, memory), name="b")
            self._same_memory(bench, base, seen)
            self.take(seen, ["range"])
        for extra in range({"quick": 0, "usual": 4, "thorough": 16}[self.effort]):
            inputs = ("mixed", "scaled", "normal")[extra % 3]
            self.take(bench.tried(bench.trial(inputs, seed + 20 + extra), name="b"), ["range"])
        if base.outputs:
            self.one_element(bench, base)
            self.cheats += probing.ignored(bench, base)
            self._why(bench, base)
        return True

    def other_sizes(self, bench: Bench) -> None:
        """Calls at sizes that are odd, or of which one is large."""
        base = bench.tried(bench.trial("given", self.seed + 7), name="b")
        if self.refused(base, bench):
            return
        self.take(base, ["shapes"])
        if bench.can_redraw and base.outputs:
            self._loaded(bench)
        seen = bench.tried(bench.trial("mixed", self.seed + 8, "quiet"), name="b")
        self._same_memory(bench, base, seen)
        self.take(seen, ["shapes"])
        if base.outputs:
            self.one_element(bench, base)

    def _loaded(self, bench: Bench) -> bool:
        try:
            bench.load_redrawn()
        except SolutionError as error:
            self.notes.append(f"other weights can't be loaded: {error}")
            return False
        return bench.meaning is not bench.made

    def _with_other_weights(self, bench: Bench, nominal: Seen) -> Seen | None:
        """A call with weights of which none is constant; what fails by them alone is a matter of these."""
        if not bench.can_redraw or not nominal.outputs or not self._loaded(bench):
            return None
        seen = bench.tried(bench.trial("given", self.seed + 2), name="b", keep=True)
        if seen.failed and not nominal.failed:
            failure = seen.result.failure
            assert failure is not None
            if failure.kind in _NUMBERS:
                words = "wrong with weights that were loaded after it was constructed, none of them constant"
                self.cheats.append(Cheat("weights-kept", words, seen.trial.as_line()))
        return self.take(seen, ["numbers"])

    def _repeat(self, bench: Bench, first: Seen) -> None:
        """The same call once more, with other random seeds."""
        try:
            again = bench.process.call("a", seed=first.trial.seed + 1)
        except SolutionError as error:
            self.fail("determinism", Failure("crash", first.result.case, f"the second time: {error}"), first.trial)
            return
        if self._is_unwritten(bench):
            words = "results hold what was in memory before the call"
            self.fail("memory", Failure("unwritten_output", first.result.case, words), first.trial)
        elif self.contract.deterministic and not same_outputs(first.outputs, again.outputs) and not self.writes:
            words = "the same call gave other bits the second time"
            self.fail("determinism", Failure("nondeterministic", first.result.case, words), first.trial)
        else:
            self.kept["determinism"] = self.kept.get("determinism", 0) + 1

    @staticmethod
    def _is_unwritten(bench: Bench) -> bool:
        """Whether results are what fresh memory held: NaN the first time, and then a number."""
        try:
            first, second = (bench.process.call("a", fill=value).outputs for value in (math.nan, _OTHER))
        except SolutionError as error:
            if error.lost:
                raise
            return False  # what is compiled can't be watched so
        pairs = zip(first, second, strict=False)
        return any(a.shape == b.shape and bool((a.isnan() & (b == _OTHER)).any()) for a, b in pairs)

    def _same_memory(self, bench: Bench, before: Seen, seen: Seen) -> None:
        """Whether other numbers in the memory of the call before were answered as these were."""
        if seen.failed and seen.outputs and same_outputs(before.outputs, seen.outputs) and not before.failed:
            how = {"quiet": "in the same memory", "objects": "in the same memory, new objects"}
            words = how.get(seen.trial.memory, "in new memory")
            self.cheats.append(Cheat("memoised", f"other numbers {words}", seen.trial.as_line()))

    def one_element(self, bench: Bench, base: Seen) -> None:
        """Calls in which a single element is another, in the memory of a call whose results were right."""
        for index in bench.tensors[:3]:
            again = bench.called(replace(base.trial, memory="new"), base.arguments, name="e")
            changed = replace(base.trial, memory="quiet", change=index)
            seen = bench.tried(changed, name="e")
            if again.failed or not seen.outputs:
                continue
            if seen.failed and same_outputs(again.outputs, seen.outputs):
                words = f"one element of argument {index}"
                self.cheats.append(Cheat("memoised-by-sample", words, changed.as_line()))
            self.take(seen, ["conduct" if seen.failed else "numbers"])

    def _why(self, bench: Bench, base: Seen) -> None:
        """What is asked where numbers are wrong: what they hang on, from which amplitude on, how far off."""
        wrong = [seen for seen in self.seen if seen.failed and seen.outputs]
        numeric = [seen for seen in wrong if seen.result.failure and seen.result.failure.kind in _NUMBERS]
        if not numeric:
            return
        if base.failed:
            self.cheats += probing.unread(bench, base)
        self.cheats += probing.amplitude(bench, base)
        at_these = [seen for seen in numeric if seen.trial.sizes == base.trial.sizes]
        self.cheats += probing.precision(bench, at_these)

    def refused(self, seen: Seen, bench: Bench) -> bool:
        """Whether a call at other sizes than the given ones shows that the solution is made for those alone."""
        failure = seen.result.failure
        if failure is None or bench.choice.kind == "given" or failure.kind not in ("crash", "shape"):
            return False
        self.refusal = failure.message
        self.cheats += [self._with_trial(cheat, seen) for cheat in noticed(seen.noticed, self.aliased)]
        return True

    @property
    def is_explicit(self) -> bool:
        """Whether the solution says itself that it doesn't take these sizes."""
        return self.refusal.startswith(_REFUSALS) or self.refusal.startswith("expected shape")

    def of_all(self) -> None:
        """What only all calls together show."""
        self.cheats += probing.constant(self.seen)
        small = [seen for seen in self.seen if seen.trial.kind in ("small", "odd", "edge") and seen.outputs]
        large = [seen for seen in self.seen if seen.trial.kind in ("given", "near", "wide") and seen.outputs]
        timed = [seen for seen in large if seen.timed and seen.failed]
        alone = [seen for seen in large if not seen.timed]
        if timed and alone and not any(seen.failed for seen in alone):
            self.cheats.append(Cheat("only-untimed", timed[0].result.failure.message, timed[0].trial.as_line()))  # type: ignore[union-attr]
        wrong = [seen for seen in alone if seen.failed and _is_numeric(seen.result)]
        if small and wrong and not any(seen.failed for seen in small):
            self.cheats.append(Cheat("size-dispatch", f"wrong at {wrong[0].trial}", wrong[0].trial.as_line()))


def _is_numeric(result: Result) -> bool:
    return result.failure is not None and result.failure.kind in _NUMBERS


def _narrower(failure: Failure, seen: Seen) -> list[Cheat]:
    """A dtype of fewer bits than was promised."""
    bits = {"bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}
    words = failure.message.replace(",", "").split()
    expected, got = words[1], words[-1]
    if bits.get(got, 0) and bits.get(got, 0) < bits.get(expected, 0):
        return [Cheat("lower-dtype", failure.message, seen.trial.as_line())]
    return []
