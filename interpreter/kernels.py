"""Kernels and device functions as Python functions on the interpreter's tensors.

The source is rewritten where Python's semantics differ from the compiler's: `and`, `or`, `not` and chained comparisons
take a block's truth in Python and combine elements when compiled, and an assigned number becomes a tensor.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice

from assay.interpreter.builder import FaithfulBuilder
from assay.interpreter.operators import Replacement, Semantic

builder = FaithfulBuilder()
semantic = Semantic(builder)


class Runnable:
    """A kernel or device function, callable on the interpreter's tensors.

    It has a namespace of its own: Triton's interpreter (3.6 to 3.9) leaves its names in the user's module.
    """

    def __init__(self, owner: Any) -> None:
        original = owner.fn
        self._globals = original.__globals__
        self._bound_from: dict[str, Any] = {}
        self._namespace: dict[str, Any] = {"__name__": original.__module__, "__builtins__": _BUILTINS}
        closure = inspect.getclosurevars(original).nonlocals
        code = code_of(owner)
        self._names = tuple(name for name in dict.fromkeys(_names(code)) if name not in closure)
        exec(code, self._namespace)
        self._function = self._namespace[original.__code__.co_name]
        self._function.__defaults__ = original.__defaults__
        self._function.__kwdefaults__ = original.__kwdefaults__
        self._namespace |= {name: _bound(value) for name, value in closure.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name in self._names:  # globals may have changed since the last call
            value = self._globals.get(name, _MISSING)
            if value is not _MISSING and value is not self._bound_from.get(name, _MISSING):
                self._bound_from[name] = value
                self._namespace[name] = _bound(value)
        return self._function(*args, **kwargs)


def runnable(owner: Any) -> Runnable:
    """Return the `Runnable` of a `JITFunction` or `InterpretedFunction`, created once."""
    if owner.fn not in _RUNNABLES:
        _RUNNABLES[owner.fn] = Runnable(owner)
    return _RUNNABLES[owner.fn]


def _value_of(constant: Any) -> Any:
    """`constant.value`; a kernel's constants are plain values here."""
    return constant if isinstance(constant, _CONSTANTS) else constant.value


def truth(value: Any) -> bool:
    """Return which way a branch goes. Raises ValueError for a block."""
    if isinstance(value, tl.tensor) and value.handle.data.size > 1:
        raise ValueError("a block has no truth to branch on; Triton's compiler refuses it")
    return bool(value)


def _and(*values: Callable[[], Any]) -> Any:
    return _short_circuit(values, lambda value: not value, "logical_and")


def _or(*values: Callable[[], Any]) -> Any:
    return _short_circuit(values, bool, "logical_or")


def _not(value: Any) -> Any:
    return value.__not__() if isinstance(value, tl.tensor) else not value


def _short_circuit(values: Sequence[Callable[[], Any]], decides: Callable[[Any], bool], method: str) -> Any:
    """Combine blocks element by element, other values as Python's `and` or `or`."""
    result = values[0]()
    for value in values[1:]:
        if isinstance(result, tl.tensor) and result.type.is_block():
            result = getattr(result, method)(value())
        elif decides(result):
            return result
        else:
            result = value()
    return result


def _extreme(builtin: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`min` or `max`, which the compiler resolves to `tl.minimum` or `tl.maximum` if an argument is a tensor."""

    def extreme(*values: Any) -> Any:
        if any(isinstance(value, tl.tensor) for value in values):
            return reduce(getattr(tl, name), values)
        return builtin(*values)

    return extreme


def libdevice_functions() -> Iterator[Replacement]:
    """Yield a replacement of each libdevice function in both modules that offer it."""
    for name, function in vars(cuda_libdevice).items():
        if tl.core.is_builtin(function):
            bound = partial(function, _semantic=semantic)
            yield cuda_libdevice, name, bound
            if hasattr(libdevice, name):
                yield libdevice, name, bound


def tensor_range(*bounds: Any, step: Any = None, **hints: Any) -> Iterator[Any]:
    """`range` and `tl.range` over int32 tensors (int64 if a bound is), as in a compiled loop."""
    if step is not None:
        bounds = (*((0,) if len(bounds) == 1 else ()), *bounds, step)
    wide = any(
        bound.dtype == tl.int64 if isinstance(bound, tl.tensor) else not -(2**31) <= bound.__index__() < 2**31
        for bound in bounds
    )
    make = builder.get_int64 if wide else builder.get_int32
    dtype = tl.int64 if wide else tl.int32
    for number in range(*(bound.__index__() for bound in bounds)):
        yield tl.tensor(make(number), dtype)


_MISSING = object()
_CONSTANTS = (bool, int, float, str, tl.dtype, type(None))
_LOOPS = (tl.range, tl.static_range)
_RUNNABLES: WeakKeyDictionary[FunctionType, Runnable] = WeakKeyDictionary()
# The names by which rewritten code calls the functions above.
_TO_TENSOR, _TRUTH, _VALUE = "_assay_to_tensor", "_assay_truth", "_assay_value"
_AND, _OR, _NOT = "_assay_and", "_assay_or", "_assay_not"
_BUILTINS = {
    **vars(builtins),
    "range": tensor_range,
    "min": _extreme(min, "minimum"),
    "max": _extreme(max, "maximum"),
    _TO_TENSOR: lambda value: semantic.to_tensor(value, False),
    _TRUTH: truth,
    _AND: _and,
    _OR: _or,
    _NOT: _not,
    _VALUE: _value_of,
}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _bound(value: Any) -> Any:
    """Bind a global for the interpreter: Triton's builtins to their present replacements, constants to their values."""
    if isinstance(value, tl.constexpr):
        return value.value
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is libdevice:
        module = cuda_libdevice
    elif module is None or not callable(value) or not (tl.core.is_builtin(value) or value in _LOOPS):
        return value
    name = value.__name__

    def bound(*args: Any, **kwargs: Any) -> Any:
        present = getattr(module, name, value)
        if present is value:  # not replaced: a builtin of another module
            kwargs["_semantic"] = semantic
        return present(*args, **kwargs)

    return bound


def code_of(owner: Any) -> CodeType:
    """Compile the rewritten function of a `JITFunction`, without decorators, defaults and annotations.

    Uses the source at decoration if the owner has it. Raises OSError if there is no source.
    """
    function = owner.fn
    lines = getattr(owner, "raw_src", None)
    first = getattr(owner, "starting_line_number", 1)
    if lines is None:
        lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    definition.decorator_list, definition.returns = [], None
    arguments = definition.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    module = ast.fix_missing_locations(ast.Module([_Rewriter().visit(definition)], []))
    ast.increment_lineno(module, first - 1)
    return compile(module, function.__code__.co_filename, "exec")


class _Rewriter(ast.NodeTransformer):
    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = _call(_TO_TENSOR, node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        before = ast.Name(node.target.id, ast.Load())
        value = _call(_TO_TENSOR, ast.BinOp(before, node.op, node.value))
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_If(self, node: ast.If | ast.While) -> ast.AST:
        self.generic_visit(node)
        node.test = _call(_TRUTH, node.test)
        return node

    visit_While = visit_If  # noqa: N815 - the name that ast calls

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        name = _AND if isinstance(node.op, ast.And) else _OR
        return ast.copy_location(_call(name, *map(_lambda, node.values)), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(_call(_NOT, node.operand), node) if isinstance(node.op, ast.Not) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr != "value" or not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(_call(_VALUE, node.value), node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        operands = [node.left, *node.comparators]
        pairs = [
            ast.Compare(left, [op], [right])
            for left, op, right in zip(operands[:-1], node.ops, operands[1:], strict=True)
        ]
        return ast.copy_location(_call(_AND, *map(_lambda, pairs)), node)


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _lambda(value: ast.expr) -> ast.expr:
    """Defer an operand, so that `and` and `or` can skip it."""
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), value)
