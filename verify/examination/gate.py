"""The gate check: a tolerance that can't fail proves nothing, so it is first shown outputs that are wrong.

The golden itself, rounded to the output format, is corrupted in ways that a faulty kernel might; the check must
reject every corruption that changes anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from assay.formats.format import Format
from assay.formats.rounding import next_down, next_up, round_to
from assay.golden.errors import Undecided
from assay.verify.cases.case import Case, build
from assay.verify.comparison.corruptions import Numbers, loudest, of_structure, with_element
from assay.verify.comparison.judge import Tolerance, judge
from assay.verify.examination.phases import gate_cases
from assay.verify.examination.question import Question

Tensor = torch.Tensor

_TRIES = (("normal", 1), ("small", 1), ("normal", 4))
"""Kinds of numbers, and how many cases of each set of options: the next where those before let something through."""
_WORDS = {"sign changed": "the sign changed"}


def corruptions(right: Tensor, limits: Tolerance, out: Format) -> Iterator[tuple[str, Tensor]]:
    """(what was done, the corrupted output) for a right output of at least one element."""
    numbers, allowed = right.numpy(), (limits.ends.high.numpy(), limits.ends.low.numpy())
    for name, wrong in of_structure(numbers):
        if name == "one row zero":
            yield "everything times 1.05", round_to(right * 1.05, out)
        if name != "two rows swapped" or _rows_differ(numbers):
            yield _WORDS.get(name, name), torch.from_numpy(wrong)
    index = loudest(numbers)
    yield "one NaN", torch.from_numpy(with_element(numbers, index, math.nan))
    for words, end, neighbour in zip(
        ("one ulp above what is allowed", "one ulp below what is allowed"), allowed, (next_up, next_down), strict=True
    ):
        beyond = float(neighbour(torch.tensor(end[index]), out))
        if beyond != end[index]:  # else the format has nothing beyond
            yield words, torch.from_numpy(with_element(numbers, index, beyond))


def _rows_differ(numbers: Numbers) -> bool:
    """Whether the first and the last row differ by more than 5 % anywhere; else a swap is hardly a change."""
    rows = numbers.reshape(-1, numbers.shape[-1] if numbers.ndim else 1)
    first, last = (np.where(np.isfinite(row), row, 0) for row in (rows[0], rows[-1]))
    return bool((np.abs(first - last) > 0.05 * np.maximum(np.abs(first), np.abs(last))).any())


NOTHING_JUDGED = "anything at all: no element is judged"


def outcomes(limits: Tolerance, out: Format) -> dict[str, bool]:
    """Of each corruption, whether the check rejects it.

    A corruption that leaves every judged element as it was (zeros of an output that is zero) says nothing and is
    passed over; so is one that turns a number into an equal one of the format.
    """
    right = round_to(limits.golden, out)
    right = torch.where(torch.isfinite(right), right, limits.golden)
    if not right.numel():
        return {}
    if not bool(limits.judged.any()):
        return {NOTHING_JUDGED: False}
    if not bool((limits.judged & torch.isfinite(limits.golden)).any()):  # a logarithm of numbers below zero
        return {}
    results = {NOTHING_JUDGED: True}
    for words, wrong in corruptions(right, limits, out):
        changed = ((wrong != right) & ~(wrong.isnan() & right.isnan()) & limits.judged).any()
        if bool(changed):
            results[words] = bool(judge(wrong, limits).broken.any())
    return results


def undetected_corruption(seen: Iterable[Mapping[str, bool]]) -> str | None:
    """The first corruption that some case of `outcomes` lets through and none rejects, or None."""
    together: dict[str, bool] = {}
    for result in seen:
        together |= {words: together.get(words, False) or rejected for words, rejected in result.items()}
    return next((words for words, rejected in together.items() if not rejected), None)


def passes_gate(limits: Tolerance, out: Format) -> str | None:
    """The first corruption that the check of one case lets through, or None."""
    return undetected_corruption([outcomes(limits, out)])


def gate(question: Question) -> str | None:
    """What the check would let through, if anything. No call of the kernel is made.

    What it lets through of ordinary numbers it may notice of small ones: of attention's gradient with operands cut to
    TF32, errors of the scores are relative ones of the weights, and the sums over many rows cancel. What it lets
    through of one small size it may notice of others: few results of a wide tolerance hold one that is known well.
    """
    seen: dict[str, list[dict[str, bool]]] = {}
    result = None
    for kind, draws in _TRIES:
        for case in gate_cases(question.sampler, "tile", kind, draws):  # smaller ones cancel some results altogether
            _add_outcomes(question, case, seen)
        result = next(filter(None, map(undetected_corruption, seen.values())), None)
        if result is None:
            break
    return result


def _add_outcomes(question: Question, case: Case, seen: dict[str, list[dict[str, bool]]]) -> None:
    """To those of each result, by its name."""
    values = {name: guarded.tensor for name, guarded in build(case).guarded.items()}
    try:
        limits = question.bench.oracle.tolerances(case, values)
    except Undecided:  # of a reference: nothing is judged either
        return
    for tensor, format, allowed in zip(case.signature.returns, case.result_formats, limits, strict=True):
        if not tensor.is_integer:
            seen.setdefault(tensor.name, []).append(outcomes(allowed, format))
