"""The location of a comparison in the user's tests, and how its answer is used.

A call is found in its source by the position that the interpreter keeps for each instruction (PEP 657); the syntax
around it shows whether the answer is discarded, only printed, or reduced by ``all``.
"""

from __future__ import annotations

import ast
import dis
import itertools
import linecache
import os
import re
import sysconfig
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any

_LIBRARIES = (
    "numpy",
    "torch",
    "jax",
    "chex",
    "unittest",
    "pytest",
    "_pytest",
    "pluggy",
    "scipy._lib",
    "assay.verify",
    "assay.mutation",
)
_TESTS = re.compile(r"^test|(^|_)tests?$|^conftest$")
_NOT_TESTS = ("numpy.testing", "torch.testing")
_REDUCTIONS = {"all", "item", "tolist", "cpu", "numpy"}
_WRAPPERS = {"all", "bool", "int", "float", "str", "repr", "logical_not", "invert"}
_OUTPUT = {"print", "pprint", "debug", "info", "warning", "error", "log", "write", "echo"}
_FAILS = re.compile(r"assert|fail|raise|exit|check|verify|expect|skip|abort|throw", re.IGNORECASE)
_KEEPS = {"append", "extend", "add", "update", "put", "set", "setdefault", "insert", "write", "send", "record"}
_CALLERS = 4  # levels of helpers through which an answer is followed

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Location:
    """A line of the user's code that compares."""

    file: str
    line: int
    text: str


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside comparison libraries and pytest."""
    while frame is not None and _in_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame


def location(frame: FrameType, root: str) -> Location:
    """Return the line of a frame; paths below ``root`` or the installed packages are relative."""
    file = frame.f_code.co_filename
    return Location(_short(file, root), frame.f_lineno, linecache.getline(file, frame.f_lineno).strip())


def is_test_code(frame: FrameType) -> bool:
    """Return whether a frame is in a test module, a conftest or a helper in a folder of tests, by its module's name.

    Elsewhere a comparison may be part of a computation, and is not an assertion.
    """
    return _is_test_module(frame.f_globals.get("__name__", ""))


def reduced_by_all(frame: FrameType) -> bool:
    """Return whether an elementwise answer is reduced by ``all``, directly or through a name."""
    result = _node(frame)
    if result is None:
        return False
    source, node = result
    if _goes_into_all(source, node):
        return True
    name = _assigned(source.parents.get(node))
    function = source.function(node)
    return name is not None and any(_goes_into_all(source, load) for load in _loads(function or source.tree, name))


def unused(frame: FrameType | None, test: CodeType | None, depth: int = _CALLERS) -> str | None:
    """Return why the answer of the comparison that ``frame`` is calling can't matter, or None if it may.

    ``test``: the code of the running test, whose return value is discarded. ``depth``: callers that are followed.
    """
    result = _node(frame) if frame is not None and depth else None
    if frame is None or result is None:
        return None
    source, node = result
    reason = _fate(source, node)
    if reason not in ("returned", None):
        return reason
    function = source.function(node)
    if reason is None and (function is None or isinstance(function, ast.Lambda) or not _harmless(function)):
        return None
    if frame.f_code is test:
        return "returned from the test" if reason else "nothing in the test can fail"
    outer = unused(frame.f_back, test, depth - 1)
    if outer is None:
        return None
    name = frame.f_code.co_name
    return f"returned by {name}, then {outer}" if reason else f"nothing in {name} can fail; what it returns is {outer}"


def may_fail(call: ast.Call) -> bool:
    """Return whether a call's name suggests that it can fail a test: ``pytest.raises``, ``assertTrue``, ``check``."""
    return _FAILS.search(_name(call)) is not None


def _fate(source: _Source, node: ast.AST) -> str | None:
    """Return how the value of a node is lost ("discarded", ...), "returned", or None if it is used."""
    while True:
        parent = source.parents.get(node)
        match parent:
            case ast.Expr():
                return "discarded"
            case ast.Return():
                return "returned"
            case ast.Attribute(attr=attr) if attr in _REDUCTIONS and isinstance(source.parents.get(parent), ast.Call):
                node = source.parents[parent]
            case ast.Call() if _name(parent) in _OUTPUT:
                return "only printed"
            case ast.Call() if _name(parent) in _WRAPPERS and node in parent.args:
                node = parent
            case ast.BoolOp() if parent.values[-1] is not node:
                return None
            case ast.UnaryOp() | ast.BoolOp() | ast.JoinedStr() | ast.FormattedValue() | ast.keyword():
                node = parent
            case ast.Assign() | ast.AnnAssign() if (name := _assigned(parent)) is not None:
                function = source.function(parent)
                if function is None:
                    return None
                loads = _loads(function, name)
                if not loads:
                    return "given a name that is never read"
                fates = {_fate(source, load) for load in loads if load.lineno >= parent.lineno}
                return fates.pop() if len(fates) == 1 else None
            case _:
                return None


def _harmless(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function can neither fail nor store an answer, so that its caller decides."""
    for node in ast.walk(function):
        match node:
            case ast.Raise() | ast.Assert() | ast.Global() | ast.Nonlocal() | ast.Yield() | ast.YieldFrom():
                return False
            case ast.With() | ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                return False
            case ast.Call() if may_fail(node) or _name(node) in _KEEPS - _OUTPUT:
                return False
    return True


def _goes_into_all(source: _Source, node: ast.AST) -> bool:
    parent = source.parents.get(node)
    if isinstance(parent, ast.Attribute):
        return parent.attr == "all"
    return isinstance(parent, ast.Call) and node in parent.args and _name(parent) == "all"


def _name(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _assigned(node: ast.AST | None) -> str | None:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return None


def _loads(within: ast.AST, name: str) -> list[ast.Name]:
    names = (node for node in ast.walk(within) if isinstance(node, ast.Name) and node.id == name)
    return [node for node in names if isinstance(node.ctx, ast.Load)]


@dataclass(frozen=True)
class _Source:
    """A file's syntax, with the parent of each node, and its calls and comparisons by where they end."""

    tree: ast.Module
    parents: dict[ast.AST, ast.AST]
    ends: dict[tuple[type, int, int], ast.AST]

    def function(self, node: ast.AST) -> Function | None:
        """Return the innermost function around a node."""
        inside: ast.AST | None = node
        while inside is not None and not isinstance(inside, Function):
            inside = self.parents.get(inside)
        return inside


@cache
def _source(file: str) -> _Source | None:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
    parents: dict[ast.AST, ast.AST] = {}
    ends: dict[tuple[type, int, int], ast.AST] = {}
    for node in ast.walk(tree):
        parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
        if isinstance(node, ast.Call | ast.Compare) and node.end_lineno and node.end_col_offset is not None:
            ends[type(node), node.end_lineno, node.end_col_offset] = node
    return _Source(tree, parents, ends)


def _node(frame: FrameType) -> tuple[_Source, Any] | None:
    """Return the call or comparison that a frame is executing, with its source."""
    source = _source(frame.f_code.co_filename)
    positions = frame.f_code.co_positions()
    _, line, _, column = next(itertools.islice(positions, frame.f_lasti // 2, None), (None, None, None, None))
    if source is None or line is None or column is None:
        return None
    # A call and a comparison may end at one place, as in ``x == approx(y)``: the operator tells them apart.
    compares = frame.f_code.co_code[frame.f_lasti] == dis.opmap["COMPARE_OP"]
    node = source.ends.get((ast.Compare if compares else ast.Call, line, column))
    return None if node is None else (source, node)


@cache
def _in_library(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _LIBRARIES) and not _is_test_module(module)


@cache
def _is_test_module(module: str) -> bool:
    return any(_TESTS.search(part) for part in module.split(".")) and not module.startswith(_NOT_TESTS)


@cache
def _short(file: str, root: str) -> str:
    for base in (root, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        if file.startswith(base + os.sep):
            return os.path.relpath(file, base)
    return file
