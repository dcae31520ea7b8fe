"""The cases of an examination's phases: the fixed ones, tried whatever the fuzzing finds, and the fuzzing itself.

The cases of the phases from exact to bias are fixed beforehand and come interleaved, in the measured order of
`assay.verify.examination.run.arranged`. The others follow one by one, in the order of `PHASES` there.

| phase          | cases                                                                                             |
|----------------|---------------------------------------------------------------------------------------------------|
| first          | one small ordinary case, which shows whether the kernel is interpreted                            |
| stored         | the cases of a golden store, if there is one (`assay.verify.cases.stored`)                        |
| exact          | small integers, powers of two, one-hot rows, ties, equal sizes, one long size: nothing is rounded |
| range          | logits of +-88, the format's ends, subnormals, zeros; scales, weights, slopes of any size and sign |
| single_operand | one tensor of several is zero or subnormal                                                        |
| domain         | each kind of numbers that one tensor has of its own: gates, steps, shares, labels, lengths, ends; |
|                | sorted rows that overlap in chains                                                                |
| block_boundary | many rows of one element more than a block, a peak in the last element, sequences of many chunks  |
| aligned        | all sizes multiples of the tile at once, as in production: kernels have a separate path for them  |
| special        | NaN and infinities, one at a time, compared by class and index, also beside the boundaries of     |
|                | packed parts; NaN in all that isn't read                                                          |
| every_number   | for an elementwise op, every number of a format of 16 bits or fewer                               |
| invariants     | the same call twice; other data first, in other and in the same memory; rows alone; poisoned memory |
| bias           | series of calls with fresh data, whose errors may not all have the same sign                      |
| variants       | each program and path of host code that some size reaches (`assay.verify.examination.variants`)   |
| emitted        | for an interpreted kernel: contracted sums and approximate functions, as in NVIDIA's backend      |
| plain_process  | for an isolated kernel: one call in a process without a trace of an examination                   |
| lengths        | sums of 8 to 65,536 terms of ordinary data, each also judged by the likely size of rounding errors |
| fuzz           | cases that cover the pairs of factors that the fixed ones leave (`assay.verify.cases.factors`);   |
|                | then cases drawn by Hypothesis, which climbs towards larger ratios of error to radius             |
| triples        | at a thorough effort every triple of a size, a distribution and an option that is left            |
| over_limit     | more than 65,535 rows, classes or table entries, if smaller cases were quick enough               |
| large_pairs    | two large sizes at once, of each pair of symbols (`assay.verify.cases.production`)                |
| production     | sizes of published models, by default (`assay.verify.cases.production`)                           |
| at             | sizes of production, if the caller names some (`assay.verify.cases.at_shape`)                     |
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings, target
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

from assay.formats.format import format_named
from assay.golden.inputs.distributions import EVERY, EXACT, MIDPOINTS, RANGE, names_of, own_names_of
from assay.golden.signature import TensorSpec, dimension, symbols_in
from assay.verify.cases.case import Case, contents
from assay.verify.cases.factors import Covering, Factors
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.cases.sampler import (
    MOST_ELEMENTS,
    MOST_WORK,
    SMALL,
    Sampler,
    real_tensors,
    seeded,
    with_peak,
    with_values,
)
from assay.verify.comparison.statistics import INDEPENDENT
from assay.verify.contract import Contract
from assay.verify.examination.drawing import without_local_constants

_MOST_OPTION_SETS = 4  # each set multiplies the fixed cases; of more sets this many are drawn
_LIMITS = {  # by style: most elements and work of a case, and the divisor of an interpreter's steps
    "small": (MOST_ELEMENTS, MOST_WORK, 32),
    "tile": (2**15, 2**21, 32),  # smaller, as there are many of these cases
    "any": (MOST_ELEMENTS, MOST_WORK, 8),
}
_DRAWS = 4  # base cases drawn where each is called many times; the one of least work is taken
_SORTED_DRAWS, _SORTED_SEEDS = 8, 4  # base cases of which the largest is taken for sorted rows, and cases of it
_SQUARE, _SHORT = 16, 8  # the size when all are equal; the longest row that is set to -inf throughout
_LONG = (20481, 4097, 1025)  # one more than multiples of blocks, and beyond what one block holds; the first that fits
_SIDE = 256  # 256 x 256 elements hold all numbers of 16 bits
_MOST_STARTS = 64  # the most calls to go through all numbers, if shapes are restricted to small ones
_UNUSED_SEEDS = 4  # cases for each base whose unread elements are NaN, each with another seed
_TILES = (64, 128)  # common tile sizes, for all dimensions at once
_LONG_SUM = (64, 512)  # a tile, and a sum over several of them
# (size, rows): one more than common block sizes; odd numbers of rows, fewer where rows are long
_BLOCK_BOUNDARIES = ((513, 31), (1025, 127), (2049, 3), (4097, 3))
_FEW_ROWS = 3
_SLOW_BOUNDARIES = ((2049, 3), (257, 3))  # of what is gone through step by step; the first that fits
# ends beyond 16 bits; each about GROWTH times the one before at most, so that its time can be extrapolated
_GROWING = (17, 257, 2049, 4097, 2**16 + 65)
_ELEMENTS_OF_A_PART = 3  # at least, beside whose boundaries NaN and infinities are placed
_FEW = 10 * 2**16  # elements of a tensor with more rows than 16 bits count: about ten for each row
_MANY = 2**21 + 2**17  # the most elements if the op's sizes admit no fewer: about 32 for each row
_SMALLER = 8  # all but one in 8 fuzzed cases have at most an 8th of the elements and steps: more cases per second

_COVERING_SHARE = 0.75  # of the fuzzed cases; the others climb
_SHARES = (32, 8) * 7 + (32, 1)  # what part of the elements and steps the covering cases may have, by turns

GROWTH = 16
"""How many times larger at most each case of a series of `over_limit_cases` is than the one before."""
LENGTHS = (8, 128, 1024, 4096, 16384, 65536)
QUICK_LENGTHS = LENGTHS[::2]
"""The lengths of a quick effort."""


def _base_cases(
    sampler: Sampler, purpose: str, styles: Sequence[str], *, most: int = _MOST_OPTION_SETS, draws: int = 1
) -> Iterator[Case]:
    """Yield a case for each style and option set, the cheapest of ``draws``; ``most`` sets, drawn at random if there
    are more. ``purpose`` makes each phase's seed its own; a style is a size class, of `_LIMITS`.

    Cases with a size of 0 or 1 are taken only if nothing else was drawn: a row of one element hides most faults.
    """
    choose = _chooser(sampler, purpose)
    sets = sampler.option_sets()
    for style in styles:
        sized = sampler.limited(*_LIMITS[style])
        for options in sets if len(sets) <= most else [choose(sets) for _ in range(most)]:
            drawn = [sized.case(choose, style=style, options=dict(options)) for _ in range(draws)]
            yield min(drawn, key=lambda c: (min(c.sizes.values(), default=2) < 2, sized.cost(c.sizes)))


def _chooser(sampler: Sampler, purpose: str) -> Callable[[Sequence[Any]], Any]:
    # the sum seeds the cases: a purpose keeps its text when its phase is renamed ("gate", "seams", "beyond")
    position = sum((index + 1) * ord(letter) for index, letter in enumerate(purpose))
    return seeded(sampler.seed * 1_000_003 + position)


def _ordinary(case: Case, values: str = "normal", **changes: Any) -> Case:
    """Return the case as one call in contiguous and plain memory, with these values in all tensors that can have
    them."""
    return with_values(case, values, **{"layouts": {}, "protocol": "once", "memory": "plain", **changes})


def _with_distributions(case: Case, distributions: Mapping[str, str]) -> Case:
    """Return the case with other distributions of the tensors named in ``distributions``."""
    return replace(case, values={**case.values, **distributions})


def ordinary_cases(sampler: Sampler, style: str, values: str = "normal", draws: int = 1) -> Iterator[Case]:
    """Yield ``draws`` ordinary cases for each option set, on which the check itself is checked."""
    for index, base in enumerate(_base_cases(sampler, "gate", (style,) * draws)):
        yield _ordinary(base, values, unused="plain", seed=index)


def exact_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases on which the arithmetic of most ops rounds nothing."""
    signatures = map(sampler.definition.signature, sampler.option_sets())
    rounds = any(tensor.bound for signature in signatures for tensor in real_tensors(signature))
    for distribution in (*EXACT, MIDPOINTS) if rounds else EXACT:
        for base in _base_cases(
            sampler, distribution, ("any", "any") if distribution == "seesaw" else ("small", "tile")
        ):
            # scales and shares that lack the distribution are powers of two: products stay exact
            factors = [t for t in base.signature.tensors if t.role in ("scale", "weight")]
            plain = {tensor.name: "powers" for tensor in factors if distribution not in names_of(tensor)}
            yield _with_distributions(_ordinary(base, distribution), plain)
    # scales of 2^-127, times which bfloat16 holds an integer; pairs in any order, and twice at one place
    for purpose, role, distribution in (("least", "scale", "least"), ("pairs", "pair", "any")):
        for base in _base_cases(sampler, purpose, ("small", "tile"), most=1):
            if changed := {tensor.name: distribution for tensor in base.signature.tensors if tensor.role == role}:
                yield _with_distributions(_ordinary(base, "integers"), changed)
    for base in _base_cases(sampler, "square", ("small",), most=1):
        equal = dict.fromkeys(sampler.free_symbols(base), _SQUARE)
        yield _ordinary(base, "integers", sizes={**base.sizes, **equal})
    for base in _base_cases(sampler, "long", ("small",), most=1):
        for symbol in sampler.free_symbols(base):
            sizes_of_sum = _LONG[-1:] if _is_slow(base, symbol) else _LONG
            longer = [sizes for size in sizes_of_sum if sampler.fits(sizes := {**base.sizes, symbol: size})]
            if longer and symbol not in (*base.definition.axes.grid, *base.definition.axes.gathered):
                yield _ordinary(base, "integers", sizes=longer[0])


def range_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases at the ends of the format's range; in some the first tensor is drawn from "above", the others from
    "below", or all have their peaks in the same places."""
    for base in _base_cases(sampler, "opposed", ("small", "tile")):
        opposed = _ordinary(base, "below")
        first = next(iter(opposed.values))
        if opposed.values[first] == "below":
            yield _with_distributions(opposed, {first: "above"})
    for base in _base_cases(sampler, "one_peak", ("tile",)):
        shapes = [base.shape(tensor) for tensor in real_tensors(base.signature)]
        if len(set(shapes)) < len(shapes):  # two tensors that may be two distributions
            yield _ordinary(base, "one_peak")
    yield from _factor_cases(sampler)
    for distribution in RANGE:
        for base in _base_cases(sampler, distribution, ("small", "tile")):
            yield _ordinary(base, distribution)


def _factor_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases of rows about an epsilon, and of factors over their whole range: all at once, then each signed scale
    alone with both signs and zero.

    In the small cases a scale's first element is negative, so that a scale of one element is negative too; in the
    others it is zero. Alone, because the signs of two scales could cancel.
    """
    for base in _base_cases(sampler, "faint", ("tile",), most=2):
        yield _ordinary(base, "faint")
    for base in _base_cases(sampler, "vast", ("small", "tile"), most=2):
        if vast := {tensor.name: "vast" for tensor in base.signature.tensors if "vast" in names_of(tensor)}:
            yield _with_distributions(_ordinary(base), vast)
    for seed, style in enumerate(("small", "tile")):
        for base in _base_cases(sampler, "cycled", (style,)):
            for tensor in base.signature.tensors:
                if tensor.role == "scale" and format_named(base.dtypes[tensor.name]).signed:
                    yield _with_distributions(_ordinary(base, seed=seed), {tensor.name: "cycled"})


def single_operand_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases in which one of several tensors is zero or subnormal, which shows the effect of the others by
    itself."""
    for distribution, others in (("zeros", "near_overflow"), ("subnormal", "normal")):
        for base in _base_cases(
            sampler, distribution + " alone", ("small",) * (2 if len(sampler.option_sets()) <= 2 else 1)
        ):
            far = {t.name: "far" for t in base.signature.tensors if t.role == "lse"}
            tensors = real_tensors(base.signature)
            for tensor in tensors if len(tensors) > 1 else ():
                if distribution in names_of(tensor):
                    yield _with_distributions(_ordinary(base, others), {**far, tensor.name: distribution})


def domain_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases in which one tensor has each of the distributions of its own in turn, small ones and tiles by turns.

    What is gone through step by step has small ones alone. In the cases of all other phases such a tensor has its
    plainest numbers, as it lacks those that these are named for.
    """
    signatures = [sampler.definition.signature(options) for options in sampler.option_sets()]
    own = {(tensor.name, name): None for each in signatures for tensor in each.tensors for name in own_names_of(tensor)}
    styles = ("small",) if sampler.definition.sizes.sequential_steps else ("small", "tile")
    for index, (tensor, name) in enumerate(own):
        for base in _base_cases(sampler, f"{tensor} {name}", styles[index % len(styles) :][:1]):
            if tensor in base.values:
                yield _with_distributions(_ordinary(base), {tensor: name})
    yield from _overlapping_cases(sampler)


def _overlapping_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases in which the sorted rows of a tensor, as ends of intervals or corners of boxes, overlap in chains.

    Of few rows hardly any do: the base is the largest of several.
    """
    if not any(tensor.role == "sorted" for tensor in sampler.definition.tensors):
        return
    bases = _base_cases(sampler, "overlapping", ("tile",) * _SORTED_DRAWS, most=1)
    for base in sorted(bases, key=lambda case: sampler.cost(case.sizes))[-1:]:
        for seed in range(_SORTED_SEEDS):
            yield _ordinary(base, "descending", seed=base.seed + seed)


def block_boundary_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases of many rows, each one element longer than a block: faults in the state passed on show most there.

    In some the final element is far above the others; the last ones have only numbers far below zero, under which a
    state or a padding of zero shows.
    """
    choose = _chooser(sampler, "seams")
    base = sampler.case(_least, style="small", options=choose(sampler.option_sets()))
    free, rows = sampler.free_symbols(base), _rows(base)
    for symbol in free:
        if symbol in (*base.definition.axes.grid, *base.definition.axes.gathered, rows):
            continue
        boundaries = _SLOW_BOUNDARIES if _is_slow(base, symbol) else _BLOCK_BOUNDARIES
        sized = [
            ({**base.sizes, **({rows: count} if rows in free else {}), symbol: n}, count) for n, count in boundaries
        ]
        fitting = [(sizes, count) for sizes, count in sized if sampler.fits(sizes)]
        for sizes, count in fitting[:1] if _is_slow(base, symbol) else fitting:
            for distribution in ("normal", "wide")[: 1 + (count > _FEW_ROWS)]:
                case = _ordinary(base, distribution, sizes=sizes, seed=choose(range(1 << 24)))
                yield case
            first = next((tensor for tensor in real_tensors(base.signature) if symbol in tensor.dims), None)
            if first is not None and all(case.shape(first)):
                yield with_peak(case, first)
        for sizes, count in fitting:
            if count > _FEW_ROWS:
                yield _ordinary(base, "below", sizes=sizes, seed=choose(range(1 << 24)))


def aligned_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases whose sizes are all whole tiles, which sizes drawn one by one hardly ever are; then a longer sum."""
    choose = _chooser(sampler, "aligned")
    sets = sampler.option_sets()
    for options in sets if len(sets) <= _MOST_OPTION_SETS else [choose(sets) for _ in range(_MOST_OPTION_SETS)]:
        base = sampler.case(lambda sizes: 2 if 2 in sizes else _least(sizes), style="small", options=options)
        over = symbols_in(base.definition.reduction.over) if base.definition.reduction is not None else ()
        for data, size, longest in (*(("normal", tile, tile) for tile in _TILES), ("positive", *_LONG_SUM)):
            sizes = _aligned(sampler, base, {symbol: longest if symbol in over else size for symbol in base.sizes})
            if sizes != base.sizes and (over or size == longest):
                yield _ordinary(base, data, unused="plain", seed=choose(range(1 << 24)), sizes=sizes)


def _is_slow(case: Case, symbol: str) -> bool:
    """Whether the indices along a symbol are gone through one after another, as those of a recurrence are."""
    return symbol in symbols_in(case.definition.sizes.sequential_steps or "")


def _aligned(sampler: Sampler, case: Case, wanted: Mapping[str, int]) -> dict[str, int]:
    """Return as many of the wanted sizes as an examination admits, grid symbols and heads last."""
    definition, sizes = case.definition, dict(case.sizes)
    known = {**definition.sizes.allowed, **sampler.shapes}
    counted = {*definition.axes.grid, *definition.sizes.multiples}
    for *_, symbol in sorted((s in counted, s in known, -index, s) for index, s in enumerate(wanted)):
        if symbol in definition.sizes.multiples.values():  # groups divide others
            continue
        if symbol in known:
            tiles = [size for size in known[symbol] if size and size % _SQUARE == 0]
            size = max((each for each in tiles if each <= wanted[symbol]), default=min(tiles, default=sizes[symbol]))
        else:
            size = math.lcm(wanted[symbol], definition.step(case.signature, symbol, sizes))
        if sampler.fits(larger := sampler.tied_sizes({**sizes, symbol: size})):
            sizes = larger
    return sizes


def over_limit_cases(sampler: Sampler) -> Iterator[Sequence[Case]]:
    """Yield series of cases that end with more rows, classes or entries of a table than 16 bits count. All other sizes
    are small, and labels and indices the largest there are.

    The smaller cases of a series tell how long the last one will take.
    """
    choose = _chooser(sampler, "beyond")
    base = sampler.case(_least, style="small", options=choose(sampler.option_sets()))
    base = _ordinary(base, seed=choose(range(1 << 24)))
    labels = [tensor for tensor in base.signature.tensors if tensor.role in ("label", "index")]
    for symbol in dict.fromkeys((_rows(base), *(tensor.bound for tensor in labels))):
        if symbol in sampler.shapes or symbol not in (*base.definition.axes.grid, *sampler.free_symbols(base)):
            continue
        last = {tensor.name: "last" for tensor in labels if tensor.bound == symbol}
        step = base.definition.step(base.signature, symbol, base.sizes)
        sizes = [_with_few_elements(sampler, base, symbol, -(-size // step) * step) for size in _GROWING]
        if all(sizes):
            yield [replace(_with_distributions(base, last), sizes=some) for some in sizes if some]


def _rows(case: Case) -> str:
    """Return the symbol that a kernel's programs are spread over: independent rows, or the first dimension; else
    empty."""
    return case.definition.row_axis(case.options) or next(iter(case.signature.tensors[0].leading), "")


def _least(values: Sequence[Any]) -> Any:
    """Return the least of the sizes that a symbol may have; 3 if any size will do, so that sums have several terms."""
    if isinstance(values, range):  # ascending, and perhaps of all seeds
        return values[0]
    return 3 if tuple(values) == SMALL else min(values)


def _with_few_elements(sampler: Sampler, base: Case, symbol: str, size: int) -> dict[str, int] | None:
    """Return sizes with ``symbol`` at ``size``, and free ones set to 1 while a tensor has too many elements."""
    sizes, tensors = {**base.sizes, symbol: size}, (*base.signature.tensors, *base.signature.returns)
    for other in sampler.free_symbols(base):
        if other != symbol and max(math.prod(tensor.shape(sizes)) for tensor in tensors) > _FEW:
            sizes[other] = 1
    return sizes if max(math.prod(tensor.shape(sizes)) for tensor in tensors) <= _MANY else None


def special_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases with one NaN or infinity, at both ends and in the middle of each tensor, and beside the boundaries of
    its parts."""
    for base in _base_cases(sampler, "special", ("small", "tile"), most=2, draws=_DRAWS):
        plain = _ordinary(base, unused="plain")
        if plain.definition.inputs.unused is not None:
            for other in range(_UNUSED_SEEDS):
                yield replace(plain, unused="nan", seed=plain.seed + other)
        for tensor in plain.signature.tensors:
            shape = plain.shape(tensor)
            if tensor.role == "scale" and all(shape) and format_named(plain.dtypes[tensor.name]).bits == 8:
                yield replace(plain, edits=((tensor.name, tuple(size // 2 for size in shape), math.nan),))
        for tensor in real_tensors(plain.signature):
            shape, infinities = plain.shape(tensor), format_named(plain.dtypes[tensor.name]).infinities
            if not all(shape):
                continue
            values = [(0.0, math.nan), (1.0, math.nan), (0.5, math.inf), (0.0, -math.inf), (1.0, math.inf)]
            for fraction, value in values + [(0.0, -0.0)] * plain.definition.axes.elementwise:
                if infinities or not math.isinf(value):
                    index = tuple(round(fraction * (size - 1)) for size in shape)
                    yield replace(plain, edits=((tensor.name, index, value),))
            if infinities:
                middle = tuple((size - 1) // 2 for size in shape)
                zeros = with_values(plain, "ties", seed=plain.seed + 1)  # zero times infinity
                yield replace(zeros, edits=((tensor.name, middle, math.inf),))
                if tensor.name == plain.signature.tensors[0].name and len(shape) == 2 and shape[1] <= _SHORT:
                    yield replace(
                        plain, edits=tuple((tensor.name, (0, column), -math.inf) for column in range(shape[1]))
                    )
        cut = _in_parts(sampler, plain)
        for tensor in real_tensors(plain.signature):
            infinities = format_named(plain.dtypes[tensor.name]).infinities
            for index in _beside_boundaries(cut, tensor):
                for value in (math.nan, math.inf)[: 1 + infinities]:
                    yield replace(cut, edits=((tensor.name, index, value),))


def _in_parts(sampler: Sampler, case: Case) -> Case:
    """Return the case with two parts or more, each of several elements, where offsets cut a dimension into parts and
    the sizes may be so."""
    sizes, values, definition = dict(case.sizes), dict(case.values), case.definition
    for offsets in case.signature.tensors:
        if offsets.role == "offsets" and offsets.bound in sampler.free_symbols(case):
            for symbol in symbols_in(offsets.dims[0]):
                allowed = sampler.shapes.get(symbol) or definition.sizes.allowed.get(symbol, (2,))
                sizes[symbol] = max(sizes[symbol], min((size for size in allowed if size > 1), default=1))
            parts = dimension(offsets.dims[0], sizes) - 1
            sizes[offsets.bound] = max(sizes[offsets.bound], _ELEMENTS_OF_A_PART * parts)
            values[offsets.name] = "even"
    return replace(case, sizes=sizes, values=values) if sampler.fits(sizes) else case


def _beside_boundaries(case: Case, tensor: TensorSpec) -> Iterator[tuple[int, ...]]:
    """Yield the indices of the last element of a part and of the first one of the next, where offsets cut a dimension
    of ``tensor`` into parts; a tile that reaches over the boundary reads both."""
    shape = case.shape(tensor)
    for offsets in case.signature.tensors:
        if offsets.role != "offsets" or offsets.bound not in tensor.dims:
            continue
        axis = tensor.dims.index(offsets.bound)
        inner = sorted({start for start in contents(case, offsets).tolist() if 0 < start < shape[axis]})
        for start in inner[:1]:
            yield tuple(start - 1 if other == axis else size - 1 for other, size in enumerate(shape))
            yield tuple(start if other == axis else 0 for other, size in enumerate(shape))


def every_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases that together hold every number of the format, for elementwise ops if few calls are enough."""
    base = sampler.case(seeded(sampler.seed), style="tile")
    tensor = base.signature.tensors[0]
    if not base.definition.axes.elementwise or format_named(base.dtypes[tensor.name]).bits > 16:
        return
    allowed = {symbol: [size for size in sampler.shapes.get(symbol, (_SIDE,)) if size] for symbol in tensor.dims}
    if not all(allowed.values()):
        return
    sizes = {symbol: min((s for s in some if s >= _SIDE), default=max(some)) for symbol, some in allowed.items()}
    rows, columns = (min(size, _SIDE) for size in sizes.values())
    starts = [row * _SIDE + column for row in range(0, _SIDE, rows) for column in range(0, _SIDE, columns)]
    starts = [start for start in starts if start < 2 ** format_named(base.dtypes[tensor.name]).bits]
    for options in sampler.option_sets()[:_MOST_OPTION_SETS]:
        for start in starts if len(starts) <= _MOST_STARTS else ():
            yield replace(_ordinary(base, sizes=sizes, seed=start), options=options, values={tensor.name: EVERY})


def invariant_cases(sampler: Sampler, contract: Contract) -> Iterator[Case]:
    """Yield cases of repeated calls, of poisoned memory, of empty dimensions, and of every layout."""
    usual = ("small", "tile", "any")
    styles = {"repeat": usual, "after_other": usual, "after_refill": usual, "after_many": ("small",)}
    if contract.batch_invariant:
        styles["alone"] = ("small", "tile", "tile", "tile", "any", "any")
    for protocol in styles:
        draws = _DRAWS if protocol == "after_many" else 1
        for base in _base_cases(sampler, protocol, styles[protocol], most=2, draws=draws):
            case = _ordinary(base, protocol=protocol)
            yield case
            rows = case.definition.row_axis(case.options)
            if protocol == "alone" and rows is not None and rows not in sampler.shapes:  # odd and even numbers of rows
                yield replace(case, sizes={**case.sizes, rows: case.sizes[rows] + 1})
    for memory in ("nan", "huge"):
        for base in _base_cases(sampler, memory, ("small", "tile", "tile", "any"), most=2):
            yield _ordinary(base, memory=memory)
    for base in _base_cases(sampler, "empty", ("small",), most=1):
        for symbol in base.definition.sizes.may_be_zero:
            if symbol in base.sizes and 0 in sampler.shapes.get(symbol, (0,)):
                yield _ordinary(base, memory="nan", sizes={**base.sizes, symbol: 0})
    for layout in sampler.layouts:
        if layout != LAYOUTS[0]:
            for base in _base_cases(sampler, layout, ("small", "tile"), most=2):
                yield _ordinary(base, layouts={tensor.name: layout for tensor in base.signature.tensors})


def emitted_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield ordinary cases to be tried with the arithmetic that NVIDIA's backend emits."""
    for base in _base_cases(sampler, "emitted", ("small", "tile"), most=2):
        yield _ordinary(base, protocol="emitted", unused="plain")


def plain_process_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield one case to be tried in a plain process."""
    for base in _base_cases(sampler, "outside", ("tile",), most=1):
        yield _ordinary(base, protocol="outside", unused="plain")


def bias_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield series of calls (`assay.verify.comparison.bias`): numbers of one sign, where errors add up, and of both
    signs."""
    drawn = sorted(
        _base_cases(sampler, "bias", ("tile",) * 4, most=2), key=lambda case: case.definition.cost(case.sizes)
    )
    for distribution in ("positive", "normal"):
        for base in drawn[-min(2, len(sampler.option_sets())) :]:  # where errors add up most
            yield _ordinary(base, distribution, protocol="bias", unused="plain")


def length_cases(sampler: Sampler, *, quick: bool = False) -> list[tuple[int, tuple[Case, ...]]]:
    """Return the lengths that sizes and shapes admit, ascending, each with one case for each distribution; all other
    sizes are small.

    A ``quick`` effort has only numbers of one sign: there a sum keeps an error that all its terms share. Of its lengths
    the second takes the place of those that are too long, if only one is not.
    """
    choose = _chooser(sampler, "lengths")
    base = sampler.case(_least, style="small", options=sampler.option_sets()[0])
    over = _summed_over(base)
    full = {tensor.name: "full" for tensor in base.signature.tensors if tensor.role == "length"}  # sums of all terms
    results: dict[int, tuple[Case, ...]] = {}
    for longest in (*QUICK_LENGTHS, LENGTHS[1]) if quick else LENGTHS:
        if quick and longest == LENGTHS[1] and len(results) > 1:
            break
        sizes = _sizes_of_sum(sampler, base, over, longest)
        if sizes is not None:
            cases = [
                _with_distributions(
                    _ordinary(base, data, unused="plain", seed=choose(range(1 << 24)), sizes=sizes), full
                )
                for data in INDEPENDENT[2 if quick else 0 :]
            ]
            results.setdefault(dimension(over, sizes), tuple(cases))
    return sorted(results.items())


def _summed_over(case: Case) -> str:
    """Return the symbol or expression that the op sums over; of an op that says nothing its first tensor's last
    dimension."""
    reduction = case.definition.reduction
    first = next((tensor.dims[-1] for tensor in case.signature.tensors if tensor.dims), "1")
    return reduction.over if reduction is not None else first


def length_of(case: Case) -> int:
    """Return the number of terms of a case's sums; where they differ (sequences end to end) their mean, rounded up."""
    return dimension(f"ceil({_summed_over(case)})", case.sizes)


def _sizes_of_sum(sampler: Sampler, base: Case, over: str, longest: int) -> dict[str, int] | None:
    """Return sizes with as many terms as possible, at most ``longest``; other free sizes are 1 if the case is too
    large.

    ``over`` is the symbol or expression that the op sums over; a symbol's divisor stays as it is.
    """
    dividend, _, divisor = over.partition("/")
    symbols, allowed = symbols_in(dividend), {**base.definition.sizes.allowed, **sampler.shapes}
    least = {symbol: 1 for symbol in sampler.free_symbols(base) if symbol not in symbols}
    for sizes in ({**base.sizes}, {**base.sizes, **least}):
        for symbol in symbols:
            shared = dimension(divisor, sizes) if divisor else 1
            step = base.definition.step(base.signature, symbol, sizes) * shared
            choices: Sequence[int] = range(step, 2 * longest * shared + step, step)  # a little beyond ``longest``
            if symbol in allowed:
                choices = sorted(size for size in allowed[symbol] if size % shared == 0)
            fitting = bisect_right(choices, longest, key=lambda size: dimension(over, {**sizes, symbol: size}))
            if not fitting:
                return None
            sizes = sampler.with_size(sizes, symbol, choices[fitting - 1])
        for tensor in base.signature.tensors:
            if tensor.bound in base.definition.axes.gathered:  # else the same terms recur, and their errors add up
                sizes[tensor.bound] = max(math.prod(tensor.shape(sizes)), sizes[tensor.bound])
        if dimension(over, sizes) <= longest and sampler.fits(sizes):
            return sizes
    return None


def covering_cases(
    factors: Factors, covered: Iterable[Case], examples: int, *, triples: bool = False
) -> Iterator[Case]:
    """Yield cases that cover the most pairs of factors, and ``triples`` if wanted, that ``covered`` leave, and then
    those before them.

    They depend on nothing that was measured, so that the same seed gives the same cases.
    """
    sampler = factors.sampler
    choose, covering = _chooser(sampler, "covering"), Covering(factors, covered, triples=triples)
    for index in range(round(_COVERING_SHARE * examples)):
        case = covering.next_case(choose, _one_of(sampler, _SHARES[index % len(_SHARES)]))
        covering.add(case)
        yield case


def triple_cases(factors: Factors, covered: Iterable[Case]) -> Iterator[Case]:
    """Yield cases that cover every triple of a size, a distribution and an option that ``covered`` leave, small ones
    where those have it."""
    sampler = factors.sampler
    choose, covering = _chooser(sampler, "triples"), Covering(factors, covered, triples=True)
    samplers = (_one_of(sampler, _SMALLER), sampler, sampler)  # twice, as other sizes are drawn at random
    while (triple := covering.triple_left(choose)) is not None:
        case = covering.case_of(triple, choose, samplers)
        if case is not None:
            covering.add(case)
            yield case


def _one_of(sampler: Sampler, share: int) -> Sampler:
    """Return a sampler of cases of one ``share`` of the elements, work and steps."""
    return sampler.limited(sampler.most_elements // share, sampler.most_work // share, share)


def fuzz(sampler: Sampler, examples: int, attempt: Callable[[Case], float | None]) -> None:
    """Call ``attempt`` on up to ``examples`` cases; the search climbs the ratio that it returns (None: stop)."""

    @st.composite
    def cases(draw: Any) -> Case:
        def choose(values: Sequence[Any]) -> Any:
            if isinstance(values, range):
                return values[draw(st.integers(0, len(values) - 1))]
            return draw(st.sampled_from(values))

        share = choose((_SMALLER,) * (_SMALLER - 1) + (1,))
        return sampler.limited(sampler.most_elements // share, sampler.most_work, share).case(choose)

    @hypothesis_seed(sampler.seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.target),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(cases())
    def run(case: Case) -> None:
        ratio = attempt(case)
        if ratio is not None and math.isfinite(ratio):
            target(ratio)

    with without_local_constants():
        run()
