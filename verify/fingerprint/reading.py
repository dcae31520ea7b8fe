"""`fingerprint`: every probe that applies to an op, each giving a trait."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from assay.runtime.environment import generators_kept, standard_environment
from assay.verify.cases.case import build
from assay.verify.comparison.oracle import one_thread
from assay.verify.errors import SettingError, TargetError
from assay.verify.examination.phases import gate_cases
from assay.verify.examination.question import ask
from assay.verify.fingerprint import accumulator, tree, values
from assay.verify.fingerprint.accumulator import Width
from assay.verify.fingerprint.card import UNSEEN, Card, Trait
from assay.verify.fingerprint.error_growth import Growth, growth, reduced
from assay.verify.fingerprint.exponentials import Exponentials
from assay.verify.fingerprint.probabilities import rounding_of_probabilities
from assay.verify.fingerprint.reductions import Reduction, reduction_of
from assay.verify.fingerprint.subject import Subject, Unseen, in_bits
from assay.verify.harness.call import Finding
from assay.verify.harness.signature import misfit
from assay.verify.settings import Settings


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
    shows has the value "not observable", with the reason. Traits of sums are read of ops whose first result is a plain
    sum (`assay.golden.registry.Reduction`: gemm, linear, gemm_fp8, attention, all_reduce), or shows one of exponentials
    (the softmax family).

    Raises what `examine` raises on a question that can't be asked, and `TargetError` where the kernel can't be called
    as the op is, or gives results of another number, shape or dtype.
    """
    listed = {name: value if isinstance(value, list) else [value] for name, value in (options or {}).items()}
    settings = Settings(op, dtype, out_dtype, listed, shapes or {}, device=device, framework=framework, timeout=timeout)
    return card_of(kernel, settings)


def card_of(kernel: Callable[..., Any], settings: Settings) -> Card:
    """`fingerprint` with its settings as a record."""
    for name, values_ in settings.options.items():
        if len(values_) != 1:
            raise SettingError(f"fingerprint: option {name}={list(values_)!r}; expected one value")
    question = ask(kernel, replace(settings, layouts=("contiguous",)))
    with generators_kept(), standard_environment(), one_thread():
        subject = Subject(question)
        _require(subject)
        repeated = _seen("repeated calls", "eight equal calls, at three sizes", lambda: values.repeated(subject))
        is_steady = repeated.value == "the same bits"
        traits = [repeated, *(_seen(*row) for row in _rows(subject, is_steady))]
        grown, errors = _growth(subject)
    return Card(question.kernel, question.definition.name, question.dtype, (*traits, errors), grown)


def _require(subject: Subject) -> None:
    """`TargetError` where no probe can tell anything: the kernel takes other arguments than the op, or gives results of
    another form."""
    bench, case = subject.question.bench, next(gate_cases(subject.question.sampler, "small"))
    wrong = misfit(bench.call.kernel, case, bench.call.listed)
    if not wrong:
        outputs = bench.call(case, build(case, bench.device))
        wrong = outputs.message if isinstance(outputs, Finding) and outputs.kind in ("shape", "dtype") else ""
    if wrong:
        name = subject.question.kernel
        raise TargetError(f"fingerprint: {name} is no {subject.op}: {wrong}; expected the op that it implements")


Probe = Callable[[], str | tuple[str, str]]
"""The value of a trait, and how it was seen where that isn't known before."""


def _seen(name: str, how: str, probe: Probe) -> Trait:
    """One trait: what the probe says and how, or why there is nothing to see."""
    try:
        result = probe()
    except Unseen as error:
        result = UNSEEN, str(error)
    value, how = result if isinstance(result, tuple) else (result, how)
    return Trait(name, value, how)


def _rows(subject: Subject, is_steady: bool) -> Iterator[tuple[str, str, Probe]]:
    """The probes that apply, in the card's order: name, how it is seen, and what tells."""
    definition = subject.question.definition
    fact = definition.reduction
    try:
        reduction = reduction_of(subject)
        width = accumulator.width(reduction, is_steady=is_steady)
    except Unseen as error:
        yield from _without_sum(subject, str(error))
        stores = _stores_of_results(subject)
    else:
        yield from _sum(reduction, width, is_steady)
        stores = _stores_of_sums(reduction, width)
    if fact is not None and fact.mean and "probabilities" in definition.stages:
        yield "probabilities", "", lambda: rounding_of_probabilities(subject)
    yield from stores
    yield "NaN", "one NaN at a time in each input", lambda: values.nan_policy(subject)
    batched = _steady(is_steady, lambda: values.batched(subject), "not even equal calls agree")
    yield "batch", "rows by themselves, and among others", batched
    yield "significant bits", "ordinary results against the certified golden", lambda: values.significance(subject)


def _without_sum(subject: Subject, why: str) -> Iterator[tuple[str, str, Probe]]:
    fact = subject.question.definition.reduction
    if fact is not None and fact.exponentials is not None:
        probe = Exponentials(subject, fact.exponentials)
        yield "accumulator", "the smallest exponential beside exp(0) = 1 that changes the sum", probe.width
        yield "accumulator rounding", "an exponential of 3/4 of the sum's last bit", probe.rounding
        return
    for name in ("accumulator", "accumulator rounding", "promotion", "order of summation", "blocks", "operands"):
        yield name, why, lambda: UNSEEN


def _sum(reduction: Reduction, width: Width, is_steady: bool) -> Iterator[tuple[str, str, Probe]]:
    large = "the smallest part of a large term that is still there when that term is taken away again"
    yield "accumulator", large, lambda: str(width)
    parts = "parts of an ulp added to sums of both signs"
    yield "accumulator rounding", parts, lambda: accumulator.rounding(reduction, width)
    yield "promotion", "", _steady(is_steady, lambda: _promotion(width))
    yield "order of summation", "", _steady(is_steady, lambda: tree.order(reduction, width))
    yield "blocks", "", _steady(is_steady, lambda: tree.blocks(reduction, width))
    yield "operands", "(1 + 2^-k) - 1, for growing k", lambda: _operands(reduction, width)


def _stores_of_sums(reduction: Reduction, width: Width) -> Iterator[tuple[str, str, Probe]]:
    exact = "sums that lie between two numbers of the result's format, of both signs"
    half = "half the least normal number times a large one"
    yield "store rounding", exact, lambda: values.store_of_sum(reduction, width)
    yield "subnormal operands", half, lambda: values.subnormal_operands(reduction)
    yield "subnormal results", "a product of two normal numbers", lambda: values.subnormal_sums(reduction)
    yield "overflow", "two terms whose sum lies beyond the format", lambda: values.overflow_of_sum(reduction)


def _stores_of_results(subject: Subject) -> Iterator[tuple[str, str, Probe]]:
    ordinary = "ordinary results beside the exact ones rounded each way"
    yield "store rounding", ordinary, lambda: values.store_of_results(subject)
    yield "subnormal results", "inputs whose results are subnormal", lambda: values.subnormal_results(subject)
    yield "overflow", "inputs whose results lie beyond the format", lambda: values.overflow(subject)


def _steady(is_steady: bool, probe: Probe, why: str = "equal calls differ") -> Probe:
    """The probe, where it says something only if equal calls agree."""

    def refuse() -> str:
        raise Unseen(why)

    return probe if is_steady else refuse


def _promotion(result: Width) -> tuple[str, str]:
    if result.is_limit:
        raise Unseen("the accumulator is as wide as the probe can show")
    how = f"the width at every eighth place of a sum of {result.tried} terms"
    if not result.promotion:
        return f"none within {result.tried} terms", how
    return f"every {result.promotion} terms, to {result.widest} bits", how


def _operands(reduction: Reduction, result: Width) -> str:
    bits, rest = accumulator.operands(reduction, result)
    if rest == "whole":
        return f"all {bits} bits of {reduction.operand}"
    return f"{rest} to {in_bits(bits, is_operand=True)}"


def _growth(subject: Subject) -> tuple[Growth | None, Trait]:
    """How the error grows, and the trait that says so."""
    name, g = "error growth", growth(subject.question.bench, subject.question.sampler)
    if g is None:
        few = "fewer than three lengths have errors to compare"
        none = f"no one dimension of {subject.op} is the length of the sum inside"
        return None, Trait(name, UNSEEN, few if reduced(subject.question.definition) else none)
    if all(own <= 1.1 * store for own, store in zip(g.errors, g.store, strict=True)):
        return g, Trait(name, UNSEEN, "the store's own rounding hides what is lost before it")
    how = f"errors on positive numbers, {g.symbol} = {g.lengths[0]} to {g.lengths[-1]}; 95 % interval of the fit"
    return g, Trait(name, f"like {g.symbol}^{g.exponent:.2f} ({g.low:.2f} to {g.high:.2f})", how)
