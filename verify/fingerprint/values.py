"""Probe stores and special values: rounding of results, subnormals, overflow, NaN."""

from contextlib import suppress
from dataclasses import replace

import torch

from assay.formats.format import Format
from assay.formats.rounding import Mode, next_down, next_up, round_to
from assay.golden.arithmetic import BallArithmetic
from assay.golden.evaluation.golden import Golden
from assay.golden.inputs.values import torch_dtype
from assay.verify.cases.case import Case, build
from assay.verify.cases.sampler import real_tensors, seeded, with_values
from assay.verify.fingerprint.accumulator import Width
from assay.verify.fingerprint.subject import Product, Reduction, Subject, Unseen, exponent_of

Tensor = torch.Tensor

_MODES: dict[str, Mode] = {
    "to nearest, ties to even": "nearest",
    "to nearest, ties away from zero": "nearest_away",
    "toward zero": "toward_zero",
    "up": "up",
    "down": "down",
}
_MAX_DISTANCE = 0.01  # share of results that may differ from a rounding's, because of the kernel's own error
_CASES = 3  # ordinary calls


def store_of_sum(reduction: Reduction, result: Width) -> str:
    """Return how sums are rounded when they are stored; raise `Unseen`.

    The sums are exact: one plus fractions of the spacing after it, with both signs. Each rounding has its own pattern.
    """
    precision = reduction.subject.out.precision
    if result.narrowest < precision + 2:
        beyond = f"sums of more bits than the result's {precision} are beyond the probe's reach"
        raise Unseen(
            beyond if result.is_limit else f"the sum itself keeps {result.narrowest} bits, the result {precision}"
        )
    gap = 2.0 ** (1 - precision)
    parts = torch.tensor([[1.0, part * gap] for part in (0.25, 0.5, 0.75, 1.25, 1.5, 1.75)], dtype=torch.float64)
    rows = torch.nn.functional.pad(torch.cat([parts, -parts]), (0, 14))
    exact = rows.sum(-1)
    many = reduction.sums(torch.cat([rows] * 8)).reshape(8, -1)
    if bool((many != many[0]).any()):
        return "stochastic"
    for name, mode in _MODES.items():
        if torch.equal(round_to(exact, reduction.subject.out, mode), many[0]):
            is_plain = isinstance(reduction, Product)  # otherwise a factor may follow, which disturbs ties
            return name if is_plain else name.partition(",")[0]
    raise Unseen("sums that lie between two numbers are stored by no known rounding")


def cases(subject: Subject, distribution: str) -> list[Case]:
    """Return ordinary calls of the op."""
    sampler, choose = subject.plan.sampler, seeded(1)
    drawn = (sampler.case(choose, style="tile") for _ in range(_CASES))
    return [with_values(c, distribution, layouts={}, protocol="once", memory="plain", unused="plain") for c in drawn]


def answers(subject: Subject, case: Case) -> tuple[Tensor, Golden]:
    """Return the first result (float64) of a call, and its golden."""
    outputs = subject.run(case, build(case, subject.plan.harness.device))
    golden = subject.plan.harness.oracle.evaluate_in(case, BallArithmetic())[0]
    if case.signature.returns[0].is_integer or case.signature.returns[0].role == "rounded":
        raise Unseen("the first result is a code, not a number")
    return outputs[0], golden


def store_of_results(subject: Subject) -> str:
    """Return how ordinary results are rounded when they are stored; raise `Unseen`.

    If the results have few bits and the kernel computes with many, almost every result is the rounded exact one.
    """
    out = subject.out
    if out.precision > 11:
        raise Unseen("results of as many bits as the arithmetic inside show its errors, not the store's")
    got, exact = [], []
    for case in cases(subject, "normal"):
        y, golden = answers(subject, case)
        usual = golden.value.isfinite() & y.isfinite() & (golden.value.abs() > 2 * out.smallest_normal)
        usual &= golden.value.abs() < out.largest / 2
        usual &= round_to(torch.where(usual, golden.value, 0.0), out) != golden.value
        got.append(y[usual])
        exact.append(golden.value[usual])
    y, x = torch.cat(got), torch.cat(exact)
    if len(y) < 100:
        raise Unseen("hardly any result needs rounding")
    names = ("to nearest, ties to even", "toward zero", "up", "down")
    mismatches = {name: float((round_to(x, out, _MODES[name]) != y).double().mean()) for name in names}
    best = min(mismatches, key=lambda name: mismatches[name])
    if mismatches[best] <= _MAX_DISTANCE:
        return best.partition(",")[0]
    beside = ((y == next_down(x, out)) | (y == next_up(x, out))).double().mean()
    if beside >= 1 - _MAX_DISTANCE and min(mismatches["up"], mismatches["down"]) > 0.2 and mismatches[best] > 0.1:
        return "to either neighbour (stochastic, or an error of its own before the store)"
    raise Unseen(
        f"{mismatches[best]:.1%} of the results are not the exact ones' rounding: the error inside is too large"
    )


def subnormal_results(subject: Subject) -> str:
    """Return how results below the least normal number are stored; raise `Unseen`."""
    out = subject.out
    seen: list[Tensor] = []
    for distribution in ("subnormal", "small", "lowest", "below"):
        for case in cases(subject, distribution):
            y, golden = answers(subject, case)
            size = golden.value.abs()
            low = (size < out.smallest_normal / 2) & (size > 4 * out.smallest_subnormal) & (golden.radius < size / 8)
            seen.append(y[low] == 0)
    zero = torch.cat(seen)
    if len(zero) < 4:
        raise Unseen("no ordinary result is subnormal")
    return "flushed to zero" if bool(zero.all()) else "some flushed to zero" if bool(zero.any()) else "kept"


def subnormal_operands(reduction: Reduction) -> str:
    """Return whether subnormal operands count, by their product with a large number; raise `Unseen`."""
    if not isinstance(reduction, Product):
        raise Unseen("only one operand is the probe's own")
    format = reduction.operand
    if not format.smallest_subnormal or format.smallest_subnormal == format.smallest_normal:
        raise Unseen("operands have no subnormal numbers")
    left, right = torch.zeros(2, 16, dtype=torch.float64)
    left[0] = format.smallest_normal / 2
    right[0] = 2.0 ** (exponent_of(format.largest) - 1)  # a product near one
    return "flushed to zero" if float(reduction.operands(left, right)) == 0 else "kept"


def subnormal_sums(reduction: Reduction) -> str:
    """Return whether subnormal results of normal operands are stored; raise `Unseen`."""
    out = reduction.subject.out
    if not isinstance(reduction, Product) or reduction.operand.smallest_normal**2 > out.smallest_normal / 2:
        raise Unseen("operands that are normal make no subnormal result")
    exponent = exponent_of(out.smallest_normal) - 1
    left, right = torch.zeros(2, 16, dtype=torch.float64)
    left[0], right[0] = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)
    if float(reduction.operands(8 * left, right)) == 0:
        raise Unseen("normal results as small are lost as well: the range inside ends before")
    return "flushed to zero" if float(reduction.operands(left, right)) == 0 else "kept"


def overflow_of_sum(reduction: Reduction) -> str:
    """Return how a finite sum beyond the result's format is stored; raise `Unseen`."""
    out = reduction.subject.out
    rows = torch.zeros(2, 16, dtype=torch.float64)
    rows[0, :2] = 1.5 * 2.0 ** exponent_of(out.largest)
    rows[1] = -rows[0]
    return _beyond(reduction.sums(rows), out)


def _beyond(y: Tensor, out: Format) -> str:
    for name, mask in (("infinity", y.isinf()), ("saturates", y.abs() == out.largest), ("NaN", y.isnan())):
        if bool(mask.all()):
            return name
    raise Unseen("some results overflow in one way and some in another")


def overflow(subject: Subject) -> str:
    """Return how finite results beyond the format are stored; raise `Unseen`."""
    out = subject.out
    if out.largest > 2.0**120 and not subject.plan.definition.axes.elementwise:
        raise Unseen("results overflow only where numbers inside do already")
    seen: list[Tensor] = []
    for distribution in ("near_overflow", "above", "lowest"):
        for case in cases(subject, distribution):
            y, golden = answers(subject, case)
            size = golden.value.abs()
            beyond = size.isfinite() & (size > 2 * out.largest) & (golden.radius < size / 8)
            seen.append(y[beyond & ((size < 2.0**120) | (out.largest > 2.0**120))])  # only the store overflows
    y = torch.cat(seen)
    if len(y) < 4:
        raise Unseen("no ordinary result lies beyond the format")
    return _beyond(y, out)


def significant_bits(got: Tensor, exact: Tensor, out: Format) -> Tensor:
    """Return the number of correct leading bits of each element (float64); NaN if the exact result is 0, NaN or
    infinite.

    s = -log2(|y - exact| / |exact|), at most the precision of the output's format; the definition of relative precision
    in D. Sohier, P. de Oliveira Castro, F. Fevotte, B. Lathuiliere, E. Petit, O. Jamond, *Confidence intervals for
    stochastic arithmetic*, ACM TOMS 47 (2021), relative to the exact result.
    """
    lost = ((got.double() - exact.double()).abs() / exact.abs()).nan_to_num(nan=torch.inf)
    bits = (-torch.log2(lost)).clamp(0, out.precision)
    return torch.where(torch.isfinite(exact) & (exact != 0), bits, torch.nan)


def summary(bits: Tensor, out: Format) -> str:
    """Return the distribution of `significant_bits` in words; raise `Unseen` if no element has any."""
    known = bits[~bits.isnan()]
    if not known.numel():
        raise Unseen("no result is a number other than zero")
    median = float(known.quantile(0.5))
    return f"{median:.1f} of {out.precision} in the median, {float(known.min()):.1f} at the fewest"


def significance(subject: Subject) -> str:
    """Return how many leading bits of ordinary results are correct; raise `Unseen`."""
    results = [torch.empty(0, dtype=torch.float64)]
    with suppress(Unseen):
        for case in cases(subject, "normal"):
            y, golden = answers(subject, case)
            results.append(significant_bits(y, golden.value, subject.out).flatten())
    return summary(torch.cat(results), subject.out)


def nan_policy(subject: Subject) -> str:
    """Return whether NaN in an input reaches every result that depends on it; raise `Unseen`."""
    lost, total = 0, 0
    for case in cases(subject, "normal"):
        for tensor in real_tensors(case.signature):
            shape = case.shape(tensor)
            if not all(shape) or not torch_dtype(case.dtypes[tensor.name]).is_floating_point:
                continue
            spoiled = replace(case, edits=((tensor.name, tuple(size // 2 for size in shape), float("nan")),))
            y, golden = answers(subject, spoiled)
            reached = golden.value.isnan()
            lost, total = lost + int((~y[reached].isnan()).sum()), total + int(reached.sum())
    if not total:
        raise Unseen("no result depends on an input that may be NaN")
    return "propagated" if not lost else "dropped" if lost == total else f"dropped in {lost} of {total} results"


def repeated(subject: Subject, times: int = 8) -> str:
    """Return whether equal calls give equal bits; raise `Unseen`."""
    for case in cases(subject, "normal"):
        inputs = build(case, subject.plan.harness.device)
        calls = (subject.run(case, inputs) for _ in range(times))
        first, *others = ([output.contiguous().numpy().tobytes() for output in outputs] for outputs in calls)
        if any(other != first for other in others):
            return "other bits in another call"
    return "the same bits"


def batched(subject: Subject) -> str:
    """Return whether a row's bits depend on the batch's other rows; raise `Unseen`."""
    harness, result = subject.plan.harness, 0
    promise = replace(harness, contract=replace(harness.contract, batch_invariant=True))
    for case in cases(subject, "normal"):
        symbol = case.definition.row_axis(case.options)
        if symbol is None:
            raise Unseen("no dimension along which results are independent")
        if case.sizes[symbol] > 1:
            failure = promise.try_case(replace(case, protocol="alone")).failure
            if failure is not None and failure.kind == "batch_variant":
                return f"a row's bits depend on the other rows ({symbol})"
            result += 1
    if not result:
        raise Unseen("only single rows were called")
    return "a row alone gives the same bits"
