"""What accounts for a failure beside numbers: side effects and bias; and how an explanation is put into words."""

from dataclasses import replace

import torch

from assay.formats.rounding import ulp_towards
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.comparison.result import Result
from assay.verify.contract import Contract
from assay.verify.explanation.fault_models import fault_models_of
from assay.verify.explanation.fault_models.evaluation import kernel_of
from assay.verify.explanation.fault_models.fault_model import FaultModel, Kernel
from assay.verify.explanation.inquiry import Inquiry
from assay.verify.findings import Explanation, Failure
from assay.verify.harness.runner import Bench

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
    bench: Bench, failure: Failure, sampler: Sampler, inquiry: Inquiry
) -> tuple[Explanation, ...]:
    """Faults of side effects that fail as the kernel does in a series of calls of two shapes that are new to both."""
    choose, cases = seeded(failure.case.seed + 2), []
    for _ in range(2):
        drawn = sampler.case(choose, style="small", options=failure.case.options)
        drawn = with_values(drawn, "normal", layouts={}, unused="plain", memory="plain")
        cases += [replace(drawn, protocol=protocol, seed=drawn.seed + index) for index, protocol in enumerate(_SERIES)]

    def results(kernel: Kernel | None, *, later: bool = False, like: list[Result] | None = None) -> list[Result]:
        """What each call of the series gives; ``later``: after one more call, for what changes by turns.

        The series ends where the inquiry is over, and where it can't be ``like`` another any more.
        """
        tried = bench
        if kernel is not None:
            tried = replace(bench, call=replace(bench.call, kernel=kernel, framework="torch"), isolation=None)
        if later:
            tried.outputs(cases[-1])
        shown: list[Result] = []
        other = 0
        for index, case in enumerate(cases):
            if inquiry.is_over():
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
        if inquiry.is_over():
            break
        with inquiry.asking(fault):
            for later in (False, True):
                own = results(kernel_of(fault, failure.case.spec, failure.case.out_dtype), later=later, like=seen)
                given = kinds(own)
                if inquiry.is_over():
                    break
                if len(given) < len(wanted) or not all(map(_give_alike, own, seen)):
                    continue
                alike = sum(map(str.__eq__, given, wanted)) / len(wanted)
                if alike >= _ALIKE and set(given) == set(wanted):
                    result.append((-alike, order, fault))
                    break
    result.sort(key=lambda entry: entry[:2])
    return tuple(Explanation(s.name, described(s, bench.contract), 0.0) for *_, s in result[:MOST])


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


def explained_by_bias(bench: Bench, failure: Failure, inquiry: Inquiry) -> tuple[Explanation, ...]:
    """Fault models whose kernels' errors lean the same way in the same calls, though each lies within the contract."""
    results = []
    for fault in fault_models_of(failure.case.spec):
        if fault.family not in ("store", "accumulator", "precision"):
            continue
        if inquiry.is_over():
            break
        with inquiry.asking(fault):
            if not fault.concerns(failure.case):
                continue
            kernel = kernel_of(fault, failure.case.spec, failure.case.out_dtype)
            call = replace(bench.call, kernel=kernel, framework="torch")
            seen = replace(bench, call=call, isolation=None).try_case(failure.case).failure
            if seen is not None and seen.kind == "bias" and seen.side == failure.side:
                results.append(Explanation(fault.name, described(fault, bench.contract), seen.ratio or 0.0))
    return tuple(results[:MOST])
