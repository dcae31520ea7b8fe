"""What else accounts for a failure than numbers: conduct and bias; and how an explanation is put into words."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

from assay.verify.contract import Contract
from assay.verify.inputs.sampler import Sampler, seeded, with_values
from assay.verify.result import Failure
from assay.verify.suspects import suspects_of
from assay.verify.suspects.evaluation import kernel_of
from assay.verify.suspects.suspect import Kernel, Suspect
from assay.verify.trial import Bench
from assay.verify.verdict import Explanation

_ALIKE = 0.9  # of the calls of the series
_SERIES = ("once", "once", "repeat", "after_other", "after_refill")  # what tells one kind of conduct from another
MOST = 5  # explanations
NUMBERS = ("contract", "exact", "nonfinite", "layout", "unwritten_output")  # kinds of failures


class Deadline:
    """So much processor time, or four times as much on the clock where a machine is busy with other things."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._processor, self._clock = seconds, time.process_time(), time.monotonic()

    def is_over(self) -> bool:
        """Whether it has passed."""
        spent = max(time.process_time() - self._processor, (time.monotonic() - self._clock) / 4)
        return spent > self._seconds


def described(suspect: Suspect, contract: Contract) -> str:
    """What is wrong, where it was seen, and the contract that is kept."""
    words = suspect.description
    if suspect.contract:
        kept = ", ".join(f"{name}={value!r}" for name, value in suspect.loosened(contract).changed().items())
        words += f"; it keeps Contract({kept})"
    return words if suspect.origin == "common slip" else f"{words} ({suspect.origin})"


def explained_by_conduct(
    bench: Bench, failure: Failure, sampler: Sampler, deadline: Deadline
) -> tuple[Explanation, ...]:
    """Suspects of conduct that fail as the kernel does in a series of calls of two shapes that are new to both."""
    choose, cases = seeded(failure.case.seed + 2), []
    for _ in range(2):
        drawn = sampler.case(choose, style="small", options=failure.case.options)
        drawn = with_values(drawn, "normal", layouts={}, unused="plain", memory="plain")
        cases += [replace(drawn, protocol=protocol, seed=drawn.seed + place) for place, protocol in enumerate(_SERIES)]

    def kinds(kernel: Kernel | None, *, later: bool = False) -> list[str]:
        """What each call of the series shows; ``later``: after one more call, for what changes by turns.

        The series ends where the deadline is over.
        """
        tried = bench
        if kernel is not None:
            tried = replace(bench, call=replace(bench.call, kernel=kernel, framework="torch"), isolation=None)
        if later:
            tried.outputs(cases[-1])
        shown = []
        for case in cases:
            if deadline.is_over():
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
    for order, suspect in enumerate(suspects_of(failure.case.spec)):
        if suspect.conduct is None or not any(wanted):
            continue
        if deadline.is_over():
            break
        with contextlib.suppress(Exception):  # whatever is wrong with one suspect, the others are still asked
            for later in (False, True):
                given = kinds(kernel_of(suspect, failure.case.spec, failure.case.out_dtype), later=later)
                if len(given) < len(wanted):
                    break
                alike = sum(map(str.__eq__, given, wanted)) / len(wanted)
                if alike >= _ALIKE and set(given) == set(wanted):
                    found.append((-alike, order, suspect))
                    break
    found.sort(key=lambda entry: entry[:2])
    return tuple(Explanation(s.name, described(s, bench.contract), 0.0) for *_, s in found[:MOST])


def explained_by_bias(bench: Bench, failure: Failure, deadline: Deadline) -> tuple[Explanation, ...]:
    """Suspects whose kernels' errors lean the same way in the same calls, though each lies within the contract."""
    found = []
    for suspect in suspects_of(failure.case.spec):
        if suspect.family not in ("store", "accumulator", "precision"):
            continue
        if deadline.is_over():
            break
        with contextlib.suppress(Exception):  # as above
            if not suspect.concerns(failure.case):
                continue
            kernel = kernel_of(suspect, failure.case.spec, failure.case.out_dtype)
            call = replace(bench.call, kernel=kernel, framework="torch")
            seen = replace(bench, call=call, isolation=None).try_case(failure.case).failure
            if seen is not None and seen.kind == "bias" and _side(seen) == _side(failure):
                found.append(Explanation(suspect.name, described(suspect, bench.contract), seen.ratio or 0.0))
    return tuple(found[:MOST])


def _side(failure: Failure) -> str:
    """To which side errors lean."""
    return failure.message.partition(" in ")[0]
