"""Campaigns: TOML files that list goldens to make; docs/golden-jobs.md describes their form.

A campaign is a sequence of tasks, each found by its number. Nothing is expanded in advance: 10^9 combinations take as
little memory as ten. msgspec checks each table against the types below; whatever depends on an op is checked by its
`Spec` and by `recipe`. An error is one line that names file, location and remedy.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate, product
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec

from assay.formats.format import format_named
from assay.golden.errors import CampaignError, ShapeError
from assay.golden.inputs.distributions import names_of
from assay.golden.inputs.recipe import Recipe, recipe
from assay.golden.options import Option
from assay.golden.registry import Spec, spec, specs
from assay.golden.signature import INTEGERS, TensorSpec, format_or_integer
from assay.runtime.errors import AssayError, unknown
from assay.runtime.files import read_text
from assay.runtime.records import MOST_DIGITS, Seed, from_toml, structured

# Milliseconds of a record written, of an element drawn, and of a step evaluated; measured in docs/scale.md.
_MS_PER_RECORD, _MS_PER_ELEMENT, _MS_PER_STEP = 8.0, 2e-4, 2e-6
_ARB_SLOWDOWN, _FLOAT64_DIGITS = 100.0, 15  # beyond so many digits Arb evaluates
_CACHED_RECIPES = 256  # those that differ in the seed only are derived from one of them
_FEISTEL_ROUNDS = 6  # four make a pseudo-random permutation (Luby and Rackoff, 1988)
_MAX_CELLS = 100_000
_EXAMPLES = {"spec": 'spec = "softmax"', "shapes": "shapes = [{ R = 4, N = 64 }]"}

Cell = tuple[Mapping[str, Any], Mapping[str, int]]  # complete options, and sizes


@dataclass(frozen=True)
class Task:
    """A golden to make: its inputs' recipe, and the number of digits (None: as many as float64 certifies)."""

    recipe: Recipe
    digits: int | None = None

    def __str__(self) -> str:
        return f"{self.recipe}" + (f"; {self.digits} digits" if self.digits else "")


@dataclass(frozen=True)
class Entry:
    """A spec and lists of which every combination is a task.

    ``cells`` are the pairs of options and sizes; ``dtypes`` and ``distributions`` name one for all tensors that can
    have it, or one per tensor. ``sample``: only that many of the combinations, always the same.
    """

    spec: str
    cells: Sequence[Cell]
    dtypes: Sequence[str | Mapping[str, str]]
    distributions: Sequence[str | Mapping[str, str]]
    digits: Sequence[int | None]
    seeds: Sequence[int]
    sample: int | None = None

    @cached_property
    def combinations(self) -> int:
        """The number of combinations."""
        return prod(map(len, (self.cells, self.dtypes, self.distributions, self.digits, self.seeds)))

    @cached_property
    def count(self) -> int:
        """The number of tasks."""
        return self.combinations if self.sample is None else min(self.sample, self.combinations)

    @cached_property
    def milliseconds(self) -> float:
        """The estimated time of one task, to report the time left."""
        op = spec(self.spec)
        cells = []
        for options, sizes in self.cells:
            elements = sum(prod(tensor.shape(sizes)) for tensor in op.signature(options).tensors)
            cells.append(_MS_PER_RECORD + (_MS_PER_ELEMENT * elements + _MS_PER_STEP * op.cost(sizes)))
        slow = [_ARB_SLOWDOWN if digits is not None and digits > _FLOAT64_DIGITS else 1.0 for digits in self.digits]
        return sum(cells) / len(cells) * sum(slow) / len(slow)

    def task(self, number: int) -> Task:
        """Return a task by its number; neighbours differ in the seed first."""
        if self.sample is not None:
            number = shuffled(number, self.combinations, self.spec)
        number, seed = divmod(number, len(self.seeds))
        number, digits = divmod(number, len(self.digits))
        return Task(replace(self._recipe(number), seed=self.seeds[seed]), self.digits[digits])

    def _recipe(self, number: int) -> Recipe:
        """Return the recipe of tasks that differ in seed and digits only."""
        if number not in self._recipes:
            if len(self._recipes) >= _CACHED_RECIPES:
                self._recipes.clear()
            rest, distribution = divmod(number, len(self.distributions))
            cell, dtype = divmod(rest, len(self.dtypes))
            options, sizes = self.cells[cell]
            values = self.distributions[distribution]
            self._recipes[number] = recipe(self.spec, sizes, self.dtypes[dtype], options=options, values=values)
        return self._recipes[number]

    @cached_property
    def _recipes(self) -> dict[int, Recipe]:
        return {}


def shuffled(number: int, count: int, salt: str) -> int:
    """Permute 0..count-1 pseudo-randomly, by ``salt``: a sample needs no memory.

    A Feistel network over the next even number of bits, repeated until the result is below ``count`` (J. Black and
    P. Rogaway, *Ciphers with arbitrary finite domains*, 2002).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for feistel_round in range(_FEISTEL_ROUNDS):
            digest = hashlib.blake2b(f"{salt}:{feistel_round}:{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        number = left << half | right
        if number < count:
            return number


@dataclass(frozen=True)
class Campaign:
    """A sequence of tasks, and the text that lists them.

    ``origin`` tells campaigns of one name apart: a digest of the file's path, empty for a bundled one.
    """

    name: str
    text: str = field(repr=False)
    entries: tuple[Entry, ...] = field(repr=False)
    origin: str = ""

    @property
    def count(self) -> int:
        """The number of tasks."""
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(entry.count for entry in self.entries))

    def task(self, number: int) -> Task:
        """Return a task by its number."""
        if not 0 <= number < self.count:
            raise IndexError(f"campaign {self.name} has {self.count} tasks; there is no number {number}")
        entry = bisect_right(self._ends, number)
        return self.entries[entry].task(number - (self._ends[entry - 1] if entry else 0))

    def milliseconds(self, number: int) -> float:
        """Return the estimated time of a task."""
        return self.entries[bisect_right(self._ends, number)].milliseconds

    def total_milliseconds(self, numbers: range) -> float:
        """Return the estimated time of the tasks with these numbers together."""
        total, first = 0.0, 0
        for entry, last in zip(self.entries, self._ends, strict=True):
            total += entry.milliseconds * max(0, min(last, numbers.stop) - max(first, numbers.start))
            first = last
        return total

    def __iter__(self) -> Iterator[Task]:
        return (entry.task(number) for entry in self.entries for number in range(entry.count))


def read_campaign(path: str | Path) -> Campaign:
    """Return the campaign of a file, named after it. Raises `CampaignError`."""
    path = Path(path)
    text = read_text(path, CampaignError)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")
    origin = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    return replace(parse_campaign(text, name or "campaign", str(path)), origin=origin)


@lru_cache(maxsize=8)
def parse_campaign(text: str, name: str, label: str = "") -> Campaign:
    """Return the campaign of a text; errors call it ``label``. Raises `CampaignError`."""
    label = label or f"campaign {name}"
    return Campaign(name, text, tuple(_entries(from_toml(text, label, CampaignError), label)))


_NOT_EMPTY = msgspec.Meta(min_length=1)
Names = str | Annotated[dict[str, str], _NOT_EMPTY]  # for all tensors, or for each by name
Whole = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Digits = Annotated[int, msgspec.Meta(ge=1, le=MOST_DIGITS)]
Seeds = Annotated[int, msgspec.Meta(ge=1, le=2**40)] | Annotated[list[Seed], _NOT_EMPTY]  # their number, or a list
SymbolSizes = Whole | str | Annotated[list[Whole | str], _NOT_EMPTY]


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """Settings of a table, or at the top of the file for all tables without them."""

    dtypes: Names | Annotated[list[Names], _NOT_EMPTY] | None = None
    distributions: Names | Annotated[list[Names], _NOT_EMPTY] | None = None
    seeds: Seeds | None = None
    digits: Digits | Annotated[list[Digits], _NOT_EMPTY] | None = None


@dataclass(frozen=True, kw_only=True)
class _File(_Shared):
    about: str = ""
    sizes: dict[str, Any] = field(default_factory=dict)
    golden: Annotated[list[dict[str, Any]], _NOT_EMPTY]


@dataclass(frozen=True, kw_only=True)
class _Table(_Shared):
    spec: str | Annotated[list[str], _NOT_EMPTY]
    shapes: dict[str, Any] | Annotated[list[dict[str, Any]], _NOT_EMPTY]
    options: dict[str, Any] = field(default_factory=dict)
    name: Annotated[str, _NOT_EMPTY] | None = None
    sample: Positive | None = None


@dataclass(frozen=True)
class _Location:
    """A location in a campaign file, as messages name it: ``mine.toml: golden[2].shapes[0].H``."""

    file: str
    path: str = ""

    def __truediv__(self, part: str | int) -> _Location:
        dot = "." if self.path else ""
        return _Location(self.file, f"{self.path}[{part}]" if isinstance(part, int) else f"{self.path}{dot}{part}")

    def __str__(self) -> str:
        return f"{self.file}: {self.path}" if self.path else self.file

    def error(self, message: str) -> CampaignError:
        return CampaignError(f"{self}: {message}")

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except CampaignError:
            raise
        except AssayError as error:
            raise self.error(str(error)) from None

    def items(self, value: Any) -> Iterator[tuple[Any, _Location]]:
        """Yield the elements of a list, or a single value, with their locations."""
        if isinstance(value, list):
            yield from ((item, self / index) for index, item in enumerate(value))
        else:
            yield value, self


def _entries(content: Mapping[str, Any], label: str) -> Iterator[Entry]:
    """Yield an entry for each spec of each [[golden]] table of a file."""
    top = _Location(label)
    if not content.get("golden"):
        raise top.error("expected at least one [[golden]] table, with a spec and shapes")
    file: _File = structured(content, _File, f"{top}:", CampaignError)
    named_sizes = dict(_named_sizes(file.sizes, top / "sizes"))
    names: dict[str, _Location] = {}
    for number, raw in enumerate(file.golden):
        here = top / "golden" / number
        for required, example in _EXAMPLES.items():
            if required not in raw:
                raise here.error(f"this [[golden]] table has no {required}; add e.g. {example}")
        table: _Table = structured(raw, _Table, str(here), CampaignError)
        if table.name is not None and names.setdefault(table.name, here) != here:
            first = names[table.name].path
            raise (here / "name").error(f"{first} has the name {table.name!r} already; choose another")
        for name, location in (here / "spec").items(table.spec):
            with location.named_in_errors():
                op = spec(name)
            yield _entry(op, table, here, file, top, named_sizes)


def _entry(
    op: Spec, table: _Table, here: _Location, file: _File, top: _Location, named_sizes: Mapping[str, int]
) -> Entry:
    cells = _cells(op, table, here, named_sizes)
    firsts = list({repr(options): (options, sizes) for options, sizes in reversed(cells)}.values())

    def setting(name: str) -> tuple[Any, _Location, bool]:
        """Return a setting of the table, else of the top of the file; its location; and whether it is the table's."""
        is_own = getattr(table, name) is not None
        return getattr(table if is_own else file, name), (here if is_own else top) / name, is_own

    digits, digits_location, _ = setting("digits")
    seeds, seeds_location, _ = setting("seeds")
    return Entry(
        spec=op.name,
        cells=cells,
        dtypes=_dtypes(op, *setting("dtypes"), firsts, here),
        distributions=_distributions(op, *setting("distributions"), firsts),
        digits=[None] if digits is None else _unique(digits_location.items(digits)),
        seeds=_unique(seeds_location.items(seeds)) if isinstance(seeds, list) else range(1 if seeds is None else seeds),
        sample=table.sample,
    )


def _named_sizes(table: Mapping[str, Any], here: _Location, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield ``model.hidden`` and its size, from the nested tables of [sizes]."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _named_sizes(value, here / name, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", structured(value, Whole, str(here / name), CampaignError)


def _cells(op: Spec, table: _Table, here: _Location, named_sizes: Mapping[str, int]) -> list[Cell]:
    """Combine every set of options with every set of sizes."""
    varied = _options(op, table.options, here / "options")
    option_sets = [op.complete(dict(zip(varied, values, strict=True))) for values in product(*varied.values())]
    cells: dict[str, Cell] = {}
    for shape, location in (here / "shapes").items(table.shapes):
        lists = {symbol: _sizes(symbol, sizes, location / symbol, named_sizes) for symbol, sizes in shape.items()}
        if prod(map(len, lists.values())) * len(option_sets) > _MAX_CELLS:
            raise location.error(f"more than {_MAX_CELLS} combinations of sizes and options; split the table")
        for values in product(*lists.values()):
            sizes = dict(zip(lists, values, strict=True))
            text = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
            for options in option_sets:
                try:
                    recipe(op.name, sizes, options=options)
                except AssayError as error:
                    symbol = error.symbol if isinstance(error, ShapeError) else ""
                    raise (location / symbol if symbol in sizes else location).error(f"{error} (in {text})") from None
                if cells.setdefault(f"{options} {sizes}", (options, sizes))[1] is not sizes:
                    raise location.error(f"the shape {text} is listed twice; leave one out")
    return list(cells.values())


def _sizes(symbol: str, raw: Any, here: _Location, named_sizes: Mapping[str, int]) -> list[int]:
    sizes = []
    for size, location in here.items(structured(raw, SymbolSizes, str(here), CampaignError)):
        if isinstance(size, str) and size not in named_sizes:
            raise location.error(
                f"{symbol}: {unknown('size', size, named_sizes)}; sizes are named in the table [sizes]"
            )
        sizes.append(named_sizes[size] if isinstance(size, str) else size)
    return sizes


def _options(op: Spec, table: Mapping[str, Any], here: _Location) -> dict[str, list[Any]]:
    """Return the values of each option that is varied."""
    varied = {}
    for name, raw in table.items():
        if name not in op.options:
            raise here.error(unknown(f"option of {op.name}", name, op.options))
        values: list[tuple[Any, _Location]] = []
        for value, location in (here / name).items(raw):
            values.append((_option_value(op.options[name], value), location))
            with location.named_in_errors():
                op.options[name].check(op.name, name, values[-1][0])
        varied[name] = _unique(values)
    return varied


def _option_value(option: Option, value: Any) -> Any:
    """Convert from TOML, which has neither None nor tuples."""
    if value == "none" and not option.accepts("none") and option.accepts(None):
        return None
    return tuple(value) if isinstance(value, list) else value


def _tensors(op: Spec, firsts: Sequence[Cell]) -> list[TensorSpec]:
    return [tensor for options, _ in firsts for tensor in op.signature(options).tensors]


def _dtypes(op: Spec, raw: Any, here: _Location, is_own: bool, firsts: Sequence[Cell], table: _Location) -> list[Any]:
    tensors = _tensors(op, firsts)
    if all(tensor.dtype is not None for tensor in tensors):
        if is_own and all(tensor.dtype != "fp8" for tensor in tensors):
            raise here.error(f"{op.name} fixes the dtype of every tensor; leave dtypes out")
        raw = raw if is_own else "float8_e4m3fn"
    elif raw is None:
        raise table.error(f'{op.name} needs dtypes; add e.g. dtypes = ["bfloat16"]')
    dtypes = []
    for dtype, location in here.items(raw):
        with location.named_in_errors():
            for name in _names(dtype):
                full = format_or_integer(name)
                if full in INTEGERS or format_named(full).kind != "float":
                    raise location.error(f"dtype {name!r} is that of integers; expected a floating-point dtype")
            meaning = [recipe(op.name, sizes, dtype, options=options).dtypes for options, sizes in firsts]
        dtypes.append((dtype, meaning, location))
    return _distinct(dtypes, is_own)


def _distributions(op: Spec, raw: Any, here: _Location, is_own: bool, firsts: Sequence[Cell]) -> list[Any]:
    tensors = _tensors(op, firsts)
    possible = {name for tensor in tensors for name in names_of(tensor)}
    distributions = []
    for values, location in here.items("" if raw is None else raw):
        if raw is not None and not is_own:  # settings for all tables hold as far as this op has such tensors
            for name in _names(values):
                if name not in _all_distributions():
                    raise location.error(unknown("distribution", name, _all_distributions()))
            if isinstance(values, dict):
                values = {tensor.name: values[tensor.name] for tensor in tensors if tensor.name in values} or ""
            elif values not in possible:
                values = ""
        with location.named_in_errors():
            meaning = [recipe(op.name, sizes, options=options, values=values).values for options, sizes in firsts]
        distributions.append((values, meaning, location))
    return _distinct(distributions, is_own)


@cache
def _all_distributions() -> frozenset[str]:
    return frozenset(name for op in specs() for tensor in spec(op).tensors for name in names_of(tensor))


def _names(value: str | Mapping[str, str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value.values())


def _unique(items: Iterator[tuple[Any, _Location]] | list[tuple[Any, _Location]]) -> list[Any]:
    """Return the values, none of which may be listed twice."""
    values: list[Any] = []
    for value, location in items:
        if value in values:
            raise location.error(f"{value!r} is listed twice; leave one out")
        values.append(value)
    return values


def _distinct(items: Sequence[tuple[Any, Any, _Location]], is_own: bool) -> list[Any]:
    """Drop values that mean the same as an earlier one; in a table's own list they are an error."""
    distinct: list[tuple[Any, Any]] = []
    for value, meaning, location in items:
        if meaning not in [other for _, other in distinct]:
            distinct.append((value, meaning))
        elif is_own:
            raise location.error(f"{value!r} gives the same inputs as an earlier one; leave one out")
    return [value for value, _ in distinct]
