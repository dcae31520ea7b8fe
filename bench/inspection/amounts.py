"""Counts the operations and bytes of a launch in the kernel's Triton IR, the compiler's first representation.

A program is interpreted with the launch's scalar arguments and its program id, so that loops run as often as they will
on the device; a large grid is sampled at even distances. Counted are two operations for each multiply-add of a product
(``tt.dot``), one for each element of any other floating-point operation, and the bytes of loads and stores, masked
elements included.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

_PROGRAMS = 48  # of a larger grid, as a sample: few enough to interpret in Python
_STEPS = 64  # of a longer loop whose iterations differ, as a sample


@dataclass
class Amounts:
    """The work of a launch: operations of products (``tt.dot``) and others, bytes of loads and of stores.

    ``complete`` is False if a branch or a loop's length depends on values in memory; such code is counted once.
    """

    products: float = 0.0
    others: float = 0.0
    loaded: float = 0.0
    stored: float = 0.0
    complete: bool = True

    def add(self, other: Amounts, times: float = 1.0) -> None:
        """Add ``other``, ``times`` times."""
        for name in ("products", "others", "loaded", "stored"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        self.complete &= other.complete

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class _Op:
    """An operation: its results, its name, the rest of its line, and its nested regions."""

    results: tuple[str, ...]
    name: str
    text: str
    regions: tuple[tuple[_Op, ...], ...] = ()


def amounts(ttir: str, grid: Sequence[int], numbers: Mapping[str, int]) -> Amounts:
    """Return the work of a launch of ``grid`` programs; ``numbers``: its scalar arguments, by IR name."""
    body = _parsed(ttir)
    total, count = Amounts(), math.prod(grid)
    indices = range(count) if count <= _PROGRAMS else [count * step // _PROGRAMS for step in range(_PROGRAMS)]
    for index in indices:
        x, rest = index % grid[0], index // grid[0]
        program = _Program((x, rest % grid[1], rest // grid[1]), tuple(grid))
        total.add(program.walk(body, dict(numbers)), count / len(indices))
    return total


class _Program:
    """One program of the grid."""

    def __init__(self, program_id: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self._program_id, self._grid = program_id, grid

    def walk(self, ops: Sequence[_Op], values: dict[str, Any], index: int = 0) -> Amounts:
        """Return the work of ``ops`` from ``index`` on; known scalars are read from and added to ``values``."""
        total = Amounts()
        while index < len(ops):
            op = ops[index]
            index += 1
            if op.name in ("cf.br", "cf.cond_br"):
                successors = self._successors(op, ops, values)
                if len(successors) > 1:  # the condition is unknown: count the branch with more work
                    total.add(max((self.walk(ops, dict(values), start) for start in successors), key=_size))
                    total.complete = False
                    break
                index = successors[0]
            elif op.name == "tt.return":
                break
            elif op.name == "scf.for":
                self._loop(op, values, total)
            elif op.name == "scf.if":
                self._branch(op, values, total)
            elif (
                op.name.startswith("scf.") and op.regions
            ):  # while, execute_region: the number of iterations is unknown
                for region in op.regions:
                    total.add(self.walk(region, dict(values)))
                total.complete = op.name == "scf.execute_region" and total.complete
            elif op.name == "tt.call":
                total.complete = False
            else:
                _count(op, total)
                if len(op.results) == 1:
                    values[op.results[0]] = self._value(op, values)
        return total

    def _successors(self, op: _Op, ops: Sequence[_Op], values: Mapping[str, Any]) -> list[int]:
        """Return the index at which a branch continues, or both if its condition is unknown."""
        labels = re.findall(r"\^(\w+)", op.text)
        indices = [next((at for at, other in enumerate(ops) if other.name == f"^{name}"), len(ops)) for name in labels]
        if op.name == "cf.br":
            return indices[:1]
        condition = values.get(_names(op.text)[0])
        return indices if condition is None else [indices[0 if condition else 1]]

    def _loop(self, op: _Op, values: dict[str, Any], total: Amounts) -> None:
        matched = re.match(r"(?:unsigned )?%([\w.$-]+) = %([\w.$-]+) to %([\w.$-]+) step %([\w.$-]+)", op.text)
        assert matched, op.text
        index, low, high, step = matched[1], *(values.get(name) for name in matched.groups()[1:])
        carried = re.findall(r"%([\w.$-]+) = %([\w.$-]+)", op.text[matched.end() :])
        known = low is not None and high is not None and bool(step)
        if low is None or high is None or not step:
            low, high, step = 0, 1, 1
            total.complete = False
        rounds = max(-(-(high - low) // step), 0)
        state: dict[str, Any] = {inner: values.get(outer) for inner, outer in carried}
        once = self.walk(op.regions[0], {**values, **dict.fromkeys(state), index: None})
        if once.complete or not known:
            total.add(once, rounds)
            return
        taken = range(rounds) if rounds <= _STEPS else [rounds * iteration // _STEPS for iteration in range(_STEPS)]
        for iteration in taken:
            inner = {**values, **state, index: low + iteration * step}
            total.add(self.walk(op.regions[0], inner), rounds / len(taken))
            state = _yielded(op.regions[0], inner, state) if len(taken) == rounds else dict.fromkeys(state)

    def _branch(self, op: _Op, values: dict[str, Any], total: Amounts) -> None:
        condition = values.get(_names(op.text)[0])
        if condition is not None:
            taken = op.regions[0 if condition else 1] if condition or len(op.regions) > 1 else ()
            inner = dict(values)
            total.add(self.walk(taken, inner))
            given = [inner.get(name) for name in _names(taken[-1].text)] if taken else []
            values.update(zip(op.results, given, strict=False))
            return
        arms = [self.walk(region, dict(values)) for region in op.regions]
        largest = max(arms, key=_size)
        nothing = len({(arm.products, arm.others, arm.loaded, arm.stored) for arm in arms}) == 1 and len(arms) > 1
        total.add(largest)
        total.complete &= nothing

    def _value(self, op: _Op, values: Mapping[str, Any]) -> Any:
        if op.name == "arith.constant":
            match = re.match(r"(-?\d+|true|false)\b(?!\.)", op.text)
            return int(_TRUTH.get(match[1], match[1])) if match else None
        if op.name in ("tt.get_program_id", "tt.get_num_programs"):
            axis = "xyz".index(op.text[0])
            return self._program_id[axis] if op.name == "tt.get_program_id" else self._grid[axis]
        if "tensor<" in op.text or op.name not in _SCALAR:
            return None
        given: list[Any] = [values.get(name) for name in _names(op.text.partition(" : ")[0])]
        if op.name == "arith.select":
            return None if given[0] is None else given[1] if given[0] else given[2]
        if None in given:
            return None
        if op.name == "arith.cmpi":
            return int(_COMPARED[op.text.partition(",")[0].strip()](*given))
        try:
            return _SCALAR[op.name](*given)
        except (ZeroDivisionError, ValueError):
            return None


def _size(amounts: Amounts) -> tuple[float, float]:
    """Return the sort key by which one branch has more work than another."""
    return amounts.products, amounts.others + amounts.loaded + amounts.stored


def _yielded(region: Sequence[_Op], values: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that an iteration of a loop yields to the next."""
    given = _names(region[-1].text.partition(" : ")[0]) if region and region[-1].name == "scf.yield" else []
    return {name: values.get(value) for name, value in zip(state, given, strict=False)}


def _count(op: _Op, total: Amounts) -> None:
    """Add the work of one operation."""
    if op.name in ("tt.dot", "tt.dot_scaled"):
        shapes = [_shape(text) for text in re.findall(r"tensor<([^>]*)>", op.text)]
        packed = 2 if op.name == "tt.dot_scaled" and "lhs = e2m1" in op.text else 1  # e2m1: two numbers per byte
        total.products += 2.0 * math.prod(shapes[-1]) * shapes[0][-1] * packed
    elif op.name in _MOVES or "atomic" in op.name:
        count = _bytes(op.text.rpartition(" : ")[2])
        if "load" in op.name or "gather" in op.name:
            total.loaded += count
        else:
            total.stored += count
    elif op.name in ("tt.reduce", "tt.scan"):
        per_element = sum(_is_float(inner) for inner in op.regions[0])
        shape = re.search(r"tensor<([^>]*)>", op.text)
        total.others += per_element * math.prod(_shape(shape[1])) if shape else 0
    elif _is_float(op):
        shape = re.search(r"tensor<([^>]*)>", op.text.rpartition(" : ")[2])
        total.others += (math.prod(_shape(shape[1])) if shape else 1) * (2 if op.name == "math.fma" else 1)


def _is_float(op: _Op) -> bool:
    """Return whether an operation is floating-point arithmetic; comparisons, selects and casts are not."""
    return op.name in _FLOATING or (op.name.startswith("math.") and not op.name.endswith("i"))


def _bytes(kind: str) -> float:
    """Return the bytes behind a type: a tensor of pointers, a pointer, or a block of a descriptor."""
    kind = kind.rpartition("-> ")[2]
    element = re.search(r"ptr<([a-z]+\d+)", kind) or re.search(r"(?:x|^)((?:bf|f|i)\d+\w*)>", kind)
    bits = int((re.search(r"\d+", element[1]) or ["8"])[0]) if element else 8
    shape = re.match(r"!?(?:tt\.tensordesc<)?tensor<(.*)", kind) or re.match(r"!tt\.tensordesc<(.*)", kind)
    return (math.prod(_shape(shape[1])) if shape else 1) * max(bits, 8) / 8


def _shape(text: str) -> list[int]:
    return [int(size) for size in re.findall(r"(\d+)x", re.match(r"(?:\d+x)*", text)[0])]  # type: ignore[index]


def _names(text: str) -> list[str]:
    return re.findall(r"%([\w.$#-]+)", text)


def _parsed(ttir: str) -> tuple[_Op, ...]:
    """Return the operations of the kernel's body."""
    lines = iter(_lines(ttir))
    for line in lines:
        if line.startswith("tt.func public"):
            return _region(lines)[0]
    return ()


def _lines(ttir: str) -> Iterator[str]:
    """Yield the lines of the IR without source locations."""
    for line in ttir.splitlines():
        if line.startswith("#"):
            continue
        kept = re.sub(r"\s*loc\((?:#loc\d*|[^()]*(?:\([^()]*\))?[^()]*)\)", "", line).strip()
        if kept:
            yield kept


def _region(lines: Iterator[str]) -> tuple[tuple[_Op, ...], str]:
    """Return the operations up to a region's closing brace, and the text after the brace."""
    entries: list[_Op] = []
    for line in lines:
        if line.startswith("}"):
            return tuple(entries), line[1:].strip()
        if line.startswith("^"):
            entries.append(_Op((), line.partition("(")[0].partition(":")[0], line))
            continue
        results, _, rest = line.partition(" = ") if line.startswith("%") else ("", "", line)
        name, _, text = rest.partition(" ")
        if name.startswith('"'):
            name, _, text = rest[1:].partition('"')
        regions = []
        if line.endswith("{"):
            inner, after = _region(lines)
            regions.append(inner)
            while after.endswith("{"):
                inner, after = _region(lines)
                regions.append(inner)
            text += " " + after
        entries.append(_Op(tuple(_results(results)), name, text, tuple(regions)))
    return tuple(entries), ""


def _results(text: str) -> Iterator[str]:
    """Yield the names of results: ``a`` of ``%a``, ``a#0`` and ``a#1`` of ``%a:2``."""
    for name in filter(None, (part.strip().lstrip("%") for part in text.split(","))):
        own, colon, count = name.partition(":")
        yield from (f"{own}#{index}" for index in range(int(count))) if colon else (own,)


def _quotient(a: int, b: int) -> int:
    return math.trunc(a / b) if abs(a) < 2**52 and abs(b) < 2**52 else a // b


_SCALAR: dict[str, Callable[..., Any]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.divsi": _quotient,
    "arith.divui": lambda a, b: a // b,
    "arith.ceildivsi": lambda a, b: -(-a // b),
    "arith.floordivsi": lambda a, b: a // b,
    "arith.remsi": lambda a, b: a - b * _quotient(a, b),
    "arith.remui": lambda a, b: a % b,
    "arith.minsi": min,
    "arith.maxsi": max,
    "arith.minui": min,
    "arith.maxui": max,
    "arith.andi": lambda a, b: a & b,
    "arith.ori": lambda a, b: a | b,
    "arith.xori": lambda a, b: a ^ b,
    "arith.shli": lambda a, b: a << b,
    "arith.shrsi": lambda a, b: a >> b,
    "arith.shrui": lambda a, b: a >> b,
    "arith.extsi": lambda a: a,
    "arith.extui": lambda a: a,
    "arith.trunci": lambda a: a,
    "arith.index_cast": lambda a: a,
    "arith.cmpi": lambda a, b: a,
    "arith.select": lambda a, b, c: b,
}
_TRUTH = {"true": "1", "false": "0"}
_MOVES = {"tt.load", "tt.store"} | {f"tt.descriptor_{what}" for what in ("load", "store", "gather", "scatter")}
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    **dict.fromkeys(("slt", "ult"), lambda a, b: a < b),
    **dict.fromkeys(("sle", "ule"), lambda a, b: a <= b),
    **dict.fromkeys(("sgt", "ugt"), lambda a, b: a > b),
    **dict.fromkeys(("sge", "uge"), lambda a, b: a >= b),
}
_FLOATING = {
    f"arith.{name}"
    for name in ("addf", "subf", "mulf", "divf", "remf", "negf", "maximumf", "minimumf", "maxnumf", "minnumf")
} | {"tt.precise_sqrt", "tt.precise_divf", "tt.extern_elementwise"}

__all__ = ["Amounts", "amounts"]
