"""KernelBench files: ``Model``, ``get_inputs()`` and ``get_init_inputs()``; the solution's class is ``ModelNew``.

MultiKernelBench and other formats with these names are read too. Sizes are the integers that the file sets at module
level; the text is rewritten for other sizes, and so are the solution's own constants of the same name and value.
``batch_size = 16``, ``N = 2048 * 2``, ``height = width = 128`` and ``shape = (64, 32)`` set sizes; those of a tuple are
called ``shape[0]`` and ``shape[1]``. Line numbers stay.
"""

from __future__ import annotations

import ast
import io
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from assay.judge.problems.problem import Answer, Entry, Instance, Problem, ProblemError, Sizes
from assay.judge.problems.running import executed, explaining, seeded
from assay.runtime.errors import one_line
from assay.runtime.files import read_text
from assay.runtime.source import syntax_tree

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}
_MOST = 2**40  # larger numbers are no sizes
_MOST_RIGHT = 2**32  # on the right of an operator
_MOST_EXPONENT = 64
_MOST_BITS, _LARGE = 2.0**24, 1000.0
_DEEPEST = 100  # levels of an expression


def constants(source: str) -> dict[str, int]:
    """Return the integers that a module's text sets by literals, by name. Raises `SyntaxError`."""
    results: dict[str, int] = {}
    for name, _, value in _constants_in(source):
        results[name] = value if results.get(name, value) == value else -1  # set twice to different values: dropped
    return {name: value for name, value in results.items() if value >= 0}


def rewritten(source: str, values: Mapping[str, int], instead_of: Mapping[str, int] | None = None) -> str:
    """Return the text with ``values`` for the constants of these names.

    ``instead_of``: replace only constants that have the value given there, for another file than the problem's.
    """
    edits: dict[tuple[int, int, int, int], str] = {}
    for name, node, value in _constants_in(source):
        if name in values and values[name] != value and (instead_of is None or instead_of.get(name) == value):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            edits[node.lineno, node.col_offset, node.end_lineno, node.end_col_offset] = str(values[name])
    lines = [line.encode() for line in io.StringIO(source, newline="")]  # the tree's own lines: form feeds end none
    for (first, begin, last, end), text in sorted(edits.items(), reverse=True):
        head, tail = lines[first - 1][:begin], lines[last - 1][end:]
        lines[first - 1 : last] = [head + text.encode() + b"\n" * (last - first) + tail]
    return b"".join(lines).decode()


def _constants_in(source: str) -> Iterator[tuple[str, ast.expr, int]]:
    """Yield name, expression and value of each integer that is set at module level."""
    for statement in syntax_tree(source).body:
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


def _number(node: ast.expr, deepest: int = _DEEPEST) -> int | None:
    """Return the value of an expression of literals, if it is an integer of at least 0 and below 2^40.

    It has at most ``deepest`` levels, each part of it is such an integer too, and none is computed twice.
    """
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value if 0 <= value < _MOST else None
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS and deepest:
            one, other = _number(left, deepest - 1), _number(right, deepest - 1)
            if one is None or other is None or other > _MOST_RIGHT:
                return None
            if (isinstance(op, ast.Pow | ast.LShift) and other > _MOST_EXPONENT) or (
                isinstance(op, ast.FloorDiv) and other == 0
            ):
                return None
            value = _OPERATORS[type(op)](one, other)
            return value if 0 <= value < _MOST else None
        case _:
            return None


def endless(source: str) -> str:
    """Return the first expression of literals whose value has more than 2^24 bits, which Python may never finish.

    Empty if there is none. Raises `SyntaxError`.
    """
    for node in ast.walk(syntax_tree(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift) and _bits(node) > _MOST_BITS:
            return ast.unparse(node)
    return ""


def _bits(node: ast.expr, deepest: int = _DEEPEST) -> float:
    """Return about how many bits the value of an expression of literals has; -infinity if it is no such expression."""
    match node:
        case ast.Constant(value=int(value)):
            return math.log2(max(value, 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS and deepest:
            one, other = _bits(left, deepest - 1), _bits(right, deepest - 1)
            if -math.inf in (one, other):
                return -math.inf
            match op:
                case ast.Pow():
                    return one * 2.0 ** min(other, _LARGE)
                case ast.LShift():
                    return one + 2.0 ** min(other, _LARGE)
                case ast.Mult():
                    return one + other
                case _:
                    return max(one, other) + 1
    return -math.inf


_NAMES = ("Model", "get_inputs", "get_init_inputs")
ENTRY = Entry("ModelNew", "class")


def reads(path: Path) -> bool:
    """Return whether a file is a problem of this format."""
    return path.suffix == ".py" and not path.is_dir() and "class Model" in read_text(path, ProblemError)


def problem(path: Path) -> Problem:
    """Return the problem. Raises `ProblemError`."""
    source = read_text(path, ProblemError)
    try:
        known, number = constants(source), endless(source)
    except SyntaxError as error:
        raise ProblemError(f"{path}: expected a Python file, got a syntax error ({error})") from None
    if number:
        raise ProblemError(f"{path}: expected numbers of at most {_MOST_BITS:,.0f} bits, got {one_line(number)}")
    missing = [name for name in _NAMES if f"{name}(" not in source and f"{name}:" not in source]
    if missing:
        raise ProblemError(f"{path}: expected Model, get_inputs and get_init_inputs, got no {', '.join(missing)}")

    def make(sizes: Sizes, seed: int) -> Instance:
        text = rewritten(source, sizes)
        namespace = executed(text, path)
        return _instance(namespace, sizes, seed, text, path)

    return Problem(path.stem, "KernelBench", path, source, (known,), tuple(known), make, ENTRY, rewrites=True)


def _instance(namespace: Mapping[str, Any], sizes: Sizes, seed: int, source: str, path: Path) -> Instance:
    lacking = [name for name in _NAMES if not callable(namespace.get(name))]
    if lacking:
        raise ProblemError(f"{path}: expected Model, get_inputs and get_init_inputs, got no {', '.join(lacking)}")
    with explaining(path, "Model(*get_init_inputs())"):
        init, named = _constructor(seeded(namespace["get_init_inputs"], seed, source))
        module = seeded(lambda: namespace["Model"](*init, **named), seed, source)
    if not isinstance(module, torch.nn.Module):
        raise ProblemError(f"{path}: expected Model to be a torch.nn.Module, got {type(module).__name__}")

    def draw(seed: int) -> tuple[Any, ...]:
        with explaining(path, "get_inputs()"):
            return tuple(seeded(namespace["get_inputs"], seed, source))

    return Instance(sizes, module, draw, module, init, named)


def _constructor(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments of the constructor, from a list, or from one list and one dict."""
    given = list(given)
    if len(given) == 2 and isinstance(given[0], list) and isinstance(given[1], dict):
        return tuple(given[0]), dict(given[1])
    return tuple(given), {}


def solution(path: Path, of: Problem) -> Answer:
    """Return the solution, a single file. Raises `ProblemError`."""
    source = read_text(path, ProblemError, f"expected a Python file with a class {of.entry.name}")
    if of.entry.name not in source:
        raise ProblemError(f"{path}: expected a class {of.entry.name}, got none")
    return Answer(path.stem, {"solution.py": source}, "solution.py", of.entry)
