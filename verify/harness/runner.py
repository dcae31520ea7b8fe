"""One trial: build a case, call the kernel as its protocol says, and judge the results.

Protocols:

- "once": one call.
- "repeat": the same call twice must give the same bits.
- "after_other", "after_refill": a call with other data of the same shapes comes first, in other memory or in the same.
- "after_many": many such calls come first, as in a benchmark.
- "emitted": Triton kernels compute with the arithmetic that NVIDIA's backend emits.
- "outside": the call is made in a plain process, where the kernel can't detect the examination.
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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from assay.golden.errors import Undecided
from assay.golden.evaluation.golden import Golden
from assay.interpreter import device_to_pretend
from assay.runtime.deadline import WALL_FACTOR
from assay.runtime.environment import seed_generators, standard_environment, with_changes
from assay.runtime.tensors import same_numbers
from assay.verify.cases.at_shape import PROTOCOL as AT
from assay.verify.cases.case import Case, Inputs, all_contents, build
from assay.verify.comparison.bias import try_series
from assay.verify.comparison.oracle import Oracle
from assay.verify.comparison.result import Result, undecided
from assay.verify.comparison.sampled import case_label, judge_samples
from assay.verify.comparison.statistics import has_independent_data, judge_statistically
from assay.verify.contract import Contract
from assay.verify.findings import Failure
from assay.verify.harness.call import EMITTED, Call, Finding, options_for
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
            for name in [name for name in before if now.get(name) is not before[name]] + _shadows(space, before):
                is_function = callable(before.get(name)) or callable(now.get(name))
                if _is_public(name) and is_function and not _own(name, now.get(name)):
                    results.append(f"{space.__name__}.{name}")
                    _restore(space, name, before)
        return results


def _shadows(space: Any, before: dict[str, Any]) -> list[str]:
    """Return the new methods that hide a method of a base class."""
    bases = space.__mro__[1:] if isinstance(space, type) else ()
    return [name for name in vars(space) if name not in before and any(name in vars(base) for base in bases)]


def _restore(space: Any, name: str, before: dict[str, Any]) -> None:
    if name in before:
        setattr(space, name, before[name])
    else:
        delattr(space, name)


def _is_public(name: str) -> bool:
    return name[0] != "_" or name[:2] == "__"


def _own(name: str, value: Any) -> bool:
    """Whether a function is the library's own wrapper of the function of this name."""
    code = getattr(value, "__code__", None)
    is_named = getattr(value, "__name__", "") == name and str(getattr(value, "__module__", "")).startswith("torch")
    return is_named and code is not None and Path(code.co_filename).is_relative_to(_LIBRARY)


_MANY = 40  # equal calls of the protocol "after_many", as a benchmark makes them


class Observer(Protocol):
    """A caller of the kernel in another process: `assay.verify.harness.isolation.Isolation`."""

    def observe(self, case: Case) -> tuple[torch.Tensor, ...] | Failure:
        """Return the outputs of a case, or its failure (`KernelHarness.observe`)."""

    def pass_over(self, known: frozenset[str]) -> None:
        """Make `observe` ignore these aspects."""


@dataclass(frozen=True)
class KernelHarness:
    """A kernel with the way to call it and the contract to judge it by.

    ``goldens`` are those of the case at hand, if already known. ``known`` are broken aspects to ignore, so that the
    rest can be judged: that the kernel changes its inputs (`memory`), or library functions (`conduct`). ``isolation``
    makes the calls in another process.
    """

    call: Call
    contract: Contract
    device: torch.device | str = "cpu"
    goldens: tuple[Golden, ...] | None = None
    known: frozenset[str] = frozenset()
    isolation: Observer | None = None

    @staticmethod
    def of(
        kernel: Callable[..., Any], settings: Settings, before: Callable[[Case, float], None] | None = None
    ) -> KernelHarness:
        """Return the harness of a kernel under these settings; ``before`` is the callback of `Call`."""
        environment = with_changes(settings.environment)
        call = Call(kernel, settings.options, settings.framework, settings.timeout, before, environment)
        call = replace(call, refuses=settings.refuses)
        if settings.pretend:
            call = replace(call, pretend=device_to_pretend(settings.pretend, settings.faithful))
        return KernelHarness(call, settings.contract, settings.device)

    def passing_over(self, known: frozenset[str]) -> KernelHarness:
        """Return a harness that ignores these aspects."""
        if self.isolation is not None:
            self.isolation.pass_over(known)
        return replace(self, known=known)

    def try_case(self, case: Case) -> Result:
        """Build a case, call the kernel and judge the results; nothing is judged if rounding decides what the reference
        computes."""
        try:
            return self._tried(case)
        except Undecided as error:
            return undecided(case, error)

    @standard_environment()
    def _tried(self, case: Case) -> Result:
        if case.protocol == "bias":
            return try_series(case, self.try_case, self.contract, self.oracle.under)
        self.call.tell(case)
        if self.isolation is not None:
            values, seen = all_contents(case), self.isolation.observe(case)
        else:
            inputs = build(case, self.device)
            values = {name: guarded.tensor.detach().cpu().clone() for name, guarded in inputs.guarded.items()}
            seen = self.observe(case, inputs)
        if isinstance(seen, Failure):
            return Result(case, seen, sampled=f"{case_label(case)}: {seen.message}" if case.protocol == AT else "")
        if case.protocol == AT:
            return judge_samples(self.oracle, case, values, seen)
        return _with_emission_note(self.oracle.judge(case, values, seen))

    @standard_environment()
    def outputs(self, case: Case) -> tuple[torch.Tensor, ...] | None:
        """Return the outputs of one call, unjudged; None if there are none."""
        case = replace(case, protocol="once")
        seen = self.isolation.observe(case) if self.isolation else self.observe(case, build(case, self.device))
        return None if isinstance(seen, Failure) else seen

    def observe(self, case: Case, inputs: Inputs) -> tuple[torch.Tensor, ...] | Failure:
        """Make the calls of the case's protocol; return the outputs, or a failure other than wrong numbers."""
        namespaces = Namespaces()
        seed_generators(case.seed)
        seen = self._outside(case, inputs) if case.protocol == "outside" else self._inside(case, inputs)
        replaced = namespaces.restore()
        if replaced and "conduct" not in self.known:
            return self._failure_of(
                case, Finding("input_mutated", f"the kernel replaced {', '.join(replaced)}", aspect="conduct")
            )
        return seen

    def _inside(self, case: Case, inputs: Inputs) -> tuple[torch.Tensor, ...] | Failure:
        before: tuple[torch.Tensor, ...] = ()
        held: tuple[torch.Tensor, ...] = ()
        if case.protocol.startswith("after_"):
            before, inputs, finding = self._other_data_first(case, inputs)
            if finding is not None:
                return self._failure_of(case, finding)
            held = tuple(output.clone() for output in before)
        outputs = self.call(case, inputs)
        if case.protocol == AT and not isinstance(outputs, Finding):
            unwritten = self._unwritten(case, inputs, outputs)
            outputs = unwritten or self.call(replace(case, memory="plain"), inputs)
        if isinstance(outputs, Finding):
            return self._failure_of(case, outputs)
        damage = inputs.damage()
        if damage is not None and "memory" not in self.known:
            name, kind = damage
            return self._failure_of(case, Finding(kind, _DAMAGE[kind].format(name)))
        if any(not same_numbers(now, then) for now, then in zip(before, held, strict=True)):
            return self._failure_of(case, Finding("nondeterministic", "a later call changed an earlier call's result"))
        for finding in (self._repeated(case, inputs, outputs), self._alone(case, outputs)):
            if finding is not None:
                return self._failure_of(case, finding)
        return outputs

    @property
    def oracle(self) -> Oracle:
        """The judge of the outputs."""
        return Oracle(self.contract, self.goldens)

    def _other_data_first(self, case: Case, inputs: Inputs) -> tuple[tuple[torch.Tensor, ...], Inputs, Finding | None]:
        """Call with other data of the same shapes; then restore the case's data, in the same memory if the protocol
        says so."""
        if case.protocol == "after_other":
            others = build(replace(case, seed=case.seed + 7_777_777, edits=()), self.device)
            outputs = self.call(case, others)
            return ((), inputs, outputs) if isinstance(outputs, Finding) else (outputs, inputs, None)
        others_data = all_contents(replace(case, seed=case.seed + 7_777_777, edits=()))
        own_data = all_contents(case)
        refilled = {name: g.refill(others_data[name].to(g.tensor.device)) for name, g in inputs.guarded.items()}
        outputs = self.call(case, Inputs(refilled, inputs.keywords))
        if case.protocol == "after_many":
            outputs = self._often(case, Inputs(refilled, inputs.keywords), outputs)
        own = {name: g.refill(own_data[name].to(g.tensor.device)) for name, g in inputs.guarded.items()}
        return ((), inputs, outputs) if isinstance(outputs, Finding) else (outputs, Inputs(own, inputs.keywords), None)

    def _often(
        self, case: Case, inputs: Inputs, first: tuple[torch.Tensor, ...] | Finding
    ) -> tuple[torch.Tensor, ...] | Finding:
        """Repeat a call many times; return the last outputs, which must equal the first."""
        if isinstance(first, Finding):
            return first
        held, last = tuple(output.clone() for output in first), first
        for _ in range(_MANY - 1):
            answer = self.call(case, inputs)
            if isinstance(answer, Finding):
                return answer
            last = answer
        if not self.contract.deterministic or all(map(same_numbers, last, held)):
            return last
        return Finding("nondeterministic", f"the last of {_MANY} equal calls gave other bits than the first")

    def _outside(self, case: Case, inputs: Inputs) -> tuple[torch.Tensor, ...] | Failure:
        """Return the kernel's outputs in a plain process, or the failure of that call."""
        keywords = options_for(case, inputs, self.call.listed)
        self.call.tell(case, WALL_FACTOR * (self.call.timeout + START))  # this process only waits
        result = call_outside(target_of(self.call.kernel), inputs.positional, keywords, self.call.timeout)
        self.call.tell(case)
        if isinstance(result, NoResult) and not (result.lacks_gpu or self.call.pretend):
            return self._failure_of(case, Finding("crash", f"in a process of its own: {result.message}"))
        outputs = self.call(case, inputs) if isinstance(result, NoResult) else self.call.form(case, inputs, result)
        return self._failure_of(case, outputs) if isinstance(outputs, Finding) else outputs

    def _repeated(self, case: Case, inputs: Inputs, outputs: tuple[torch.Tensor, ...]) -> Finding | None:
        if case.protocol != "repeat" or not self.contract.deterministic:
            return None
        held = tuple(output.clone() for output in outputs)
        again = self.call(case, inputs)
        if isinstance(again, Finding):
            return replace(again, message=f"in the second of two equal calls: {again.message}")
        for index, (first, second) in enumerate(zip(held, again, strict=True)):
            if not same_numbers(first, second):
                return Finding(
                    "nondeterministic", "the same call gave other bits the second time", index, _differ(first, second)
                )
        return None

    def _alone(self, case: Case, outputs: tuple[torch.Tensor, ...]) -> Finding | None:
        symbol = case.definition.row_axis(case.options)
        if case.protocol != "alone" or symbol is None or case.sizes[symbol] < 2:
            return None
        signature, rows = case.signature, case.sizes[symbol]
        for row in sorted({0, min(1, rows - 1), min(2, rows - 1), rows // 2, rows - 1}):
            single = replace(case, sizes={**case.sizes, symbol: 1})
            whole = build(case, self.device)
            sliced = {
                tensor.name: replace(guarded, tensor=_row(guarded.tensor, tensor.dims, symbol, row))
                for tensor, guarded in zip(signature.tensors, whole.guarded.values(), strict=True)
            }
            alone = self.call(single, Inputs(sliced, whole.keywords))
            if isinstance(alone, Finding):
                return replace(alone, message=f"row {row} alone: {alone.message}")
            for index, (tensor, part, full) in enumerate(zip(signature.returns, alone, outputs, strict=True)):
                if symbol in tensor.dims and not same_numbers(part, _row(full, tensor.dims, symbol, row)):
                    return Finding("batch_variant", f"row {row} alone gives other bits than among {rows}", index)
        return None

    def _unwritten(self, case: Case, inputs: Inputs, poisoned: tuple[torch.Tensor, ...]) -> Finding | None:
        """Return a finding if elements of a large output are never written: NaN in NaN-filled memory, and not in other
        memory."""
        for position, result in enumerate(poisoned):
            if not bool(result.isnan().any()):
                continue
            again = self.call(replace(case, memory="huge"), inputs)
            if isinstance(again, Finding):
                return again
            unwritten = result.isnan() & ~again[position].isnan()
            if bool(unwritten.any()):
                index = tuple(int(part) for part in unwritten.nonzero()[0])
                words = f"{int(unwritten.sum())} of {result.numel()} elements, first at {list(index)}"
                message = f"the output holds what was in memory before the call ({words})"
                return Finding("unwritten_output", message, position, index, aspect="memory")
        return None

    def _failure_of(self, case: Case, finding: Finding) -> Failure:
        name = case.signature.returns[finding.output].name
        return Failure(
            finding.kind,
            case,
            finding.message,
            name,
            finding.index,
            device_lost=finding.device_lost,
            aspect=finding.aspect,
        )


def _with_emission_note(result: Result) -> Result:
    """Return the result; a failure of the protocol "emitted" says with which arithmetic the call was made."""
    if result.failure is None or result.case.protocol != EMITTED:
        return result
    how = "with a b + c rounded once and functions approximate, as NVIDIA's backend has them"
    return replace(result, failure=replace(result.failure, message=f"{how}: {result.failure.message}"))


def suspicion(harness: KernelHarness, case: Case) -> Failure | None:
    """Return the failure of a case, by the contract or by the statistical bound; None if it passes both."""
    result = harness.try_case(case)
    if result.failure is not None or not has_independent_data(case):
        return result.failure
    return judge_statistically(harness.oracle, case, result).failure


_DAMAGE = {
    "input_mutated": "the kernel changed its input {0}",
    "out_of_bounds_write": "the kernel wrote beyond its input {0}",
}


def _differ(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    different = (a.double() != b.double()) & ~(a.double().isnan() & b.double().isnan())
    indices = different.nonzero()
    return tuple(int(index) for index in indices[0]) if len(indices) else ()


def _row(tensor: torch.Tensor, dims: tuple[str, ...], symbol: str, row: int) -> torch.Tensor:
    """Return one row along ``symbol``, as a dimension of size one."""
    return tensor.narrow(dims.index(symbol), row, 1) if symbol in dims else tensor
