"""Kernels and device functions as Python functions on the interpreter's tensors."""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice

from assay.interpreter.builder import FaithfulBuilder
from assay.interpreter.semantic import Semantic
from assay.interpreter.source import BOTH, EITHER, NEITHER, TO_TENSOR, TRUTH, VALUE, code_of

builder = FaithfulBuilder()
semantic = Semantic(builder)


class Runnable:
    """A kernel or device function to be called on the interpreter's tensors.

    It runs in a namespace of its own: Triton's interpreter writes its names into the user's module for good.
    """

    def __init__(self, owner: Any) -> None:
        original = owner.fn
        self._globals = original.__globals__
        self._seen: dict[str, Any] = {}
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
            if value is not _MISSING and value is not self._seen.get(name, _MISSING):
                self._seen[name] = value
                self._namespace[name] = _bound(value)
        return self._function(*args, **kwargs)


def runnable(owner: Any) -> Runnable:
    """The `Runnable` of a `JITFunction` or `InterpretedFunction`, made once."""
    if owner.fn not in _RUNNABLES:
        _RUNNABLES[owner.fn] = Runnable(owner)
    return _RUNNABLES[owner.fn]


def value_of(constant: Any) -> Any:
    """`constant.value`, which of a kernel's constants is the constant: they are not wrapped here."""
    return constant if isinstance(constant, _CONSTANTS) else constant.value


def truth(value: Any) -> bool:
    """Which way a branch goes. Raises ValueError for a block."""
    if isinstance(value, tl.tensor) and value.handle.data.size > 1:
        raise ValueError("a block has no truth to branch on; Triton's compiler refuses it")
    return bool(value)


def both(*values: Callable[[], Any]) -> Any:
    """`and`: of blocks element by element, else as Python has it."""
    return _folded(values, lambda value: not value, "logical_and")


def either(*values: Callable[[], Any]) -> Any:
    """`or`: of blocks element by element, else as Python has it."""
    return _folded(values, bool, "logical_or")


def neither(value: Any) -> Any:
    """`not`: of a tensor element by element."""
    return value.__not__() if isinstance(value, tl.tensor) else not value


def _folded(values: Sequence[Callable[[], Any]], decided: Callable[[Any], bool], method: str) -> Any:
    result = values[0]()
    for value in values[1:]:
        if isinstance(result, tl.tensor) and result.type.is_block():
            result = getattr(result, method)(value())
        elif decided(result):
            return result
        else:
            result = value()
    return result


def _extreme(builtin: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`min` and `max`, which the compiler takes for those of its language where a tensor is among the arguments."""

    def extreme(*values: Any) -> Any:
        if any(isinstance(value, tl.tensor) for value in values):
            return reduce(getattr(tl, name), values)
        return builtin(*values)

    return extreme


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
_BUILTINS = {
    **vars(builtins),
    "range": tensor_range,
    "min": _extreme(min, "minimum"),
    "max": _extreme(max, "maximum"),
    TO_TENSOR: lambda value: semantic.to_tensor(value, False),
    TRUTH: truth,
    BOTH: both,
    EITHER: either,
    NEITHER: neither,
    VALUE: value_of,
}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _bound(value: Any) -> Any:
    """A global as the interpreter needs it: of Triton's, imported by its name, what stands in for it in its module.

    A constant is its value, as a kernel's constants are.
    """
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
        if present is value:  # not one of the language's own
            kwargs["_semantic"] = semantic
        return present(*args, **kwargs)

    return bound
