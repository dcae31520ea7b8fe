"""`examine` and `check`: a kernel against the certified golden, over fixed phases and fuzzed cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from assay.golden.registry import Spec, spec
from assay.precision.formats import format_named
from assay.verify.calls import Call, Finding, check_framework
from assay.verify.contract import Contract
from assay.verify.errors import SettingError, VerificationError
from assay.verify.fuzz import fuzz
from assay.verify.gate import passes_gate, smallest_gain
from assay.verify.inputs.cases import Case, build, format_or_integer
from assay.verify.inputs.layouts import LAYOUTS
from assay.verify.inputs.sampler import Sampler
from assay.verify.phases import exact_cases, gate_cases, invariant_cases, range_cases, special_cases
from assay.verify.repro import repro_line
from assay.verify.shrink import shrink
from assay.verify.trial import Bench, Failure, Result
from assay.verify.verdict import Verdict

TRUSTED_SHARE = 0.1  # of the judged elements must be nonzero
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
    progress: Progress | None = None,
    watch: Callable[[str], None] | None = None,
) -> Verdict:
    """Examine ``kernel`` as an implementation of spec ``op``.

    The kernel is called with the spec's tensors positionally and with the listed ``options`` only, each over its list
    of values. ``dtype`` names the dtype of all its floating tensors, or of each by name; it may be left out where the
    spec fixes them all. ``shapes`` restricts symbolic dimensions, ``layouts`` the memory layouts. ``examples`` fuzzed
    cases come after the fixed phases. ``timeout`` is in seconds per call. ``progress(phase, done, of)`` is called as
    the examination goes on, ``watch(line)`` with the repro line of each case before it is tried.

    Raises `UnknownSpec`, `OptionError`, `ContractError` or `SettingError` on a question that can't be asked; whatever
    the kernel does becomes part of the verdict.
    """
    examination = _Examination.plan(
        kernel, op, dtype, out_dtype, options, shapes, contract, examples, seed, device, framework, layouts, timeout
    )
    if watch is not None:
        bench = examination.bench
        examination.bench = replace(bench, before=lambda case: watch(repro_line(bench, case)))
    return examination.run(progress or (lambda phase, done, of: None))


def check(kernel: Callable[..., Any], op: str, **settings: Any) -> Verdict:
    """`examine`, raising `VerificationError` (an AssertionError) with the report unless the kernel passes."""
    verdict = examine(kernel, op, **settings)
    if not verdict.passed:
        raise VerificationError(f"\n{verdict}")
    return verdict


@dataclass
class _Examination:
    """One examination under way."""

    kernel_name: str
    definition: Spec
    bench: Bench
    sampler: Sampler
    examples: int
    dtype_name: str
    refusal: str = ""
    cases: int = 0
    worst: float = 0.0
    judged: int = 0
    nonzero: int = 0
    unjudged: int = 0
    unresolved: int = 0
    detectable: float = float("inf")
    phases: dict[str, int] = field(default_factory=dict)
    failure: Failure | None = None
    found_in: str = ""

    @classmethod
    def plan(
        cls,
        kernel: Callable[..., Any],
        op: str,
        dtype: str | Mapping[str, str] | None,
        out_dtype: str | None,
        options: Mapping[str, Sequence[Any]] | None,
        shapes: Mapping[str, Any] | None,
        contract: Contract | None,
        examples: int,
        seed: int,
        device: str,
        framework: str,
        layouts: Sequence[str],
        timeout: float,
    ) -> _Examination:
        """Check every setting, once, before the first call."""
        definition = spec(op)
        if not callable(kernel):
            raise SettingError(f"kernel: expected a callable, got {type(kernel).__name__}")
        if isinstance(examples, bool) or not isinstance(examples, int) or examples < 0:
            raise SettingError(f"examples={examples!r}; expected a whole number of at least 0")
        check_framework(framework)
        check_device(device)
        contract = contract or Contract()
        sampler = Sampler(
            definition, _dtypes(definition, dtype), dict(options or {}), _sizes(shapes or {}), tuple(layouts), seed
        )
        sampler.check()
        first = sampler.case(lambda values: values[0], style="small")
        out = _out_dtypes(first, out_dtype)
        contract.model(definition, format_named(next(iter(first.dtypes.values()))))
        call = Call(kernel, sampler.options, out, framework, timeout)
        name = getattr(kernel, "__qualname__", None) or getattr(kernel, "__name__", None) or repr(kernel)
        return cls(
            kernel_name=name,
            definition=definition,
            bench=Bench(call, contract, device),
            sampler=sampler,
            examples=examples,
            dtype_name=", ".join(dict.fromkeys(name for name in first.dtypes.values())),
            refusal=_refusal(contract, first),
        )

    def run(self, progress: Progress) -> Verdict:
        """The phases in turn, until one finds a violation."""
        started = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            outcome, note = self._outcome(progress)
        return Verdict(
            outcome=outcome,
            kernel=self.kernel_name,
            spec=self.definition.name,
            dtype=self.dtype_name,
            contract=str(self.bench.contract),
            cases=self.cases,
            worst=self.worst,
            failure=self.failure,
            phases=self.phases,
            elements=self.judged,
            unjudged=self.unjudged,
            unresolved=self.unresolved,
            detectable=self.detectable,
            seconds=time.perf_counter() - started,
            seed=self.sampler.seed,
            note=note,
            repro=repro_line(self.bench, self.failure.case) if self.failure else "",
        )

    def _outcome(self, progress: Progress) -> tuple[str, str]:
        if self.refusal:
            return "REFUSED", self.refusal
        loophole = self._gate()
        for name, cases in self._fixed_phases():
            self._run_phase(name, list(cases), progress)
        if self.failure is None and self.examples:
            self._fuzz(progress)
        if self.failure is not None:
            progress("shrinking", 0, 0)
            self._shrink()
            return "FAIL", ""
        if loophole:
            return "VACUOUS", f"under this contract the check lets through {loophole}"
        if self.cases == 0 or self.judged == 0:
            return "VACUOUS", "nothing was decided: no element of any case was judged"
        if self.unresolved:
            return "INCONCLUSIVE", f"{self.unresolved} elements lie within the golden's own radius of the limit"
        if self.nonzero < TRUSTED_SHARE * self.judged:
            return "MISTRUSTED", f"only {self.nonzero} of {self.judged} judged elements should be other than zero"
        return "PASS", ""

    def _gate(self) -> str | None:
        """What the check would let through, if anything; no call of the kernel."""
        loophole = None
        for case in gate_cases(self.sampler):
            values = {name: guarded.tensor for name, guarded in build(case).guarded.items()}
            limits = self.bench.tolerances(case, values)
            for tensor, dtype, allowed in zip(case.signature.returns, self.bench.call.out_dtypes, limits, strict=True):
                if not tensor.is_integer:
                    loophole = loophole or passes_gate(allowed, format_named(dtype))
                    self.detectable = min(self.detectable, smallest_gain(allowed))
        return loophole

    def _fixed_phases(self) -> Iterator[tuple[str, Iterable[Case]]]:
        yield "exact", exact_cases(self.sampler)
        yield "invariants", invariant_cases(self.sampler, self.bench.contract)
        yield "range", range_cases(self.sampler)
        yield "special", special_cases(self.sampler)

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
            progress("fuzz", done, self.examples)
            return self.attempt("fuzz", case).worst

        fuzz(self.sampler, self.examples, one)

    def attempt(self, phase: str, case: Case) -> Result:
        """Try a case and add what it showed."""
        result = self.bench.try_case(case)
        self.cases += 1
        self.phases[phase] = self.phases.get(phase, 0) + 1
        self.worst = max(self.worst, result.worst)
        self.judged += result.judged
        self.nonzero += result.nonzero
        self.unjudged += result.unjudged
        self.unresolved += result.unresolved
        if result.failure is not None:
            self.failure, self.found_in = result.failure, phase
        return result

    def _shrink(self) -> None:
        """The smallest case that fails likewise, and what kind of fault it shows."""
        assert self.failure is not None
        if self.failure.kind == "timeout":
            return
        self.failure = shrink(self.failure, lambda case: self.bench.try_case(case).failure, self.sampler)
        self.failure = self._classified(self.failure)

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
            inputs = build(replace(failure.case, memory=memory), self.bench.device)
            outputs = self.bench.call(replace(failure.case, memory=memory), inputs)
            if isinstance(outputs, Finding):
                return False
            place = [tensor.name for tensor in failure.case.signature.returns].index(failure.output)
            value = float(outputs[place][failure.index])
            seen.append("nan" if value != value else repr(value))
        return seen[0] == seen[1] != seen[2]


def check_device(device: str) -> None:
    """Raise `SettingError` for a device that this machine hasn't got."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingError(f"device={device!r} can't be used: {str(error).splitlines()[0]}") from None


def _dtypes(definition: Spec, dtype: str | Mapping[str, str] | None) -> str | dict[str, str]:
    """The dtype as given, its names checked."""
    tensors = definition.signature().tensors
    if dtype is None:
        free = [tensor.name for tensor in tensors if tensor.dtype is None]
        if free:
            raise SettingError(f"dtype: {definition.name} needs the dtype of {', '.join(free)}, e.g. dtype='bfloat16'")
        return "float8_e4m3fn"  # the op fixes every dtype; of those that may vary, fp8's, this is the default
    if isinstance(dtype, str):
        format_or_integer(dtype)
        return dtype
    names = {tensor.name for tensor in tensors}
    for name, value in dtype.items():
        if name not in names:
            raise SettingError(f"dtype: {definition.name} has no tensor {name!r}; it has {', '.join(sorted(names))}")
        format_or_integer(value)
    if not dtype:
        raise SettingError("dtype={}; expected a name, or a name for each tensor")
    return dict(dtype)


def _sizes(shapes: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Sizes as sequences; one whole number stands for itself."""
    return {symbol: [sizes] if isinstance(sizes, int) else sizes for symbol, sizes in shapes.items()}


def _out_dtypes(case: Case, out_dtype: str | None) -> tuple[str, ...]:
    """The dtype of each result: stated, fixed by the op, or that of the first floating tensor of 16 bits or more."""
    wide = [
        name
        for name in case.dtypes.values()
        if name not in ("int32", "int64") and format_named(name).kind == "float" and format_named(name).bits >= 16
    ]
    found = []
    for place, tensor in enumerate(case.signature.returns):
        if out_dtype is not None and (place == 0 or tensor.dtype is None):
            found.append(format_or_integer(out_dtype))
        elif tensor.dtype is not None:
            found.append(tensor.dtype)
        elif wide:
            found.append(wide[0])
        else:
            raise SettingError(f"out_dtype: no input has 16 bits or more; state the dtype of {tensor.name}")
    return tuple(found)


def _refusal(contract: Contract, case: Case) -> str:
    """Why the contract says nothing about this case, if so."""
    from assay.verify.contract import accumulator

    takes = accumulator(contract.accumulate).inputs
    first = next(iter(case.dtypes.values()))
    if takes and first not in takes:
        return f"the accumulator {contract.accumulate!r} takes {', '.join(takes)}; the contract says nothing about {first}"
    return ""
