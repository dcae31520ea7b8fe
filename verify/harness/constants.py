"""The whole numbers with which a kernel's source compares sizes: where another path may begin.

Comparisons (of ``n > 64`` the size 65), moduli, quotients, shifts and masks (``n % 4096``, ``n // 128``, ``n >> 12``,
``n & 63``), ends of slices, ranges, ``min`` and ``max``, keys of tables, ``match`` and defaults of parameters count,
and the tables and names of the module that these use. A module-level tuple or list of whole numbers is a table too
(buckets of a dispatcher). Comparisons that one condition joins may hold together only where each of their sizes is that
of its own symbol: they are joint.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import combinations, product
from pathlib import Path

LARGEST = 2**14
"""Larger numbers are limits of a device or of a format rather than sizes of a case."""
_MOST_BYTES = 2**20  # of a source
_LONGEST_SHIFT = 20
_LEAST_WRAPPED = 32
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


Compared = tuple[str, int]
"""A constant that is compared, with the name that it is compared with, empty if that isn't a name."""
Joint = tuple[Compared, Compared]
"""Two of one condition."""


def joint_constants(ran: Mapping[str, Iterable[int]]) -> list[Joint]:
    """Return the pairs of constants from 1 to `LARGEST` that one condition compares, of the functions that ``ran``.

    Of ``rows == 1 and n > 4096`` that is ("rows", 1) with ("n", 4097). Two indices that a sum makes one are a pair too:
    of ``i // 128 * width + j // 128`` 129 with 129. ``ran`` is as in `compared_constants`.
    """
    results: dict[Joint, None] = {}
    for file, lines in ran.items():
        starts = set(lines)
        for start, node, names in _functions(file):
            for condition in ast.walk(node) if start in starts else ():
                if isinstance(condition, ast.BoolOp):
                    parts = [list(_compared(part, names)) for part in condition.values]
                elif isinstance(condition, ast.BinOp) and isinstance(condition.op, ast.Add):
                    parts = [list(_wrapped(part, names)) for part in (condition.left, condition.right)]
                else:
                    continue
                for one, other in combinations([each for each in parts if each], 2):
                    results.update(dict.fromkeys(product(one, other)))
    return list(results)


def _wrapped(part: ast.AST, names: Mapping[str, tuple[int, ...]]) -> Iterator[Compared]:
    """Yield the sizes at which the indices of a term wrap around."""
    for node in ast.walk(part):
        if isinstance(node, ast.BinOp):
            yield from (("", number) for number in _of_wrapping(node, names))


def _compared(part: ast.AST, names: Mapping[str, tuple[int, ...]]) -> Iterator[Compared]:
    """Yield the constants that a part of a condition compares, each with the name that it is compared with."""
    if isinstance(part, ast.Compare):
        others = [node for node in (part.left, *part.comparators) if not list(_numbers(node, names))]
        name = next((other.id for other in others if isinstance(other, ast.Name)), "")
        yield from ((name, number) for number in _of_comparison(part, names) if 1 <= number <= LARGEST)


@cache
def _by_function(file: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return for each function of a source, and for the module (line 0), its first line and its constants."""
    return tuple(
        (start, tuple(_of_tables(node) if isinstance(node, ast.Module) else _of_function(node, names)))
        for start, node, names in _functions(file)
    )


@cache
def _functions(file: str) -> tuple[tuple[int, ast.AST, Mapping[str, tuple[int, ...]]], ...]:
    """Return the module (line 0) and each function of a source, with its first line and what names stand for."""
    path = Path(file)
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return ()
        module = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()
    names = _named(module)
    results: list[tuple[int, ast.AST, Mapping[str, tuple[int, ...]]]] = [(0, module, names)]
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            results.append((start, node, names))
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
            yield from _of_comparison(node, names)
        elif isinstance(node, ast.BinOp):
            yield from _of_wrapping(node, names)
        elif isinstance(node, ast.Slice) and node.upper is not None and node.step is None:
            yield from _beginnings(node.upper, names, beyond=True)
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


def _of_comparison(node: ast.Compare, names: Mapping[str, tuple[int, ...]]) -> Iterator[int]:
    parts = (node.left, *node.comparators)
    for left, operator, right in zip(parts, node.ops, node.comparators, strict=False):
        yield from _beginnings(left, names, isinstance(operator, ast.Lt | ast.GtE))
        yield from _beginnings(right, names, isinstance(operator, ast.Gt | ast.LtE))


def _of_wrapping(node: ast.BinOp, names: Mapping[str, tuple[int, ...]]) -> Iterator[int]:
    """Yield the sizes at which an index wraps around: one more than n of ``% n``, ``// n``, ``>> log2 n`` and ``& (n -
    1)``; none of another operation.

    Small ones are sizes of ordinary cases.
    """
    if not isinstance(node.op, ast.Mod | ast.FloorDiv | ast.RShift | ast.BitAnd):
        return
    for number in _numbers(node.right, names):
        if isinstance(node.op, ast.RShift):
            number = 1 << number if 0 <= number <= _LONGEST_SHIFT else 0
        elif isinstance(node.op, ast.BitAnd):
            number += 1
        if _LEAST_WRAPPED <= number < LARGEST:
            yield number + 1


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
