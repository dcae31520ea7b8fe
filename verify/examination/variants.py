"""The phase of variants: an ordinary case for each program and path of host code that some size reaches.

Every bucket of a dispatcher is another program, and a size that no case has may run one that nobody has tried. The
kernel is observed along each size by itself, and along all together, for a few of the listed options
(`assay.verify.harness.variants`). Then come cases: first one for each variant; then, unless the effort is quick, the
others of both ends and the middle of each series of sizes that are one variant. The constants with which the kernel's
source compares something are sizes too, of the sizes in turn, with the sizes above and below. Those of one condition
are sizes of two symbols at once, of the symbols that are named so, else of each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from assay.golden.errors import ShapeError
from assay.golden.inputs.recipe import check_sizes
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import MOST_ELEMENTS, MOST_WORK, SMALL, Sampler, real_tensors, with_peak, with_values
from assay.verify.findings import Variant
from assay.verify.harness.constants import Joint
from assay.verify.harness.runner import KernelHarness
from assay.verify.harness.variants import Axis, ObservedVariant, Variants, variants_of

LARGEST = 8192
"""The largest size at which a kernel is observed."""
_LARGEST_TOGETHER = 2048
_OBSERVED = {"quick": (1, 0.5), "usual": (4, 2.0), "thorough": (8, 8.0)}
"""By effort: the most option sets, and seconds of processor time after which no more sizes are tried."""
_LATER_RUNS = 6  # of one variant's series of sizes, beyond the longest three: scattered ones
_FEW_CONSTANTS = 16  # of a quick effort
_FEW_JOINT, _MOST_JOINT = 10, 40  # cases of joint constants, of a quick effort and of others
_BATCH = 4  # constants of which all sizes are tried before those of others
_BESIDE = (67, 35, 19)  # other sizes beside the one that was chosen, no whole tile; the first that keeps a case quick
_WIDENED_ELEMENTS, _WIDENED_WORK = 2**15, 2**20
_MOST_RUNS = 12  # that a verdict lists for one variant and symbol


@dataclass(frozen=True)
class Search:
    """What was observed of a kernel along ``axes``, and the cases to try for it."""

    sampler: Sampler
    axes: Sequence[Axis]
    observed: Variants

    @staticmethod
    def of(harness: KernelHarness, sampler: Sampler, effort: str) -> Search:
        """Observe a kernel."""
        sets, seconds = _OBSERVED[effort]
        drawn = [sampler.case(_smallest, style="small", options=options) for options in sampler.option_sets()[:sets]]
        plain = {"layouts": {}, "protocol": "once", "memory": "plain", "unused": "plain"}
        bases = [with_values(base, "normal", **plain) for base in drawn]
        axes = [axis for base in bases for axis in _axes(sampler, base, runs_all=not harness.call.watch.launches)]
        dense = effort != "quick"
        if harness.isolation is not None:
            return Search(sampler, axes, harness.isolation.variants(axes, seconds, dense=dense))
        return Search(sampler, axes, variants_of(harness, axes, seconds, dense=dense))

    def cases(self, effort: str) -> list[tuple[Case, int | None]]:
        """Return the cases, each with the number of its variant; None for a case of a constant."""
        results: dict[str, tuple[Case, int | None]] = {}
        for case, number in self._drawn(effort):
            results.setdefault(f"{case.sizes} {case.options} {case.edits}", (case, number))
        return list(results.values())

    def programs(self) -> str:
        """Return an expression of the sizes for how many programs a call launches, "3*T*ceil(D/64)"; empty if unknown.

        Along each axis of one symbol the programs are taken to be those of the least observed size once for each block
        of indices, whose size the largest observed one tells.
        """
        factors, blocks, base = list[str](), dict[str, int](), 0
        for axis, counts in zip(self.axes, self.observed.programs, strict=False):
            if axis.base is not self.axes[0].base or len(axis.steps) != 1 or not counts:
                continue
            (symbol,), least, most = axis.steps, min(counts), max(counts)
            size = axis.base.sizes[symbol]
            base = base or counts.get(size, 0)
            if counts[most] <= counts[least]:
                continue
            single = counts[most] * least >= 0.9 * counts[least] * most  # a program for each index
            blocks[symbol] = 1 if single else max(round(most * counts[least] / counts[most]), 1)
            factors.append(symbol if single else f"ceil({symbol}/{blocks[symbol]})")
        if not factors:
            return ""
        at_base = math.prod(-(-self.axes[0].base.sizes[symbol] // block) for symbol, block in blocks.items())
        return "*".join([str(max(round(base / at_base), 1)), *factors])

    def listed(self, tried: Collection[int]) -> tuple[Variant, ...]:
        """Return the variants as a verdict lists them, of which those of the numbers in ``tried`` were tried."""
        return tuple(self._listed(each, number in tried) for number, each in enumerate(self.observed.variants))

    def _listed(self, variant: ObservedVariant, tried: bool) -> Variant:
        runs: dict[str, set[tuple[int, int]]] = {}
        together = all(len(self.axes[index].steps) > 1 for index in variant.runs)
        for index, own in variant.runs.items():
            symbols = self.axes[index].steps
            for symbol in symbols if len(symbols) == 1 or together else ():
                runs.setdefault(symbol, set()).update(own)
        return Variant(
            sizes={symbol: (min(own)[0], max(last for _, last in own)) for symbol, own in runs.items()},
            launches=variant.launches,
            configs=variant.configs,
            tried=tried,
            together=together,
            runs={symbol: tuple(sorted(own)[:_MOST_RUNS]) for symbol, own in runs.items()},
            refusal=variant.refusal,
        )

    def _drawn(self, effort: str) -> Iterator[tuple[Case, int | None]]:
        variants = [(number, each) for number, each in enumerate(self.observed.variants) if not each.refusal]
        for number, variant in variants:
            yield from ((case, number) for case in islice(self._begins(variant), 1))
        quick = effort == "quick"
        joint = (case for pair in self.observed.joint for case in self._together(pair))
        yield from ((case, None) for case in islice(joint, _FEW_JOINT if quick else _MOST_JOINT))
        # a size of one has a program of its own in many a dispatcher, whose condition may be no constant of the source
        constants = (*([1] if variants else ()), *self.observed.constants[: _FEW_CONSTANTS if quick else None])
        for first in range(0, len(constants), _BATCH):  # those of functions that ran come first
            for offset in (0,) if quick else (1, 0, -1):
                sizes = [constant + offset for constant in constants[first : first + _BATCH]]
                yield from self._cheapest_first((self._at(size), None) for size in sizes)
        if not quick:
            yield from self._cheapest_first((self._ends(variant), number) for number, variant in variants)

    def _cheapest_first(self, drawn: Iterable[tuple[Iterator[Case], int | None]]) -> list[tuple[Case, int | None]]:
        cases = [(case, number) for some, number in drawn for case in some]
        return sorted(cases, key=lambda drawn: self.sampler.cost(drawn[0].sizes))

    def _begins(self, variant: ObservedVariant) -> Iterator[Case]:
        """Yield the first size of each series of the variant, the longest series first."""
        for index, runs in variant.runs.items():
            yield from self._cases(index, [first for first, _ in sorted(runs, key=_length, reverse=True)])

    def _ends(self, variant: ObservedVariant) -> Iterator[Case]:
        """Yield both ends and the middle of the longest series, and where some others begin."""
        for index, runs in variant.runs.items():
            longest = sorted(runs, key=_length, reverse=True)
            ends = [value for first, last in longest[:3] for value in (last, first, (first + last) // 2)]
            yield from self._cases(index, [*ends, *(first for first, _ in longest[3 : 3 + _LATER_RUNS])])

    def _at(self, size: int) -> Iterator[Case]:
        """Yield cases in which this is the size of each symbol in turn, of heads with more than one group too."""
        for index, axis in enumerate(self.axes):
            if len(axis.steps) == 1 and size in axis.values:
                for case in self._cases(index, [size]):
                    yield case
                    yield from self._grouped(case, *axis.steps)

    def _grouped(self, case: Case, symbol: str) -> Iterator[Case]:
        """Yield the case with as many groups of this symbol as may share: with one, no index of a head is wrong."""
        groups = self.sampler.definition.axes.groups.get(symbol, "")
        if groups in case.sizes and groups not in self.sampler.shapes:
            size = case.sizes[symbol]
            shared = next((each for each in range(2, size) if size % each == 0), 1)
            more = replace(case, sizes={**case.sizes, groups: max(size // shared, 1)})
            if size > 1 and self._has_time_for(more):
                yield more

    def _together(self, joint: Joint) -> Iterator[Case]:
        """Yield cases in which two constants are the sizes of two symbols, each also with a peak in the last element.

        A constant that is compared with no size by name may be one of heads in a group: of two groups, then.
        """
        axes = [axis for axis in self.axes if len(axis.steps) == 1 and axis.base is self.axes[0].base]
        named = [[axis for axis in axes if name.lower() in map(str.lower, axis.steps)] or axes for name, _ in joint]
        for both in product(*named):
            symbols = [symbol for axis in both for symbol in axis.steps]
            wanted = [(axis, size) for axis, (_, size) in zip(both, joint, strict=True) if size in axis.values]
            if len(wanted) < 2 or symbols[0] == symbols[1]:
                continue
            sizes = both[0].base.sizes
            for axis, size in wanted:
                sizes = replace(axis, base=replace(axis.base, sizes=sizes)).sizes(size)
            for heads, groups in self.sampler.definition.axes.groups.items():
                if heads in symbols and heads not in dict(joint) and groups in sizes:
                    sizes = {**sizes, heads: 2 * sizes[heads], groups: 2 * sizes[groups]}
            case = self._shrunk(replace(both[0].base, sizes=sizes, seed=sum(size for _, size in wanted)), symbols)
            if self._is_valid(case) and self._has_time_for(case):
                case = self._widened(case, symbols)
                yield case
                yield from (with_peak(case, tensor) for tensor in real_tensors(case.signature)[:1])

    def _shrunk(self, case: Case, symbols: Collection[str]) -> Case:
        """Return the case with its other free sizes smaller, as far as an examination has no time for it."""
        if self._has_time_for(case):
            return case
        tensors = len(case.signature.tensors) + len(case.signature.returns)
        sampler = self.sampler.limited(MOST_ELEMENTS // tensors, MOST_WORK)
        others = [symbol for symbol in self.sampler.free_symbols(case) if symbol not in symbols]
        return replace(case, sizes=sampler.halved(case.signature, case.sizes, others))

    def _is_valid(self, case: Case) -> bool:
        try:
            check_sizes(self.sampler.definition, case.signature, case.options, case.sizes)
        except ShapeError:
            return False
        return True

    def _has_time_for(self, case: Case, launched: int = 0) -> bool:
        """Whether an examination has time for a case, whose call launches so many programs."""
        steps, work = self.sampler.cost(case.sizes)
        few = self.sampler.max_steps is None or max(steps, launched) <= self.sampler.max_steps
        return _elements(case) <= MOST_ELEMENTS and work <= MOST_WORK and few

    def _cases(self, index: int, wanted: Iterable[int]) -> Iterator[Case]:
        """Yield the cases along an axis at these values, or those nearest, that an examination has time for."""
        axis = self.axes[index]
        for value in wanted:
            nearest = value if value in axis.values else min(axis.values, key=lambda each: abs(each - value))
            case = self._shrunk(replace(axis.base, sizes=axis.sizes(nearest), seed=value), [*axis.steps])
            # interpreted programs run one after the other
            launched = 0 if self.sampler.max_steps is None else self.observed.launched(index, value)
            if self._has_time_for(case, launched):
                yield self._widened(case, [*axis.steps])

    def _widened(self, case: Case, symbols: Collection[str]) -> Case:
        """Return the case with its other free sizes beyond a tile, as far as it stays quick: a program may be wrong in
        a tail, or a tile, that small sizes don't have.
        """
        if self.sampler.max_steps is not None:
            return case
        sampler = self.sampler.limited(_WIDENED_ELEMENTS, _WIDENED_WORK)
        others = [symbol for symbol in self.sampler.free_symbols(case) if symbol not in symbols]
        for symbol in reversed(others):  # what is summed over mostly comes last
            wider = (sampler.with_size(case.sizes, symbol, size) for size in _BESIDE)
            sizes = next((some for some in wider if sampler.fits(some, case.signature)), case.sizes)
            case = replace(case, sizes=sizes)
        return case


def _axes(sampler: Sampler, base: Case, *, runs_all: bool) -> Iterator[Axis]:
    """Yield the axes of a base case: each symbol that may vary alone, and then all that may have any size, together.

    ``runs_all``: operators of torch run, and aren't recorded as launches are, so that the sizes together stay small.
    """
    definition = sampler.definition
    partners = set(definition.sizes.multiples.values())
    for symbol in base.signature.symbols:
        if symbol in sampler.ties or symbol in partners:
            continue
        step = definition.step(base.signature, symbol, base.sizes)
        known = sampler.shapes.get(symbol) or definition.sizes.allowed.get(symbol)
        option = definition.sizes.minimum.get(symbol)
        least = max(int(base.options[option]), 1) if option else 1
        values: Sequence[int] = range(-(-least // step) * step, LARGEST + 1, step)
        if known:
            values = sorted({size for size in known if size >= least and size % step == 0})
        if len(values) > 1:
            yield Axis(base, {symbol: 1}, sampler.ties, values)
    together = dict.fromkeys(sampler.free_symbols(base), 1)
    last = _LARGEST_TOGETHER
    while runs_all and last > 1 and definition.cost({**base.sizes, **dict.fromkeys(together, last)}) > MOST_WORK:
        last //= 2
    if len(together) > 1:
        yield Axis(base, together, sampler.ties, range(1, last + 1))


def _smallest(values: Sequence[Any]) -> Any:
    """Return the least of the sizes that a symbol may have; 3 if any size will do, so that sums have several terms."""
    if isinstance(values, range):
        return values[0]
    return 3 if tuple(values) == SMALL else min(values)


def _elements(case: Case) -> int:
    return sum(math.prod(case.shape(tensor)) for tensor in (*case.signature.tensors, *case.signature.returns))


def _length(run: tuple[int, int]) -> int:
    return run[1] - run[0]
