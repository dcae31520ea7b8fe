"""KernelBench files: ``Model``, ``get_inputs()`` and ``get_init_inputs()``; the solution's class is ``ModelNew``.

MultiKernelBench and other formats with these names are read too. Sizes are the integers that the file sets at module
level; the text is rewritten for other sizes, and so are the solution's own constants of the same name and value.
``batch_size = 16``, ``N = 2048 * 2``, ``height = width = 128`` and ``shape = (64, 32)`` set sizes; those of a tuple are
called ``shape[0]`` and ``shape[1]``. Line numbers stay.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from assay.judge.problems.problem import Answer, Entry, Instance, Problem, ProblemError, Sizes
from assay.judge.problems.running import executed, explained, seeded

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Pow, ast.LShift)
_MOST = 2**40  # larger numbers are no sizes


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
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    for (first, begin, last, end), text in sorted(edits.items(), reverse=True):
        head, tail = lines[first - 1][:begin], lines[last - 1][end:]
        lines[first - 1 : last] = [head + text.encode() + b"\n" * (last - first) + tail]
    return b"".join(lines).decode()


def _constants_in(source: str) -> Iterator[tuple[str, ast.expr, int]]:
    """Yield name, expression and value of each integer that is set at module level."""
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
    """Return the value of an expression of literals, if it is an integer of at least 0."""
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


_NAMES = ("Model", "get_inputs", "get_init_inputs")
ENTRY = Entry("ModelNew", "class")


def reads(path: Path) -> bool:
    """Return whether a file is a problem of this format."""
    return path.is_file() and path.suffix == ".py" and "class Model" in path.read_text(encoding="utf-8")


def problem(path: Path) -> Problem:
    """Return the problem. Raises `ProblemError`."""
    source = path.read_text(encoding="utf-8")
    try:
        known = constants(source)
    except SyntaxError as error:
        raise ProblemError(f"{path}: expected a Python file, got a syntax error ({error})") from None
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
    try:
        init, named = _constructor(seeded(namespace["get_init_inputs"], seed, source))
        module = seeded(lambda: namespace["Model"](*init, **named), seed, source)
    except ProblemError:
        raise
    except Exception as error:
        raise explained(error, path, "Model(*get_init_inputs())") from None
    if not isinstance(module, torch.nn.Module):
        raise ProblemError(f"{path}: expected Model to be a torch.nn.Module, got {type(module).__name__}")

    def draw(seed: int) -> tuple[Any, ...]:
        try:
            return tuple(seeded(namespace["get_inputs"], seed, source))
        except Exception as error:
            raise explained(error, path, "get_inputs()") from None

    return Instance(sizes, module, draw, module, init, named)


def _constructor(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments of the constructor, from a list, or from one list and one dict."""
    given = list(given)
    if len(given) == 2 and isinstance(given[0], list) and isinstance(given[1], dict):
        return tuple(given[0]), dict(given[1])
    return tuple(given), {}


def solution(path: Path, of: Problem) -> Answer:
    """Return the solution, a single file. Raises `ProblemError`."""
    if not path.is_file():
        raise ProblemError(f"{path}: expected a Python file with a class {of.entry.name}, got none")
    source = path.read_text(encoding="utf-8")
    if of.entry.name not in source:
        raise ProblemError(f"{path}: expected a class {of.entry.name}, got none")
    return Answer(path.stem, {"solution.py": source}, "solution.py", of.entry)
