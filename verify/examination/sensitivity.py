"""The sensitivity check: before any call of the kernel, the comparison must reject corrupted outputs.

A tolerance that can't fail proves nothing. So the golden itself, rounded to the output format, is corrupted as a faulty
kernel might corrupt it, and the comparison must reject every corruption that changes a judged element. If one goes
undetected the examination goes on, and ends as VACUOUS unless it finds a fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from assay.formats.format import Format
from assay.formats.rounding import next_down, next_up, round_to
from assay.golden.errors import ReferenceRefuses, Undecided
from assay.verify.cases.case import build
from assay.verify.comparison.corruptions import Numbers, of_structure, of_the_largest, with_element
from assay.verify.comparison.judge import Tolerance, judge
from assay.verify.examination.phases import ordinary_cases
from assay.verify.examination.plan import Plan

Tensor = torch.Tensor

_ROUNDS = (("normal", 1), ("small", 1), ("normal", 4))
"""What numbers the sensitivity check tries, in how many cases of each option set. A later round is tried only if some
corruption went undetected in all cases so far."""
_ANYTHING = "anything at all: no element is judged"


def corruptions(right: Tensor, limits: Tolerance, out: Format) -> Iterator[tuple[str, Tensor]]:
    """Yield pairs (what was done, the corrupted output) for a correct output of at least one element."""
    numbers, allowed = right.numpy(), (limits.ends.high.numpy(), limits.ends.low.numpy())
    for name, wrong in of_structure(numbers):
        if name == "one row zero":
            yield "everything times 1.05", round_to(right * 1.05, out)
        if name != "two rows swapped" or _rows_differ(numbers):
            yield "the sign changed" if name == "sign changed" else name, torch.from_numpy(wrong)
    index = of_the_largest(numbers)
    yield "one NaN", torch.from_numpy(with_element(numbers, index, math.nan))
    for side, end, neighbour in zip(("above", "below"), allowed, (next_up, next_down), strict=True):
        beyond = float(neighbour(torch.tensor(end[index]), out))
        if beyond != end[index]:  # else the format has nothing beyond
            yield f"one ulp {side} what is allowed", torch.from_numpy(with_element(numbers, index, beyond))


def _rows_differ(numbers: Numbers) -> bool:
    """Whether the first and the last row differ by more than 5 % anywhere; otherwise a swap hardly changes anything."""
    rows = numbers.reshape(-1, numbers.shape[-1] if numbers.ndim else 1)
    first, last = (np.where(np.isfinite(row), row, 0) for row in (rows[0], rows[-1]))
    return bool((np.abs(first - last) > 0.05 * np.maximum(np.abs(first), np.abs(last))).any())


def outcomes(limits: Tolerance, out: Format) -> dict[str, bool]:
    """Return whether the comparison rejects each corruption, by its description.

    A corruption that leaves every judged element equal (zeros of an output that is zero, or -0 for 0) is skipped.
    """
    right = round_to(limits.golden, out)
    right = torch.where(torch.isfinite(right), right, limits.golden)
    if not right.numel():
        return {}
    if not bool(limits.judged.any()):
        return {_ANYTHING: False}
    if not bool((limits.judged & torch.isfinite(limits.golden)).any()):  # a logarithm of numbers below zero
        return {}
    results = {_ANYTHING: True}
    for words, wrong in corruptions(right, limits, out):
        changed = ((wrong != right) & ~(wrong.isnan() & right.isnan()) & limits.judged).any()
        if bool(changed):
            results[words] = bool(judge(wrong, limits).broken.any())
    return results


def undetected_corruption(seen: Iterable[Mapping[str, bool]]) -> str | None:
    """Return the first corruption that no case of `outcomes` rejects, or None."""
    together: dict[str, bool] = {}
    for result in seen:
        together |= {words: together.get(words, False) or rejected for words, rejected in result.items()}
    return next((words for words, rejected in together.items() if not rejected), None)


def sensitivity_check(plan: Plan) -> str | None:
    """Return a corruption that no case detects, or None. The kernel isn't called.

    A corruption that passes on ordinary numbers may be rejected on small ones: in attention's gradient with TF32
    operands, errors of the scores are relative errors of the weights, and sums over many rows cancel. One that passes
    at one small size may be rejected at others: few results with a wide tolerance include a well-determined one.

    Raises `DefinitionError` of a reference that gives other shapes than stated, or runs at none of the sizes.
    """
    seen: dict[str, list[dict[str, bool]]] = {}
    undetected, refused, tried = None, list[ReferenceRefuses](), 0
    for distribution, draws in _ROUNDS:
        for case in ordinary_cases(
            plan.sampler, "tile", distribution, draws
        ):  # smaller ones cancel some results altogether
            values = {name: guarded.tensor for name, guarded in build(case).guarded.items()}
            try:
                limits = plan.harness.oracle.tolerances(case, values)
            except Undecided:  # of a reference: nothing is judged either
                tried += 1
                continue
            except ReferenceRefuses as error:  # these sizes; the cases that are tried will show which others
                refused.append(error)
                continue
            tried += 1
            for tensor, format, allowed in zip(case.signature.returns, case.result_formats, limits, strict=True):
                if not tensor.is_integer:
                    seen.setdefault(tensor.name, []).append(outcomes(allowed, format))
        undetected = next(filter(None, map(undetected_corruption, seen.values())), None)
        if undetected is None:
            break
    if refused and not tried:
        raise refused[0]
    return undetected
