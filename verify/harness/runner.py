"""One trial: build a case, call the kernel as its protocol says, and judge the results.

Protocols:

- "once": one call.
- "repeat", "after_other", "after_refill", "after_many": calls before the judged one (`assay.verify.cases.sequences`).
  Each result is held until the last call and must stay as it was; equal calls must give the same bits. Programs of
  interpreted kernels run in another order in each call: ascending in the last, descending in the one before it,
  shuffled in others.
- "emitted": Triton kernels compute with the arithmetic that NVIDIA's backend emits.
- "outside": the call is made in a plain process, where the kernel can't detect the examination. The phase is
  "plain_process", the module `assay.verify.harness.clean_process`, and the aspect "conduct", which tampering breaks.
- "alone": each row by itself must give the bits that it gives among the others.
- "bias": calls with fresh data, whose errors may not all lean to one side.
- "at": a large case, called in poisoned memory, which shows unwritten elements, and then in plain memory, of whose
  results samples are judged.

Tampering: the public functions of torch's and numpy's namespaces are watched during a call. Replacing one is a finding,
and the function is put back. Libraries may replace their own, as torch does when its compiler is first loaded.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from assay.golden.errors import DefinitionError, ReferenceRefuses, Undecided
from assay.golden.evaluation.golden import Golden
from assay.interpreter import Assignment, DependentPrograms, device_to_pretend
from assay.runtime.deadline import WALL_FACTOR
from assay.runtime.environment import seed_generators, standard_environment, with_changes
from assay.runtime.tensors import same_numbers
from assay.verify.cases.at_shape import PROTOCOL as AT
from assay.verify.cases.case import Case, EarlierCall, Inputs, all_contents, build
from assay.verify.cases.sampler import Sampler
from assay.verify.cases.sequences import call_of, earlier_calls, sequence_in_words, with_sequence
from assay.verify.comparison.bias import try_series
from assay.verify.comparison.oracle import Oracle, Values
from assay.verify.comparison.result import Result, undecided
from assay.verify.comparison.sampled import case_label, judge_samples
from assay.verify.comparison.statistics import has_independent_data, judge_statistically
from assay.verify.contract import Contract
from assay.verify.findings import Failure
from assay.verify.harness import lost_device
from assay.verify.harness.call import EMITTED, Call, failure_of, options_for
from assay.verify.harness.clean_process import START, NoResult, call_outside
from assay.verify.harness.target import target_of
from assay.verify.settings import Settings

_WATCHED: tuple[Any, ...] = (torch, torch.Tensor, torch.nn.functional, torch.testing, np, np.testing, time)
_LIBRARY = Path(torch.__file__).parent


class Namespaces:
    """The content of the watched namespaces at one time."""

    def __init__(self) -> None:
        self._before = [dict(vars(space)) for space in _WATCHED]

    def restore(self) -> list[str]:
        """Put back the public functions that have been replaced or deleted since, and return their names."""
        results = []
        for space, before in zip(_WATCHED, self._before, strict=True):
            now = vars(space)
            if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
                continue
            bases = space.__mro__[1:] if isinstance(space, type) else ()
            hiding = [name for name in now if name not in before and any(name in vars(base) for base in bases)]
            for name in [name for name in before if now.get(name) is not before[name]] + hiding:
                is_public = name[0] != "_" or name[:2] == "__"
                is_function = callable(before.get(name)) or callable(now.get(name))
                if is_public and is_function and not _is_of_torch(name, now.get(name)):
                    results.append(f"{space.__name__}.{name}")
                    if name in before:
                        setattr(space, name, before[name])
                    else:
                        delattr(space, name)
        return results


def _is_of_torch(name: str, value: Any) -> bool:
    """Whether a function is torch's own wrapper of the function of this name."""
    code = getattr(value, "__code__", None)
    is_named = getattr(value, "__name__", "") == name and str(getattr(value, "__module__", "")).startswith("torch")
    return is_named and code is not None and Path(code.co_filename).is_relative_to(_LIBRARY)


Outputs = tuple[torch.Tensor, ...]


_MOST_DEPENDENT = 256  # programs of a call that all run if some can't by themselves
_RECENT = 8  # results that are compared after each call


class _History:
    """The results of a sequence of calls, which are held while later calls are made."""

    def __init__(self, calls: Sequence[EarlierCall]) -> None:
        self._calls = calls
        self._held: list[
            tuple[int, torch.Tensor, torch.Tensor]
        ] = []  # number of the call, result, and its numbers then
        self._first: dict[str, tuple[int, Outputs]] = {}  # the first results of equal calls

    def words(self, number: int) -> str:
        """Return which calls came before this one, as the end of a message; empty if none did."""
        if number == 1:
            return ""
        return f", in call {number} of {len(self._calls)} ({sequence_in_words(self._calls[:-1])})"

    def change(self, case: Case, number: int, outputs: Outputs) -> Failure | None:
        """Return a failure if the call of this number, which gave ``outputs``, has changed an earlier call's result.

        Of many results the latest are compared after each call, and all after the last.
        """
        for earlier, result, then in self._held if number == len(self._calls) else self._held[-_RECENT:]:
            if not same_numbers(result, then):
                words = f"a later call changed an earlier call's result: call {number} that of call {earlier}"
                if any(same_numbers(result, output) for output in outputs):
                    words += ", which is now its own"
                calls = sequence_in_words(self._calls[:-1])
                return failure_of(case, "nondeterministic", f"{words} of {len(self._calls)} ({calls})")
        return None

    def difference(self, case: Case, number: int, outputs: Outputs) -> Failure | None:
        """Return a failure if an equal call gave other bits."""
        earlier, first = self._first.setdefault(_key(case), (number, tuple(output.clone() for output in outputs)))
        for index, (one, two) in enumerate(zip(first, outputs, strict=True)):
            if not same_numbers(one, two):
                a, b = one.double(), two.double()
                different = ((a != b) & ~(a.isnan() & b.isnan())).nonzero()  # empty if only zeros' bits are
                element = tuple(int(position) for position in different[0]) if len(different) else ()
                words = "the same call gave other bits the second time"
                if len(self._calls) > 2:
                    calls = sequence_in_words(self._calls[:-1])
                    words = f"two equal calls gave other bits: {earlier} and {number} of {len(self._calls)} ({calls})"
                return failure_of(case, "nondeterministic", words, index, element)
        return None

    def hold(self, number: int, outputs: Outputs, inputs: Inputs) -> None:
        """Hold the results of a call, but for those that are views of its inputs."""
        memory = {guarded.buffer.untyped_storage().data_ptr() for guarded in inputs.guarded.values()}
        for output in outputs:
            if output.untyped_storage().data_ptr() not in memory:
                self._held.append((number, output, output.clone()))


def _key(case: Case) -> str:
    """Return what equal calls of a sequence have in common."""
    return repr((case.seed, case.edits, sorted(case.sizes.items()), sorted(case.options.items()), case.dtypes))


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return which elements of two results have the same bits."""
    first, second = (each.contiguous()[..., None].view(torch.uint8) for each in (one, other))
    return (first == second).all(-1)


def _refilled(inputs: Inputs, case: Case) -> Inputs:
    """Return the case's data in the memory of these inputs."""
    values = all_contents(case)
    return Inputs(
        {name: g.refill(values[name].to(g.tensor.device)) for name, g in inputs.guarded.items()}, inputs.keywords
    )


class Observer(Protocol):
    """A caller of the kernel in another process: `assay.verify.harness.isolation.Isolation`."""

    @property
    def is_of_device(self) -> bool:
        """Whether that process has a device, which the kernel may lose; the next case then gets a new process."""

    def observe(self, case: Case, ignored_aspects: frozenset[str]) -> Outputs | Failure:
        """Return the outputs of a case, or its failure (`KernelHarness.observe`)."""

    def blocking(self) -> AbstractContextManager[None]:
        """Return a context with new processes, in which each launch on CUDA waits for its end."""

    def variants(self, axes: Sequence[Any], seconds: float, *, dense: bool) -> Any:
        """Observe the kernel's variants where it runs (`assay.verify.harness.variants`)."""

    def compiled(self, cases: Sequence[Case]) -> Any:
        """Compile the programs of these cases where the kernel runs (`assay.verify.harness.compilation`)."""


@dataclass(frozen=True)
class KernelHarness:
    """A kernel with the way to call it and the contract to judge it by.

    ``goldens`` are those of the case at hand, if already known. ``ignored_aspects`` are broken ones to ignore, so that
    the rest can be judged: that the kernel changes its inputs (`memory`), or library functions (`conduct`).
    ``isolation`` makes the calls in another process. ``sampler`` draws the other sizes of sequences of calls.
    ``aside``: which wrong elements an explanation takes to be another fault's, the "finite" ones or the "nonfinite".
    ``most_programs``: of interpreted launches of large cases no more programs run, and what they store is judged; 0:
    all run.
    """

    call: Call
    contract: Contract
    device: torch.device | str = "cpu"
    goldens: tuple[Golden, ...] | None = None
    ignored_aspects: frozenset[str] = frozenset()
    isolation: Observer | None = None
    sampler: Sampler | None = None
    most_programs: int = 0
    aside: str = ""

    @staticmethod
    def of(
        kernel: Callable[..., Any],
        settings: Settings,
        heartbeat: Callable[[Case, float], None] | None = None,
        sampler: Sampler | None = None,
    ) -> KernelHarness:
        """Return the harness of a kernel under these settings; ``heartbeat`` is the callback of `Call`."""
        environment = with_changes(settings.environment)
        pretend = device_to_pretend(settings.pretend, settings.faithful) if settings.pretend else ""
        call = Call(
            kernel,
            settings.options,
            settings.framework,
            settings.timeout,
            heartbeat,
            environment,
            pretend=pretend,
            refuses=settings.refuses,
            assignment=Assignment(on_device=torch.device(settings.device).type != "cpu"),
        )
        return KernelHarness(call, settings.contract, settings.device, sampler=sampler)

    @property
    def outlives_device(self) -> bool:
        """Whether this process goes on when the kernel loses its device."""
        return self.isolation is not None and self.isolation.is_of_device

    @property
    def _takes_other_dtypes(self) -> bool:
        """Whether a call in a dtype that the contract doesn't name can do no harm: it is compiled for nobody."""
        return torch.device(self.device).type == "cpu" and self.call.framework == "torch"

    @property
    def oracle(self) -> Oracle:
        """The judge of the outputs."""
        return Oracle(self.contract, self.goldens)

    @standard_environment()
    def try_case(self, case: Case) -> Result:
        """Build a case, call the kernel and judge the results; nothing is judged if rounding decides what the reference
        computes.

        Raises `DependentPrograms` if only some programs were to run, and can't be judged by themselves.

        The result's case pins the configurations in which autotuned launches ran on a device.
        """
        self.call.assignment.begin(case.configs)
        if self.sampler is not None:
            case = with_sequence(case, self.sampler, other_dtypes=self._takes_other_dtypes)
        result = self._tried(case)
        used = self.call.assignment.used
        if not used:
            return result
        failure = result.failure and replace(result.failure, case=replace(result.failure.case, configs=used))
        return replace(result, case=replace(result.case, configs=used), failure=failure)

    def _tried(self, case: Case) -> Result:
        try:
            if case.protocol == "bias":
                return try_series(case, self.try_case, self.contract, self.oracle.evaluate_in)
            self.call.report(case)
            if self.isolation is not None:
                values, seen = all_contents(case), self.isolation.observe(case, self.ignored_aspects)
            else:
                inputs = build(case, self.device)
                values = {name: guarded.tensor.detach().cpu().clone() for name, guarded in inputs.guarded.items()}
                if case.protocol == AT and self.most_programs and self.call.watch.launches:
                    result = self._of_some_programs(case, inputs, values)
                    if result is not None:
                        return result
                seen = self.observe(case, inputs)
            if isinstance(seen, Failure):
                return Result(case, seen, sampled=f"{case_label(case)}: {seen.message}" if case.protocol == AT else "")
            if case.protocol == AT:
                return judge_samples(self.oracle, case, values, seen)
            result = self.oracle.judge(case, values, seen)
        except Undecided as error:
            return undecided(case, error)
        except DefinitionError as error:
            # Of a reference by example each size was tried by itself; it may refuse two of them together.
            by_example = case.definition.needs_dtypes and case.definition.sizes.allowed
            if not by_example and not isinstance(error, ReferenceRefuses):
                raise
            return Result(case, failure_of(case, "refused", str(error)))
        except Exception as error:
            if not lost_device.is_lost(error):
                raise
            return Result(case, lost_device.failure_by(error, case))
        if result.failure is not None and (calls := earlier_calls(case)):
            message = f"{result.failure.message}, after earlier calls: {sequence_in_words(calls)}"
            return replace(result, failure=replace(result.failure, message=message))
        if result.failure is None or case.protocol != EMITTED:
            return result
        how = "with a b + c rounded once and functions approximate, as NVIDIA's backend has them"
        return replace(result, failure=replace(result.failure, message=f"{how}: {result.failure.message}"))

    def _of_some_programs(self, case: Case, inputs: Inputs, values: Values) -> Result | None:
        """Judge what a few programs of each launch store; None if all should run.

        These are all there are, or something is wrong, or they may depend on each other and aren't many. Raises
        `DependentPrograms` if they may and are.
        """
        try:
            result = self._sampled(case, inputs, values)
        except DependentPrograms:
            if self.call.watch.programs > _MOST_DEPENDENT:
                raise
            return None
        return result if result is not None and result.failure is None else None

    def _sampled(self, case: Case, inputs: Inputs, values: Values) -> Result | None:
        """Judge what comes out with the same bits whether the memory of programs that don't run holds NaN or large
        numbers; None if all run, or a call fails."""
        assignment, seen = self.call.assignment, list[Outputs]()
        assignment.most_programs = self.most_programs
        try:
            for memory in ("nan", "huge"):
                outputs = self.call(replace(case, memory=memory), inputs)
                if isinstance(outputs, Failure) and outputs.kind == "not_interpreted":
                    raise DependentPrograms(outputs.message)
                if isinstance(outputs, Failure) or not self.call.watch.sampled:
                    return None
                seen.append(outputs)
        finally:
            assignment.most_programs = 0
        ran = [_equal_bits(one, other) for one, other in zip(*seen, strict=True)]
        if self._damage(case, inputs) is not None:
            return None
        result = judge_samples(self.oracle, case, values, seen[0], ran)
        if not result.judged:
            raise DependentPrograms("no element comes from the programs that ran alone")
        return result

    def outputs(self, case: Case) -> Outputs | None:
        """Return the outputs of one call, unjudged; None if there are none."""
        return self.last_outputs(replace(case, protocol="once"))

    @standard_environment()
    def last_outputs(self, case: Case) -> Outputs | None:
        """Return the outputs of the last call that a case's protocol makes, unjudged; None if there are none."""
        if self.isolation is not None:
            seen = self.isolation.observe(case, self.ignored_aspects)
        else:
            seen = self.observe(case, build(case, self.device))
        return None if isinstance(seen, Failure) else seen

    def observe(self, case: Case, inputs: Inputs) -> Outputs | Failure:
        """Make the calls of the case's protocol; return the outputs, or a failure other than wrong numbers."""
        namespaces = Namespaces()
        seed_generators(case.seed)
        self.call.assignment.begin(case.configs)
        seen = (
            self._in_plain_process(case, inputs) if case.protocol == "outside" else self._in_this_process(case, inputs)
        )
        replaced = namespaces.restore()
        if replaced and "conduct" not in self.ignored_aspects:
            words = f"the kernel replaced {', '.join(replaced)}"
            return failure_of(case, "input_mutated", words, aspect="conduct")
        return replace(seen, case=case) if isinstance(seen, Failure) else seen  # some calls are of a changed case

    def _in_this_process(self, case: Case, inputs: Inputs) -> Outputs | Failure:
        """Make the calls in this process."""
        if case.protocol == AT:
            outputs = self.call(case, inputs)
            if not isinstance(outputs, Failure):
                outputs = self._unwritten(case, inputs, outputs) or self.call(replace(case, memory="plain"), inputs)
            return outputs if isinstance(outputs, Failure) else self._damage(case, inputs) or outputs
        outputs = self._in_sequence(case, inputs)
        return outputs if isinstance(outputs, Failure) else self._alone(case, outputs) or outputs

    def _damage(self, case: Case, inputs: Inputs) -> Failure | None:
        damage = inputs.damage()
        if damage is None or "memory" in self.ignored_aspects:
            return None
        name, kind = damage
        verb = "changed" if kind == "input_mutated" else "wrote beyond"
        return failure_of(case, kind, f"the kernel {verb} its input {name}")

    def _in_sequence(self, case: Case, inputs: Inputs) -> Outputs | Failure:
        """Make the calls of a case one after another; return the results of the last."""
        calls = (*earlier_calls(case), EarlierCall())
        if case.protocol == "repeat" and not self.contract.deterministic:
            calls = calls[-1:]
        history, held = _History(calls), 0
        outputs: Outputs | Failure = ()
        for number, call in enumerate(calls, 1):
            made, given = call_of(case, call), inputs
            if call.memory != "same" or call.sizes or call.options or call.dtype:
                given = build(made, self.device)
            elif call.data != held:
                given = inputs = _refilled(inputs, made)
                held = call.data
            outputs = self._ordered_call(made, given, order=len(calls) - number)
            if isinstance(outputs, Failure):
                if call.dtype or (outputs.kind == "refused" and (call.sizes or call.options)):
                    continue  # nothing was promised for it
                which = "" if outputs.kind in ("refused", "not_interpreted") else history.words(number)
                return replace(outputs, message=f"{outputs.message}{which}")
            if failure := self._damage(case, given):
                return replace(failure, message=f"{failure.message}{history.words(number)}")
            if failure := history.change(made, number, outputs) or (
                history.difference(made, number, outputs) if self.contract.deterministic else None
            ):
                lines = self.call.watch.contended
                more = (
                    f"; programs ran in another order, which {lines} depends on"
                    if lines and "bits" in failure.message
                    else ""
                )
                return replace(failure, case=case, message=failure.message + more)
            history.hold(number, outputs, given)
        assert isinstance(outputs, tuple)
        return outputs

    def _ordered_call(self, case: Case, inputs: Inputs, order: int) -> Outputs | Failure:
        """Make a call in which interpreted programs run in this order, or ascending if they can't."""
        assignment = self.call.assignment
        assignment.order = order if self.contract.deterministic else 0
        try:
            outputs = self.call(case, inputs)
            if not assignment.order or not isinstance(outputs, Failure) or outputs.kind != "not_interpreted":
                return outputs
            assignment.order = 0
            return self.call(case, inputs)
        finally:
            assignment.order = 0

    def _in_plain_process(self, case: Case, inputs: Inputs) -> Outputs | Failure:
        """Return the kernel's outputs in a plain process, or the failure of that call."""
        keywords = options_for(case, inputs, self.call.listed)
        self.call.report(case, WALL_FACTOR * (self.call.timeout + START))  # this process only waits
        result = call_outside(target_of(self.call.kernel), inputs.positional, keywords, self.call.timeout)
        self.call.report(case)
        if not isinstance(result, NoResult):
            return self.call.checked_results(case, inputs, result)
        if result.lacks_gpu or self.call.pretend:
            return self.call(case, inputs)
        return failure_of(case, "crash", f"in a process of its own: {result.message}")

    def _alone(self, case: Case, outputs: Outputs) -> Failure | None:
        symbol = case.definition.row_axis(case.options)
        if case.protocol != "alone" or symbol is None or case.sizes[symbol] < 2:
            return None
        signature, rows = case.signature, case.sizes[symbol]

        def single(tensor: torch.Tensor, dims: tuple[str, ...], row: int) -> torch.Tensor:
            return tensor.narrow(dims.index(symbol), row, 1) if symbol in dims else tensor

        # the first three, the middle and the last: each costs a call
        for row in sorted({0, min(1, rows - 1), min(2, rows - 1), rows // 2, rows - 1}):
            whole = build(case, self.device)
            sliced = {
                tensor.name: replace(guarded, tensor=single(guarded.tensor, tensor.dims, row))
                for tensor, guarded in zip(signature.tensors, whole.guarded.values(), strict=True)
            }
            alone = self.call(replace(case, sizes={**case.sizes, symbol: 1}), Inputs(sliced, whole.keywords))
            if isinstance(alone, Failure):
                return replace(alone, message=f"row {row} alone: {alone.message}")
            for index, (tensor, part, full) in enumerate(zip(signature.returns, alone, outputs, strict=True)):
                if symbol in tensor.dims and not same_numbers(part, single(full, tensor.dims, row)):
                    words = f"row {row} alone gives other bits than among {rows}"
                    return failure_of(case, "batch_variant", words, index)
        return None

    def _unwritten(self, case: Case, inputs: Inputs, poisoned: Outputs) -> Failure | None:
        """Return a failure if elements of a large output are never written: NaN in NaN-filled memory, and not in other
        memory."""
        for position, result in enumerate(poisoned):
            if not bool(result.isnan().any()):
                continue
            again = self.call(replace(case, memory="huge"), inputs)
            if isinstance(again, Failure):
                return again
            unwritten = result.isnan() & ~again[position].isnan()
            if bool(unwritten.any()):
                index = tuple(int(part) for part in unwritten.nonzero()[0])
                words = f"{int(unwritten.sum())} of {result.numel()} elements, first at {list(index)}"
                message = f"the output holds what was in memory before the call ({words})"
                return failure_of(case, "unwritten_output", message, position, index, aspect="memory")
        return None


def failure_or_suspicion(harness: KernelHarness, case: Case) -> Failure | None:
    """Return a case's failure: proven by the contract, else suspected by the statistical bound; else None."""
    result = harness.try_case(case)
    if result.failure is not None or not has_independent_data(case):
        return result.failure
    return judge_statistically(harness.oracle, result.case, result).failure
