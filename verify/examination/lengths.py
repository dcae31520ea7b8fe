"""Cases of growing length on ordinary data: sums of 8 to 65,536 terms.

The short phases judge by the contract's worst case, which says little about long sums. Here every length is also judged
by the statistical bound (`assay.verify.comparison.statistics`). All other sizes are small.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from assay.formats.rounding import next_down, next_up
from assay.golden.signature import dimension, symbols_in
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import SMALL, Sampler, seeded, with_values
from assay.verify.comparison.judge import Tolerance
from assay.verify.comparison.result import Result
from assay.verify.comparison.statistics import INDEPENDENT
from assay.verify.examination.bases import hash_of
from assay.verify.findings import Detectable

LENGTHS = (8, 128, 1024, 4096, 16384, 65536)
QUICKEST = LENGTHS[::2]
"""The lengths of a quick effort."""

_FEW = 3  # for other symbols of free size: several rows, at little work
_FULL = {"length": "full"}  # by role: sequence lengths at their maximum, so that sums have all their terms


def length_cases(sampler: Sampler, *, quick: bool = False) -> list[tuple[int, tuple[Case, ...]]]:
    """Return the lengths that sizes and shapes admit, ascending, each with one case for each distribution.

    A ``quick`` effort has only numbers of one sign: there a sum keeps an error that all its terms share.
    """
    choose = seeded(hash_of("lengths", sampler.seed))
    base = sampler.case(_few, style="small", options=sampler.option_sets()[0])
    over = over_of(base)
    results: dict[int, tuple[Case, ...]] = {}
    for target in QUICKEST if quick else LENGTHS:
        sizes = _sizes(sampler, base, over, target)
        if sizes is not None:
            case = replace(base, sizes=sizes)
            made = tuple(_plain(case, data, choose(range(1 << 24))) for data in INDEPENDENT[1 if quick else 0 :])
            results.setdefault(dimension(over, sizes), made)
    return sorted(results.items())


def over_of(case: Case) -> str:
    """Return the symbol or expression that the op sums over; the last axis of its first tensor if it has no
    reduction."""
    reduction = case.definition.reduction
    return reduction.over if reduction is not None else case.signature.tensors[0].dims[-1]


def _few(values: Sequence[Any]) -> Any:
    if isinstance(values, range):
        return values[0]
    return _FEW if tuple(values) == SMALL else min(values)


def _plain(case: Case, data: str, seed: int) -> Case:
    case = with_values(case, data, layouts={}, protocol="once", memory="plain", unused="plain", seed=seed)
    full = {tensor.name: _FULL[tensor.role] for tensor in case.signature.tensors if tensor.role in _FULL}
    return replace(case, values={**case.values, **full})


def _sizes(sampler: Sampler, base: Case, over: str, target: int) -> dict[str, int] | None:
    """Return sizes with as many terms as possible, at most ``target``; other free sizes are 1 if the case is too
    large."""
    symbols = symbols_in(over.partition("/")[0])  # what they are shared by stays as it is
    least = {symbol: 1 for symbol in sampler.free_symbols(base) if symbol not in symbols}
    for sizes in ({**base.sizes}, {**base.sizes, **least}):
        for symbol in symbols:
            allowed = _allowed(sampler, base, symbol, sizes, target)
            fitting = bisect_right(allowed, target, key=lambda size: dimension(over, {**sizes, symbol: size}))
            if not fitting:
                return None
            sizes = sampler.with_size(sizes, symbol, allowed[fitting - 1])
        if dimension(over, sizes) <= target and sampler.fits(sizes):
            return sizes
    return None


def _allowed(sampler: Sampler, base: Case, symbol: str, sizes: dict[str, int], target: int) -> Sequence[int]:
    """Return the sizes that a symbol may have, ascending, a little beyond ``target`` if it may have any."""
    _, _, by = over_of(base).partition("/")
    shared = dimension(by, sizes) if by else 1
    if symbol in sampler.shapes or symbol in base.definition.sizes.allowed:
        restricted = sampler.shapes.get(symbol) or base.definition.sizes.allowed[symbol]
        return sorted(size for size in restricted if size % shared == 0)
    step = base.definition.step(base.signature, symbol, sizes) * shared
    return range(step, 2 * target * shared + step, step)


def least_errors(limits: Tolerance) -> torch.Tensor:
    """Return, for each element, the smallest relative error that the check would detect; infinity if there is none."""
    golden = torch.where(limits.judged & torch.isfinite(limits.golden), limits.golden, 0.0)
    up = golden > 0
    end = torch.where(up, limits.ends.high, limits.ends.low)
    beyond = torch.where(up, next_up(end, limits.out), next_down(end, limits.out))
    gain = (end + limits.share * (beyond - end) - golden) / golden
    nothing = (golden == 0) | gain.isnan() | (beyond == end)  # beyond the format's end there is no number
    return torch.where(nothing, torch.inf, gain)


def detectable(length: int, seen: Sequence[tuple[Result, Result]]) -> Detectable | None:
    """Return what is detected at a length, from pairs of results (worst case, statistical); None if nothing was
    judged."""
    levels = [min(map(_noticed, results), default=math.inf) for results in zip(*seen, strict=True)]
    return Detectable(length, *levels) if levels and levels[0] < math.inf else None


def _noticed(result: Result) -> float:
    """Return the largest of the outputs' median detectable errors; infinity if no number is judged."""
    medians = [_median(least_errors(limits)) for limits in result.tolerances]
    return max((median for median in medians if median < math.inf), default=math.inf)


def _median(errors: torch.Tensor) -> float:
    known = errors[errors.isfinite()]
    return float(known.median()) if known.numel() else math.inf
