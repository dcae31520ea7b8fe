"""Aspects: which of them a case shows, a case without one of them, and which one a failure is a matter of.

A case has several: a strided call with subnormals and a size of 33 shows `layouts`, `subnormals` and `shapes`. So a
failure is put down to what its case doesn't fail without, and once an aspect is broken, cases that follow are tried
without it, so that one fault hides no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from assay.golden.inputs.distributions import EVERY, EXTREME
from assay.verify.cases.at_shape import PROTOCOL as AT
from assay.verify.cases.case import Case, all_contents
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.cases.sampler import Sampler, with_values
from assay.verify.findings import Failure

_OF_KINDS = {
    "bias": "bias",
    "nondeterministic": "determinism",
    "batch_variant": "determinism",
    "out_of_bounds_write": "memory",
    "input_mutated": "memory",
}
_OF_PROTOCOLS = {
    "bias": "bias",
    "outside": "conduct",
    "after_refill": "conduct",
    "after_many": "conduct",
    "after_other": "determinism",
    "repeat": "determinism",
    "alone": "determinism",
    "emitted": "numbers",
}
_WHOLE = {"numbers", "shapes", "memory"}  # what a large case shows
_SUBNORMAL = {"subnormal", "least"}
_UNUSUAL = {"special", "range", "subnormals"}
_PLAIN_SIZES = (64, 16)
_LONGEST = 131  # of sizes about one or two tiles
_ORDER = ("conduct", "determinism", "memory", "layouts", "special", "subnormals", "range", "shapes")
"""What is taken from a failing case, one after the other."""


def aspects_of(case: Case) -> set[str]:
    """The aspects that a case shows where it succeeds."""
    if case.protocol in ("bias", "outside"):
        return {_OF_PROTOCOLS[case.protocol]}
    if case.protocol == AT:
        return set(_WHOLE)
    result = {_OF_PROTOCOLS[case.protocol]} if case.protocol != "once" else set[str]()
    if case.memory != "plain" or case.unused != "plain":
        result.add("memory")
    if any(layout != LAYOUTS[0] for layout in case.layouts.values()):
        result.add("layouts")
    if any(not math.isfinite(value) or _is_minus_zero(value) for _, _, value in case.edits):
        result.add("special")
    kinds = set(case.values.values())
    if kinds & _SUBNORMAL:
        result.add("subnormals")
    if kinds & (EXTREME - _SUBNORMAL):
        result.add("range")
    if any(size < 2 or size > _LONGEST or size % _PLAIN_SIZES[1] for size in case.sizes.values()):
        result.add("shapes")
    return result if result & _UNUSUAL else result | {"numbers"}


def _is_minus_zero(value: float) -> bool:
    return value == 0 and math.copysign(1, value) < 0


def without_aspect(aspect: str, case: Case, sampler: Sampler) -> Case:
    """The case as it is where there is nothing of this aspect to see; the same where it is in no other way."""
    if aspect == _OF_PROTOCOLS.get(case.protocol):
        return replace(case, protocol="once")
    match aspect:
        case "memory":
            return replace(case, memory="plain", unused="plain")
        case "layouts":
            return replace(case, layouts={})
        case "special":
            return replace(case, edits=())
        case "range" | "subnormals" if aspect in aspects_of(case):
            return with_values(case, "normal")
        case "shapes":
            return _of_plain_sizes(case, sampler)
    return case


def _of_plain_sizes(case: Case, sampler: Sampler) -> Case:
    """Whole tiles along every symbol that may have any size, as large as the case may be; two of what a grid counts.

    What a few cases have longer (`Sizes.long`) is a whole tile too.
    """
    definition, grid = case.definition, case.definition.axes.grid
    for size in _PLAIN_SIZES:
        sizes = {symbol: 2 if symbol in grid else size for symbol in sampler.free_symbols(case)}
        long = {*definition.sizes.long} - {*sampler.shapes, *sampler.ties}
        sizes |= {symbol: size for symbol in long if size in definition.sizes.allowed.get(symbol, (size,))}
        if sampler.fits(sizes := {**case.sizes, **sizes}):
            return replace(
                case, sizes=sizes, edits=tuple(edit for edit in case.edits if _lies_in(edit[0], edit[1], case, sizes))
            )
    return case


def _lies_in(name: str, index: Iterable[int], case: Case, sizes: dict[str, int]) -> bool:
    tensor = next(tensor for tensor in case.signature.tensors if tensor.name == name)
    return all(position < size for position, size in zip(index, tensor.shape(sizes), strict=True))


def attributed_to(failure: Failure, attempt: Callable[[Case], Failure | None], sampler: Sampler) -> str:
    """The aspect that a failure is a matter of: the first that its case doesn't fail without, else `numbers`.

    Numbers that aren't wrong again are a matter of `determinism`.

    ``attempt`` tries a case. A call that didn't come back isn't made again: it is a matter of the first that its case
    shows, and no mere warning.
    """
    case = failure.case
    if failure.aspect or failure.kind in _OF_KINDS:
        return failure.aspect or _OF_KINDS[failure.kind]
    shown = [aspect for aspect in _ORDER if aspect in aspects_of(case)]
    if failure.kind == "timeout" or failure.device_lost:
        return next((aspect for aspect in shown if aspect not in ("special", "subnormals")), "numbers")

    def fails(simpler: Case) -> bool:
        result = attempt(simpler)
        return result is not None and _group(result) == _group(failure)

    if failure.golden is not None and not fails(case):
        return "determinism"
    plainest = case
    for aspect in shown:
        plainest = without_aspect(aspect, plainest, sampler)
    if fails(plainest):
        return "numbers"
    for aspect in shown:
        simpler = without_aspect(aspect, case, sampler)
        if simpler != case and not fails(simpler):
            return _kind_of_numbers(failure) if EVERY in case.values.values() else aspect
        case = simpler
    return _kind_of_numbers(failure) if EVERY in case.values.values() else "numbers"


def _group(failure: Failure) -> str:
    """Failures that may turn into each other: wrong numbers, whether or not nothing was rounded."""
    return "contract" if failure.kind == "exact" else failure.kind


def _kind_of_numbers(failure: Failure) -> str:
    """Of a failure among all numbers of a format, what its input is; the op works element by element."""
    case = failure.case
    tensor = case.signature.tensors[0]
    value = float(all_contents(case)[tensor.name][failure.index])
    if not math.isfinite(value) or _is_minus_zero(value):
        return "special"
    return "numbers"
