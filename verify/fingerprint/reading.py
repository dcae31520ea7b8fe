"""`fingerprint`: run every probe that applies to an op; each yields a trait.

Sums of exponentials (softmax, its logarithm, log-sum-exp): the terms are exp(0) = 1 and one exponential of chosen size
s, all others being zero. log-sum-exp is then log(1 + s), about s, and the first element of softmax is 1 / (1 + s): they
are 0 and 1 exactly when the sum has lost s.

Rounding of attention's probabilities before the product with the values: one key has score 0, hence weight 1, and all
others have score -s. The values are chosen so that the two parts nearly cancel. The result then shows the rounding
error of exp(-s), which is compared with that of each candidate rounding.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from assay.formats.format import Format
from assay.formats.rounding import Mode, round_to
from assay.runtime.environment import generators_kept, standard_environment
from assay.verify.cases.case import build
from assay.verify.comparison.oracle import one_thread
from assay.verify.errors import SettingError, TargetError
from assay.verify.examination.phases import ordinary_cases
from assay.verify.examination.plan import make_plan
from assay.verify.findings import Failure
from assay.verify.fingerprint import accumulator, tree, values
from assay.verify.fingerprint.accumulator import Width
from assay.verify.fingerprint.card import UNSEEN, Card, Trait
from assay.verify.fingerprint.error_growth import Growth, growth, reduced
from assay.verify.fingerprint.subject import Subject, Unseen, in_bits, reduction_of
from assay.verify.harness.call import signature_mismatch
from assay.verify.settings import Settings

Tensor = torch.Tensor

_OTHERS, _WIDTH = 31, 64  # keys besides the first; head size
_SCORES = 24  # scores, one for each sequence of the batch
_CLOSE = 0.03  # of the rounding's effect: results this near are taken as results of that rounding
_LEAST_SHARE = 0.75  # of the results must be that near; the error of the exponential itself may change some
_AHEAD = 0.2  # lead over the next best candidate: half of the results that round to nearest are also rounded down


def rounding_of_probabilities(subject: Subject) -> tuple[str, str]:
    """Return how probabilities are rounded, and the evidence; raise `Unseen`."""
    definition = subject.plan.definition
    if not {"q", "k", "v"}.issubset(tensor.name for tensor in definition.tensors):
        raise Unseen("the probe chooses tensors q, k and v")
    changed = {name for name, option in definition.options.items() if subject.options[name] != option.default}
    if changed - {"return_lse"}:
        raise Unseen(f"{', '.join(sorted(changed))}: changes what the probe chooses; ask with the default")
    format = subject.format_of("q")
    if format.precision > 11:
        raise Unseen(f"{format} is no coarser than the arithmetic")
    seen, expected = _experiment(subject, format)
    plain = expected["not rounded"]
    effect = float(torch.stack([(value - plain).abs().mean() for value in expected.values()]).max())
    shares = {name: float(((seen - value).abs() < _CLOSE * effect).double().mean()) for name, value in expected.items()}
    best, second = sorted(shares, key=lambda name: -shares[name])[:2]
    if shares[best] < _LEAST_SHARE or shares[second] > shares[best] - _AHEAD:
        raise Unseen(f"what is left when two parts cancel fits no known rounding ({shares[best]:.0%} of it {best})")
    how = f"two parts of the sum that cancel but for the rounding of the smaller probability ({shares[best]:.0%} fit)"
    return best, how


def _experiment(subject: Subject, format: Format) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the kernel's result for each score, and the expected result for each rounding."""
    steps = torch.arange(1, _SCORES + 1, dtype=torch.float64)
    scores = round_to(steps * 0.21, format)  # exp(-s) from 0.8 down to 0.006
    weight = torch.exp(-scores)
    first = round_to(_OTHERS * weight, format)  # value of the first key; the others have the value -1
    sizes = {"B": _SCORES, "H": 1, "Hkv": 1, "Sq": 16, "Sk": _OTHERS + 1, "D": _WIDTH, "Dv": _WIDTH}
    q = torch.zeros(_SCORES, 1, 16, _WIDTH, dtype=torch.float64)
    q[..., 0] = math.sqrt(_WIDTH)
    k = torch.zeros(_SCORES, 1, _OTHERS + 1, _WIDTH, dtype=torch.float64)
    k[:, 0, 1:, 0] = -scores[:, None]
    v = torch.full((_SCORES, 1, _OTHERS + 1, _WIDTH), -1.0, dtype=torch.float64)
    v[:, 0, 0] = first[:, None]
    total = 1 + _OTHERS * weight
    expected = {"not rounded": (first - _OTHERS * weight) / total}
    modes: dict[str, Mode] = {f"rounded to {format}": "nearest", f"truncated to {format}": "toward_zero"}
    for name, mode in modes.items():
        expected[f"{name} before the division"] = (first - _OTHERS * round_to(weight, format, mode)) / total
        one, other = (round_to(part / total, format, mode) for part in (torch.ones_like(weight), weight))
        expected[f"{name} after the division"] = one * first - _OTHERS * other
    return subject.call(sizes, {"q": q, "k": k, "v": v})[0][:, 0, 0, 0], expected


_COLUMNS, _SECOND = 64, 37  # columns; the one with the chosen exponential
_ROWS = 16
_MOST = 30  # most bits that the probe tries
_WELL = 0.3  # relative error up to which a sum is taken to contain s


def _bits_of_exponentials(subject: Subject, less_one: Callable[[float], float]) -> tuple[int, bool]:
    """Return how many bits a sum of exponentials keeps, and whether that is the most that the results can show.

    ``less_one`` computes the sum less one from a row's first result (`_sum_less_one`).
    """
    most = _MOST if less_one(1.0) else subject.out.precision  # results near one show their format's bits
    bits = 1
    for shift in range(1, most):
        size = 1.01 * 2.0**-shift
        if abs(_sum_less_one(subject, less_one, size) / size - 1) > _WELL:
            break
        bits = shift + 1
    if bits < 4:
        raise Unseen("sums of two exponentials are far from what they should be")
    return bits, bits == most


def _width_of_exponentials(subject: Subject, less_one: Callable[[float], float]) -> str:
    bits, is_limit = _bits_of_exponentials(subject, less_one)
    return f"at least {bits} bits" if is_limit else in_bits(bits)


def _rounding_of_exponentials(subject: Subject, less_one: Callable[[float], float]) -> str:
    """Return how 3/4 of the last bit is rounded."""
    bits, is_limit = _bits_of_exponentials(subject, less_one)
    if is_limit:
        raise Unseen("the sum is as wide as the results show")
    gap = 2.0 ** (1 - bits)
    return "to nearest" if _sum_less_one(subject, less_one, 0.75 * gap) > gap / 2 else "toward zero"


def _sum_less_one(subject: Subject, less_one: Callable[[float], float], size: float) -> float:
    """Return the sum of 1 and an exponential of this size, less one, as the result shows it.

    ``less_one`` raises `ZeroDivisionError` or `OverflowError` if the result shows no sum.
    """
    tensor = subject.plan.definition.tensors[0]
    x = torch.full((_ROWS, _COLUMNS), -math.inf, dtype=torch.float64)
    x[:, 0], x[:, _SECOND] = 0.0, math.log(size)
    x = x.to(torch.float32).to(getattr(torch, subject.format_of(tensor.name).name)).double()
    actual = math.exp(float(x[0, _SECOND]))
    y = subject.call(dict(zip(tensor.dims, x.shape, strict=True)), {tensor.name: x})[0]
    first = float(y.flatten()[0])
    try:
        seen = less_one(first)
    except (ZeroDivisionError, OverflowError):
        seen = math.nan
    if not math.isfinite(seen):
        raise Unseen(f"with -inf among the inputs the result is {first:g}, which shows no sum of exponentials")
    return seen * size / actual


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
    """Return the numerical properties of ``kernel``, an implementation of spec ``op``, read from its results alone.

    The settings are those of `assay.verify.examine`; ``options`` has one value for each option. A trait that no result
    shows has the value "not observable", with the reason. Traits of sums are available for ops whose first result is a
    plain sum (`assay.golden.registry.Reduction`: gemm, linear, gemm_fp8, attention, all_reduce) or shows a sum of
    exponentials (the softmax family).

    Raises the errors of `examine` for invalid settings, and `TargetError` if the kernel's arguments differ from the
    op's, or its results have another number, shape or dtype.
    """
    listed = {name: value if isinstance(value, list) else [value] for name, value in (options or {}).items()}
    settings = Settings(op, dtype, out_dtype, listed, shapes or {}, device=device, framework=framework, timeout=timeout)
    return card_of(kernel, settings)


def card_of(kernel: Callable[..., Any], settings: Settings) -> Card:
    """Return the fingerprint for settings given as a record."""
    for name, values_ in settings.options.items():
        if len(values_) != 1:
            raise SettingError(f"fingerprint: option {name}={list(values_)!r}; expected one value")
    plan = make_plan(kernel, replace(settings, layouts=("contiguous",)))
    with generators_kept(), standard_environment(), one_thread():
        subject = Subject(plan)
        _require(subject)
        repeated = _seen("repeated calls", "eight equal calls, at three sizes", lambda: values.repeated(subject))
        is_steady = repeated.value == "the same bits"
        traits = [repeated, *(_seen(*row) for row in _rows(subject, is_steady))]
        growth, errors = _growth(subject)
    return Card(plan.kernel, plan.definition.name, plan.dtype, (*traits, errors), growth)


def _require(subject: Subject) -> None:
    """Raise `TargetError` if the kernel's arguments or the form of its results differ from the op's."""
    harness, case = subject.plan.harness, next(ordinary_cases(subject.plan.sampler, "small"))
    wrong = signature_mismatch(harness.call.kernel, case, harness.call.listed)
    if not wrong:
        outputs = harness.call(case, build(case, harness.device))
        wrong = outputs.message if isinstance(outputs, Failure) and outputs.kind in ("shape", "dtype") else ""
    if wrong:
        name = subject.plan.kernel
        raise TargetError(f"fingerprint: {name} is no {subject.op}: {wrong}; expected the op that it implements")


Probe = Callable[[], str | tuple[str, str]]
"""The value of a trait, and the evidence unless the row of the probe states it."""


def _seen(name: str, how: str, probe: Probe) -> Trait:
    """Return one trait: the probe's value and evidence, or the reason why nothing can be seen."""
    try:
        result = probe()
    except Unseen as error:
        result = UNSEEN, str(error)
    value, how = result if isinstance(result, tuple) else (result, how)
    return Trait(name, value, how)


def _rows(subject: Subject, is_steady: bool) -> Iterator[tuple[str, str, Probe]]:
    """Yield the probes that apply, in the card's order: name, method and function."""
    definition = subject.plan.definition
    fact = definition.reduction

    def steady(probe: Probe, why: str = "equal calls differ") -> Probe:
        """Return a probe that raises `Unseen` unless equal calls agree."""

        def refuse() -> str:
            raise Unseen(why)

        return probe if is_steady else refuse

    stores: list[tuple[str, str, Probe]]
    try:
        reduction = reduction_of(subject)
        width = accumulator.width(reduction, is_steady=is_steady)
    except Unseen as error:
        why = str(error)
        if fact is not None and fact.exponentials is not None:
            of_exponentials = subject, fact.exponentials
            how = "the smallest exponential beside exp(0) = 1 that changes the sum"
            yield "accumulator", how, lambda: _width_of_exponentials(*of_exponentials)
            how = "an exponential of 3/4 of the sum's last bit"
            yield "accumulator rounding", how, lambda: _rounding_of_exponentials(*of_exponentials)
        else:
            for name in (
                "accumulator",
                "accumulator rounding",
                "promotion",
                "order of summation",
                "blocks",
                "operands",
            ):
                yield name, why, lambda: UNSEEN
        stores = [
            ("store rounding", "ordinary results beside the exact ones rounded each way",
             lambda: values.store_of_results(subject)),
            ("subnormal results", "inputs whose results are subnormal", lambda: values.subnormal_results(subject)),
            ("overflow", "inputs whose results lie beyond the format", lambda: values.overflow(subject)),
        ]  # fmt: skip
    else:
        large = "the smallest part of a large term that is still there when that term is taken away again"
        parts = "parts of an ulp added to sums of both signs"
        yield "accumulator", large, lambda: str(width)
        yield "accumulator rounding", parts, lambda: accumulator.rounding(reduction, width)
        yield "promotion", "", steady(lambda: _promotion(width))
        yield "order of summation", "", steady(lambda: tree.order(reduction, width))
        yield "blocks", "", steady(lambda: tree.blocks(reduction, width))
        yield "operands", "(1 + 2^-k) - 1, for growing k", lambda: accumulator.operands(reduction, width)
        stores = [
            ("store rounding", "sums that lie between two numbers of the result's format, of both signs",
             lambda: values.store_of_sum(reduction, width)),
            ("subnormal operands", "half the least normal number times a large one",
             lambda: values.subnormal_operands(reduction)),
            ("subnormal results", "a product of two normal numbers", lambda: values.subnormal_sums(reduction)),
            ("overflow", "two terms whose sum lies beyond the format", lambda: values.overflow_of_sum(reduction)),
        ]  # fmt: skip
    if fact is not None and fact.mean and "probabilities" in definition.stages:
        yield "probabilities", "", lambda: rounding_of_probabilities(subject)
    yield from stores
    yield "NaN", "one NaN at a time in each input", lambda: values.nan_policy(subject)
    batched = steady(lambda: values.batched(subject), "not even equal calls agree")
    yield "batch", "rows by themselves, and among others", batched
    yield "significant bits", "ordinary results against the certified golden", lambda: values.significance(subject)


def _promotion(result: Width) -> tuple[str, str]:
    if result.is_limit:
        raise Unseen("the accumulator is as wide as the probe can show")
    how = f"the width at every eighth place of a sum of {result.tried} terms"
    if not result.promotion:
        return f"none within {result.tried} terms", how
    return f"every {result.promotion} terms, to {result.widest} bits", how


def _growth(subject: Subject) -> tuple[Growth | None, Trait]:
    name, g = "error growth", growth(subject.plan.harness, subject.plan.sampler)
    if g is None:
        few = "fewer than three lengths have errors to compare"
        none = f"no one dimension of {subject.op} is the length of the sum inside"
        return None, Trait(name, UNSEEN, few if reduced(subject.plan.definition) else none)
    if all(own <= 1.1 * store for own, store in zip(g.errors, g.store, strict=True)):
        return g, Trait(name, UNSEEN, "the store's own rounding hides what is lost before it")
    how = f"errors on positive numbers, {g.symbol} = {g.lengths[0]} to {g.lengths[-1]}; 95 % interval of the fit"
    return g, Trait(name, f"like {g.symbol}^{g.exponent:.2f} ({g.low:.2f} to {g.high:.2f})", how)
