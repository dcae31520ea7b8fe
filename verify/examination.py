"""`examine` and `check`: a kernel against the certified golden, over fixed phases and fuzzed cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from assay.golden.run import Golden
from assay.precision.formats import format_named
from assay.verify import phases
from assay.verify.calls import target_of
from assay.verify.contract import Contract
from assay.verify.errors import VerificationError
from assay.verify.explain import explain
from assay.verify.fuzz import fuzz
from assay.verify.gate import loophole, outcomes, smallest_gain
from assay.verify.inputs.cases import Case, build
from assay.verify.inputs.layouts import LAYOUTS
from assay.verify.inputs.sampler import Sampler
from assay.verify.isolation import GIB, Isolation
from assay.verify.outside import is_there
from assay.verify.picture import ErrorMap, map_of, summed
from assay.verify.question import Question, ask
from assay.verify.repro import repro_line
from assay.verify.result import Failure, Result
from assay.verify.sample import Sample, sample_of
from assay.verify.shrink import shrink
from assay.verify.trial import Bench
from assay.verify.verdict import Explanation, Verdict

_TRUSTED_SHARE = 0.1  # of the judged elements must be nonzero
_PATIENCE = 4.0  # seconds that a case of growing size may take at most, as the one before it tells
Progress = Callable[[str, int, int], None]


def examine(
    kernel: Callable[..., Any],
    op: str,
    *,
    dtype: str | Mapping[str, str] | None = None,
    out_dtype: str | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    contract: Contract | None = None,
    examples: int = 200,
    seed: int = 0,
    device: str = "cpu",
    framework: str = "torch",
    layouts: Sequence[str] = LAYOUTS,
    timeout: float = 30.0,
    isolate: bool = False,
    memory: float = 4.0,
    goldens: str | None = None,
    shrinking: bool = True,
    progress: Progress | None = None,
    watch: Callable[[str, float], None] | None = None,
) -> Verdict:
    """Examine ``kernel`` as an implementation of spec ``op``.

    The kernel is called with the spec's tensors positionally and with the listed ``options`` only, each over its list
    of values. ``dtype`` names the dtype of all its floating tensors, or of each by name; it may be left out where the
    spec fixes them all. ``shapes`` restricts symbolic dimensions, ``layouts`` the memory layouts. ``examples`` fuzzed
    cases come after the fixed phases. ``timeout`` is in seconds per call. With
    ``isolate`` the kernel runs in a process of its own (`assay.verify.isolation`), which may hold ``memory`` GiB beyond
    what it starts with, and once in one where nothing tells of the examination. ``goldens`` is the address of a store
    of goldens (`assay.golden.store`): those of its records that answer the question are cases too.
    Without ``shrinking`` a failure is reported as it was met, unexplained.
    ``progress(phase, done, of)`` is called as the examination goes on, ``watch(line, seconds)`` with the repro line
    of each case before it is tried, and before and after each call of the kernel, which comes back within so many
    seconds unless it hangs beyond interruption; 0 where no call is under way.

    Raises `UnknownSpec`, `OptionError`, `ContractError` or `SettingError` on a question that can't be asked; whatever
    the kernel does becomes part of the verdict.
    """
    question = ask(
        kernel,
        op,
        dtype=dtype,
        out_dtype=out_dtype,
        options=options,
        shapes=shapes,
        contract=contract,
        examples=examples,
        seed=seed,
        device=device,
        framework=framework,
        layouts=layouts,
        timeout=timeout,
    )
    bench = question.bench
    if watch is not None:
        plain = question.bench
        bench = replace(
            plain,
            call=replace(plain.call, before=lambda case, seconds: watch(repro_line(plain, case), seconds)),
        )
    report = progress or (lambda phase, done, of: None)
    if not isolate:
        return _Examination(question, bench, question.sampler, goldens, shrinking).run(report)
    with Isolation(bench, int(memory * GIB)) as isolation:
        bench = replace(bench, isolation=isolation)
        return _Examination(question, bench, question.sampler, goldens, shrinking).run(report)


def check(kernel: Callable[..., Any], op: str, **settings: Any) -> Verdict:
    """`examine`, raising `VerificationError` (an AssertionError) with the report unless the kernel passes."""
    verdict = examine(kernel, op, **settings)
    if not verdict.passed:
        raise VerificationError(str(verdict))
    return verdict


@dataclass
class _Examination:
    """One examination under way."""

    question: Question
    bench: Bench
    sampler: Sampler
    goldens: str | None = None
    shrinking: bool = True
    cases: int = 0
    worst: float = 0.0
    judged: int = 0
    nonzero: int = 0
    unjudged: int = 0
    unresolved: int = 0
    detectable: float = float("inf")
    phases: dict[str, int] = field(default_factory=dict)
    histogram: tuple[int, ...] = ()
    failure: Failure | None = None
    map: ErrorMap | None = None
    sample: Sample | None = None
    explanations: tuple[Explanation, ...] = ()

    def run(self, progress: Progress) -> Verdict:
        """The phases in turn, until one finds a violation."""
        started = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            outcome, note = self._outcome(progress)
        return Verdict(
            outcome=outcome,
            kernel=self.question.kernel,
            spec=self.question.definition.name,
            dtype=self.question.dtype,
            contract=str(self.bench.contract),
            cases=self.cases,
            worst=self.worst,
            failure=self.failure,
            explanations=self.explanations,
            phases=self.phases,
            elements=self.judged,
            unjudged=self.unjudged,
            unresolved=self.unresolved,
            histogram=self.histogram,
            map=self.map,
            sample=self.sample,
            detectable=self.detectable,
            seconds=time.perf_counter() - started,
            seed=self.sampler.seed,
            note=note,
            repro=repro_line(self.bench, self.failure.case) if self.failure else "",
        )

    def _outcome(self, progress: Progress) -> tuple[str, str]:
        if self.question.refusal:
            return "REFUSED", self.question.refusal
        open_way = self._gate()
        if self.goldens is not None:
            self._stored(self.goldens, progress)
        for name, cases in self._fixed_phases():
            self._run_phase(name, list(cases), progress)
        if self.failure is None and self.question.examples:
            self._fuzz(progress)
        self._grow(progress)
        if self.failure is not None:
            progress("shrinking", 0, 0)
            self._shrink()
            return "FAIL", ""
        if open_way:
            return "VACUOUS", f"under this contract the check lets through {open_way}"
        if self.cases == 0 or self.judged == 0:
            return "VACUOUS", "nothing was decided: no element of any case was judged"
        if self.unresolved:
            return "INCONCLUSIVE", f"{self.unresolved} elements lie within the golden's own radius of the limit"
        if self.nonzero < _TRUSTED_SHARE * self.judged:
            return "MISTRUSTED", f"only {self.nonzero} of {self.judged} judged elements should be other than zero"
        return "PASS", ""

    def _gate(self) -> str | None:
        """What the check would let through, if anything; no call of the kernel."""
        seen: dict[str, list[dict[str, bool]]] = {}
        for style in ("tile", "small"):
            for case in phases.gate_cases(self.sampler, style):
                values = {name: guarded.tensor for name, guarded in build(case).guarded.items()}
                limits = self.bench.appraiser.tolerances(case, values)
                for tensor, dtype, allowed in zip(case.signature.returns, case.result_dtypes, limits, strict=True):
                    if tensor.is_integer:
                        continue
                    self.detectable = min(self.detectable, smallest_gain(allowed))
                    if style == "tile":  # at a size of two or so some results cancel altogether
                        seen.setdefault(tensor.name, []).append(outcomes(allowed, format_named(dtype)))
        return next(filter(None, map(loophole, seen.values())), None)

    def _stored(self, address: str, progress: Progress) -> None:
        """The cases of a store, judged by its goldens."""
        from assay.verify.stored import stored_cases

        self.phases["stored"] = 0
        found = list(stored_cases(address, self.sampler))
        for done, stored in enumerate(found, 1):
            if self.failure is None:
                self.attempt("stored", stored.case, stored.goldens)
                progress("stored", done, len(found))

    def _fixed_phases(self) -> Iterator[tuple[str, Iterable[Case]]]:
        yield "exact", phases.exact_cases(self.sampler)
        yield "invariants", phases.invariant_cases(self.sampler, self.bench.contract)
        yield "range", phases.range_cases(self.sampler)
        yield "lone", phases.lone_cases(self.sampler)
        yield "seams", phases.seam_cases(self.sampler)
        yield "special", phases.special_cases(self.sampler)
        yield "every", phases.every_cases(self.sampler)
        yield "bias", phases.bias_cases(self.sampler)
        if self.bench.isolation is not None and self._can_be_called_outside():
            yield "outside", phases.outside_cases(self.sampler)

    def _can_be_called_outside(self) -> bool:
        """Whether a plain process can call the kernel: by its name, with torch's tensors."""
        call = self.bench.call
        return call.framework == "torch" and is_there(target_of(call.kernel))

    def _run_phase(self, name: str, cases: Sequence[Case], progress: Progress) -> None:
        for done, case in enumerate(cases):
            if self.failure is not None:
                return
            self.attempt(name, case)
            progress(name, done + 1, len(cases))

    def _fuzz(self, progress: Progress) -> None:
        done = 0

        def one(case: Case) -> float | None:
            nonlocal done
            if self.failure is not None:
                return None
            done += 1
            progress("fuzz", done, self.question.examples)
            return self.attempt("fuzz", case).worst

        fuzz(self.sampler, self.question.examples, one)

    def _grow(self, progress: Progress) -> None:
        """Cases of growing size, each series as far as the next case won't take long."""
        longest = min(_PATIENCE, self.bench.call.timeout / 4) / phases.GROWTH
        for series in phases.beyond_cases(self.sampler):
            for done, case in enumerate(series, 1):
                tries = 2 if done == 1 else 1  # the first call may compile
                slow = all(self._seconds(case) > longest for _ in range(tries))
                progress("beyond", done, len(series))
                if slow or self.failure is not None:
                    break

    def _seconds(self, case: Case) -> float:
        """How long it takes to try a case of growing size; nothing once there is a failure."""
        started = time.perf_counter()
        if self.failure is None:
            self.attempt("beyond", case)
        return time.perf_counter() - started

    def attempt(self, phase: str, case: Case, goldens: tuple[Golden, ...] | None = None) -> Result:
        """Try a case, by goldens known already or evaluated now, and add what it showed."""
        result = replace(self.bench, goldens=goldens).try_case(case)
        self.cases += 1
        self.phases[phase] = self.phases.get(phase, 0) + 1
        self.worst = max(self.worst, result.worst)
        self.judged += result.judged
        self.nonzero += result.nonzero
        self.unjudged += result.unjudged
        self.unresolved += result.unresolved
        self.histogram = summed(self.histogram, result.histogram)
        if result.failure is not None:
            self.failure, self.map = result.failure, map_of(result)
        return result

    def _shrink(self) -> None:
        """The smallest case that fails likewise, and what kind of fault it shows."""
        assert self.failure is not None
        takes_long = self.failure.kind == "timeout" or self.failure.case.protocol == "outside"
        if takes_long or not self.shrinking:
            return
        first = self.failure.case
        self.failure = shrink(self.failure, lambda case: self.bench.try_case(case).failure, self.sampler)
        self.failure = self._classified(self.failure)
        self.explanations = explain(self.bench, self.failure, first, self.sampler)
        again = self.bench.try_case(self.failure.case) if self.map is not None else None
        self.sample = sample_of(self.failure.case, again)

    def _classified(self, failure: Failure) -> Failure:
        """A wrong number may come from memory that was never written, or from a stride that was ignored."""
        if failure.kind not in ("contract", "exact", "nonfinite"):
            return failure
        if self._depends_on_memory(failure):
            message = f"the output holds what was in memory before the call ({failure.message})"
            return replace(failure, kind="unwritten_output", message=message)
        if any(layout != "contiguous" for layout in failure.case.layouts.values()):
            contiguous = self.bench.try_case(replace(failure.case, layouts={}))
            if contiguous.failure is None:
                message = f"right for contiguous inputs, wrong for this layout ({failure.message})"
                return replace(failure, kind="layout", message=message)
        return failure

    def _depends_on_memory(self, failure: Failure) -> bool:
        """Whether the failing element changes with what fresh memory holds, and with that alone."""
        seen = []
        for memory in ("nan", "nan", "huge"):
            outputs = self.bench.outputs(replace(failure.case, memory=memory))
            if outputs is None:
                return False
            place = [tensor.name for tensor in failure.case.signature.returns].index(failure.output)
            value = float(outputs[place][failure.index])
            seen.append("nan" if value != value else repr(value))
        return seen[0] == seen[1] != seen[2]
