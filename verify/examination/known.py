"""What is known of a failure, found by trying it: at which sizes it comes, on which data, and under which contract.

In: a shrunk failure and the question. Out: words for a report, and whether another contract is kept. Each takes a few
seconds at most.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from assay.golden.inputs.distributions import names_of
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import real_tensors, with_values
from assay.verify.contract import Contract
from assay.verify.examination.course import Course
from assay.verify.examination.question import Question
from assay.verify.explanation.inquiry import Inquiry
from assay.verify.findings import Failure

_SIZES = (1, 2, 3, 7, 8, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 256, 257)
_LONGER = (512, 513, 1024, 2048, 2049, 4096, 8192)
_KINDS = ("normal", "positive", "integers", "powers", "small", "wide", "steep", "large_mean")
_SECONDS = 2.0  # for each
_SECONDS_OF_CONTRACT = 4.0


class Promises:
    """Which other contracts a kernel keeps: each is examined once at quick effort, for all aspects that are broken."""

    def __init__(self, question: Question, broken: Collection[str]) -> None:
        self._question, self._broken = question, set(broken)
        self._known: dict[str, tuple[set[str], bool]] = {}

    def kept(self, aspect: str, contract: Contract) -> bool | None:
        """Whether a contract is kept: False where the aspect is broken under it; None where only others are, or time
        did not suffice."""
        key = str(contract.changed())
        if key not in self._known:
            self._known[key] = self._examined(contract)
        broken, over = self._known[key]
        return False if aspect in broken else None if over or broken - self._question.settings.unpromised else True

    def _examined(self, contract: Contract) -> tuple[set[str], bool]:
        """What is broken under a contract, and whether the examination ended before all was tried."""
        question = self._question
        changed: dict[str, Any] = {"contract": contract, "effort": "quick", "examples": None, "at": (), "goldens": None}
        settings = replace(question.settings, **changed)
        other = replace(question, settings=settings, bench=replace(question.bench, contract=contract))
        inquiry, over = Inquiry(_SECONDS_OF_CONTRACT), False

        def progress(phase: str, done: int, of: int) -> None:
            nonlocal over
            if inquiry.is_over() or self._broken <= course.tally.broken:
                over = course.ended = True

        course = Course(other, progress)
        return course.run().broken, over


def sizes_in_words(failure: Failure, question: Question) -> str:
    """At which sizes of each symbol the case is right, and at which wrong, all else as it is; empty where all are."""
    tells = Trials(question)
    sampler, case, words = question.sampler, failure.case, []
    for symbol in sampler.free_symbols(case) or sampler.shapes:
        cases = {}
        for size in _candidates(question, case, symbol):
            sizes = {**case.sizes, symbol: size}
            if sampler.fits(sizes) and all(
                value % max(sizes.get(sampler.definition.sizes.multiples.get(name, ""), 1), 1) == 0
                for name, value in sizes.items()
            ):
                cases[str(size)] = replace(with_values(case, "normal"), sizes=sizes, edits=(), origin={})
        result = tells.sorted(cases)
        if all(result):
            words.append(f"{symbol}: {_right_and_wrong(result, 'at')}")
    return "; ".join(words)


def data_in_words(failure: Failure, first: Case, question: Question) -> str:
    """On which distributions the kernel is right, and on which wrong: at the sizes at which it was ``first`` met."""
    case, cases = replace(failure.case, sizes=first.sizes), {}
    numbers = real_tensors(case.signature)
    for kind in _KINDS:
        if numbers and kind in names_of(numbers[0]):
            cases[kind] = with_values(case, kind, edits=(), origin={}, seed=case.seed + 1)
    result = Trials(question).sorted(cases)
    return f"data: {_right_and_wrong(result, 'on')}" if any(result) else ""


def _candidates(question: Question, case: Case, symbol: str) -> Sequence[int]:
    given = question.sampler.shapes.get(symbol) or question.sampler.definition.sizes.allowed.get(symbol)
    if given:
        return [size for size in _SIZES if size in given] or list(given)[:8]
    size = case.sizes[symbol]
    return _SIZES if size <= _SIZES[-1] else (*_SIZES, *(longer for longer in _LONGER if longer < size), size)


def _right_and_wrong(result: tuple[list[str], list[str]], word: str) -> str:
    parts = zip(("right", "wrong"), result, strict=True)
    return ", ".join(f"{which} {word} {', '.join(names)}" for which, names in parts if names)


class Trials:
    """Cases that are tried until time is over."""

    def __init__(self, question: Question) -> None:
        self._bench, self._inquiry = question.bench, Inquiry(_SECONDS)

    def sorted(self, cases: dict[str, Case]) -> tuple[list[str], list[str]]:
        """The names of the cases that are right, and of those that are wrong."""
        results: tuple[list[str], list[str]] = ([], [])
        for name, case in self._in_time(cases):
            results[self._bench.try_case(case).failure is not None].append(name)
        return results

    def _in_time(self, cases: dict[str, Case]) -> Iterator[tuple[str, Case]]:
        for name, case in cases.items():
            if self._inquiry.is_over():
                break
            yield name, case
