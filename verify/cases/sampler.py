"""Sampling of cases: sizes at block boundaries, and a distribution and a layout for each tensor.

`Sampler` draws with a chooser, a function that picks an element of a sequence: a seeded generator in the fixed phases,
Hypothesis in the fuzz phase.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from assay.golden.inputs.distributions import GENERAL, names_of
from assay.golden.inputs.values import dtype_of
from assay.golden.registry import Spec
from assay.golden.signature import Signature, TensorSpec, dimension
from assay.verify.cases.case import Case
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.errors import SettingError

Chooser = Callable[[Sequence[Any]], Any]

SMALL = (1, 2, 3, 4, 5, 6, 7, 8)
TILE = (15, 16, 17, 31, 32, 33, 37, 61, 63, 64, 65, 97, 127, 128, 129, 131)
LARGE = (255, 256, 257, 300, 384, 511, 513, 767, 768, 1000, 1023, 1025)
HUGE = (1279, 2049, 4095, 4096, 5003, 8193)
VAST = (*HUGE, 32769)  # of columns and what is summed over: each row may be a program of an interpreted kernel
_BUCKETS = (12, 24, 40, 48, 80, 96, 100, 112, 160, 192, 200, 224, 320, 448, 512, 640, 896, 1024, 1536, 2048, 3072, 3584)
BOUNDARIES = tuple(sorted({*SMALL, *TILE, *LARGE, *VAST, *_BUCKETS}))
"""Sizes that cases cover the classes of sizes with: about tiles, and those for which dispatchers have programs."""
MEMORIES = ("plain", "plain", "nan", "huge")
UNUSED = ("plain", "nan")
PROTOCOLS = ("once",) * 6 + ("repeat", "after_other", "after_refill")

MOST_ELEMENTS = 2**17  # of a tensor of a case: keeps a case quick, with its golden
MOST_WORK = 2**24  # operations of a case (`Spec.cost`), for the same reason
_PEAK = 100.0  # far above normal numbers: it dominates a softmax or a norm if it is taken in
_INTERPRETED_ELEMENTS = 2**14  # an interpreted kernel takes a hundred times as long for each
_INTERPRETED_WORK = 2**20  # likewise
_INTERPRETED_STEPS = 1024  # programs and scan steps, about a millisecond each whatever their size
_BATCHES = (1, 2, 3)
_GATHERED = (1, 2, 3, 4, 8, 17, 64)  # experts, most of which take time and are alike
_FEWEST = 4  # of an op's own sizes, that small cases have
_GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)


def seeded(seed: int) -> Chooser:
    """Return a chooser that depends on ``seed`` only."""
    return random.Random(seed).choice


@dataclass(frozen=True)
class Sampler:
    """Samples the cases of one examination, from a spec, dtypes, the listed options and restrictions on shapes.

    ``ties`` maps a symbol to another one whose size it shares.
    """

    definition: Spec
    dtype: str | Mapping[str, str]
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    layouts: Sequence[str] = LAYOUTS
    seed: int = 0
    out_dtype: str | None = None
    most_elements: int = MOST_ELEMENTS
    most_work: int = MOST_WORK
    max_steps: int | None = None
    ties: Mapping[str, str] = field(default_factory=dict)

    def for_interpreter(self) -> Sampler:
        """Return a sampler for an interpreted kernel, whose programs and scan steps run one by one."""
        return replace(self.limited(_INTERPRETED_ELEMENTS, _INTERPRETED_WORK), max_steps=_INTERPRETED_STEPS)

    def with_steps(self, expression: str) -> Sampler:
        """Return a sampler that knows how many programs run one by one; unchanged if the expression is empty."""
        sizes = replace(self.definition.sizes, sequential_steps=expression or self.definition.sizes.sequential_steps)
        return replace(self, definition=replace(self.definition, sizes=sizes))

    def limited(self, elements: int, work: int, share: int = 1) -> Sampler:
        """Return a sampler with these limits on elements and work too, and this fraction of an interpreter's steps."""
        steps = None if self.max_steps is None else self.max_steps // share
        sizes = min(self.most_elements, elements), min(self.most_work, work)
        return replace(self, most_elements=sizes[0], most_work=sizes[1], max_steps=steps)

    def option_sets(self) -> list[dict[str, Any]]:
        """Return every combination of the listed options, completed by the defaults."""
        combinations = product(*self.options.values())
        return [self.definition.complete({}) | dict(zip(self.options, values, strict=True)) for values in combinations]

    def case(self, choose: Chooser, *, style: str = "any", options: Mapping[str, Any] | None = None) -> Case:
        """Draw a case. ``style``: "any", "small" (no size over 8) or "tile" (sizes about one or two tiles)."""
        if options is None:
            options = {name: choose(list(values)) for name, values in self.options.items()}
        complete = self.definition.complete(options)
        signature = self.definition.signature(complete)
        sizes = self.sizes(choose, signature, style)
        for symbol, option in self.definition.sizes.minimum.items():
            sizes[symbol] = self._at_least(symbol, sizes[symbol], int(complete[option]))
        theme = choose(GENERAL)
        follow = choose((True, True, False))
        values, layouts = {}, {}
        for tensor in signature.tensors:
            names = tuple(name for name in names_of(tensor) if name not in ("zeros", "ones", "least", "faint"))
            values[tensor.name] = theme if follow and tensor.role == "real" and theme in names else choose(names)
            layouts[tensor.name] = choose(self.layouts) if choose((True, False)) else self.layouts[0]
        return Case(
            spec=self.definition.qualified_name,
            sizes=sizes,
            dtypes={tensor.name: dtype_of(tensor, self.dtype) for tensor in signature.tensors},
            options=complete,
            values=values,
            layouts=layouts,
            seed=choose(range(1 << 24)),
            out_dtype=self.out_dtype,
            memory=choose(MEMORIES),
            protocol=choose(PROTOCOLS),
            unused=choose(UNUSED) if self.definition.inputs.unused else "plain",
        )

    def free_symbols(self, case: Case) -> list[str]:
        """Return the symbols of a case that may take any size."""
        bound = {
            *self.shapes,
            *self.ties,
            *self.definition.sizes.allowed,
            *self.definition.sizes.multiples,
            *self.definition.sizes.multiples.values(),
        }
        return [s for s in case.sizes if s not in bound and self.definition.step(case.signature, s, case.sizes) == 1]

    def fits(self, sizes: Mapping[str, int], signature: Signature | None = None) -> bool:
        """Whether a call of these sizes is within the limits, under the first option set unless a signature is
        given."""
        signature = signature or self.definition.signature(self.option_sets()[0])
        tied = {symbol: sizes[other] for symbol, other in self.ties.items() if other in sizes}
        return not self._too_much(signature, {**sizes, **tied})

    def cost(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return the cost of a call: the interpreter's steps, if the kernel is interpreted, and the work."""
        steps = self.definition.sizes.sequential_steps if self.max_steps is not None else None
        return 0 if steps is None else dimension(steps, sizes), self.definition.cost(sizes)

    def tied_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes with tied symbols as large as those that they are tied to."""
        return {symbol: sizes.get(self.ties.get(symbol, symbol), size) for symbol, size in sizes.items()}

    def with_size(self, sizes: Mapping[str, int], symbol: str, size: int) -> dict[str, int]:
        """Return the sizes with another size for a symbol and all symbols tied with it."""
        return self.tied_sizes({**sizes, symbol: size, self.ties.get(symbol, symbol): size})

    def tied(self, case: Case) -> Case:
        """Return the case with tied sizes, without edits of elements that it then lacks."""
        sizes = self.tied_sizes(case.sizes)
        if sizes == case.sizes:
            return case
        shapes = {tensor.name: tensor.shape(sizes) for tensor in case.signature.tensors}
        inside = [edit for edit in case.edits if all(i < n for i, n in zip(edit[1], shapes[edit[0]], strict=True))]
        return replace(case, sizes=sizes, edits=tuple(inside))

    def sizes(self, choose: Chooser, signature: Signature, style: str) -> dict[str, int]:
        """Draw a size for each symbol, within the limits on elements and work."""
        symbols = [symbol for symbol in signature.symbols if symbol not in self.ties]
        long = {choose(symbols), choose(symbols)} if style == "any" and symbols and choose(range(4)) == 0 else set()
        if style == "any" and symbols and not long:
            long = {choose(symbols)}
        sizes: dict[str, int] = {}
        for symbol in sorted(symbols, key=lambda name: name in self.definition.sizes.multiples):
            sizes[symbol] = self._size(choose, signature, symbol, style, symbol in long, sizes)
        sizes |= {symbol: sizes[self.ties[symbol]] for symbol in signature.symbols if symbol in self.ties}
        sizes = {symbol: sizes[symbol] for symbol in signature.symbols}
        last = () if self._has_steps_for(sizes) else {*sizes} - {*self.definition.axes.grid}  # programs are much alike
        for symbol in sorted(symbols, key=lambda name: (name in long, name in last, -sizes[name])):
            while self._too_much(signature, sizes) and sizes[symbol] > 1:
                smaller = self.tied_sizes({**sizes, symbol: self._smaller(signature, symbol, sizes)})
                if not self._is_less(signature, smaller, sizes):  # another symbol is what makes it too much
                    break
                sizes = smaller
        return sizes

    def halved(self, signature: Signature, sizes: Mapping[str, int], symbols: Sequence[str]) -> dict[str, int]:
        """Return the sizes with the largest of these symbols halved, again and again, until a call is within the limits
        or none of them helps."""
        result = dict(sizes)
        while self._too_much(signature, result):
            smaller = {
                symbol: self.tied_sizes({**result, symbol: self._smaller(signature, symbol, result)})
                for symbol in symbols
                if result[symbol] > 1
            }
            helping = [symbol for symbol, other in smaller.items() if self._is_less(signature, other, result)]
            if not helping:
                break
            result = smaller[max(helping, key=result.__getitem__)]
        return result

    def _at_least(self, symbol: str, size: int, least: int) -> int:
        """Return a size no smaller than an option requires."""
        if size >= least or symbol not in self.shapes:
            return max(size, least)
        fitting = [size for size in self.shapes[symbol] if size >= least]
        if not fitting:
            raise SettingError(f"shapes: {symbol} at most {max(self.shapes[symbol])}; the options need {least} or more")
        return min(fitting)

    def _size(
        self, choose: Chooser, signature: Signature, symbol: str, style: str, long: bool, sizes: Mapping[str, int]
    ) -> int:
        pool: Sequence[int] = {"small": SMALL, "tile": TILE}.get(style, ())
        if symbol in self.shapes:
            pool = self._dividing(symbol, self._restricted(choose, symbol, style))
        elif symbol in self.definition.sizes.allowed:
            pool = self._divisors(symbol)
            pool = sorted(pool)[:_FEWEST] if style == "small" else pool
        elif symbol in self.definition.axes.groups:
            pool = [sizes[self.definition.axes.groups[symbol]] * group for group in _GROUPS]
        elif self.is_batch(signature, symbol) and not (long and symbol in self.definition.axes.grid):
            pool = _BATCHES
        elif symbol in self.definition.axes.gathered and symbol not in self.definition.axes.grid and not long:
            pool = _GATHERED
        elif long and not pool:
            pool = LARGE if choose(range(4)) else HUGE if symbol in self.definition.axes.grid else VAST
        elif not pool:
            pool = choose((SMALL, SMALL, TILE, TILE, range(1, 150)))
            if symbol in self.definition.sizes.may_be_zero and choose(range(16)) == 0:
                pool = (0,)
        size = int(choose(list(pool)))
        step = self.step(signature, symbol, sizes)
        if symbol in self.shapes and size % step:
            partner = self.definition.sizes.multiples.get(symbol, "")
            others = self.shapes.get(partner) or self.definition.sizes.allowed.get(partner, ())
            fitting = [size for size in self.shapes[symbol] if size % step == 0]
            if not fitting or not any(size % max(other, 1) == 0 for other in others):
                of = f" ({partner})" if others else ""
                steps = " or ".join(map(str, others)) or step
                raise SettingError(f"shapes: {symbol}={size}; {self.definition.name} needs a multiple of {steps}{of}")
            size = int(choose(fitting))
        return -(-size // step) * step

    def is_batch(self, signature: Signature, symbol: str) -> bool:
        """Whether a symbol counts batches or groups of heads, whose programs are much alike and only take time."""
        axes, dims = self.definition.axes, signature.tensors[0].dims
        return symbol in axes.groups.values() or (symbol == axes.rows and len(dims) > 2 and symbol == dims[0])

    def step(self, signature: Signature, symbol: str, sizes: Mapping[str, int]) -> int:
        """Return the number that a symbol, and all symbols tied with it, must be a multiple of."""
        alike = [symbol, *(tied for tied, other in self.ties.items() if other == symbol and tied in signature.symbols)]
        return math.lcm(*(self.definition.step(signature, name, sizes) for name in alike))

    def _divisors(self, symbol: str) -> Sequence[int]:
        """Return the op's sizes for a symbol that divide one of the caller's sizes of another symbol, if they must."""
        result: Sequence[int] = self.definition.sizes.allowed[symbol]
        for name, partner in self.definition.sizes.multiples.items():
            if partner == symbol and name in self.shapes:
                result = [size for size in result if any(other % size == 0 for other in self.shapes[name])] or result
        return result

    def _dividing(self, symbol: str, pool: Sequence[int]) -> Sequence[int]:
        """Return the caller's sizes for a symbol that divide a size of another symbol, if they must."""
        for name, partner in self.definition.sizes.multiples.items():
            if partner != symbol or name not in self.shapes:
                continue
            restricted = self.shapes[name]
            fitting = [size for size in pool if any(other % max(size, 1) == 0 for other in restricted)]
            fitting = fitting or [s for s in self.shapes[symbol] if any(other % max(s, 1) == 0 for other in restricted)]
            if not fitting:
                some, others = ", ".join(map(str, restricted[:4])), ", ".join(map(str, self.shapes[symbol][:4]))
                raise SettingError(
                    f"shapes: {name}={some}, {symbol}={others}; {self.definition.name} needs {name} to be a multiple "
                    f"of {symbol}"
                )
            pool = fitting
        return pool

    def _restricted(self, choose: Chooser, symbol: str, style: str) -> Sequence[int]:
        """Return the caller's sizes; of a long range mostly its boundary sizes."""
        restricted = self.shapes[symbol]
        if len(restricted) <= 8:
            return restricted
        known = {"small": SMALL, "tile": TILE}.get(style, SMALL + TILE + LARGE)
        boundary = [size for size in known if size in restricted] + [restricted[0], restricted[-1]]
        return boundary if choose(range(4)) else restricted

    def _smaller(self, signature: Signature, symbol: str, sizes: Mapping[str, int]) -> int:
        """Return about half of a size, if the symbol may have it."""
        step = self.step(signature, symbol, sizes)
        half = max(step, sizes[symbol] // 2 // step * step)
        # A reference refuses sizes that it doesn't allow.
        own = self.definition.sizes.allowed.get(symbol, ()) if self.definition.needs_dtypes else ()
        if symbol in self.shapes or own:
            restricted = self.shapes.get(symbol, own)
            fitting = [size for size in restricted if size < sizes[symbol] and size % step == 0]
            return max((size for size in fitting if size <= half), default=max(fitting, default=sizes[symbol]))
        multiples = self.definition.sizes.multiples
        is_divisor = any(partner == symbol and name in sizes for name, partner in multiples.items())
        return sizes[symbol] if is_divisor else half

    def _too_much(self, signature: Signature, sizes: Mapping[str, int]) -> bool:
        return any(self._excess(signature, sizes))

    def _has_steps_for(self, sizes: Mapping[str, int]) -> bool:
        return self.cost(sizes)[0] <= (self.max_steps or 0)

    def _is_less(self, signature: Signature, smaller: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
        """Whether smaller sizes reduce any excess."""
        both = zip(self._excess(signature, smaller), self._excess(signature, sizes), strict=True)
        return any(less < more for less, more in both)

    def _excess(self, signature: Signature, sizes: Mapping[str, int]) -> list[int]:
        """Return by how much the work, the elements of each tensor and the interpreter's steps exceed their limits."""
        counts = [prod(tensor.shape(sizes)) for tensor in (*signature.tensors, *signature.returns)]
        steps, work = self.cost(sizes)
        over = [steps - (self.max_steps or 0), work - self.most_work, *(n - self.most_elements for n in counts)]
        return [max(each, 0) for each in over]


def real_tensors(signature: Signature) -> list[TensorSpec]:
    """Return the tensors whose numbers enter the arithmetic and may be NaN or infinite."""
    return [tensor for tensor in signature.tensors if tensor.role == "real" and tensor.dtype != "int8"]


def with_values(case: Case, distribution: str, **changes: Any) -> Case:
    """Return the case with ``distribution`` for each tensor that has it, and the plainest one for the rest."""
    values = {}
    for tensor in case.signature.tensors:
        names = names_of(tensor)
        values[tensor.name] = distribution if distribution in names else names[0]
    return replace(case, values=values, **changes)


def with_peak(case: Case, tensor: TensorSpec) -> Case:
    """Return the case of ordinary numbers in which the last element of a tensor is far above the others."""
    last = tuple(extent - 1 for extent in case.shape(tensor))
    return with_values(case, "normal", edits=((tensor.name, last, _PEAK),))
