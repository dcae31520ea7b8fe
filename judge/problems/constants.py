"""The whole numbers that a file sets at module level, and the same text with others in their place.

``batch_size = 16``, ``N = 2048 * 2``, ``height = width = 128`` and ``shape = (64, 32)`` set sizes; those of a tuple are
called ``shape[0]`` and ``shape[1]``. Lines keep their numbers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Pow, ast.LShift)
_MOST = 2**40


def constants(source: str) -> dict[str, int]:
    """The whole numbers that a module's text sets by literals, by name. Raises `SyntaxError`."""
    results: dict[str, int] = {}
    for name, _, value in _places(source):
        results[name] = value if results.get(name, value) == value else -1  # set twice: which one counts isn't known
    return {name: value for name, value in results.items() if value >= 0}


def rewritten(source: str, values: Mapping[str, int], instead_of: Mapping[str, int] | None = None) -> str:
    """The text with ``values`` for the constants of these names.

    ``instead_of``: only for those that have the value given there, as what another file calls the same.
    """
    edits: dict[tuple[int, int, int, int], str] = {}
    for name, node, value in _places(source):
        if name in values and values[name] != value and (instead_of is None or instead_of.get(name) == value):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            edits[node.lineno, node.col_offset, node.end_lineno, node.end_col_offset] = str(values[name])
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    for (first, begin, last, end), text in sorted(edits.items(), reverse=True):
        head, tail = lines[first - 1][:begin], lines[last - 1][end:]
        lines[first - 1 : last] = [head + text.encode() + b"\n" * (last - first) + tail]
    return b"".join(lines).decode()


def _places(source: str) -> Iterator[tuple[str, ast.expr, int]]:
    """Name, expression and value of each whole number that is set at module level."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets: list[ast.expr] = [statement.target]
            value = statement.value
        elif isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        else:
            continue
        for target in targets:
            yield from _of_target(target, value)


def _of_target(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr, int]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for part, of in zip(target.elts, value.elts, strict=True):
            yield from _of_target(part, of)
    elif isinstance(target, ast.Name) and isinstance(value, ast.Tuple | ast.List):
        for index, part in enumerate(value.elts):
            number = _number(part)
            if number is not None:
                yield f"{target.id}[{index}]", part, number
    elif isinstance(target, ast.Name):
        number = _number(value)
        if number is not None:
            yield target.id, value, number


def _number(node: ast.expr) -> int | None:
    """The value of an expression of literals, if it is a whole number of at least 0."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value if 0 <= value < _MOST else None
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
            if _number(left) is None or _number(right) is None or (_number(right) or 0) > 2**32:
                return None
            if isinstance(op, ast.Pow | ast.LShift) and (_number(right) or 0) > 64:
                return None
            if isinstance(op, ast.FloorDiv) and _number(right) == 0:
                return None
            value = eval(compile(ast.Expression(node), "constants", "eval"), {"__builtins__": {}})
            return value if 0 <= value < _MOST else None
        case _:
            return None
