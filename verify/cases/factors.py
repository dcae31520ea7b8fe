"""The factors of an examination, the pairs of their levels that cases cover, and cases that cover more of them.

A factor is what may differ between two cases: the size of a symbol, by class; the value of an option; the distribution
of a tensor's numbers, by kind; its layout; the protocol, the memory and the unused elements. All follow from the
sampler: from the signature, the roles of the tensors and the restrictions, for any op alike.

Most faults of software need at most two factors at certain levels (Kuhn, Wallace & Gallo, *Software fault interactions
and implications for software testing*, 2004). `Covering.next_case` therefore builds each case greedily, level by level,
from those that stand in the most uncovered pairs with the levels chosen before, as AETG does (Cohen et al., *The AETG
system*, 1997). If they are wanted, triples of a size, a distribution and an option count too, each as half a pair. Sets
of levels are bits of whole numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, islice
from typing import Any, TypeVar

from assay.golden.inputs.distributions import kinds_of
from assay.golden.inputs.values import dtype_of
from assay.golden.signature import Signature
from assay.verify.cases.case import Case
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.cases.sampler import BOUNDARIES, MEMORIES, PROTOCOLS, UNUSED, Chooser, Sampler

T = TypeVar("T")
OptionSet = tuple[dict[str, Any], Signature]
Level = tuple[str, str]
"""A factor and one of its levels, in words."""

_TILE = 16  # sizes that are a multiple of it are whole tiles
_ENDS = (1, 8, 64, 512, 4096)  # the largest sizes of the classes
_BEYOND = f"over {_ENDS[-1]:,}"
_MOST_HEADS = 512  # many kernels and definitions go through them one by one
_MOST_NAMED = 4  # levels that no case had; of more only the number is said
_PAIRS_NAMED = 2  # of symbols that no case had large at once
_PAIR = 2  # triples that a pair is worth, which then are hardly fewer
_FEW = 8  # sizes of a restricted symbol, each of which is then a class of its own


def size_class(size: int) -> str:
    """Return the class of a size: by magnitude, and whether it is a whole number of tiles of 16."""
    low = 1
    for high in _ENDS:
        if size <= high:
            whole = size >= _TILE and size % _TILE == 0
            return (f"{low:,} to {high:,}" if low < high else f"{high}") + (" in whole tiles" if whole else "")
        low = high + 1
    return _BEYOND


class Factors:
    """The factors of a sampler's cases: their levels, numbered, and which of them can stand in one case."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.signatures = [(options, sampler.definition.signature(options)) for options in sampler.option_sets()]
        names = dict.fromkeys(symbol for _, signature in self.signatures for symbol in signature.symbols)
        self.symbols = {name: self._classes(name) for name in names if name not in sampler.ties}
        """The sizes of each symbol that isn't tied to another one, by class, ascending."""
        tensors = {tensor.name: tensor for _, signature in self.signatures for tensor in signature.tensors}
        self.kinds = {name: kinds_of(tensor) for name, tensor in tensors.items()}
        """The kinds of each tensor's distributions, with the distributions of each kind."""
        self._kind = {
            name: {drawn: kind for kind, some in kinds.items() for drawn in some} for name, kinds in self.kinds.items()
        }
        self.levels = self._numbered()
        numbers = {
            start: [number for (factor, _), number in self.levels.items() if factor.startswith(start)]
            for start in ("size of ", "option ", "values of ")
        }
        self.sizes, self.options, self.values = (sum(1 << each for each in some) for some in numbers.values())
        """The levels of sizes, of options and of distributions."""
        self.impossible: dict[tuple[int, int], int] = {}
        """The distributions that no case can have with a pair of a size and an option, though with either."""

    @cached_property
    def feasible(self) -> list[int]:
        """The levels that can stand in one case with each level, within the restrictions and limits, by number."""
        everywhere = {together for together, _ in self._kinds_of_sets}
        own: dict[str, int] = {}
        for (factor, _), number in self.levels.items():
            own[factor] = own.get(factor, 0) | 1 << number
        result = [0] * len(self.levels)
        for (factor, _), number in self.levels.items():
            for together in everywhere:
                if together >> number & 1:
                    result[number] |= together & ~own[factor]
        for one, other in self._sizes_apart():
            result[one] &= ~(1 << other)
            result[other] &= ~(1 << one)
        return result

    def levels_of(self, case: Case) -> Iterator[int]:
        """Yield the number of each factor's level in a case."""
        pairs = [(f"size of {name}", self._class(name, size)) for name, size in case.sizes.items()]
        pairs += [(f"option {name}", repr(value)) for name, value in case.options.items()]
        for tensor in case.signature.tensors:
            kinds = self._kind[tensor.name]
            plainest = next(iter(kinds.values()))
            pairs.append((f"values of {tensor.name}", kinds.get(case.values.get(tensor.name, ""), plainest)))
            pairs.append((f"layout of {tensor.name}", case.layouts.get(tensor.name, LAYOUTS[0])))
        pairs += [("protocol", case.protocol), ("memory", case.memory), ("unused elements", case.unused)]
        return (self.levels[pair] for pair in pairs if pair in self.levels)

    def triples(self) -> Iterator[tuple[int, int, int]]:
        """Yield each size with each option, and the distributions that may stand with both."""
        for size in _bits(self.sizes):
            for option in _bits(self.feasible[size] & self.options):
                could = self.feasible[size] & self.feasible[option] & self.values
                yield size, option, could & ~self.impossible.get((size, option), 0)

    def admitting(self, sampler: Sampler, wanted: int) -> list[OptionSet]:
        """Return the option sets under which a case may have the levels ``wanted``."""
        fits: dict[str, bool] = {}
        sizes = {
            name: sizes
            for name, classes in self.symbols.items()
            for level, sizes in classes.items()
            if wanted >> self.levels.get((f"size of {name}", level), len(self.levels)) & 1
        }
        results = []
        for each, (together, kind) in zip(self.signatures, self._kinds_of_sets, strict=True):
            if wanted & ~together:
                continue
            if kind not in fits:
                fits[kind] = self.fitting(sampler, *each, sizes) is not None
            results += [each] if fits[kind] else []
        return results

    @cached_property
    def _kinds_of_sets(self) -> list[tuple[int, str]]:
        """Of each option set the levels that can occur, and what its sizes hang on."""
        return [(self._together(*each), self._restriction(*each)) for each in self.signatures]

    def _restriction(self, options: Mapping[str, Any], signature: Signature) -> str:
        """Return the symbols of an option set, and what restricts their sizes."""
        bounds = [options[name] for name in self.sampler.definition.sizes.minimum.values()]
        return str((signature.symbols, signature.steps, bounds))

    def listed(self, options: Mapping[str, Any]) -> list[Level]:
        """Return the levels of the options that are varied."""
        return [(f"option {name}", repr(options[name])) for name in self.sampler.options]

    def in_order(self, signature: Signature, choose: Chooser | None = None) -> list[str]:
        """Return the symbols to draw, in random order if wished, each after the one that it is a multiple of."""
        symbols = [symbol for symbol in signature.symbols if symbol in self.symbols]
        symbols = symbols if choose is None else shuffled(symbols, choose)
        return sorted(symbols, key=lambda symbol: symbol in self.sampler.definition.sizes.multiples)

    def fitting(
        self,
        sampler: Sampler,
        options: Mapping[str, Any],
        signature: Signature,
        wanted: Mapping[str, Sequence[int]],
    ) -> dict[str, int] | None:
        """Return sizes of those in ``wanted``, the others at their least; None if none are possible within the limits
        of ``sampler``."""
        order = self.in_order(signature)
        multiples = sampler.definition.sizes.multiples

        def extended(sizes: dict[str, int]) -> dict[str, int] | None:
            if len(sizes) == len(order):
                return sizes if sampler.fits(sizes, signature) else None
            symbol = order[len(sizes)]
            step, least = sampler.step(signature, symbol, sizes), self._least(symbol, options)
            if symbol in wanted:
                possible = self._multiples(symbol, wanted[symbol], step, least)
                possible = possible if symbol in multiples.values() else possible[:1]
            else:
                dividends = [
                    wanted[name] for name, partner in multiples.items() if partner == symbol and name in wanted
                ]
                possible = self._smallest(symbol, step, max(least, 1), dividends)
            for size in possible:
                result = extended({**sizes, symbol: size})
                if result is not None:
                    return result
            return None

        return extended({})

    def _smallest(self, symbol: str, step: int, least: int, dividends: Sequence[Sequence[int]]) -> list[int]:
        """Return the smallest size that is a multiple of ``step``, not below ``least``, and divides one of each of the
        ``dividends``; an empty list if there is none."""
        listed = self.sampler.shapes.get(symbol) or self.sampler.definition.sizes.allowed.get(symbol)
        sizes: Iterable[int] = sorted(listed) if listed else range(-(-least // step) * step, BOUNDARIES[-1], step)
        fitting = (size for size in sizes if size >= least and size % step == 0)
        dividing = (size for size in fitting if all(any(n % size == 0 for n in some) for some in dividends))
        return list(islice(dividing, 1))

    def of_class(
        self, options: Mapping[str, Any], signature: Signature, symbol: str, name: str, sizes: Mapping[str, int]
    ) -> list[int]:
        """Return sizes of a symbol of this class that go with the ``sizes`` of the symbols before it."""
        step = self.sampler.step(signature, symbol, sizes)
        return self._multiples(symbol, self.symbols[symbol][name], step, self._least(symbol, options))

    def _least(self, symbol: str, options: Mapping[str, Any]) -> int:
        return int(options.get(self.sampler.definition.sizes.minimum.get(symbol, ""), 0))

    def _multiples(self, symbol: str, sizes: Sequence[int], step: int, least: int) -> list[int]:
        """Return the sizes that are multiples of ``step`` and not below ``least``; of a free symbol without any, the
        first such size of the same class."""
        fitting = [size for size in sizes if size >= least and size % step == 0]
        if fitting or symbol in self.sampler.shapes or symbol in self.sampler.definition.sizes.allowed:
            return fitting
        name, first = self._class(symbol, sizes[0]), -(-max(sizes[0], least, 1) // step) * step
        others = (first + index * step for index in range(_TILE + 1))
        return list(islice((other for other in others if self._class(symbol, other) == name), 1))

    def _numbered(self) -> dict[Level, int]:
        """Number the levels of all factors that have several."""
        factors: dict[str, Sequence[str]] = {f"size of {name}": list(sizes) for name, sizes in self.symbols.items()}
        factors |= {f"option {name}": list(map(repr, values)) for name, values in self.sampler.options.items()}
        for name, kinds in self.kinds.items():
            factors |= {f"values of {name}": list(kinds), f"layout of {name}": self.sampler.layouts}
        factors |= {"protocol": list(dict.fromkeys(PROTOCOLS)), "memory": list(dict.fromkeys(MEMORIES))}
        if self.sampler.definition.inputs.unused is not None:
            factors["unused elements"] = UNUSED
        pairs = ((name, level) for name, levels in factors.items() if len(levels) > 1 for level in levels)
        return {pair: number for number, pair in enumerate(pairs)}

    def _classes(self, symbol: str) -> dict[str, tuple[int, ...]]:
        known = self.sampler.shapes.get(symbol) or self.sampler.definition.sizes.allowed.get(symbol)
        most = _MOST_HEADS if symbol in self.sampler.definition.axes.groups else BOUNDARIES[-1]
        sizes = sorted({*known} - {0}) if known else [size for size in BOUNDARIES if size <= most]
        result: dict[str, list[int]] = {}
        for size in sizes:
            result.setdefault(self._class(symbol, size), []).append(size)
        return {name: tuple(some) for name, some in result.items()}

    def _class(self, symbol: str, size: int) -> str:
        restricted = self.sampler.shapes.get(symbol, ())
        return str(size) if 0 < len(restricted) <= _FEW else size_class(size)

    def _together(self, options: Mapping[str, Any], signature: Signature) -> int:
        """Return the levels that can occur under an option set."""
        factors = {f"size of {symbol}" for symbol in signature.symbols}
        factors |= {f"{what} of {tensor.name}" for tensor in signature.tensors for what in ("values", "layout")}
        factors |= {"protocol", "memory", "unused elements"}
        chosen = {*self.listed(options)}
        return sum(1 << number for level, number in self.levels.items() if level[0] in factors or level in chosen)

    def _sizes_apart(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of levels of sizes that no case can have, by steps or because it would be too large; of a level
        that no case can have at all, it with every other one.

        Of two symbols whose sizes don't hang on each other all larger ones are too large where one is.
        """
        possible: dict[str, list[str]] = {}
        for one, sizes in self.symbols.items():
            possible[one] = [name for name in sizes if self._can_be({one: name})]
            impossible = [name for name in sizes if name not in possible[one]] if len(sizes) > 1 else []
            for number in (self.levels[f"size of {one}", name] for name in impossible):
                yield from ((number, other) for other in self.levels.values())
        symbols = [name for name, sizes in self.symbols.items() if len(sizes) > 1]
        divisors = self.sampler.definition.sizes.multiples.values()
        for position, one in enumerate(symbols):
            for other in symbols[position + 1 :]:
                second, hang = possible[other], one in divisors or other in divisors
                most = len(second)  # classes of the other symbol that fit the class before
                for name in possible[one]:
                    while not hang and most and not self._can_be({one: name, other: second[most - 1]}):
                        most -= 1
                    for index, partner in enumerate(second):
                        if not self._can_be({one: name, other: partner}) if hang else index >= most:
                            yield self.levels[f"size of {one}", name], self.levels[f"size of {other}", partner]

    def _can_be(self, wanted: Mapping[str, str]) -> bool:
        """Whether a case within the limits can have sizes of these classes, all other symbols being at their least."""
        sizes = {symbol: self.symbols[symbol][name] for symbol, name in wanted.items()}
        return any(
            self.fitting(self.sampler, options, signature, sizes) is not None
            for options, signature in self._distinct
            if {*wanted} <= {*signature.symbols}
        )

    @cached_property
    def _distinct(self) -> list[tuple[dict[str, Any], Signature]]:
        """One option set for each set of symbols, and of what restricts them."""
        kinds = (kind for _, kind in self._kinds_of_sets)
        return list(dict(reversed([*zip(kinds, self.signatures, strict=True)])).values())


class Covering:
    """The pairs of levels that cases have covered so far; with ``triples`` also those of a size, a distribution and an
    option."""

    def __init__(self, factors: Factors, cases: Iterable[Case] = (), *, triples: bool = False) -> None:
        self.factors = factors
        self._triples: dict[tuple[int, int], int] | None = {} if triples else None
        """The distributions with which each pair of a size and an option has stood."""
        self._given_up: dict[tuple[int, int], int] = {}  # those with which no case of it was found
        self._covered = [0] * len(factors.levels)  # the levels with which each level has stood in a case
        self._largest: dict[str, int] = {}
        self._most_elements = 0  # of a tensor
        self._both: dict[tuple[str, str], int] = {}  # the largest size that both symbols of a pair reached at once
        self._drawn: Counter[tuple[str, int]] = Counter()  # sizes of each magnitude in bits, by symbol
        for case in cases:
            self.add(case)

    def add(self, case: Case) -> None:
        """Count the pairs of a case; one without elements covers none."""
        if 0 in case.sizes.values():
            return
        numbers = list(self.factors.levels_of(case))
        row = sum(1 << number for number in numbers)
        for number in numbers:
            self._covered[number] |= row
        if self._triples is not None:
            for pair in self._sized_options(row):
                self._triples[pair] = self._triples.get(pair, 0) | row & self.factors.values
        for name, size in case.sizes.items():
            self._largest[name] = max(size, self._largest.get(name, 0))
        counts = (math.prod(case.shape(tensor)) for tensor in (*case.signature.tensors, *case.signature.returns))
        self._most_elements = max(self._most_elements, *counts)
        for symbols in combinations(case.sizes, 2):
            self._both[symbols] = max(min(case.sizes[symbol] for symbol in symbols), self._both.get(symbols, 0))

    @property
    def pairs(self) -> tuple[int, int]:
        """How many feasible pairs are covered, and how many there are."""
        feasible = self.factors.feasible
        done = sum((mask & could).bit_count() for mask, could in zip(self._covered, feasible, strict=True))
        return done // 2, sum(could.bit_count() for could in feasible) // 2

    @property
    def triples(self) -> tuple[int, int]:
        """How many feasible triples of a size, a distribution and an option are covered, and how many there are."""
        done, total = 0, 0
        for size, option, could in self.factors.triples():
            done += (could & (self._triples or {}).get((size, option), 0)).bit_count()
            total += could.bit_count()
        return done, total

    def triple_left(self, choose: Chooser) -> tuple[int, int, int] | None:
        """Return a size, an option and a distribution that no case has had together, of the two of which the most are
        left; None if none is."""
        had, given_up = self._triples or {}, self._given_up
        left = (
            (could & ~had.get((size, option), 0) & ~given_up.get((size, option), 0), size, option)
            for size, option, could in self.factors.triples()
        )
        values, size, option = max(left, key=lambda each: each[0].bit_count(), default=(0, 0, 0))
        return (size, option, choose(list(_bits(values)))) if values else None

    def _sized_options(self, row: int) -> Iterator[tuple[int, int]]:
        """Yield the pairs of a size and an option among the levels of ``row``."""
        options = list(_bits(row & self.factors.options))
        for size in _bits(row & self.factors.sizes):
            yield from ((size, option) for option in options)

    def _triples_with(self, number: int, row: int) -> int:
        """Return in how many uncovered triples a level stands with levels of ``row``; a size: with any distribution."""
        if self._triples is None or 1 << number & self.factors.options:
            return 0
        if 1 << number & self.factors.sizes:
            values = self.factors.feasible[number] & self.factors.values
            options = _bits(row & self.factors.options)
            return sum((values & ~self._triples.get((number, option), 0)).bit_count() for option in options)
        pairs = self._sized_options(row) if 1 << number & self.factors.values else ()
        return sum(not self._triples.get(pair, 0) >> number & 1 for pair in pairs)

    @property
    def _own_sizes(self) -> set[str]:
        """The symbols that can't have any size, or count what is much alike."""
        definition, signature = self.factors.sampler.definition, self.factors.signatures[0][1]
        listed = {*definition.sizes.allowed, *definition.sizes.multiples, *definition.sizes.multiples.values()}
        return listed | {name for name in self._largest if self.factors.sampler.is_batch(signature, name)}

    @property
    def left_out(self) -> str:
        """What no case has covered, in words: sizes beyond the largest, one or two at once, levels, then the factors of
        most pairs."""
        factors, names = self.factors, list(self.factors.levels)
        free = [name for name in factors.symbols if name not in factors.sampler.shapes]
        words = [f"tensors > {self._most_elements:,} elements"] if free else []
        words += [f"{name} > {self._largest[name]:,}" for name in free if name in self._largest]
        both = sorted((size, pair) for pair, size in self._both.items() if {*pair} <= {*free} - self._own_sizes)
        words += [f"{' and '.join(pair)} > {size:,} at once" for size, pair in both[:_PAIRS_NAMED]]
        untried = {number for number, mask in enumerate(self._covered) if factors.feasible[number] and not mask}
        levels = [f"{level} as {factor}" for factor, level in (names[number] for number in sorted(untried))]
        words += levels if len(levels) <= _MOST_NAMED else [f"{len(levels)} levels of factors"]
        counts: Counter[tuple[str, str]] = Counter()
        for number, left in enumerate(self._left):
            others = (other for other in _bits(left) if other > number and not untried & {number, other})
            counts.update((names[number][0], names[other][0]) for other in others)
        left_out = [f"{', '.join(words)}: not tried"] if words else []
        if counts:
            (one, other), count = counts.most_common(1)[0]
            left_out.append(f"{counts.total():,} pairs left, {count} of them of {one} with {other}")
        done, total = self.triples if self._triples is not None else (0, 0)
        if done < total:
            left_out.append(f"of {total:,} triples of a size, a distribution and an option {total - done:,} left")
        return "; ".join(left_out)

    def case_of(self, triple: tuple[int, int, int], choose: Chooser, samplers: Sequence[Sampler]) -> Case | None:
        """Return a case of a triple, within the limits of the first of ``samplers`` for which one is found; else None,
        and it is given up.

        What no option set admits is impossible, and counts no more. Where not even the size came, as another one
        prevents it, the triples of the same size and option are given up too.
        """
        size, option, values = triple
        wanted, came = sum(1 << number for number in triple), 0
        if not self.factors.admitting(samplers[-1], wanted):
            self.factors.impossible[size, option] = self.factors.impossible.get((size, option), 0) | 1 << values
            return None
        for sampler in samplers:
            case = self.next_case(choose, sampler, wanted)
            has = sum(1 << number for number in self.factors.levels_of(case))
            if not wanted & ~has:
                return case
            came |= has & 1 << size
        given_up = 1 << values if came else self.factors.values
        self._given_up[size, option] = self._given_up.get((size, option), 0) | given_up
        return None

    def next_case(self, choose: Chooser, sampler: Sampler, wanted: int = 0) -> Case:
        """Return a case of the most uncovered pairs, within the limits of ``sampler``; it counts only once added.

        ``wanted`` are levels that it has if some case can.
        """
        factors, left, row = self.factors, self._left, 0

        def gain(level: Level) -> tuple[int, int, int]:
            number = factors.levels.get(level)
            if number is None:
                return 0, 0, 0
            pairs, triples = (left[number] & row).bit_count(), self._triples_with(number, row)
            if factors.values >> number & 1:
                pairs += (left[number] & row & factors.values).bit_count()
            return _PAIR * pairs + triples, left[number].bit_count(), choose(range(1 << 16))

        def is_wanted(level: Level) -> bool:
            return level in factors.levels and bool(wanted >> factors.levels[level] & 1)

        def best(factor: str, levels: Iterable[str], possible: Callable[[str], bool] = bool) -> str:
            """Take the possible level of most gain; return it, or an empty string if none is possible."""
            nonlocal row
            named = [(factor, level) for level in levels]
            ordered = sorted(list(filter(is_wanted, named)) or named, key=gain, reverse=True)
            taken = next((level for level in ordered if possible(level[1])), (factor, ""))
            row |= 1 << factors.levels[taken] if taken in factors.levels else 0
            return taken[1]

        sets = factors.signatures
        if wanted:  # under other options a tensor may be missing, or a size be too small
            sets = factors.admitting(sampler, wanted) or sets
        for name in factors.sampler.options:
            taken = best(f"option {name}", dict.fromkeys(repr(options[name]) for options, _ in sets))
            sets = [each for each in sets if repr(each[0][name]) == taken]
        options, signature = next(
            (options, signature)
            for options, signature in factors.signatures
            if all(row >> factors.levels[level] & 1 for level in factors.listed(options) if level in factors.levels)
        )
        sizes: dict[str, int] = {}
        symbols, multiples = factors.in_order(signature, choose), sampler.definition.sizes.multiples
        first = {
            name for name in symbols if any(is_wanted((f"size of {name}", each)) for each in factors.symbols[name])
        }
        for symbol in sorted(symbols, key=lambda name: (name in multiples, name not in first)):
            drawn: dict[str, int] = {}

            def possible(name: str, symbol: str = symbol, drawn: dict[str, int] = drawn) -> bool:
                drawn[name] = self._size(sampler, options, signature, symbol, name, sizes, choose)
                return drawn[name] > 0

            name = best(f"size of {symbol}", factors.symbols[symbol], possible)
            if not name:  # no class of the symbol goes with the sizes before it
                return sampler.case(choose, options=options)
            sizes[symbol] = drawn[name]
            self._drawn[symbol, drawn[name].bit_length()] += 1
        drawn_from: dict[str, str] = {}
        layouts: dict[str, str] = {}
        for tensor in shuffled(signature.tensors, choose):
            kinds = factors.kinds[tensor.name]
            drawn_from[tensor.name] = choose(kinds[best(f"values of {tensor.name}", kinds)])
            layouts[tensor.name] = best(f"layout of {tensor.name}", sampler.layouts)
        unused = sampler.definition.inputs.unused is not None
        complete = sampler.tied_sizes({symbol: sizes.get(symbol, 0) for symbol in signature.symbols})
        return Case(
            spec=sampler.definition.qualified_name,
            sizes=complete,
            dtypes={tensor.name: dtype_of(tensor, sampler.dtype) for tensor in signature.tensors},
            options=options,
            values={tensor.name: drawn_from[tensor.name] for tensor in signature.tensors},
            layouts={tensor.name: layouts[tensor.name] for tensor in signature.tensors},
            seed=choose(range(1 << 24)),
            out_dtype=sampler.out_dtype,
            memory=best("memory", dict.fromkeys(MEMORIES)),
            protocol=best("protocol", dict.fromkeys(PROTOCOLS)),
            unused=best("unused elements", UNUSED) if unused else "plain",
        )

    @property
    def _left(self) -> list[int]:
        """The levels with which each level has yet to stand."""
        return [could & ~mask for mask, could in zip(self._covered, self.factors.feasible, strict=True)]

    def _size(
        self,
        sampler: Sampler,
        options: Mapping[str, Any],
        signature: Signature,
        symbol: str,
        name: str,
        sizes: Mapping[str, int],
        choose: Chooser,
    ) -> int:
        """Return a size of this class, of the magnitude least often drawn, that goes with those of other symbols; 0 if
        there is none."""
        some = self.factors.of_class(options, signature, symbol, name, sizes)
        some = sorted(shuffled(some, choose), key=lambda size: self._drawn[symbol, size.bit_length()])
        chosen = {name: (size,) for name, size in sizes.items()}
        for size in dict.fromkeys((*some[:1], *sorted(some)[:1])):
            if self.factors.fitting(sampler, options, signature, {**chosen, symbol: (size,)}) is not None:
                return size
        return 0


def shuffled(values: Sequence[T], choose: Chooser) -> list[T]:
    """Return the values in random order."""
    return sorted(values, key=lambda _: choose(range(1 << 16)))


def _bits(mask: int) -> Iterator[int]:
    """Yield the positions of the ones of a whole number."""
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1
