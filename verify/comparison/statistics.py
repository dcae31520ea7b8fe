"""The statistical bound: errors within the contract's worst case, but far larger than rounding plausibly causes.

A contract's tolerance holds whatever its roundings do, and grows with the length n of a sum as n u: at 16,384 columns a
float32 softmax may be off by 1.4e-3. The errors of correct kernels grow as sqrt(n) u. An error beyond that
(`assay.golden.arithmetic.model` has the bound, its constant and the data that it assumes) proves nothing, but is
*suspect*: the same definition is evaluated again under the contract's model with ``chance``.

It is applied at the lengths that an examination tries one after the other, on independently drawn data, as the bound
assumes. An element passes if the output is in [store(exact - B), store(exact + B)].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from assay.formats.rounding import next_down, next_up
from assay.golden.inputs.distributions import names_of
from assay.verify.cases.at_shape import PROTOCOL as AT
from assay.verify.cases.case import Case, all_contents
from assay.verify.comparison.judge import Tolerance
from assay.verify.comparison.oracle import Oracle
from assay.verify.comparison.result import Result
from assay.verify.findings import Detectable

HOLLOW = 0.1
"""The relative error of a whole output beyond which a check that lets it pass says nothing of its length."""
INDEPENDENT = ("normal", "large_mean", "positive")
"""Distributions of numbers that are drawn each for itself; those of a large mean show a variance of one pass, which the
worst case of long rows would allow."""


def has_independent_data(case: Case) -> bool:
    """Whether the data of a case satisfy the bound's assumption."""
    real = {tensor.name for tensor in case.signature.tensors if tensor.role == "real"}
    drawn = all(kind in INDEPENDENT for name, kind in case.values.items() if name in real)
    return drawn and case.protocol == "once" and not case.edits


def judge_statistically(oracle: Oracle, case: Case, result: Result) -> Result:
    """Judge the outputs of a result without a failure by the statistical bound.

    A failure is of kind "unlikely"; its ratio is the error over that bound.
    """
    if not result.outputs:  # nothing was judged
        return result
    seen = replace(oracle, statistical=True).judge(case, all_contents(case), result.outputs)
    if seen.failure is None:
        return seen
    failure = seen.failure
    message = (
        f"{failure.violations} of {failure.elements} elements are within what the contract's worst case allows, but "
        f"up to {failure.ratio:.3g} times as far off as rounding takes them"
    )
    return replace(seen, failure=replace(failure, kind="unlikely", message=message))


def least_errors(limits: Tolerance) -> torch.Tensor:
    """Return, for each element, the smallest relative error that the check would detect; infinity if there is none."""
    golden = torch.where(limits.judged & torch.isfinite(limits.golden), limits.golden, 0.0)
    up = golden > 0
    end = torch.where(up, limits.ends.high, limits.ends.low)
    beyond = torch.where(up, next_up(end, limits.out), next_down(end, limits.out))
    gain = (end + limits.share * (beyond - end) - golden) / golden
    nothing = (golden == 0) | gain.isnan() | (beyond == end)  # beyond the format's end there is no number
    return torch.where(nothing, torch.inf, gain)


def is_ordinary(case: Case) -> bool:
    """Whether the real numbers of a case are independent ones, and the other tensors have their plainest numbers."""
    if case.protocol == AT:
        return True
    others = [tensor for tensor in case.signature.tensors if tensor.role != "real"]
    plain = all(case.values[tensor.name] in (names_of(tensor)[0], "full") for tensor in others)
    return plain and has_independent_data(case)


def noticed(result: Result) -> float:
    """Return the relative error, common to a whole output, that half of the elements of each output detect; infinity
    if there is none."""
    known = [errors[errors.isfinite()] for errors in map(least_errors, result.tolerances)]
    return max((float(part.median()) for part in known if part.numel()), default=math.inf)


def is_hollow(result: Result) -> bool:
    """Whether the worst case lets more than a tenth of some output be wrong unseen."""
    hollow = _hollow([result])
    for limits in result.tolerances:
        numbers = limits.golden.isfinite() & (limits.golden != 0)
        radius = torch.where(limits.judged, limits.pre_store_radius, torch.inf)
        judged = limits.judged & numbers
        shares = (radius / limits.golden.abs())[judged if bool(judged.any()) else numbers]
        if shares.numel() and float(shares.median()) > hollow:
            return noticed(result) > hollow
    return False


def _hollow(results: Iterable[Result]) -> float:
    """Return the relative error beyond which a check says nothing of these results: no less than a gap between two
    numbers of an output's format, which no check notices."""
    outs = [limits.out for result in results for limits in result.tolerances]
    return max([HOLLOW, *(2.0**-out.trailing_bits for out in outs if out.kind == "float")])


def _has_numbers(results: tuple[Result, Result]) -> bool:
    """Whether some element should be a number other than zero."""
    return any(bool((part.golden.isfinite() & (part.golden != 0)).any()) for part in results[0].tolerances)


def detectable(length: int, seen: Sequence[tuple[Result, Result]]) -> Detectable | None:
    """Return what is detected at a length, from pairs of results (worst case, statistical); None if there is nothing
    to judge.

    Of several outputs the largest median of their elements' errors counts, of several results the smallest.
    """
    levels = [min(map(noticed, results)) for results in zip(*seen, strict=True)]
    if not levels or (levels[0] == math.inf and not any(map(_has_numbers, seen))):
        return None
    broken, suspect = levels
    hollow = _hollow(result for pair in seen for result in pair)
    return Detectable(length, broken, suspect, min(levels) > hollow)
