"""The arithmetic of wrong numbers: how large their errors are and to which side, which arguments they belong to, and
whether subnormal numbers come out as zero. Measured on all elements of the calls that show a fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from assay.golden.signature import TensorSpec
from assay.verify.cases.sampler import real_tensors
from assay.verify.explanation.fault_models.fault_tolerance import Observation
from assay.verify.findings import Fact, Picture

Tensor = torch.Tensor
_LEAST = 6  # elements on either side of a bound, and errors of which a side is said
_LEAST_DISTINCT = 4  # arguments of wrong elements
_POINTS = 120  # of a picture
_SMALL = 2.0**-4  # relative errors up to this may be roundings
_ONE_SIDED = 0.98  # share of the errors
_SPREAD = 0.25  # share of the elements that are wrong at least: else an error has a place, not a size


def residuals(observations: Sequence[Observation], aspect: str, *, is_related: bool = False) -> list[Fact]:
    """Return what the errors of each output have in common, in all calls that show the fault; not how large they are if
    a relation to the goldens says it (``is_related``)."""
    facts = []
    for number, tensor in enumerate(observations[0].case.signature.returns if observations else ()):
        if tensor.is_integer or tensor.name in observations[0].case.definition.outputs.chosen:
            continue
        calls = [_errors(observation, number) for observation in observations]
        words, picture = _flushed(calls), None
        if not words:
            words, picture = _of_argument(observations, calls, tensor)
        words = words or ("" if is_related else _sized(calls))
        if words:
            facts.append(Fact("arithmetic", f"{words.format(tensor.name)} ({len(calls)} calls)", aspect, picture))
    return facts


@dataclass(frozen=True)
class _Errors:
    """An output in one call, float64 of its shape; ``right`` marks the judged elements that aren't ``wrong``."""

    got: Tensor
    golden: Tensor
    wrong: Tensor
    right: Tensor
    format: str
    least: float


def _errors(observation: Observation, number: int) -> _Errors:
    limits, wrong = observation.limits[number], observation.broken[number]
    got, out = observation.outputs[number].double(), limits.out
    return _Errors(got, limits.golden, wrong, limits.judged & ~wrong, out.name, out.smallest_normal)


def _flushed(calls: Sequence[_Errors]) -> str:
    """All wrong elements are zero, and should be subnormal."""
    golden = torch.cat([call.golden[call.wrong] for call in calls])
    got = torch.cat([call.got[call.wrong] for call in calls])
    for format, least in ((calls[0].format, calls[0].least), ("float32", 2.0**-126)):
        if len(got) >= _LEAST and bool(((got == 0) & (golden != 0) & (golden.abs() < least)).all()):
            return f"the wrong elements of {{}} are 0, and the right ones below the least normal number of {format}"
    return ""


def _of_argument(
    observations: Sequence[Observation], calls: Sequence[_Errors], output: TensorSpec
) -> tuple[str, Picture | None]:
    """Elements are wrong where an input's element, or its magnitude, is between two numbers, and nowhere else; the
    picture has the relative errors over that input."""
    for tensor in real_tensors(observations[0].case.signature):
        if not tensor.dims or not _is_part(tensor.dims, output.dims):
            continue
        wrong, right, points = [], [], list[tuple[float, float]]()
        for observation, call in zip(observations, calls, strict=True):
            values = observation.values[tensor.name].detach().cpu().double()
            shape = [values.shape[tensor.dims.index(d)] if d in tensor.dims else 1 for d in output.dims]
            values = values.reshape(shape).expand(call.wrong.shape)
            wrong.append(values[call.wrong])
            right.append(values[call.right])
            shown = (call.wrong | call.right) & (call.golden != 0) & call.got.isfinite() & values.isfinite()
            errors = (call.got - call.golden)[shown] / call.golden[shown]
            points += zip(values[shown].tolist(), errors.tolist(), strict=True)
        if words := _bound(torch.cat(wrong), torch.cat(right), tensor.name):
            points = sorted(points)[:: -(-len(points) // _POINTS) or 1]
            picture = Picture(tensor.name, f"relative error of {output.name}", tuple(points))
            return "{} is wrong " + words, picture if len(points) >= _LEAST else None
    return "", None


def _is_part(dims: Sequence[str], of: Sequence[str]) -> bool:
    """Whether dimensions are some of others, in their order."""
    return list(dims) == [name for name in of if name in dims] and len(set(of)) == len(of)


def _bound(wrong: Tensor, right: Tensor, name: str) -> str:
    """Return the numbers between which all wrong elements are and no right one is; empty if there are none."""
    if min(len(wrong), len(right)) < _LEAST or not bool(wrong.isfinite().all()) or not bool(right.isfinite().all()):
        return ""
    for words, one, other in ((name, wrong, right), (f"|{name}|", wrong.abs(), right.abs())):
        low, high = float(one.min()), float(one.max())
        below, above = other[other < low], other[other > high]
        if len(below) + len(above) < len(other) or len(set(one.tolist())) < _LEAST_DISTINCT:
            continue
        parts = [f"up to {float(below.max()):.4g}"] if len(below) else []
        parts += [f"from {float(above.min()):.4g} on"] if len(above) else []
        return f"where {words} is {low:.4g} to {high:.4g}, and right {' and '.join(parts)}"
    return ""


def _sized(calls: Sequence[_Errors]) -> str:
    """Many elements are wrong by a little: how much, and to which side."""
    wrong, judged = (sum(int(mask.sum()) for mask in masks) for masks in _masks(calls))
    got, golden = (torch.cat(parts) for parts in _numbers(calls))
    errors = (got - golden) / golden
    if len(errors) < _LEAST or wrong < _SPREAD * judged or not bool(errors.isfinite().all()):
        return ""
    largest, median = float(errors.abs().max()), float(errors.abs().median())
    if not 0 < largest <= _SMALL or median == 0:
        return ""
    sides = {
        "toward zero": (errors < 0),
        "away from zero": (errors > 0),
        "upward": (got > golden),
        "downward": (got < golden),
    }
    shares = {words: float(mask.double().mean()) for words, mask in sides.items()}
    side = next((words for words, share in shares.items() if share >= _ONE_SIDED), "")
    which = f", {shares[side]:.0%} of them {side}" if side else ", to both sides"
    return (
        f"the errors of the wrong elements of {{}} are up to 2^{math.log2(largest):.1f} of the right ones, half of "
        f"them over 2^{math.log2(median):.1f}{which}"
    )


def _masks(calls: Sequence[_Errors]) -> Iterator[list[Tensor]]:
    yield [call.wrong for call in calls]
    yield [call.wrong | call.right for call in calls]


def _numbers(calls: Sequence[_Errors]) -> Iterator[list[Tensor]]:
    """Yield what came of the wrong elements, and the goldens, but where these are zero."""
    masks = [call.wrong & (call.golden != 0) for call in calls]
    yield [call.got[mask] for call, mask in zip(calls, masks, strict=True)]
    yield [call.golden[mask] for call, mask in zip(calls, masks, strict=True)]
