"""Expressions over sizes, as definitions have them in axes and constraints: evaluated node by node, within bounds."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from assay.judge.problems.problem import ProblemError
from assay.runtime.source import syntax_tree

_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a // b if a % b == 0 else a / b,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_MOST = 2**63  # every number on the way is smaller
_MOST_EXPONENT = 64
_DEEPEST = 50  # levels of an expression
_LONGEST = 1000  # characters


def value_of(expression: str, names: Mapping[str, int]) -> Any:
    """Evaluate an expression of numbers, names and the usual operators.

    Raises `ProblemError` for any other, and for one whose numbers reach 2^63, or exponents exceed 64.
    """

    def value(node: ast.AST, deepest: int) -> Any:
        if not deepest:
            raise ArithmeticError(f"more than {_DEEPEST} levels")
        parts = [value(part, deepest - 1) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.BinOp(op=ast.Pow()) if abs(parts[1]) > _MOST_EXPONENT:
                raise ArithmeticError(f"an exponent of {parts[1]}")
            case ast.BinOp(op=op) | ast.UnaryOp(op=op) | ast.Compare(ops=[op]) if type(op) in _OPERATORS:
                return bounded(_OPERATORS[type(op)](*parts))
            case ast.BoolOp(op=op):
                return all(parts) if isinstance(op, ast.And) else any(parts)
        raise ProblemError(f"expected an expression over {', '.join(sorted(names))}, got {expression[:80]!r}")

    def bounded(number: Any) -> Any:
        if isinstance(number, complex) or not abs(number) < _MOST:
            raise ArithmeticError(f"a number of {_MOST:.0e} or more")
        return number

    if not isinstance(expression, str) or len(expression) > _LONGEST:
        raise ProblemError(f"expected an expression of at most {_LONGEST} characters, got {expression!r:.80}")
    try:
        return bounded(value(syntax_tree(expression, "eval").body, _DEEPEST))
    except SyntaxError as error:
        raise ProblemError(f"expected an expression, got {expression[:80]!r} ({error.msg})") from None
    except ArithmeticError as error:
        raise ProblemError(f"{expression[:80]!r} can't be evaluated ({error})") from None


def names_in(expression: str) -> set[str]:
    """Return the names in an expression; of a text that is none, ``?``."""
    try:
        tree = syntax_tree(expression, "eval")
    except SyntaxError:
        return {"?"}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
