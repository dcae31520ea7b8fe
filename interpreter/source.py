"""A kernel's source as Python code that acts on the interpreter's tensors as the compiler's does on its own.

Python's `and`, `or`, `not` and chained comparisons take a block's truth, which it hasn't; the compiler combines
elements. And a number that is assigned to a variable becomes a tensor.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import CodeType
from typing import Any

TO_TENSOR, TRUTH, VALUE = "_assay_to_tensor", "_assay_truth", "_assay_value"
BOTH, EITHER, NEITHER = "_assay_and", "_assay_or", "_assay_not"
"""The names by which the code calls `semantic.to_tensor`, `truth`, `value_of`, `both`, `either` and `neither`."""


def code_of(owner: Any) -> CodeType:
    """The code that defines the function of a `JITFunction`: without decorators, defaults and annotations.

    Source is what it was at decoration, where the owner has kept it. Raises OSError where there is none.
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
    module = ast.fix_missing_locations(ast.Module([_Transformer().visit(definition)], []))
    ast.increment_lineno(module, first - 1)
    return compile(module, function.__code__.co_filename, "exec")


class _Transformer(ast.NodeTransformer):
    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = _call(TO_TENSOR, node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        before = ast.Name(node.target.id, ast.Load())
        return ast.copy_location(
            ast.Assign([node.target], _call(TO_TENSOR, ast.BinOp(before, node.op, node.value))), node
        )

    def visit_If(self, node: ast.If | ast.While) -> ast.AST:
        self.generic_visit(node)
        node.test = _call(TRUTH, node.test)
        return node

    visit_While = visit_If  # noqa: N815 - the name that ast asks for

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        name = BOTH if isinstance(node.op, ast.And) else EITHER
        return ast.copy_location(_call(name, *map(_thunk, node.values)), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(_call(NEITHER, node.operand), node) if isinstance(node.op, ast.Not) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr != "value" or not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(_call(VALUE, node.value), node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        operands = [node.left, *node.comparators]
        pairs = [
            ast.Compare(left, [op], [right])
            for left, op, right in zip(operands[:-1], node.ops, operands[1:], strict=True)
        ]
        return ast.copy_location(_call(BOTH, *map(_thunk, pairs)), node)


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _thunk(value: ast.expr) -> ast.expr:
    """The expression as a function, since what is known to be decided is not evaluated."""
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), value)
