"""The whole numbers with which a kernel's source compares sizes: where another path may begin.

Comparisons (of ``n > 64`` the size 65), ranges, ``min`` and ``max``, keys of tables, ``match`` and defaults of
parameters count, and the tables and names of the module that these use. A module-level tuple or list of whole numbers
is a table too (buckets of a dispatcher).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

LARGEST = 2**14
"""Larger numbers are limits of a device or of a format rather than sizes of a case."""
_MOST_BYTES = 2**20  # of a source
_LONGEST_SHIFT = 20
_COMPARING = frozenset({"range", "min", "max", "bisect", "bisect_left", "bisect_right"})


def compared_constants(ran: Mapping[str, Iterable[int]]) -> list[int]:
    """Return the constants from 2 to `LARGEST` of these sources, those of functions that ``ran`` first, each once.

    ``ran`` maps the file of a source to the first lines of its functions that ran. Files that aren't Python are left
    out.
    """
    first, others = list[int](), list[int]()
    for file, lines in ran.items():
        starts = set(lines)
        for start, constants in _by_function(file):
            (first if start in starts else others).extend(constants)
    return [number for number in dict.fromkeys([*first, *others]) if 2 <= number <= LARGEST]


@cache
def _by_function(file: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return for each function of a source, and for the module (line 0), its first line and its constants."""
    path = Path(file)
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return ()
        module = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()
    names = _named(module)
    results = [(0, tuple(_of_tables(module)))]
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            results.append((start, tuple(_of_function(node, names))))
    return tuple(results)


def _named(module: ast.Module) -> dict[str, tuple[int, ...]]:
    """Return the numbers that names of the module stand for."""
    results: dict[str, tuple[int, ...]] = {}
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            numbers = tuple(_numbers(node.value, {}))
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            results |= {target.id: numbers for target in targets if isinstance(target, ast.Name) and numbers}
    return results


def _of_tables(module: ast.Module) -> Iterator[int]:
    """Yield the whole numbers of the module's own tuples, lists, sets and keys."""
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for part in ast.walk(node.value):
                if isinstance(part, ast.Tuple | ast.List | ast.Set | ast.Dict):
                    yield from _numbers(part, {})


def _of_function(function: ast.AST, names: Mapping[str, tuple[int, ...]]) -> Iterator[int]:
    for node in ast.walk(function):
        if isinstance(node, ast.Compare):
            parts = (node.left, *node.comparators)
            for left, operator, right in zip(parts, node.ops, node.comparators, strict=False):
                yield from _beginnings(left, names, isinstance(operator, ast.Lt | ast.GtE))
                yield from _beginnings(right, names, isinstance(operator, ast.Gt | ast.LtE))
        elif isinstance(node, ast.Call) and _name(node.func) in _COMPARING:
            for part in node.args:
                yield from _numbers(part, names)
        elif isinstance(node, ast.MatchValue):
            yield from _numbers(node.value, names)
        elif isinstance(node, ast.Dict):
            yield from _numbers(node, names)
        elif isinstance(node, ast.arguments):
            for default in (*node.defaults, *filter(None, node.kw_defaults)):
                yield from _numbers(default, names)


def _beginnings(node: ast.AST, names: Mapping[str, tuple[int, ...]], beyond: bool) -> Iterator[int]:
    """Yield the sizes at which the other path of a comparison begins: one more than its constants if ``beyond``."""
    for number in _numbers(node, names):
        yield number + 1 if beyond and number < LARGEST else number


def _numbers(node: ast.AST, names: Mapping[str, tuple[int, ...]]) -> Iterator[int]:
    """Yield the whole numbers of an expression: its value, the elements of a sequence, the keys of a table."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        for element in node.elts:
            yield from _numbers(element, names)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            if key is not None:
                yield from _numbers(key, names)
    elif isinstance(node, ast.Name):
        yield from names.get(node.id, ())
    elif (value := _value(node)) is not None:
        yield value
    elif isinstance(node, ast.BinOp | ast.UnaryOp | ast.Call | ast.BoolOp | ast.Starred):
        for child in ast.iter_child_nodes(node):
            yield from _numbers(child, names)


def _value(node: ast.AST) -> int | None:
    """Return the value of a constant or of whole-number arithmetic of constants; None if it isn't one."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _value(node.left), _value(node.right)
    if left is None or right is None or not (abs(left) <= LARGEST and abs(right) <= LARGEST):
        return None
    with suppress(ZeroDivisionError):
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.FloorDiv):
            return left // right
        if isinstance(node.op, ast.Pow | ast.LShift) and 0 <= right <= _LONGEST_SHIFT and left in (1, 2):
            return left**right if isinstance(node.op, ast.Pow) else left << right
    return None


def _name(function: ast.AST) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
