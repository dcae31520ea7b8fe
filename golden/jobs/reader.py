"""What a campaign's TOML means, and what is wrong with it: the line, and how to mend it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice, product
from math import prod
from typing import Any, NoReturn

from assay.golden.errors import CampaignError, unknown
from assay.golden.inputs.distributions import names_of
from assay.golden.inputs.recipe import recipe
from assay.golden.inputs.values import format_or_integer
from assay.golden.jobs.entry import Entry
from assay.golden.jobs.positions import Path, Positions
from assay.golden.registry import Option, Spec, spec, specs
from assay.precision.errors import AssayError
from assay.precision.formats import format_named

_SHARED = ("dtypes", "distributions", "seeds", "digits")  # at the top they hold for every table that doesn't say
_TOP = ("about", "sizes", "golden", *_SHARED)
_TABLE = ("name", "spec", "shapes", "options", "sample", *_SHARED)
_EXAMPLES = {"spec": 'spec = "softmax"', "shapes": "shapes = [{ R = 4, N = 64 }]"}
_MOST_CELLS = 100_000
_MOST_SEEDS = 2**40

Cell = tuple[Mapping[str, Any], Mapping[str, int]]


class Reader:
    """The content of a campaign file, and how to complain about a place in it by its line."""

    def __init__(self, label: str, text: str, content: Mapping[str, Any]) -> None:
        self._label, self._content, self._positions = label, content, Positions(text)

    def entries(self) -> Iterator[Entry]:
        """An entry for each spec of each [[golden]] table. Raises `CampaignError`."""
        self._known(self._content, (), "key", _TOP)
        if not isinstance(self._content.get("about", ""), str):
            self._fail(("about",), f"about={self._content['about']!r}; expected text")
        sizes = dict(self._named_sizes(self._content.get("sizes", {}), ("sizes",)))
        tables = self._content.get("golden")
        if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
            self._fail(("golden",), "expected at least one [[golden]] table, with a spec and shapes")
        names: dict[str, int] = {}
        for place, table in enumerate(tables):
            path: Path = ("golden", place)
            self._known(table, path, "key", _TABLE)
            self._name(table.get("name"), (*path, "name"), names)
            for required, example in _EXAMPLES.items():
                if required not in table:
                    self._fail(path, f"this [[golden]] table has no {required}; add e.g. {example}")
            for name, at in self._items(table["spec"], (*path, "spec")):
                yield self._entry(table, path, self._spec(name, at), sizes)

    def _entry(self, table: Mapping[str, Any], path: Path, op: Spec, sizes: Mapping[str, int]) -> Entry:
        sample = table.get("sample")
        if sample is not None and (type(sample) is not int or sample < 1):
            self._fail((*path, "sample"), f"sample={sample!r}; expected a whole number, one or more")
        cells = self._cells(op, table, path, sizes)
        firsts = list({repr(options): (options, sizes) for options, sizes in reversed(cells)}.values())
        return Entry(
            spec=op.name,
            cells=cells,
            dtypes=self._dtypes(op, table, path, firsts),
            distributions=self._distributions(op, table, path, firsts),
            digits=self._digits(*self._stated(table, path, "digits")[:2]),
            seeds=self._seeds(*self._stated(table, path, "seeds")[:2]),
            sample=sample,
        )

    # What the keys of a table mean.

    def _spec(self, name: Any, path: Path) -> Spec:
        if not isinstance(name, str):
            self._fail(path, f"spec={name!r}; expected the name of a spec, in quotes")
        with self._told(path):
            return spec(name)

    def _name(self, name: Any, path: Path, known: dict[str, int]) -> None:
        """Names are for readers; two tables must not share one."""
        if name is None:
            return
        if not isinstance(name, str) or not name:
            self._fail(path, f"name={name!r}; expected text")
        if name in known:
            self._fail(path, f"the name {name!r} is given in line {known[name]} already; choose another")
        known[name] = self._positions.line(path)

    def _cells(self, op: Spec, table: Mapping[str, Any], path: Path, named: Mapping[str, int]) -> list[Cell]:
        """Every set of options with every set of sizes."""
        choices = self._options(op, table.get("options", {}), (*path, "options"))
        sets = [op.complete(dict(zip(choices, values, strict=True))) for values in product(*choices.values())]
        cells: dict[str, Cell] = {}
        for shape, at in self._items(table["shapes"], (*path, "shapes")):
            if not isinstance(shape, dict):
                self._fail(at, f"shape {shape!r}; expected a table of sizes, {_EXAMPLES['shapes']}")
            lists = {symbol: self._sizes(symbol, size, (*at, symbol), named) for symbol, size in shape.items()}
            if prod(map(len, lists.values())) * len(sets) > _MOST_CELLS:
                self._fail(at, f"more than {_MOST_CELLS} combinations of sizes and options; split the table")
            for values in product(*lists.values()):
                sizes = dict(zip(lists, values, strict=True))
                for options in sets:
                    self._fits(op, options, sizes, at)
                    if cells.setdefault(f"{options} {sizes}", (options, sizes))[1] is not sizes:
                        self._fail(at, f"the shape {_in_words(sizes)} is listed twice; leave one out")
        if not cells:
            self._fail((*path, "shapes"), f"no shape; add e.g. {_EXAMPLES['shapes']}")
        return list(cells.values())

    def _fits(self, op: Spec, options: Mapping[str, Any], sizes: Mapping[str, int], path: Path) -> None:
        """Complain, in the line of the size that is to blame, where ``sizes`` are impossible."""
        try:
            recipe(op.name, sizes, options=options)
        except AssayError as error:
            blamed = [
                symbol for symbol in re.findall(r"\b([A-Za-z]\w*)=", str(error)) if (*path, symbol) in self._positions
            ]
            self._fail((*path, blamed[0]) if blamed else path, f"{error} (in {_in_words(sizes)})")
        if options.get("top_k", 0) > sizes.get("E", options.get("top_k", 0)):
            self._fail((*path, "E"), f"{op.name}: E={sizes['E']} must be at least top_k={options['top_k']}")

    def _sizes(self, symbol: str, given: Any, path: Path, named: Mapping[str, int]) -> list[int]:
        """The sizes of a symbol: whole numbers, and names of the table [sizes]."""
        found = []
        for size, at in self._items(given, path):
            if isinstance(size, str):
                if size not in named:
                    self._fail(at, f"{symbol}: {unknown('size', size, named)}; sizes are named in the table [sizes]")
                size = named[size]
            if type(size) is not int or size < 0:
                self._fail(at, f"{symbol}={size!r}; expected a whole number, zero or more, or a name of [sizes]")
            found.append(size)
        return found

    def _named_sizes(self, table: Any, path: Path) -> Iterator[tuple[str, int]]:
        """``model.hidden`` and its size, from the nested tables of [sizes]."""
        if not isinstance(table, dict):
            self._fail(path, f"{path[-1]}={table!r}; expected a table of sizes")
        for name, value in table.items():
            at = (*path, name)
            if isinstance(value, dict):
                yield from self._named_sizes(value, at)
            elif type(value) is int and value >= 0:
                yield ".".join(map(str, at[1:])), value
            else:
                self._fail(at, f"{name}={value!r}; expected a whole number, zero or more")

    def _options(self, op: Spec, table: Any, path: Path) -> dict[str, list[Any]]:
        """The values of each option that is varied."""
        if not isinstance(table, dict):
            self._fail(path, f"options={table!r}; expected a table, e.g. options = {{ causal = ['none'] }}")
        self._known(table, path, f"option of {op.name}", op.options)
        found = {}
        for name, values in table.items():
            at, read = (*path, name), []
            for value, place in self._items(values, at):
                value = _option_value(op.options[name], value)
                with self._told(place):
                    op.options[name].check(op.name, name, value)
                if value in read:
                    self._fail(place, f"{name}={value!r} is listed twice; leave one out")
                read.append(value)
            found[name] = read
        return found

    def _dtypes(self, op: Spec, table: Mapping[str, Any], path: Path, firsts: Sequence[Cell]) -> list[Any]:
        stated, at, own = self._stated(table, path, "dtypes")
        tensors = [tensor for options, _ in firsts for tensor in op.signature(options).tensors]
        if all(tensor.dtype is not None for tensor in tensors):
            if own and all(tensor.dtype != "fp8" for tensor in tensors):
                self._fail(at, f"{op.name} fixes the dtype of every tensor; leave dtypes out")
            stated = stated if own else ["float8_e4m3fn"]
        elif stated is None:
            self._fail(path, f'{op.name} needs dtypes; add e.g. dtypes = ["bfloat16"]')
        found = []
        for dtype, place in self._items(stated, at):
            with self._told(place):
                for name in self._names(dtype, place, "a dtype"):
                    full = format_or_integer(name)
                    if full in ("int32", "int64") or format_named(full).kind != "float":
                        self._fail(place, f"dtype {name!r} is that of integers; expected a floating-point dtype")
                made = [recipe(op.name, sizes, dtype, options=options).dtypes for options, sizes in firsts]
            found.append((dtype, made, place))
        return self._distinct(found, own, "dtype")

    def _distributions(self, op: Spec, table: Mapping[str, Any], path: Path, firsts: Sequence[Cell]) -> list[Any]:
        stated, at, own = self._stated(table, path, "distributions")
        tensors = [tensor for options, _ in firsts for tensor in op.signature(options).tensors]
        known = {name for tensor in tensors for name in names_of(tensor)}
        found = []
        for values, place in self._items([""] if stated is None else stated, at):
            for name in self._names(values, place, "a distribution"):
                if stated is not None and not own and name not in _distributions():
                    self._fail(place, unknown("distribution", name, _distributions()))
            if not own and isinstance(values, dict):  # said for all tables: as far as this op has such tensors
                values = {tensor.name: values[tensor.name] for tensor in tensors if tensor.name in values} or ""
            elif not own and values not in known:
                values = ""
            with self._told(place):
                made = [recipe(op.name, sizes, options=options, values=values).values for options, sizes in firsts]
            found.append((values, made, place))
        return self._distinct(found, own, "distribution")

    def _digits(self, stated: Any, path: Path) -> list[int | None]:
        if stated is None:
            return [None]
        found: list[int | None] = []
        for digits, at in self._items(stated, path):
            if type(digits) is not int or digits < 1 or digits in found:
                self._fail(at, f"digits={digits!r}; expected whole numbers, one or more, each once")
            found.append(digits)
        return found

    def _seeds(self, stated: Any, path: Path) -> Sequence[int]:
        """A number of seeds, 0 and up, or a list of seeds."""
        if stated is None:
            return range(1)
        if type(stated) is int:
            if not 1 <= stated <= _MOST_SEEDS:
                self._fail(path, f"seeds={stated}; expected how many, from 1 to {_MOST_SEEDS}, or a list of seeds")
            return range(stated)
        found: list[int] = []
        for seed, at in self._items(stated, path):
            if type(seed) is not int or seed in found:
                self._fail(at, f"seed {seed!r}; expected whole numbers, each once, or how many seeds there shall be")
            found.append(seed)
        return found

    # How to go about a place.

    def _stated(self, table: Mapping[str, Any], path: Path, name: str) -> tuple[Any, Path, bool]:
        """What the table, or else the top of the file, says; where; and whether it is the table."""
        if name in table:
            return table[name], (*path, name), True
        return self._content.get(name), (name,), False

    def _items(self, value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
        """The elements of a list, or a lone value, with their places."""
        if not isinstance(value, list):
            yield value, path
            return
        if not value:
            self._fail(path, f"{path[-1]} is an empty list; list at least one, or leave it out")
        for place, item in enumerate(value):
            yield item, (*path, place)

    def _names(self, value: Any, path: Path, kind: str) -> list[str]:
        """The names in a name or in a table of names by tensor."""
        names = list(value.values()) if isinstance(value, dict) else [value]
        if not names or not all(isinstance(name, str) for name in names):
            self._fail(path, f"{value!r}; expected the name of {kind}, or one per tensor, {{ x = ... }}")
        return names

    def _distinct(self, found: Sequence[tuple[Any, Any, Path]], own: bool, kind: str) -> list[Any]:
        """The values without those that mean the same as an earlier one; what is listed for one table must differ."""
        kept: list[tuple[Any, Any]] = []
        for value, meaning, path in found:
            if meaning not in [other for _, other in kept]:
                kept.append((value, meaning))
            elif own:
                self._fail(path, f"{kind} {value!r} gives the same inputs as an earlier one; leave one out")
        return [value for value, _ in kept]

    def _known(self, table: Mapping[str, Any], path: Path, kind: str, known: Sequence[str] | Mapping[str, Any]) -> None:
        for name in table:
            if name not in known:
                self._fail((*path, name), unknown(kind, name, known))

    @contextmanager
    def _told(self, path: Path) -> Iterator[None]:
        """What goes wrong within is told with its line."""
        try:
            yield
        except CampaignError:
            raise
        except AssayError as error:
            self._fail(path, str(error))

    def _fail(self, path: Path, message: str) -> NoReturn:
        raise CampaignError(f"{self._label}:{self._positions.line(path)}: {message}")


@cache
def _distributions() -> frozenset[str]:
    """The distributions that any tensor of any op can have."""
    return frozenset(name for op in specs() for tensor in spec(op).tensors for name in names_of(tensor))


def _option_value(option: Option, value: Any) -> Any:
    """TOML has no None and no tuples."""
    if value == "none" and not option.accepts("none") and option.accepts(None):
        return None
    if isinstance(value, list):
        return tuple(value)
    return value


def _in_words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{symbol}={size}" for symbol, size in islice(sizes.items(), 12))
