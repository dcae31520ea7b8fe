"""`fingerprint`: every probe that applies to an op, each giving a trait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from assay.verify.appraisal import one_thread
from assay.verify.errors import SettingError
from assay.verify.fingerprint import accumulator, tree, values
from assay.verify.fingerprint.accumulator import Width
from assay.verify.fingerprint.card import UNSEEN, Card, Trait
from assay.verify.fingerprint.exponentials import Exponentials
from assay.verify.fingerprint.probabilities import rounding_of_probabilities
from assay.verify.fingerprint.reductions import Reduction, reduction_of
from assay.verify.fingerprint.subject import Subject, Unseen, in_bits
from assay.verify.question import ask
from assay.verify.statistics.growth import Growth, growth, reduced
from assay.verify.statistics.significance import significant_bits, summary


def fingerprint(
    kernel: Callable[..., Any],
    op: str,
    *,
    dtype: str | Mapping[str, str] | None = None,
    out_dtype: str | None = None,
    options: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    device: str = "cpu",
    framework: str = "torch",
    timeout: float = 30.0,
) -> Card:
    """What ``kernel``, an implementation of spec ``op``, does inside, read from its results alone.

    The settings are those of `assay.verify.examine`; ``options`` has one value for each option. A trait that no result
    shows has the value "not observable", with the reason. Traits of sums are read for gemm, linear, gemm_fp8,
    attention and all_reduce, those of sums of exponentials for the softmax family.

    Raises what `examine` raises on a question that can't be asked.
    """
    listed = {}
    for name, value in (options or {}).items():
        if isinstance(value, list) and len(value) != 1:
            raise SettingError(f"fingerprint: option {name}={value!r}; expected one value")
        listed[name] = value if isinstance(value, list) else [value]
    question = ask(
        kernel,
        op,
        dtype=dtype,
        out_dtype=out_dtype,
        options=listed,
        shapes=shapes,
        device=device,
        framework=framework,
        layouts=("contiguous",),
        timeout=timeout,
    )
    with torch.random.fork_rng(devices=[]), one_thread():
        reading = _Reading(Subject(question))
        reading.all()
    return Card(question.kernel, op, question.dtype, tuple(reading.traits), reading.growth)


@dataclass
class _Reading:
    """The traits found so far."""

    subject: Subject
    traits: list[Trait] = field(default_factory=list)
    growth: Growth | None = None
    repeats: bool = True

    def add(self, name: str, probe: Callable[[], tuple[str, str]]) -> None:
        """One trait: what the probe says and how, or why there is nothing to see."""
        try:
            value, how = probe()
        except Unseen as error:
            value, how = UNSEEN, str(error)
        self.traits.append(Trait(name, value, how))

    def all(self) -> None:
        """Every trait, in the card's order."""
        self.repetition()
        self.inside()
        self.stores()
        self.add("NaN", lambda: (values.nan_policy(self.subject), "one NaN at a time in each input"))
        self.rows()
        self.errors()

    def repetition(self) -> None:
        """Whether equal calls agree, on which most other probes depend."""
        self.add("repeated calls", lambda: (values.repeated(self.subject), "eight equal calls, at three sizes"))
        self.repeats = self.traits[-1].value == "the same bits"

    def inside(self) -> None:
        """The traits of the sum inside."""
        reduction: Reduction | None = None
        found: Width | None = None
        why = ""
        try:
            reduction = reduction_of(self.subject)
            found = accumulator.width(reduction, is_steady=self.repeats)
        except Unseen as error:
            why = str(error)
        self.reduction, self.width = reduction, found
        if reduction is not None and found is not None:
            self._sum(reduction, found)
        elif self.subject.op in ("softmax", "log_softmax", "logsumexp"):
            self._exponentials()
        else:
            for name in (
                "accumulator",
                "accumulator rounding",
                "promotion",
                "order of summation",
                "blocks",
                "operands",
            ):
                self.traits.append(Trait(name, UNSEEN, why))
        if self.subject.op == "attention":
            self.add("probabilities", lambda: rounding_of_probabilities(self.subject))

    def _sum(self, reduction: Reduction, found: Width) -> None:
        how = "the smallest part of a large term that is still there when that term is taken away again"
        self.traits.append(Trait("accumulator", str(found), how))
        how = "parts of an ulp added to sums of both signs"
        self.add("accumulator rounding", lambda: (accumulator.rounding(reduction, found), how))
        self.add("promotion", lambda: self._steady(lambda: _promotion(found)))
        self.add("order of summation", lambda: self._steady(lambda: tree.order(reduction, found)))
        self.add("blocks", lambda: self._steady(lambda: tree.blocks(reduction, found)))
        self.add("operands", lambda: _operands(reduction, found))

    def _steady(self, probe: Callable[[], tuple[str, str]]) -> tuple[str, str]:
        if not self.repeats:
            raise Unseen("equal calls differ")
        return probe()

    def _exponentials(self) -> None:
        probe = Exponentials(self.subject)
        how = "the smallest exponential beside exp(0) = 1 that changes the sum"
        self.add("accumulator", lambda: (probe.width(), how))
        self.add("accumulator rounding", lambda: (probe.rounding(), "an exponential of 3/4 of the sum's last bit"))

    def stores(self) -> None:
        """Rounding, subnormals and overflow of results."""
        subject = self.subject
        if self.reduction is None or self.width is None:
            ordinary = "ordinary results beside the exact ones rounded each way"
            self.add("store rounding", lambda: (values.store_of_results(subject), ordinary))
            self.add(
                "subnormal results", lambda: (values.subnormal_results(subject), "inputs whose results are subnormal")
            )
            self.add("overflow", lambda: (values.overflow(subject), "inputs whose results lie beyond the format"))
            return
        reduction, width = self.reduction, self.width
        exact = "sums that lie between two numbers of the result's format, of both signs"
        self.add("store rounding", lambda: (values.store_of_sum(reduction, width), exact))
        self.add(
            "subnormal operands",
            lambda: (values.subnormal_operands(reduction), "half the least normal number times a large one"),
        )
        self.add("subnormal results", lambda: (values.subnormal_sums(reduction), "a product of two normal numbers"))
        self.add("overflow", lambda: (values.overflow_of_sum(reduction), "two terms whose sum lies beyond the format"))

    def rows(self) -> None:
        """Whether a row depends on its batch."""

        def probe() -> tuple[str, str]:
            if not self.repeats:
                raise Unseen("not even equal calls agree")
            return values.batched(self.subject), "rows by themselves, and among others"

        self.add("batch", probe)

    def errors(self) -> None:
        """Significant bits, and how the error grows."""
        self.add("significant bits", lambda: _significance(self.subject))
        if reduced(self.subject.question.definition) is None:
            why = f"no one dimension of {self.subject.op} is the length of the sum inside"
            self.traits.append(Trait("error growth", UNSEEN, why))
            return
        self.growth = growth(self.subject.question.bench, self.subject.question.sampler)
        if self.growth is None:
            self.traits.append(Trait("error growth", UNSEEN, "fewer than three lengths have errors to compare"))
            return
        g = self.growth
        how = f"errors on positive numbers, {g.symbol} = {g.lengths[0]} to {g.lengths[-1]}; 95 % interval of the fit"
        value = f"like {g.symbol}^{g.exponent:.2f} ({g.low:.2f} to {g.high:.2f})"
        if all(own <= 1.1 * store for own, store in zip(g.errors, g.store, strict=True)):
            value, how = UNSEEN, "the store's own rounding hides what is lost before it"
        self.traits.append(Trait("error growth", value, how))


def _promotion(found: Width) -> tuple[str, str]:
    if found.is_limit:
        raise Unseen("the accumulator is as wide as the probe can show")
    how = f"the width at every eighth place of a sum of {found.tried} terms"
    if not found.promotion:
        return f"none within {found.tried} terms", how
    return f"every {found.promotion} terms, to {found.widest} bits", how


def _operands(reduction: Reduction, found: Width) -> tuple[str, str]:
    bits, rest = accumulator.operands(reduction, found)
    how = "(1 + 2^-k) - 1, for growing k"
    format = reduction.operand
    if rest == "whole":
        return f"all {bits} bits of {format}", how
    return f"{rest} to {in_bits(bits, is_operand=True)}", how


def _significance(subject: Subject) -> tuple[str, str]:
    found = []
    with suppress(Unseen):
        for case in values.cases(subject, "normal"):
            y, golden = values.answers(subject, case)
            found.append(significant_bits(y, golden.value, subject.out).flatten())
    bits = summary(torch.cat(found), subject.out) if found else None
    if bits is None:
        raise Unseen("no result is a number other than zero")
    return str(bits), "ordinary results against the certified golden"
