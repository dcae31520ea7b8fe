"""The axes of a definition: constant, variable, or an expression over others, and the constraints between them."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.judge.problems.problem import ProblemError, Sizes

_USUAL = 16
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
_NEAREST: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Eq: lambda size, bound: bound,
    ast.Gt: lambda size, bound: max(size, bound + 1),
    ast.GtE: max,
    ast.Lt: lambda size, bound: min(size, bound - 1),
    ast.LtE: min,
}
_LAST = re.compile(r"(\w+)\s*==\s*(\w+)\[-1\](?:\.item\(\))?")


@dataclass(frozen=True)
class Axes:
    """``constant`` sizes, the names of ``variable`` ones, ``expressions`` for the rest.

    ``constraints`` are those between axes alone; ``last`` says which axis a tensor's last element is
    (``total_q == indptr[-1].item()``).
    """

    constant: Mapping[str, int]
    variable: tuple[str, ...]
    expressions: Mapping[str, str]
    constraints: tuple[str, ...]
    last: Mapping[str, str]
    where: Path

    @staticmethod
    def of(content: Mapping[str, Any], where: Path) -> Axes:
        """The axes of a definition. Raises `ProblemError`."""
        constant: dict[str, int] = {}
        variable, expressions = [], {}
        for name, axis in content["axes"].items():
            match axis.get("type", "var"):
                case "const" if "value" in axis:
                    constant[name] = int(axis["value"])
                case "var" | "const":
                    variable.append(name)
                case "expr":
                    expressions[name] = str(axis["expression"])
                case other:
                    raise ProblemError(f"{where}: axes.{name}: expected const, var or expr, got {other!r}")
        known = {*constant, *variable, *expressions}
        between, last = [], {}
        for constraint in content.get("constraints") or ():
            match = _LAST.fullmatch(constraint.strip())
            if match is not None and match[1] in known:
                last[match[2]] = match[1]
            elif _names(constraint) <= known:
                between.append(constraint)
        return Axes(constant, tuple(variable), expressions, tuple(between), last, where)

    @property
    def all(self) -> set[str]:
        """The names of all axes."""
        return {*self.constant, *self.variable, *self.expressions}

    def resolved(self, sizes: Sizes) -> dict[str, int]:
        """The size of every axis. Raises `ProblemError` where one is missing."""
        results = {**self.constant, **{name: int(sizes[name]) for name in self.variable if name in sizes}}
        open_ = dict(self.expressions)
        while open_:
            ready = [name for name, text in open_.items() if _names(text) <= results.keys()]
            if not ready:
                raise ProblemError(f"{self.where}: axes: {', '.join(open_)} can't be evaluated")
            for name in ready:
                results[name] = int(value_of(open_.pop(name), results))
        missing = [name for name in self.variable if name not in results]
        if missing:
            raise ProblemError(f"{self.where}: a workload states no size of {', '.join(missing)}")
        return results

    def length(self, name: Any, sizes: Mapping[str, int]) -> int:
        """A dimension: an axis, an expression over axes, or a number."""
        return sizes[name] if name in sizes else int(value_of(str(name), sizes))

    def allows(self, sizes: Sizes) -> bool:
        """Whether the constraints between axes hold."""
        try:
            result = self.resolved(sizes)
            return all(bool(value_of(text, result)) for text in self.constraints)
        except (ProblemError, ZeroDivisionError):
            return False

    def usual(self) -> Sizes:
        """Sizes where no workload states any: all alike, and what constraints make of them."""
        sizes = dict.fromkeys(self.variable, _USUAL)
        for text in self.constraints:
            tree = ast.parse(text, mode="eval").body
            match tree:
                case ast.Compare(left=ast.Name(id=name), ops=[op], comparators=[right]) if name in sizes:
                    bound = int(value_of(ast.unparse(right), {**self.constant, **sizes}))
                    sizes[name] = _NEAREST[type(op)](sizes[name], bound) if type(op) in _NEAREST else sizes[name]
        return sizes


def value_of(expression: str, names: Mapping[str, int]) -> Any:
    """The value of an expression of numbers, names and the usual operators. Raises `ProblemError` on any other."""

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(operand))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.BoolOp(op=ast.And(), values=parts):
                return all(value(part) for part in parts)
            case ast.BoolOp(values=parts):
                return any(value(part) for part in parts)
        raise ProblemError(f"expected an expression over {', '.join(sorted(names))}, got {expression!r}")

    return value(ast.parse(expression, mode="eval"))


def _names(expression: str) -> set[str]:
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:
        return {"?"}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
