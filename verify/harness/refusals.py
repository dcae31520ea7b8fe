"""Refusals: errors that a kernel documents, or that a library raises, at sizes or layouts that it doesn't support.

A documented refusal is a pattern of its message with a condition on sizes: ``{"feature dim >= 64KB": "N * itemsize >
65536"}``. Libraries' own messages are in configs/refusals.toml. Any other error of a kernel is a crash.
"""

from __future__ import annotations

import ast
import dis
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from assay import configs
from assay.runtime.errors import one_line, unknown
from assay.verify.cases.case import Case
from assay.verify.errors import SettingError

ERRORS = (ValueError, NotImplementedError, RuntimeError)
ITEMSIZE = "itemsize"  # bytes of an element of what contracts call "input"
_OPERATIONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def refusals(patterns: Mapping[str, str] | Iterable[str]) -> dict[str, str]:
    """Return a mapping from patterns to conditions, from a pattern, a list of patterns, or such a mapping."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return dict(patterns) if isinstance(patterns, Mapping) else dict.fromkeys(patterns, "")


def checked(patterns: Any, symbols: Iterable[str]) -> dict[str, str]:
    """Return the checked ``refuses`` setting: conditions on sizes by message pattern; "" holds at any sizes.

    A pattern, or a list of patterns, means refusals at any sizes. Raises `SettingError`.
    """
    rows = refusals(patterns)
    known = {*symbols, ITEMSIZE}
    for pattern, condition in rows.items():
        if not isinstance(pattern, str) or not isinstance(condition, str):
            raise SettingError(f"refuses={patterns!r}; expected patterns of messages, e.g. {{'too wide': 'N > 65536'}}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise SettingError(f"refuses: {pattern!r}: {error}; expected a regular expression") from None
        for name in _names(condition):
            if name not in known:
                raise SettingError(f"refuses: {condition!r}: {unknown('dimension', name, known)}")
        _holds(condition, dict.fromkeys(known, 1))
    return dict(rows)


def refusal(error: BaseException, case: Case, refuses: Mapping[str, str]) -> str:
    """Return the message of an error that is a documented refusal at the sizes of the case; otherwise empty."""
    if not refuses or not isinstance(error, ERRORS):
        return ""
    sizes = {**case.sizes, ITEMSIZE: case.input_format.bits // 8}
    for pattern, condition in refuses.items():
        if re.search(pattern, str(error)) and _holds(condition, sizes):
            where = f" where {condition}" if condition else ""
            return f"{type(error).__name__} {pattern!r}{where}"
    return ""


def refused_by_library(error: BaseException) -> str:
    """Return in words that PyTorch, Triton or JAX refuses the call by a message of configs/refusals.toml; else empty.

    A kernel can't refuse in a library's name: the error must come from the library's own Python code, or from a call
    of compiled code.
    """
    text = str(error)
    for library, message, refused in _of_libraries():
        if message.search(text) and _raised_by(library, error):
            return f"{library} refuses {refused}: {one_line(error)[:160]}"
    return ""


@cache
def _of_libraries() -> tuple[tuple[str, re.Pattern[str], str], ...]:
    rows = configs.table("refusals")["refusal"]
    return tuple((row["library"], re.compile(row["message"]), row.get("refused", "it")) for row in rows)


def _raised_by(library: str, error: BaseException) -> bool:
    """Whether the innermost frame of an error is the library's, or doesn't raise it itself but calls compiled code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    frame = trace.tb_frame
    if f"{frame.f_globals.get('__name__', '')}.".startswith(f"{library}."):
        return True
    return dis.opname[frame.f_code.co_code[trace.tb_lasti]] not in ("RAISE_VARARGS", "RERAISE")


def refused_by_reference(
    error: BaseException, case: Case, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> str:
    """Return the message of an error on arguments that the PyTorch reference refuses too; otherwise empty."""
    definition: Any = case.definition
    if not definition.needs_dtypes or not isinstance(error, ERRORS):
        return ""
    try:
        definition.definition.forms[0](*arguments, **keywords)
    except ERRORS as own:
        words = f"the reference refuses these arguments too ({type(own).__name__}: {one_line(own)[:120]})"
        return f"{words}; restrict sizes by shapes= (--shape), or tie them in tensors= ('8*D')"
    except Exception:
        return ""
    return ""


def _tree(condition: str) -> ast.expr:
    try:
        return ast.parse(condition, mode="eval").body
    except SyntaxError:
        raise SettingError(f"refuses: {condition!r}; expected a condition on sizes, e.g. 'N > 65536'") from None


def _names(condition: str) -> list[str]:
    return [node.id for node in ast.walk(_tree(condition)) if isinstance(node, ast.Name)] if condition else []


def _holds(condition: str, sizes: Mapping[str, int]) -> bool:
    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return sizes.get(name, 0)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value(left), value(right))
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _OPERATIONS for op in ops):
                numbers = [value(left), *map(value, others)]
                pairs = zip(ops, numbers, numbers[1:], strict=False)
                return all(_OPERATIONS[type(op)](a, b) for op, a, b in pairs)
            case ast.BoolOp(op=ast.And(), values=parts):
                return all(map(value, parts))
            case ast.BoolOp(op=ast.Or(), values=parts):
                return any(map(value, parts))
        expected = "expected comparisons of sizes, joined by and / or"
        raise SettingError(f"refuses: {condition!r}; {expected}, e.g. 'N > 65536 or N % 8 != 0'")

    return not condition or bool(value(_tree(condition)))
