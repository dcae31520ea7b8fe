"""Cheats that a solution's source shows: an imported reference or grader, a pasted reference, patched libraries.

What it does at run time is observed there (`host`); a name that is only mentioned is no cheat.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from assay.runtime.source import syntax_tree

_PATCHED = ("torch", "numpy", "time", "builtins", "random")
_SETTINGS = ("backends", "config", "_inductor", "_dynamo")
_GRADERS = ("reference", "check", "checker", "eval", "evaluate", "grader", "problem", "kernelbench", "task_reference")


def patches(files: Mapping[str, str]) -> list[str]:
    """Return assignments to attributes of torch, numpy, time or builtins: ``torch.allclose (main.py:3)``.

    Settings that libraries offer (``torch.backends``, a compiler's ``config``) don't count, nor do names of a library
    that wasn't imported.
    """
    results = []
    for name, tree in _trees(files):
        modules = _imported(tree)
        for node in ast.walk(tree):
            for target in node.targets if isinstance(node, ast.Assign) else []:
                if not isinstance(target, ast.Attribute):
                    continue
                root, *rest = _dotted(target).split(".")
                parts = [*modules.get(root, "").split("."), *rest]
                if parts[0] in _PATCHED and not set(parts) & set(_SETTINGS):
                    results.append(f"{_dotted(target)} ({name}:{target.lineno})")
    return results


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return imported names that are never assigned to, with their modules: ``{"F": "torch.nn.functional"}``."""
    results: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                results[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            results |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {name: module for name, module in results.items() if name not in assigned}


def imported_graders(files: Mapping[str, str], reference: str) -> list[str]:
    """Return imports with the name of a reference or a grader that aren't the solution's own files."""
    own = {name.rpartition("/")[2].removesuffix(".py") for name in files}
    wanted = {*_GRADERS, reference.lower()} - own
    results = []
    for name, tree in _trees(files):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            else:
                continue
            for module in modules:
                if module.partition(".")[0].lower() in wanted:
                    results.append(f"{module} ({name}:{node.lineno})")
    return results


def is_pasted(source: str, entry: str, files: Mapping[str, str], name: str) -> bool:
    """Return whether the solution's code is the reference's, apart from names."""
    reference = _body(source, entry)
    return bool(reference) and any(_body(text, name) == reference for text in files.values())


def _body(source: str, name: str) -> list[str]:
    """Return the statements of a function, or of a class's ``forward``, with normalised local names."""
    try:
        return _statements(syntax_tree(source), name)
    except (SyntaxError, RecursionError):  # such a text doesn't run either, or is nested too deeply to be compared
        return []


def _statements(tree: ast.Module, name: str) -> list[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            inside = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "forward"]
            return _normal(inside[0]) if inside else []
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _normal(node)
    return []


def _normal(function: ast.FunctionDef) -> list[str]:
    names: dict[str, str] = {}

    class Renamed(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            if node.id in local:
                return ast.Name(names.setdefault(node.id, f"v{len(names)}"), node.ctx)
            return node

        def visit_Assert(self, node: ast.Assert) -> None:
            return None

    local = {argument.arg for argument in function.args.args}
    local |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for argument in function.args.args:
        names.setdefault(argument.arg, f"v{len(names)}")
    body = [part for part in function.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    return [ast.unparse(Renamed().visit(ast.parse(ast.unparse(part)))) for part in body]


def _trees(files: Mapping[str, str]) -> Iterator[tuple[str, ast.Module]]:
    for name, text in files.items():
        if name.endswith(".py"):
            try:
                yield name, syntax_tree(text)
            except SyntaxError:
                continue


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else ["?"]), *reversed(parts)])
