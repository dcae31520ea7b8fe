"""What a campaign's TOML means, and what is wrong with it: the place, what is expected there, and how to mend it.

msgspec holds each table to the types below; whatever hangs on an op is held to its `Spec`, and to `recipe`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import prod
from typing import Annotated, Any

import msgspec

from assay.formats.format import format_named
from assay.golden.errors import CampaignError, ShapeError
from assay.golden.inputs.distributions import names_of
from assay.golden.inputs.recipe import recipe
from assay.golden.inputs.values import INTEGERS, format_or_integer
from assay.golden.jobs.entry import Entry
from assay.golden.options import Option
from assay.golden.registry import Spec, spec, specs
from assay.runtime.errors import AssayError, unknown
from assay.runtime.records import structured

_EXAMPLES = {"spec": 'spec = "softmax"', "shapes": "shapes = [{ R = 4, N = 64 }]"}
_MOST_CELLS = 100_000
_NOT_EMPTY = msgspec.Meta(min_length=1)

Cell = tuple[Mapping[str, Any], Mapping[str, int]]  # complete options, and sizes
Names = str | Annotated[dict[str, str], _NOT_EMPTY]  # for all tensors, or for each by name
Whole = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seeds = Annotated[int, msgspec.Meta(ge=1, le=2**40)] | Annotated[list[int], _NOT_EMPTY]  # how many, or which
Sizes = Whole | str | Annotated[list[Whole | str], _NOT_EMPTY]


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """What a table may say, or the top of the file for all tables that don't."""

    dtypes: Names | Annotated[list[Names], _NOT_EMPTY] | None = None
    distributions: Names | Annotated[list[Names], _NOT_EMPTY] | None = None
    seeds: Seeds | None = None
    digits: Positive | Annotated[list[Positive], _NOT_EMPTY] | None = None


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
class _Place:
    """A place in a campaign file, as messages name it: ``mine.toml: golden[2].shapes[0].H``."""

    file: str
    path: str = ""

    def __truediv__(self, part: str | int) -> _Place:
        dot = "." if self.path else ""
        return _Place(self.file, f"{self.path}[{part}]" if isinstance(part, int) else f"{self.path}{dot}{part}")

    def __str__(self) -> str:
        return f"{self.file}: {self.path}" if self.path else self.file

    def error(self, message: str) -> CampaignError:
        """What is wrong here."""
        return CampaignError(f"{self}: {message}")

    @contextmanager
    def told(self) -> Iterator[None]:
        """What goes wrong within is told with this place."""
        try:
            yield
        except CampaignError:
            raise
        except AssayError as error:
            raise self.error(str(error)) from None


def entries(content: Mapping[str, Any], label: str) -> Iterator[Entry]:
    """An entry for each spec of each [[golden]] table of a file. Raises `CampaignError`."""
    top = _Place(label)
    if not content.get("golden"):
        raise top.error("expected at least one [[golden]] table, with a spec and shapes")
    file: _File = structured(content, _File, f"{top}:", CampaignError)
    sizes = dict(_named_sizes(file.sizes, top / "sizes"))
    names: dict[str, _Place] = {}
    for number, given in enumerate(file.golden):
        at = top / "golden" / number
        for required, example in _EXAMPLES.items():
            if required not in given:
                raise at.error(f"this [[golden]] table has no {required}; add e.g. {example}")
        table: _Table = structured(given, _Table, str(at), CampaignError)
        if table.name is not None and names.setdefault(table.name, at) != at:
            raise (at / "name").error(f"{names[table.name].path} has the name {table.name!r} already; choose another")
        for name, place in _items(table.spec, at / "spec"):
            with place.told():
                op = spec(name)
            yield _entry(op, table, at, file, top, sizes)


def _entry(op: Spec, table: _Table, at: _Place, file: _File, top: _Place, sizes: Mapping[str, int]) -> Entry:
    cells = _cells(op, table, at, sizes)
    firsts = list({repr(options): (options, sizes) for options, sizes in reversed(cells)}.values())

    def stated(name: str) -> tuple[Any, _Place, bool]:
        """What the table, or else the top of the file, says; where; and whether it is the table."""
        own = getattr(table, name) is not None
        return getattr(table if own else file, name), (at if own else top) / name, own

    digits, where, _ = stated("digits")
    seeds, place, _ = stated("seeds")
    return Entry(
        spec=op.name,
        cells=cells,
        dtypes=_dtypes(op, *stated("dtypes"), firsts, at),
        distributions=_distributions(op, *stated("distributions"), firsts),
        digits=[None] if digits is None else _once(_items(digits, where)),
        seeds=range(1 if seeds is None else seeds) if not isinstance(seeds, list) else _once(_items(seeds, place)),
        sample=table.sample,
    )


def _named_sizes(table: Mapping[str, Any], at: _Place, prefix: str = "") -> Iterator[tuple[str, int]]:
    """``model.hidden`` and its size, from the nested tables of [sizes]."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _named_sizes(value, at / name, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", structured(value, Whole, str(at / name), CampaignError)


def _cells(op: Spec, table: _Table, at: _Place, named: Mapping[str, int]) -> list[Cell]:
    """Every set of options with every set of sizes."""
    choices = _options(op, table.options, at / "options")
    sets = [op.complete(dict(zip(choices, values, strict=True))) for values in product(*choices.values())]
    cells: dict[str, Cell] = {}
    for shape, place in _items(table.shapes, at / "shapes"):
        lists = {symbol: _sizes(symbol, sizes, place / symbol, named) for symbol, sizes in shape.items()}
        if prod(map(len, lists.values())) * len(sets) > _MOST_CELLS:
            raise place.error(f"more than {_MOST_CELLS} combinations of sizes and options; split the table")
        for values in product(*lists.values()):
            sizes = dict(zip(lists, values, strict=True))
            words = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
            for options in sets:
                try:
                    recipe(op.name, sizes, options=options)
                except AssayError as error:
                    symbol = error.symbol if isinstance(error, ShapeError) else ""
                    blamed = place / symbol if symbol in sizes else place
                    raise blamed.error(f"{error} (in {words})") from None
                if cells.setdefault(f"{options} {sizes}", (options, sizes))[1] is not sizes:
                    raise place.error(f"the shape {words} is listed twice; leave one out")
    return list(cells.values())


def _sizes(symbol: str, given: Any, at: _Place, named: Mapping[str, int]) -> list[int]:
    """The sizes of a symbol: whole numbers, and names of the table [sizes]."""
    found = []
    for size, place in _items(structured(given, Sizes, str(at), CampaignError), at):
        if isinstance(size, str) and size not in named:
            raise place.error(f"{symbol}: {unknown('size', size, named)}; sizes are named in the table [sizes]")
        found.append(named[size] if isinstance(size, str) else size)
    return found


def _options(op: Spec, table: Mapping[str, Any], at: _Place) -> dict[str, list[Any]]:
    """The values of each option that is varied."""
    found = {}
    for name, values in table.items():
        if name not in op.options:
            raise at.error(unknown(f"option of {op.name}", name, op.options))
        read: list[tuple[Any, _Place]] = []
        for value, place in _items(values, at / name):
            read.append((_option_value(op.options[name], value), place))
            with place.told():
                op.options[name].check(op.name, name, read[-1][0])
        found[name] = _once(read)
    return found


def _option_value(option: Option, value: Any) -> Any:
    """TOML has no None and no tuples."""
    if value == "none" and not option.accepts("none") and option.accepts(None):
        return None
    return tuple(value) if isinstance(value, list) else value


def _dtypes(op: Spec, stated: Any, place: _Place, own: bool, firsts: Sequence[Cell], table: _Place) -> list[Any]:
    tensors = [tensor for options, _ in firsts for tensor in op.signature(options).tensors]
    if all(tensor.dtype is not None for tensor in tensors):
        if own and all(tensor.dtype != "fp8" for tensor in tensors):
            raise place.error(f"{op.name} fixes the dtype of every tensor; leave dtypes out")
        stated = stated if own else "float8_e4m3fn"
    elif stated is None:
        raise table.error(f'{op.name} needs dtypes; add e.g. dtypes = ["bfloat16"]')
    found = []
    for dtype, at in _items(stated, place):
        with at.told():
            for name in _names(dtype):
                full = format_or_integer(name)
                if full in INTEGERS or format_named(full).kind != "float":
                    raise at.error(f"dtype {name!r} is that of integers; expected a floating-point dtype")
            made = [recipe(op.name, sizes, dtype, options=options).dtypes for options, sizes in firsts]
        found.append((dtype, made, at))
    return _distinct(found, own)


def _distributions(op: Spec, stated: Any, place: _Place, own: bool, firsts: Sequence[Cell]) -> list[Any]:
    tensors = [tensor for options, _ in firsts for tensor in op.signature(options).tensors]
    known = {name for tensor in tensors for name in names_of(tensor)}
    found = []
    for values, at in _items("" if stated is None else stated, place):
        if stated is not None and not own:  # said for all tables: as far as this op has such tensors
            for name in _names(values):
                if name not in _all_distributions():
                    raise at.error(unknown("distribution", name, _all_distributions()))
            if isinstance(values, dict):
                values = {tensor.name: values[tensor.name] for tensor in tensors if tensor.name in values} or ""
            elif values not in known:
                values = ""
        with at.told():
            made = [recipe(op.name, sizes, options=options, values=values).values for options, sizes in firsts]
        found.append((values, made, at))
    return _distinct(found, own)


@cache
def _all_distributions() -> frozenset[str]:
    """The distributions that any tensor of any op can have."""
    return frozenset(name for op in specs() for tensor in spec(op).tensors for name in names_of(tensor))


def _items(value: Any, at: _Place) -> Iterator[tuple[Any, _Place]]:
    """The elements of a list, or a lone value, with their places."""
    if isinstance(value, list):
        yield from ((item, at / number) for number, item in enumerate(value))
    else:
        yield value, at


def _names(value: str | Mapping[str, str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value.values())


def _once(found: Iterator[tuple[Any, _Place]] | list[tuple[Any, _Place]]) -> list[Any]:
    """The values, of which none may be listed twice."""
    values: list[Any] = []
    for value, at in found:
        if value in values:
            raise at.error(f"{value!r} is listed twice; leave one out")
        values.append(value)
    return values


def _distinct(found: Sequence[tuple[Any, Any, _Place]], own: bool) -> list[Any]:
    """The values without those that mean the same as an earlier one; what is listed for one table must differ."""
    kept: list[tuple[Any, Any]] = []
    for value, meaning, at in found:
        if meaning not in [other for _, other in kept]:
            kept.append((value, meaning))
        elif own:
            raise at.error(f"{value!r} gives the same inputs as an earlier one; leave one out")
    return [value for value, _ in kept]
