"""One trial: build a case, call the kernel as its protocol says, and judge the results.

Protocols:

- "once": one call.
- "repeat": the same call twice must give the same bits.
- "after_other", "after_refill": a call with other data of the same shapes comes first, in other memory or in the same.
- "after_many": many such calls come first, as in a benchmark.
- "emitted": Triton kernels compute with the arithmetic that NVIDIA's backend emits.
- "outside": the call is made in a plain process, where the kernel can't detect the examination. The phase is
  "plain_process", the module `assay.verify.harness.clean_process`, and the aspect "conduct", which "after_refill" and
  "after_many" show too, and tampering breaks.
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

from assay.golden.errors import Undecided
from assay.golden.evaluation.golden import Golden
from assay.interpreter import Assignment, device_to_pretend
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

_OTHER_SEED = 7_777_777  # added to a case's seed, for other data of the same shapes
_MANY = 40  # equal calls of the protocol "after_many", as a benchmark makes them


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
    ``isolation`` makes the calls in another process.
    """

    call: Call
    contract: Contract
    device: torch.device | str = "cpu"
    goldens: tuple[Golden, ...] | None = None
    ignored_aspects: frozenset[str] = frozenset()
    isolation: Observer | None = None

    @staticmethod
    def of(
        kernel: Callable[..., Any], settings: Settings, heartbeat: Callable[[Case, float], None] | None = None
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
        return KernelHarness(call, settings.contract, settings.device)

    @property
    def outlives_device(self) -> bool:
        """Whether this process goes on when the kernel loses its device."""
        return self.isolation is not None and self.isolation.is_of_device

    @property
    def oracle(self) -> Oracle:
        """The judge of the outputs."""
        return Oracle(self.contract, self.goldens)

    @standard_environment()
    def try_case(self, case: Case) -> Result:
        """Build a case, call the kernel and judge the results; nothing is judged if rounding decides what the reference
        computes.

        The result's case pins the configurations in which autotuned launches ran on a device.
        """
        self.call.assignment.begin(case.configs)
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
                seen = self.observe(case, inputs)
            if isinstance(seen, Failure):
                return Result(case, seen, sampled=f"{case_label(case)}: {seen.message}" if case.protocol == AT else "")
            if case.protocol == AT:
                return judge_samples(self.oracle, case, values, seen)
            result = self.oracle.judge(case, values, seen)
        except Undecided as error:
            return undecided(case, error)
        except Exception as error:
            if not lost_device.is_lost(error):
                raise
            return Result(case, lost_device.failure_by(error, case))
        if result.failure is None or case.protocol != EMITTED:
            return result
        how = "with a b + c rounded once and functions approximate, as NVIDIA's backend has them"
        return replace(result, failure=replace(result.failure, message=f"{how}: {result.failure.message}"))

    @standard_environment()
    def outputs(self, case: Case) -> Outputs | None:
        """Return the outputs of one call, unjudged; None if there are none."""
        case = replace(case, protocol="once")
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
        before: Outputs = ()
        if case.protocol.startswith("after_"):
            first, inputs = self._other_data_first(case, inputs)
            if isinstance(first, Failure):
                return first
            before = first
        held = tuple(output.clone() for output in before)
        outputs = self.call(case, inputs)
        if case.protocol == AT and not isinstance(outputs, Failure):
            outputs = self._unwritten(case, inputs, outputs) or self.call(replace(case, memory="plain"), inputs)
        if isinstance(outputs, Failure):
            return outputs
        damage = inputs.damage()
        if damage is not None and "memory" not in self.ignored_aspects:
            name, kind = damage
            verb = "changed" if kind == "input_mutated" else "wrote beyond"
            return failure_of(case, kind, f"the kernel {verb} its input {name}")
        if any(not same_numbers(now, then) for now, then in zip(before, held, strict=True)):
            return failure_of(case, "nondeterministic", "a later call changed an earlier call's result")
        return self._repeated(case, inputs, outputs) or self._alone(case, outputs) or outputs

    def _other_data_first(self, case: Case, inputs: Inputs) -> tuple[Outputs | Failure, Inputs]:
        """Call with other data of the same shapes; return the outputs, and the case's own data, in the same memory
        unless the protocol is "after_other"."""
        other = replace(case, seed=case.seed + _OTHER_SEED, edits=())
        if case.protocol == "after_other":
            return self.call(case, build(other, self.device)), inputs

        def refilled(data: Case) -> Inputs:
            values = all_contents(data)
            filled = {name: g.refill(values[name].to(g.tensor.device)) for name, g in inputs.guarded.items()}
            return Inputs(filled, inputs.keywords)

        others = refilled(other)
        first = last = self.call(case, others)
        if case.protocol == "after_many" and not isinstance(first, Failure):
            held = tuple(output.clone() for output in first)
            for _ in range(_MANY - 1):
                last = self.call(case, others)
                if isinstance(last, Failure):
                    break
            if not isinstance(last, Failure) and self.contract.deterministic and not all(map(same_numbers, last, held)):
                words = f"the last of {_MANY} equal calls gave other bits than the first"
                last = failure_of(case, "nondeterministic", words)
        return last, refilled(case)

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

    def _repeated(self, case: Case, inputs: Inputs, outputs: Outputs) -> Failure | None:
        if case.protocol != "repeat" or not self.contract.deterministic:
            return None
        held = tuple(output.clone() for output in outputs)
        again = self.call(case, inputs)
        if isinstance(again, Failure):
            return replace(again, message=f"in the second of two equal calls: {again.message}")
        for index, (first, second) in enumerate(zip(held, again, strict=True)):
            if not same_numbers(first, second):
                a, b = first.double(), second.double()
                different = (
                    (a != b) & ~(a.isnan() & b.isnan())
                ).nonzero()  # empty if only the bits of zeros or NaN are
                element = tuple(int(position) for position in different[0]) if len(different) else ()
                words = "the same call gave other bits the second time"
                return failure_of(case, "nondeterministic", words, index, element)
        return None

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
