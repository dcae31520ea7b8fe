"""The fixed phases of an examination: cases that are tried whatever the fuzzing finds.

| phase      | cases                                                                                              |
|------------|----------------------------------------------------------------------------------------------------|
| exact      | small integers, powers of two, one-hot rows, ties: nothing is rounded, nothing is tolerated         |
| range      | logits of +-88 and beyond, values near the format's ends, subnormals, rows of zeros                 |
| special    | NaN and infinities, one at a time, compared by class and place; NaN wherever nothing is read        |
| invariants | the same call twice; other data first, in other and in the same memory; each row alone; poisoned memory |
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from assay.verify.contract import Contract
from assay.verify.inputs.cases import Case
from assay.verify.inputs.distributions import EXACT, RANGE
from assay.verify.inputs.layouts import LAYOUTS
from assay.verify.inputs.sampler import Sampler, real_tensors, seeded, with_values

_MOST_OPTION_SETS = 4
_SPOILED = 4  # cases a base whose unused elements are NaN


def gate_cases(sampler: Sampler) -> Iterator[Case]:
    """Ordinary cases on which the check itself is checked."""
    for place, base in enumerate(_bases(sampler, "gate", ("tile", "small"))):
        yield with_values(base, "normal", layouts={}, memory="plain", protocol="once", unused="plain", seed=place)


def exact_cases(sampler: Sampler) -> Iterator[Case]:
    """Cases on which nothing is rounded in the arithmetic of most ops."""
    for distribution in EXACT:
        styles = ("any", "any") if distribution == "seesaw" else ("small", "tile")
        for base in _bases(sampler, distribution, styles):
            yield with_values(base, distribution, layouts={}, protocol="once", memory="plain")


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
            ):
                if math.isinf(value) and not _has_infinity(plain.dtypes[tensor.name]):
                    continue
                index = tuple(round(fraction * (size - 1)) for size in shape)
                yield replace(plain, edits=((tensor.name, index, value),))


def invariant_cases(sampler: Sampler, contract: Contract) -> Iterator[Case]:
    """Calls in pairs, poisoned memory, and every layout."""
    protocols = ["repeat", "after_other", "after_refill", *(["alone"] if contract.batch_invariant else [])]
    for protocol in protocols:
        styles = ("small", "tile", "any") if protocol != "alone" else ("small", "tile", "tile", "tile", "any", "any")
        for base in _bases(sampler, protocol, styles, most=2):
            case = with_values(base, "normal", layouts={}, protocol=protocol, memory="plain")
            yield case
            rows = case.definition.rows
            if (
                protocol == "alone" and rows is not None and rows not in sampler.shapes
            ):  # an odd and an even number of rows
                yield replace(case, sizes={**case.sizes, rows: case.sizes[rows] + 1})
    for memory in ("nan", "huge"):
        for base in _bases(sampler, memory, ("small", "tile", "tile", "any"), most=2):
            yield with_values(base, "normal", layouts={}, protocol="once", memory=memory)
    for layout in sampler.layouts:
        if layout != LAYOUTS[0]:
            for base in _bases(sampler, layout, ("small", "tile"), most=2):
                names = [tensor.name for tensor in base.signature.tensors]
                yield with_values(base, "normal", layouts=dict.fromkeys(names, layout), protocol="once", memory="plain")


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
