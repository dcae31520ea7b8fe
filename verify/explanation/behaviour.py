"""What accounts for a failure beside numbers: side effects and bias; and how an explanation is put into words."""

from dataclasses import replace

from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.contract import Contract
from assay.verify.execution.runner import Bench
from assay.verify.explanation.fault_models import fault_models_of
from assay.verify.explanation.fault_models.evaluation import kernel_of
from assay.verify.explanation.fault_models.fault_model import FaultModel, Kernel
from assay.verify.explanation.inquiry import Inquiry
from assay.verify.findings import Explanation, Failure

_ALIKE = 0.9  # of the calls of the series
_SERIES = ("once", "once", "repeat", "after_other", "after_refill")  # what tells one kind of side effects from another
MOST = 5  # explanations
NUMBERS = ("contract", "exact", "nonfinite", "layout", "unwritten_output")  # kinds of failures


def described(fault: FaultModel, contract: Contract) -> str:
    """What is wrong, where it was seen, and the contract that is kept."""
    words = fault.description
    if fault.contract:
        kept = ", ".join(f"{name}={value!r}" for name, value in fault.loosened(contract).changed().items())
        words += f"; it keeps Contract({kept})"
    return words if fault.origin == "common slip" else f"{words} ({fault.origin})"


def explained_by_side_effects(
    bench: Bench, failure: Failure, sampler: Sampler, inquiry: Inquiry
) -> tuple[Explanation, ...]:
    """Faults of side effects that fail as the kernel does in a series of calls of two shapes that are new to both."""
    choose, cases = seeded(failure.case.seed + 2), []
    for _ in range(2):
        drawn = sampler.case(choose, style="small", options=failure.case.options)
        drawn = with_values(drawn, "normal", layouts={}, unused="plain", memory="plain")
        cases += [replace(drawn, protocol=protocol, seed=drawn.seed + place) for place, protocol in enumerate(_SERIES)]

    def kinds(kernel: Kernel | None, *, later: bool = False) -> list[str]:
        """What each call of the series shows; ``later``: after one more call, for what changes by turns.

        The series ends where the inquiry is over.
        """
        tried = bench
        if kernel is not None:
            tried = replace(bench, call=replace(bench.call, kernel=kernel, framework="torch"), isolation=None)
        if later:
            tried.outputs(cases[-1])
        shown = []
        for case in cases:
            if inquiry.is_over():
                break
            seen = tried.try_case(case).failure
            shown.append("" if seen is None else seen.kind)
        return shown

    wanted, found = kinds(None), []
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
                given = kinds(kernel_of(fault, failure.case.spec, failure.case.out_dtype), later=later)
                if len(given) < len(wanted):
                    break
                alike = sum(map(str.__eq__, given, wanted)) / len(wanted)
                if alike >= _ALIKE and set(given) == set(wanted):
                    found.append((-alike, order, fault))
                    break
    found.sort(key=lambda entry: entry[:2])
    return tuple(Explanation(s.name, described(s, bench.contract), 0.0) for *_, s in found[:MOST])


def explained_by_bias(bench: Bench, failure: Failure, inquiry: Inquiry) -> tuple[Explanation, ...]:
    """Fault models whose kernels' errors lean the same way in the same calls, though each lies within the contract."""
    found = []
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
                found.append(Explanation(fault.name, described(fault, bench.contract), seen.ratio or 0.0))
    return tuple(found[:MOST])
