"""Cases of large sizes, which are examined without being asked for: those of published models
(configs/production_sizes.toml), and two sizes of any op or reference that are large at once.

A row of the table says what each symbol of an op is in one model. Where that is too large for a case, the counts
(tokens, sequences, places of a context) are halved first, the largest of them each time. If it still is, each of the
model's own sizes comes in a case of its own, in which the others are halved too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

from assay.configs import table
from assay.golden.errors import ShapeError
from assay.golden.inputs.recipe import check_sizes
from assay.golden.registry import Spec
from assay.golden.signature import Signature, dimension, symbols_in
from assay.verify.cases.at_shape import at_case
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler

LEVELS = ((5 * 2**18, 2**27), (5 * 2**21, 2**30), (5 * 2**24, 2**33))
"""The most elements of all tensors together and the most operations of a case, each level `GROWTH` times those of the
one before. Most cases of the first are small enough to be judged whole; it holds two rows of the largest vocabulary."""
GROWTH = 8


_BOTH = ((1025, 1091), (577, 641), (289, 323))  # two sizes that are large at once, no whole tiles; the first that fit
_OTHERS = (67, 35, 19)  # the other sizes then, as far as they fit: no whole tiles either
_LARGE = 64  # the least size of a model that is worth a case of its own
_FEW = 16  # counts are no smaller where a model's own sizes are halved, unless they must be


@dataclass(frozen=True)
class Row:
    """The sizes of an op in a model: ``own`` are the symbols whose sizes are the model's, ``counts`` those of which no
    model says how many there are."""

    model: str
    sizes: Mapping[str, int]
    own: tuple[str, ...]
    counts: tuple[str, ...]


@cache
def rows_of(op: str) -> tuple[Row, ...]:
    """Return the rows of the op of this name, in the order of the table; an empty tuple if it has none."""
    content = table("production_sizes")
    counts: dict[str, int] = content["counts"]
    results = []
    for entry in content["sizes"]:
        texts = {symbol: text for symbol, text in entry.items() if symbol not in ("ops", "of")}
        counted = tuple(symbol for symbol, text in texts.items() if counts.keys() & {*symbols_in(text)})
        own = tuple(symbol for symbol, text in texts.items() if symbols_in(text) and symbol not in counted)
        for model in entry["of"] if op in entry["ops"] else ():
            numbers = {name: number for name, number in content["models"][model].items() if name != "source"}
            sizes = {symbol: dimension(text, numbers | counts) for symbol, text in texts.items()}
            results.append(Row(model, sizes, own, counted))
    return tuple(results)


def production_rows(definition: Spec) -> tuple[Row, ...]:
    """Return the rows of a built-in op; an empty tuple for any other."""
    return rows_of(definition.name) if definition.qualified_name == definition.name else ()


def production_cases(sampler: Sampler, level: int) -> Iterator[tuple[str, Case]]:
    """Yield the cases of all rows within the limits of a level, each with the model's name; option sets take turns."""
    elements, work = LEVELS[level]
    sets, seen = sampler.option_sets(), list[dict[str, int]]()
    for row in production_rows(sampler.definition):
        options = sets[len(seen) % len(sets)]
        signature = sampler.definition.signature(options)
        large = [tensor for tensor in (*signature.tensors, *signature.returns) if len(tensor.dims) > 1]
        limited = replace(sampler, most_elements=elements // max(len(large), 1), most_work=work, max_steps=None)
        for sizes in _sizes(limited, options, row):
            if sizes not in seen:
                seen.append(sizes)
                yield row.model, at_case(sampler, sizes, options)


def large_pairs(sampler: Sampler) -> Iterator[Case]:
    """Yield a case for each pair of symbols that may have any size, in which both are large; option sets take turns.

    Such a case would exceed the limits of ordinary ones, so that of its output samples are judged.
    """
    elements, work = LEVELS[0]
    sets, number = sampler.option_sets(), 0
    base = sampler.case(_three, style="small", options=sets[0])
    free = [symbol for symbol in sampler.free_symbols(base) if not sampler.is_batch(base.signature, symbol)]
    for pair in combinations(free, 2):
        case = sampler.case(_three, style="small", options=sets[number % len(sets)])
        if not {*pair} <= {*case.sizes}:
            continue
        large = [tensor for tensor in (*case.signature.tensors, *case.signature.returns) if len(tensor.dims) > 1]
        limited = replace(sampler, most_elements=elements // max(len(large), 1), most_work=work, max_steps=None)
        drawn = (sampler.tied_sizes({**case.sizes, **dict(zip(pair, both, strict=True))}) for both in _BOTH)
        sizes = next((each for each in drawn if _is_valid(limited, case.signature, case.options, each)), None)
        if sizes is None:
            continue
        for symbol in [each for each in free if each in sizes and each not in pair]:
            wider = (sampler.with_size(sizes, symbol, size) for size in _OTHERS)
            sizes = next((some for some in wider if _is_valid(limited, case.signature, case.options, some)), sizes)
        number += 1
        yield at_case(sampler, sizes, case.options)


def load_of(case: Case, programs: int = 0) -> tuple[int, float]:
    """Return the elements of all tensors of a case, and its operations; those of this many programs, if not 0, each of
    which has an index along the grid symbols."""
    elements = sum(math.prod(case.shape(tensor)) for tensor in (*case.signature.tensors, *case.signature.returns))
    grid = max(math.prod(case.sizes.get(symbol, 1) for symbol in case.definition.axes.grid), 1)
    return elements, case.definition.cost(case.sizes) * min(1.0, programs / grid if programs else 1.0)


def _three(values: Sequence[Any]) -> Any:
    """Return a size that has neighbours on both sides, of an op's own sizes the least."""
    return 3 if 3 in values else min(values)


def _sizes(sampler: Sampler, options: Mapping[str, Any], row: Row) -> Iterator[dict[str, int]]:
    """Yield the sizes of a row's cases: one if all of the model's own sizes fit, else one for each that fits alone."""
    definition = sampler.definition
    signature = definition.signature(options)
    full = sampler.tied_sizes({symbol: _admitted(sampler, symbol, row.sizes[symbol]) for symbol in signature.symbols})
    own = [symbol for symbol in row.own if full[symbol] == row.sizes[symbol] and symbol not in sampler.ties]
    counts = [symbol for symbol in row.counts if symbol not in sampler.ties]

    whole = sampler.halved(signature, full, counts)
    if own and _is_valid(sampler, signature, options, whole):
        yield whole
        return
    fixed = {*definition.sizes.allowed, *definition.sizes.multiples.values()}
    few = sampler.tied_sizes(full | {symbol: min(full[symbol], _FEW) for symbol in counts})
    for held in own:
        others = [symbol for symbol in own if symbol != held and symbol not in fixed]
        sizes = sampler.halved(signature, sampler.halved(signature, few, others), counts)
        if full[held] >= _LARGE and _is_valid(sampler, signature, options, sizes):
            yield sizes


def _is_valid(sampler: Sampler, signature: Signature, options: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
    """Whether a call may have these sizes, and has them within the sampler's limits."""
    try:
        check_sizes(sampler.definition, signature, options, sizes)
    except ShapeError:
        return False
    return sampler.fits(sizes, signature)


def _admitted(sampler: Sampler, symbol: str, size: int) -> int:
    """Return the size if the caller's sizes admit it, else the largest of theirs below it, or their least."""
    known: Sequence[int] = sampler.shapes.get(symbol, ())
    if not known or size in known:
        return size
    return max((each for each in known if 0 < each < size), default=min(known))
