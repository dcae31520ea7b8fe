"""Source texts: of a reference, with what it uses of its project, and the syntax tree of a text of others."""

from __future__ import annotations

import ast
import inspect
import warnings
from types import CodeType
from typing import Any, Literal

import torch

from assay.runtime.errors import first_line

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype)


def syntax_tree(text: str, mode: Literal["exec", "eval"] = "exec") -> Any:
    """Return the syntax tree of a Python text that anybody may have written. Raises `SyntaxError` if it has none.

    `ast.parse` raises other errors too, for texts that are nested too deeply or hold a null character. Its warnings, of
    odd numbers and escapes, are dropped.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text, mode=mode)
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise SyntaxError(first_line(error)) from None


def source_of(target: Any) -> str:
    """Return the text of a function, module or class, with the text of the functions it calls in its top-level package.

    Numbers, names and tuples of these that it uses from its module or enclosing functions count by value. Objects that
    are not written in Python count by name.
    """
    seen: dict[Any, str] = {}
    _add(target, _package(target), seen)
    return "\n".join(seen.values())


def _package(target: Any) -> str:
    owner = type(target) if isinstance(target, torch.nn.Module) else target
    return str(getattr(owner, "__module__", None) or "").partition(".")[0]


def _add(target: Any, package: str, seen: dict[Any, str]) -> None:
    owner = type(target) if isinstance(target, torch.nn.Module) else inspect.unwrap(target)
    if id(owner) in seen:
        return
    seen[id(owner)] = getattr(owner, "__qualname__", type(owner).__qualname__)
    try:
        seen[id(owner)] = inspect.getsource(owner)
    except (OSError, TypeError):
        return
    functions = [owner] if inspect.isfunction(owner) else [f for f in vars(owner).values() if inspect.isfunction(f)]
    for function in functions:
        around = dict(inspect.getclosurevars(function).nonlocals) if function.__closure__ else {}
        for name in _names(function.__code__):
            value = around.get(name, function.__globals__.get(name))
            if (inspect.isfunction(value) or inspect.isclass(value)) and _package(value) == package:
                _add(value, package, seen)
            elif _is_plain(value):
                seen[id(function), name] = f"{name}={value!r}"
    if isinstance(target, torch.nn.Module):
        for part in target.children():
            if _package(part) == package:
                _add(part, package, seen)


def _names(code: CodeType) -> list[str]:
    """Return the global and enclosing names of a function, and of functions defined inside of it."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return [*code.co_names, *code.co_freevars, *(name for part in inner for name in _names(part))]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
