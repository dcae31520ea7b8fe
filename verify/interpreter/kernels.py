"""A Triton kernel's source as a Python function that the interpreter can run.

Triton's own rewriting is reused (each version knows its language), but into a namespace of our own: Triton's puts its
names into the user's module for good.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.runtime import interpreter as plain

from assay.verify.interpreter.builder import FaithfulBuilder
from assay.verify.interpreter.semantic import Semantic

builder = FaithfulBuilder()
semantic = Semantic(builder)


class _Rewriter(plain.FunctionRewriter):  # type: ignore[misc]
    """`FunctionRewriter` whose result is code, not a function among the user's globals."""

    def _find_def(self, lines: list[str]) -> int:
        return next(number for number, line in enumerate(lines, 1) if line.strip().startswith("def "))

    def _compile_and_exec(self, tree: Any) -> CodeType:
        return compile(tree, filename=self.filename, mode="exec")


class Runnable:
    """A kernel or device function to be called on the interpreter's tensors."""

    def __init__(self, original: FunctionType) -> None:
        self._globals = original.__globals__
        self._seen: dict[str, Any] = {}
        self._namespace: dict[str, Any] = {"__name__": original.__module__, "__builtins__": _BUILTINS}
        self._namespace |= inspect.getclosurevars(original).nonlocals
        code = _Rewriter(original).rewrite_ast()
        if isinstance(code, FunctionType):  # without source, it runs as it is
            code = original.__code__
        self._names = tuple(dict.fromkeys(_names(code)))
        for name in self._names:
            if name not in self._globals and name not in _BUILTINS and hasattr(plain, name):
                self._namespace[name] = getattr(plain, name)  # what Triton's rewriting put in
        self._namespace["interpreter_semantic"] = semantic
        self._refresh()
        if code is original.__code__:
            self._function = FunctionType(code, self._namespace, original.__name__, original.__defaults__)
            self._function.__kwdefaults__ = original.__kwdefaults__
        else:
            exec(code, self._namespace)
            self._function = self._namespace[original.__name__]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._refresh()
        return self._function(*args, **kwargs)

    def _refresh(self) -> None:
        """Globals may have changed since the last call."""
        for name in self._names:
            value = self._globals.get(name, _MISSING)
            if value is not _MISSING and value is not self._seen.get(name, _MISSING):
                self._seen[name] = value
                self._namespace[name] = _bound(value)


def runnable(function: FunctionType) -> Runnable:
    """The `Runnable` of a function, made once."""
    if function not in _RUNNABLES:
        _RUNNABLES[function] = Runnable(function)
    return _RUNNABLES[function]


def libdevice_functions() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Each function of libdevice, in both modules that offer it, as (module, name, function to be used instead)."""
    for name, function in vars(cuda_libdevice).items():
        if tl.core.is_builtin(function):
            bound = partial(function, _semantic=semantic)
            yield cuda_libdevice, name, bound
            if hasattr(libdevice, name):
                yield libdevice, name, bound


def tensor_range(*bounds: Any, step: Any = None, **hints: Any) -> Iterator[Any]:
    """`range` and `tl.range`: the numbers are int32 tensors (int64 where a bound is), as a compiled loop's are."""
    if step is not None:
        bounds = (*((0,) if len(bounds) == 1 else ()), *bounds, step)
    wide = any(isinstance(bound, tl.tensor) and bound.dtype == tl.int64 for bound in bounds)
    make = builder.get_int64 if wide else builder.get_int32
    dtype = tl.int64 if wide else tl.int32
    for number in range(*(bound.__index__() for bound in bounds)):
        yield tl.tensor(make(number), dtype)


_MISSING = object()
_RUNNABLES: WeakKeyDictionary[FunctionType, Runnable] = WeakKeyDictionary()
_BUILTINS = {**vars(builtins), "range": tensor_range}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _bound(value: Any) -> Any:
    """A global as the interpreter needs it: a builtin of Triton's, imported by its name, as it is in its module."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is libdevice:
        module = cuda_libdevice
    elif not callable(value) or not tl.core.is_builtin(value):
        return value
    name = value.__name__
    return lambda *args, **kwargs: getattr(module, name)(*args, **kwargs)
