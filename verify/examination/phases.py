"""The fixed phases of an examination: cases that are tried whatever the fuzzing finds.

| phase      | cases                                                                                              |
|------------|----------------------------------------------------------------------------------------------------|
| first      | one small ordinary case, which shows whether the kernel is interpreted                              |
| exact      | small integers, powers of two, one-hot rows, ties, equal sizes, one long size: nothing is rounded |
| range      | logits of +-88 and beyond, near the format's ends, subnormals, zeros, factors of any size and sign |
| lone       | one tensor of several is zero or subnormal                                                          |
| seams      | many rows of one element more than a block, a peak in the last element, sequences of many chunks    |
| aligned    | all sizes multiples of the tile at once, as in production: kernels have a separate path for them    |
| special    | NaN and infinities, one at a time, compared by class and index; NaN in all elements that are not read |
| every      | for an elementwise op, every number of a format of 16 bits or fewer                                 |
| invariants | the same call twice; other data first, in other and in the same memory; each row alone; poisoned memory |
| bias       | series of calls with fresh data, whose errors may not all have the same sign                        |
| lengths    | sums of growing length (`lengths`), each also judged by the likely size of rounding errors          |
| beyond     | more than 65,535 rows, or classes, if smaller cases were quick enough                               |
| emitted    | for an interpreted kernel: contracted sums and approximate functions, as in NVIDIA's backend        |
| outside    | for an isolated kernel: one call in a process without a trace of an examination                     |

Scales, weights and slopes over all that their dtype holds, beside ordinary numbers.

The fuzz phase: Hypothesis draws cases and climbs towards larger ratios of error to radius.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings, target
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

from assay.formats.format import format_named
from assay.golden.inputs.distributions import EVERY, EXACT, MIDPOINTS, RANGE, names_of
from assay.golden.signature import TensorSpec, symbols_in
from assay.verify.cases.case import Case
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.cases.sampler import SMALL, Sampler, real_tensors, seeded, with_values
from assay.verify.contract import Contract
from assay.verify.examination.bases import MOST_OPTION_SETS, bases, hash_of


def factor_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases of factors over their whole range: all at once, then each signed scale alone with both signs and
    zero.

    In the small cases a scale's first element is negative, so that a scale of one element is negative too; in the
    others it is zero. Alone, because the signs of two scales could cancel.
    """
    for base in bases(sampler, "vast", ("small", "tile"), most=2):
        ordinary = with_values(base, "normal", layouts={}, protocol="once", memory="plain")
        if vast := {tensor.name: "vast" for tensor in base.signature.tensors if "vast" in names_of(tensor)}:
            yield replace(ordinary, values={**ordinary.values, **vast})
    for seed, style in enumerate(("small", "tile")):
        for base in bases(sampler, "cycled", (style,)):
            ordinary = with_values(base, "normal", layouts={}, protocol="once", memory="plain", seed=seed)
            for tensor in base.signature.tensors:
                if tensor.role == "scale" and format_named(base.dtypes[tensor.name]).signed:
                    yield replace(ordinary, values={**ordinary.values, tensor.name: "cycled"})


_DRAWS = 4  # base cases drawn where each is called many times; the one of least work is taken
_STYLES = {"after_many": ("small",), "alone": ("small", "tile", "tile", "tile", "any", "any")}
_SQUARE, _SHORT = 16, 8  # the size when all are equal; the longest row that is set to -inf throughout
_LONG = (20481, 4097, 1025)  # one more than multiples of blocks, and beyond what one block holds; the first that fits
_SIDE = 256  # 256 x 256 elements hold all numbers of 16 bits
_MOST_STARTS = 64  # the most calls to go through all numbers, if shapes are restricted to small ones
_SPOILED = 4  # cases for each base whose unused elements are NaN, each with another seed
_TILES = (64, 128)  # common tile sizes, for all dimensions at once
_LONG_SUM = (64, 512)  # a tile, and a sum over several of them
_PEAK = 100.0  # far above normal numbers: it dominates a softmax or a norm if it is taken in
# (size, rows): one more than common block sizes; odd numbers of rows, fewer where rows are long
_BLOCK_BOUNDARIES = ((513, 31), (1025, 127), (2049, 3), (4097, 3))

GROWTH = 16
"""How many times larger at most each case of a series of `over_limit_cases` is than the one before."""

# ends beyond 16 bits; each about GROWTH times the one before at most, so that its time can be extrapolated
_GROWING = (17, 257, 2049, 4097, 2**16 + 65)
_FEW = 10 * 2**16  # elements of a tensor with more rows than 16 bits count: about ten for each row
_MANY = 2**21 + 2**17  # the most elements if the op's sizes admit no fewer: about 32 for each row


def gate_cases(sampler: Sampler, style: str, values: str = "normal", draws: int = 1) -> Iterator[Case]:
    """Yield ``draws`` ordinary cases for each option set, on which the check itself is checked."""
    for index, base in enumerate(bases(sampler, "gate", (style,) * draws)):
        yield with_values(base, values, layouts={}, memory="plain", protocol="once", unused="plain", seed=index)


def exact_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases on which the arithmetic of most ops rounds nothing."""
    rounds = any(tensor.bound for options in sampler.option_sets() for tensor in _reals(sampler, options))
    for distribution in (*EXACT, MIDPOINTS) if rounds else EXACT:
        styles = ("any", "any") if distribution == "seesaw" else ("small", "tile")
        for base in bases(sampler, distribution, styles):
            case = with_values(base, distribution, layouts={}, protocol="once", memory="plain")
            yield _with_plain_factors(case, distribution)
    for base in bases(sampler, "least", ("small", "tile"), most=1):  # bfloat16 holds an integer times 2^-127
        plain = with_values(base, "integers", layouts={}, protocol="once", memory="plain")
        least = {tensor.name: "least" for tensor in base.signature.tensors if tensor.role == "scale"}
        if least:
            yield replace(plain, values={**plain.values, **least})
    for base in bases(sampler, "pairs", ("small", "tile"), most=1):  # in any order, and twice at one place
        pairs = {tensor.name: "any" for tensor in base.signature.tensors if tensor.role == "pair"}
        if pairs:
            plain = with_values(base, "integers", layouts={}, protocol="once", memory="plain")
            yield replace(plain, values={**plain.values, **pairs})
    for base in bases(sampler, "square", ("small",), most=1):
        plain = with_values(base, "integers", layouts={}, protocol="once", memory="plain")
        yield replace(plain, sizes={**base.sizes, **dict.fromkeys(sampler.free_symbols(base), _SQUARE)})
    for base in bases(sampler, "long", ("small",), most=1):
        plain = with_values(base, "integers", layouts={}, protocol="once", memory="plain")
        for symbol in sampler.free_symbols(base):
            longer = [sizes for size in _LONG if sampler.fits(sizes := {**base.sizes, symbol: size})]
            if longer and symbol not in base.definition.axes.grid:
                yield replace(plain, sizes=longer[0])


def range_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases at the ends of the format's range; in some the first tensor is drawn from "above", the others from
    "below"."""
    for base in bases(sampler, "opposed", ("small", "tile")):
        opposed = with_values(base, "below", layouts={}, protocol="once", memory="plain")
        first = next(iter(opposed.values))
        if opposed.values[first] == "below":
            yield replace(opposed, values={**opposed.values, first: "above"})
    yield from factor_cases(sampler)
    for distribution in RANGE:
        for base in bases(sampler, distribution, ("small", "tile")):
            yield with_values(base, distribution, layouts={}, protocol="once", memory="plain")


def single_operand_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases in which one of several tensors is zero or subnormal, which shows the effect of the others by
    itself."""
    for kind, others in (("zeros", "near_overflow"), ("subnormal", "normal")):
        for base in bases(sampler, kind + " alone", ("small",) * (2 if len(sampler.option_sets()) <= 2 else 1)):
            case = with_values(base, others, layouts={}, protocol="once", memory="plain")
            far = {t.name: "far" for t in case.signature.tensors if t.role == "lse"}
            tensors = real_tensors(case.signature)
            for tensor in [tensor for tensor in tensors if kind in names_of(tensor)] if len(tensors) > 1 else ():
                yield replace(case, values={**case.values, **far, tensor.name: kind})


def block_boundary_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases of many rows, each one element longer than a block: faults in what a block passes on show most there.

    In the last ones the final element is far above the others. Then come sequences of many chunks (`Sizes.long`).
    """
    choose = seeded(hash_of("seams", sampler.seed))
    base = sampler.case(_slim, style="small", options=choose(sampler.option_sets()))
    free, rows = sampler.free_symbols(base), _rows(base)
    for symbol in free:
        for size, count in _BLOCK_BOUNDARIES if symbol not in (*base.definition.axes.grid, rows) else ():
            sizes = {**base.sizes, **({rows: count} if rows in free else {}), symbol: size}
            fits = sampler.fits(sizes)
            for distribution in ("normal", "wide")[: 1 + (count > 3)] if fits else ():
                case = with_values(base, distribution, layouts={}, protocol="once", memory="plain")
                case = replace(case, sizes=sizes, seed=choose(range(1 << 24)))
                yield case
            first = next((tensor for tensor in real_tensors(base.signature) if symbol in tensor.dims), None)
            if first is not None and fits and all(case.shape(first)):
                last = tuple(extent - 1 for extent in case.shape(first))
                yield replace(with_values(case, "normal"), edits=((first.name, last, _PEAK),))
    for symbol, long in base.definition.sizes.long.items():
        fitting = [sizes for size in long if sampler.fits(sizes := {**base.sizes, symbol: size})]
        if fitting and symbol not in sampler.shapes:
            case = with_values(base, "normal", layouts={}, protocol="once", memory="plain")
            yield replace(case, sizes=fitting[0], seed=choose(range(1 << 24)))


def aligned_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases whose sizes are all whole tiles, which sizes drawn one by one hardly ever are; then a longer sum."""
    choose = seeded(hash_of("aligned", sampler.seed))
    sets = sampler.option_sets()
    for options in sets if len(sets) <= MOST_OPTION_SETS else [choose(sets) for _ in range(MOST_OPTION_SETS)]:
        base = sampler.case(_two, style="small", options=options)
        over = symbols_in(base.definition.reduction.over) if base.definition.reduction is not None else ()
        for data, size, longest in (*(("normal", tile, tile) for tile in _TILES), ("positive", *_LONG_SUM)):
            sizes = _aligned(sampler, base, {symbol: longest if symbol in over else size for symbol in base.sizes})
            if sizes != base.sizes and (over or size == longest):
                seed = choose(range(1 << 24))
                case = with_values(base, data, layouts={}, protocol="once", memory="plain", unused="plain", seed=seed)
                yield replace(case, sizes=sizes)


def _two(values: Sequence[Any]) -> Any:
    return 2 if 2 in values else values[0] if isinstance(values, range) else min(values)


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
    """Yield series of cases that end with more rows, or classes, than 16 bits count. All other sizes are small.

    The smaller cases of a series tell how long the last one will take.
    """
    choose = seeded(hash_of("beyond", sampler.seed))
    base = sampler.case(_slim, style="small", options=choose(sampler.option_sets()))
    base = with_values(base, "normal", layouts={}, protocol="once", memory="plain", seed=choose(range(1 << 24)))
    labels = [tensor for tensor in base.signature.tensors if tensor.role == "label"]
    for symbol in (_rows(base), *(tensor.bound for tensor in labels)):
        if symbol in sampler.shapes or symbol not in (*base.definition.axes.grid, *sampler.free_symbols(base)):
            continue
        last = {tensor.name: "last" for tensor in labels if tensor.bound == symbol}
        step = base.definition.step(base.signature, symbol, base.sizes)
        sizes = [_slimmed(sampler, base, symbol, -(-size // step) * step) for size in _GROWING]
        if all(sizes):
            yield [replace(base, sizes=some, values={**base.values, **last}) for some in sizes if some]


def _rows(case: Case) -> str:
    """Return the symbol that a kernel's programs are spread over: independent rows, or the first dimension; else
    empty."""
    return case.definition.row_axis(case.options) or next(iter(case.signature.tensors[0].leading), "")


def _slim(values: Sequence[Any]) -> Any:
    """Return the least of the sizes that a symbol may have; 3 if any size will do, so that sums have several terms."""
    if isinstance(values, range):  # ascending, and perhaps of all seeds
        return values[0]
    return 3 if tuple(values) == SMALL else min(values)


def _slimmed(sampler: Sampler, base: Case, symbol: str, size: int) -> dict[str, int] | None:
    """Return sizes with ``symbol`` at ``size``, and free ones set to 1 while a tensor has too many elements."""
    sizes, tensors = {**base.sizes, symbol: size}, (*base.signature.tensors, *base.signature.returns)
    for other in sampler.free_symbols(base):
        if other != symbol and max(math.prod(tensor.shape(sizes)) for tensor in tensors) > _FEW:
            sizes[other] = 1
    return sizes if max(math.prod(tensor.shape(sizes)) for tensor in tensors) <= _MANY else None


def special_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield cases with one NaN or infinity, at both ends and in the middle of each tensor."""
    for base in bases(sampler, "special", ("small", "tile"), most=2, draws=_DRAWS):
        plain = with_values(base, "normal", layouts={}, protocol="once", memory="plain", unused="plain")
        if plain.definition.inputs.unused is not None:
            for other in range(_SPOILED):
                yield replace(plain, unused="nan", seed=plain.seed + other)
        for tensor in plain.signature.tensors:
            if tensor.role != "scale" or not all(shape := plain.shape(tensor)):
                continue
            if format_named(plain.dtypes[tensor.name]).bits == 8:
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
                *(((0.0, -0.0),) if plain.definition.axes.elementwise else ()),
            ):
                if math.isinf(value) and not format_named(plain.dtypes[tensor.name]).infinities:
                    continue
                index = tuple(round(fraction * (size - 1)) for size in shape)
                yield replace(plain, edits=((tensor.name, index, value),))
            if format_named(plain.dtypes[tensor.name]).infinities:
                middle = tuple((size - 1) // 2 for size in shape)
                zeros = with_values(plain, "ties", seed=plain.seed + 1)  # zero times infinity
                yield replace(zeros, edits=((tensor.name, middle, math.inf),))
                if tensor.name == plain.signature.tensors[0].name and len(shape) == 2 and shape[1] <= _SHORT:
                    yield replace(
                        plain, edits=tuple((tensor.name, (0, position), -math.inf) for position in range(shape[1]))
                    )


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
    numbers = 2 ** format_named(base.dtypes[tensor.name]).bits
    starts = [start for start in starts if start < numbers]
    for options in sampler.option_sets()[:MOST_OPTION_SETS]:
        for start in starts if len(starts) <= _MOST_STARTS else ():
            case = with_values(base, "normal", layouts={}, protocol="once", memory="plain", sizes=sizes, seed=start)
            yield replace(case, options=options, values={tensor.name: EVERY})


def invariant_cases(sampler: Sampler, contract: Contract) -> Iterator[Case]:
    """Yield cases of repeated calls, of poisoned memory, and of every layout."""
    alone = ["alone"] if contract.batch_invariant else []
    protocols = ["repeat", "after_other", "after_refill", "after_many", *alone]
    for protocol in protocols:
        styles = _STYLES.get(protocol, ("small", "tile", "any"))
        for base in bases(sampler, protocol, styles, most=2, draws=_DRAWS if protocol == "after_many" else 1):
            case = with_values(base, "normal", layouts={}, protocol=protocol, memory="plain")
            yield case
            rows = case.definition.row_axis(case.options)
            if (
                protocol == "alone" and rows is not None and rows not in sampler.shapes
            ):  # an odd and an even number of rows
                yield replace(case, sizes={**case.sizes, rows: case.sizes[rows] + 1})
    for memory in ("nan", "huge"):
        for base in bases(sampler, memory, ("small", "tile", "tile", "any"), most=2):
            yield with_values(base, "normal", layouts={}, protocol="once", memory=memory)
    for base in bases(sampler, "empty", ("small",), most=1):
        for symbol in base.definition.sizes.may_be_zero:
            if symbol in base.sizes and 0 in sampler.shapes.get(symbol, (0,)):
                yield with_values(
                    base, "normal", layouts={}, protocol="once", memory="nan", sizes={**base.sizes, symbol: 0}
                )
    for layout in sampler.layouts:
        if layout != LAYOUTS[0]:
            for base in bases(sampler, layout, ("small", "tile"), most=2):
                names = [tensor.name for tensor in base.signature.tensors]
                yield with_values(base, "normal", layouts=dict.fromkeys(names, layout), protocol="once", memory="plain")


def emitted_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield ordinary cases to be tried with the arithmetic that NVIDIA's backend emits."""
    for base in bases(sampler, "emitted", ("small", "tile"), most=2):
        yield with_values(base, "normal", layouts={}, protocol="emitted", memory="plain", unused="plain")


def outside_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield one case to be tried in a plain process."""
    for base in bases(sampler, "outside", ("tile",), most=1):
        yield with_values(base, "normal", layouts={}, protocol="outside", memory="plain", unused="plain")


def bias_cases(sampler: Sampler) -> Iterator[Case]:
    """Yield series of calls (`assay.verify.comparison.bias`): numbers of one sign, where errors add up, and of both
    signs."""
    drawn = sorted(bases(sampler, "bias", ("tile",) * 4, most=2), key=lambda case: case.definition.cost(case.sizes))
    for distribution in ("positive", "normal"):
        for base in drawn[-min(2, len(sampler.option_sets())) :]:  # where errors add up most
            yield with_values(base, distribution, layouts={}, protocol="bias", memory="plain", unused="plain")


def _reals(sampler: Sampler, options: Mapping[str, Any]) -> list[TensorSpec]:
    return real_tensors(sampler.definition.signature(options))


def _with_plain_factors(case: Case, distribution: str) -> Case:
    """Return the case with powers of two for scales and shares that lack ``distribution``: products stay exact."""
    kinds = {tensor.name: names_of(tensor) for tensor in case.signature.tensors if tensor.role in ("scale", "weight")}
    plain = {name: "powers" for name, known in kinds.items() if distribution not in known}
    return replace(case, values={**case.values, **plain})


_SMALLER = 8  # all but one in 8 fuzzed cases have at most an 8th of the elements and steps: more cases per second


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

    run()
