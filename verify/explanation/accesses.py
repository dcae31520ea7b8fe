"""What accounts for an access out of bounds: which element it was, and what it is not without."""

import re
from dataclasses import replace

from assay.verify.cases.case import build
from assay.verify.cases.sampler import Sampler
from assay.verify.contract import Contract
from assay.verify.explanation.behaviour import NUMBERS, described
from assay.verify.explanation.fault_models import fault_models_of
from assay.verify.explanation.inquiry import Inquiry
from assay.verify.findings import Explanation, Failure
from assay.verify.harness.runner import Bench

_LOADED = re.compile(r"loads element (-?\d+) of ")
_OUTSIDE = re.compile(r"loads element (\d+) of \w+, out of bounds")
_FAULT = "ignored_labels_loaded"
_TILES = (16, 32, 64, 128)
TAIL = "tail_loaded"
"""The explanation's name where a load isn't masked beyond the last whole tile."""


def explained_by_accesses(
    bench: Bench, failure: Failure, sampler: Sampler, inquiry: Inquiry
) -> tuple[Explanation, ...]:
    """What a load out of bounds is not without: a label that is ignored, or a size that is no whole tile."""
    return () if inquiry.is_over() else _by_labels(bench, failure) or _by_tails(bench, failure, sampler, inquiry)


def _by_tails(bench: Bench, failure: Failure, sampler: Sampler, inquiry: Inquiry) -> tuple[Explanation, ...]:
    """That a load isn't masked along a dimension: at whole tiles of it the kernel doesn't crash, at one more it loads
    out of bounds again, and all else is as it was."""
    case = failure.case
    if _OUTSIDE.search(failure.message) is None:
        return ()

    def tried(symbol: str, size: int) -> Failure | None:
        return bench.try_case(replace(case, sizes=sampler.with_size(case.sizes, symbol, size))).failure

    def is_inside(symbol: str, size: int) -> bool:
        again = tried(symbol, size)
        return again is None or again.kind in NUMBERS

    def is_outside(symbol: str, size: int) -> bool:
        again = tried(symbol, size)
        return again is not None and _OUTSIDE.search(again.message) is not None

    for symbol in sampler.free_symbols(case):
        size = case.sizes[symbol]
        wholes = {1 << max(size - 1, 0).bit_length(), *(-(-size // tile) * tile for tile in _TILES)}
        for whole in sorted(wholes - {size, 0}):
            if inquiry.is_over():
                return ()
            fits = sampler.fits(sampler.with_size(case.sizes, symbol, whole + 1))
            if fits and is_inside(symbol, whole) and is_outside(symbol, whole + 1):
                words = (
                    f"a load is not masked along {symbol}: at {symbol}={whole}, a whole tile, all is in bounds, and at "
                )
                return (Explanation(TAIL, f"{words}{symbol}={whole + 1} it is not", 0.0),)
    return ()


def _by_labels(bench: Bench, failure: Failure) -> tuple[Explanation, ...]:
    """That an ignored token's label was loaded: one points there, and without one nothing is loaded out of bounds."""
    result, case = _LOADED.search(failure.message), failure.case
    fault = next((fault for fault in fault_models_of(case.spec) if fault.name == _FAULT), None)
    if result is None or fault is None or "target" not in {tensor.name for tensor in case.signature.tensors}:
        return ()
    target = build(case).guarded["target"].tensor
    ignored = [row for row, label in enumerate(target.tolist()) if label == case.options["ignore_index"]]
    pointed = {row * case.sizes["V"] + case.options["ignore_index"] for row in ignored}
    labelled = replace(case, edits=(*case.edits, *(("target", (row,), 0.0) for row in ignored)))
    again = bench.try_case(labelled).failure
    if int(result[1]) not in pointed or (again is not None and _LOADED.search(again.message)):
        return ()
    return (Explanation(fault.name, described(fault, Contract()), 0.0),)
