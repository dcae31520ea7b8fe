"""The fixed phases of an examination: cases that are tried whatever the fuzzing finds.

| phase      | cases                                                                                              |
|------------|----------------------------------------------------------------------------------------------------|
| exact      | small integers, powers of two, one-hot rows, ties, sizes all alike, one long size: nothing is rounded |
| range      | logits of +-88 and beyond, values near the format's ends, subnormals, rows of zeros                 |
| special    | NaN and infinities, one at a time, compared by class and place; NaN wherever nothing is read        |
| every      | of an op that works element by element, every number of a format of 16 bits or fewer                |
| invariants | the same call twice; other data first, in other and in the same memory; each row alone; poisoned memory |
| bias       | series of calls with fresh data, whose errors may not all lean to one side                          |
| outside    | of an isolated kernel: one call in a process where nothing tells of an examination                  |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from assay.golden.inputs.distributions import EVERY, EXACT, MIDPOINTS, RANGE
from assay.golden.signature import TensorSpec
from assay.precision.formats import format_named
from assay.verify.contract import Contract
from assay.verify.inputs.cases import Case, work
from assay.verify.inputs.layouts import LAYOUTS
from assay.verify.inputs.sampler import ROWS, Sampler, real_tensors, seeded, with_values

_MOST_OPTION_SETS = 4
_STYLES = {"after_many": ("small",), "alone": ("small", "tile", "tile", "tile", "any", "any")}
_SQUARE = 16  # all sizes alike
_LONG = (20481, 4097, 1025)  # one size beyond what fits a block
_SHORT = 8  # a row that may be all -inf
_SIDE = 256  # rows and columns that hold all numbers of 16 bits
_MOST_STARTS = 64  # calls that all numbers may take
_SPOILED = 4  # cases a base whose unused elements are NaN


def gate_cases(sampler: Sampler, style: str) -> Iterator[Case]:
    """Ordinary cases on which the check itself is checked."""
    for place, base in enumerate(_bases(sampler, "gate", (style,))):
        yield with_values(base, "normal", layouts={}, memory="plain", protocol="once", unused="plain", seed=place)


def exact_cases(sampler: Sampler) -> Iterator[Case]:
    """Cases on which nothing is rounded in the arithmetic of most ops."""
    rounds = any(tensor.bound for options in sampler.option_sets() for tensor in _reals(sampler, options))
    for distribution in (*EXACT, MIDPOINTS) if rounds else EXACT:
        styles = ("any", "any") if distribution == "seesaw" else ("small", "tile")
        for base in _bases(sampler, distribution, styles):
            yield with_values(base, distribution, layouts={}, protocol="once", memory="plain")
    for base in _bases(sampler, "square", ("small",), most=1):
        plain = with_values(base, "integers", layouts={}, protocol="once", memory="plain")
        yield replace(plain, sizes={**base.sizes, **dict.fromkeys(sampler.free_symbols(base), _SQUARE)})
    for base in _bases(sampler, "long", ("small",), most=1):
        plain = with_values(base, "integers", layouts={}, protocol="once", memory="plain")
        for symbol in sampler.free_symbols(base):
            longer = [sizes for size in _LONG if sampler.fits(sizes := {**base.sizes, symbol: size})]
            if longer and symbol not in ROWS:
                yield replace(plain, sizes=longer[0])


def range_cases(sampler: Sampler) -> Iterator[Case]:
    """Cases at the ends of the format's range; in some the first tensor lies above and the others below."""
    for base in _bases(sampler, "opposed", ("small", "tile")):
        opposed = with_values(base, "below", layouts={}, protocol="once", memory="plain")
        first = next(iter(opposed.values))
        if opposed.values[first] == "below":
            yield replace(opposed, values={**opposed.values, first: "above"})
    for distribution in RANGE:
        for base in _bases(sampler, distribution, ("small", "tile")):
            yield with_values(base, distribution, layouts={}, protocol="once", memory="plain")


def special_cases(sampler: Sampler) -> Iterator[Case]:
    """One NaN or infinity at a time, at both ends and in the middle of each tensor."""
    for base in _bases(sampler, "special", ("small", "tile"), most=2):
        plain = with_values(base, "normal", layouts={}, protocol="once", memory="plain", unused="plain")
        if plain.definition.unused is not None:
            for other in range(_SPOILED):
                yield replace(plain, unused="nan", seed=plain.seed + other)
        for tensor in plain.signature.tensors:
            narrow = plain.dtypes[tensor.name].startswith("float8")
            if tensor.role == "scale" and narrow and all(shape := plain.shape(tensor)):
                yield replace(plain, edits=((tensor.name, tuple(size // 2 for size in shape), math.nan),))
        for tensor in real_tensors(plain.signature):
            shape = plain.shape(tensor)
            if not all(shape):
                continue
            for fraction, value in (
                (0.0, math.nan),
                (1.0, math.nan),
                (0.5, math.inf),
                (0.0, -math.inf),
                (1.0, math.inf),
                *(((0.0, -0.0),) if plain.definition.elementwise else ()),
            ):
                if math.isinf(value) and not _has_infinity(plain.dtypes[tensor.name]):
                    continue
                index = tuple(round(fraction * (size - 1)) for size in shape)
                yield replace(plain, edits=((tensor.name, index, value),))
            if _has_infinity(plain.dtypes[tensor.name]):
                middle = tuple((size - 1) // 2 for size in shape)
                zeros = with_values(plain, "ties", seed=plain.seed + 1)  # zero times infinity
                yield replace(zeros, edits=((tensor.name, middle, math.inf),))
                if tensor.name == plain.signature.tensors[0].name and len(shape) == 2 and shape[1] <= _SHORT:
                    yield replace(plain, edits=tuple((tensor.name, (0, place), -math.inf) for place in range(shape[1])))


def every_cases(sampler: Sampler) -> Iterator[Case]:
    """Every number of the format, where an op works element by element and few calls of the sizes allowed hold them."""
    base = sampler.case(seeded(sampler.seed), style="tile")
    tensor = base.signature.tensors[0]
    if not base.definition.elementwise or format_named(base.dtypes[tensor.name]).bits > 16:
        return
    allowed = {symbol: [size for size in sampler.shapes.get(symbol, (_SIDE,)) if size] for symbol in tensor.dims}
    if not all(allowed.values()):
        return
    sizes = {symbol: min((s for s in some if s >= _SIDE), default=max(some)) for symbol, some in allowed.items()}
    rows, columns = (min(size, _SIDE) for size in sizes.values())
    starts = [row * _SIDE + column for row in range(0, _SIDE, rows) for column in range(0, _SIDE, columns)]
    numbers = 2 ** format_named(base.dtypes[tensor.name]).bits
    starts = [start for start in starts if start < numbers]
    for options in sampler.option_sets()[:_MOST_OPTION_SETS]:
        for start in starts if len(starts) <= _MOST_STARTS else ():
            case = with_values(base, "normal", layouts={}, protocol="once", memory="plain", sizes=sizes, seed=start)
            yield replace(case, options=options, values={tensor.name: EVERY})


def invariant_cases(sampler: Sampler, contract: Contract) -> Iterator[Case]:
    """Calls in pairs, poisoned memory, and every layout."""
    alone = ["alone"] if contract.batch_invariant else []
    protocols = ["repeat", "after_other", "after_refill", "after_many", *alone]
    for protocol in protocols:
        styles = _STYLES.get(protocol, ("small", "tile", "any"))
        for base in _bases(sampler, protocol, styles, most=2):
            case = with_values(base, "normal", layouts={}, protocol=protocol, memory="plain")
            yield case
            rows = case.definition.independent(case.options)
            if (
                protocol == "alone" and rows is not None and rows not in sampler.shapes
            ):  # an odd and an even number of rows
                yield replace(case, sizes={**case.sizes, rows: case.sizes[rows] + 1})
    for memory in ("nan", "huge"):
        for base in _bases(sampler, memory, ("small", "tile", "tile", "any"), most=2):
            yield with_values(base, "normal", layouts={}, protocol="once", memory=memory)
    for base in _bases(sampler, "empty", ("small",), most=1):
        for symbol in base.definition.empty:
            if symbol in base.sizes and 0 in sampler.shapes.get(symbol, (0,)):
                yield with_values(
                    base, "normal", layouts={}, protocol="once", memory="nan", sizes={**base.sizes, symbol: 0}
                )
    for layout in sampler.layouts:
        if layout != LAYOUTS[0]:
            for base in _bases(sampler, layout, ("small", "tile"), most=2):
                names = [tensor.name for tensor in base.signature.tensors]
                yield with_values(base, "normal", layouts=dict.fromkeys(names, layout), protocol="once", memory="plain")


def outside_cases(sampler: Sampler) -> Iterator[Case]:
    """One case to be tried where nothing tells of an examination."""
    for base in _bases(sampler, "outside", ("tile",), most=1):
        yield with_values(base, "normal", layouts={}, protocol="outside", memory="plain", unused="plain")


def bias_cases(sampler: Sampler) -> Iterator[Case]:
    """Series of calls (`assay.verify.statistics.bias`): numbers of one sign, where errors add up, and of both."""
    bases = sorted(_bases(sampler, "bias", ("tile",) * 4, most=2), key=lambda case: work(case.definition, case.sizes))
    for distribution in ("positive", "normal"):
        for base in bases[-min(2, len(sampler.option_sets())) :]:  # where errors add up most
            yield with_values(base, distribution, layouts={}, protocol="bias", memory="plain", unused="plain")


def _reals(sampler: Sampler, options: Mapping[str, Any]) -> list[TensorSpec]:
    return real_tensors(sampler.definition.signature(options))


def _bases(sampler: Sampler, purpose: str, styles: tuple[str, ...], *, most: int = _MOST_OPTION_SETS) -> Iterator[Case]:
    """A case per style and option set, the option sets in turn where there are many."""
    choose = seeded(hash_of(purpose, sampler.seed))
    sets = sampler.option_sets()
    for style in styles:
        picked = sets if len(sets) <= most else [choose(sets) for _ in range(most)]
        for options in picked:
            yield sampler.case(choose, style=style, options={name: options[name] for name in options})


def hash_of(purpose: str, seed: int) -> int:
    """A seed of its own for each purpose."""
    return seed * 1_000_003 + sum((place + 1) * ord(letter) for place, letter in enumerate(purpose))


def _has_infinity(dtype: str) -> bool:
    return dtype in ("float64", "float32", "bfloat16", "float16", "float8_e5m2")
