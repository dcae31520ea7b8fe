"""Which framework a reference is written with, and its form in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

_DEPTH = 4


def in_torch(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference itself where it is written with PyTorch; else the same function of torch tensors."""
    framework = framework_of(reference)
    if framework == "jax":
        from assay.golden.lowering.jax import from_jax

        return from_jax(reference)
    if framework == "numpy":
        from assay.golden.lowering.frameworks.numpy_like import from_numpy

        return from_numpy(reference)
    return reference


def framework_of(reference: Callable[..., Any]) -> str:
    """ "jax", "numpy" or "torch": what the names that a function uses, and those that its helpers use, come from.

    JAX comes before PyTorch and PyTorch before NumPy, for functions of the former use the latter beside it.
    """
    found = set(_roots(reference, _DEPTH))
    return "jax" if found & {"jax", "jaxlib"} else "numpy" if "numpy" in found and "torch" not in found else "torch"


def _roots(value: Any, depth: int) -> Iterator[str]:
    """The packages that a function, and what it calls of its own, come from or use."""
    if isinstance(value, ModuleType):
        yield value.__name__.partition(".")[0]
        return
    if isinstance(value, partial):
        value = value.func
    yield (getattr(value, "__module__", None) or "").partition(".")[0]
    yield type(value).__module__.partition(".")[0]
    value = getattr(value, "__wrapped__", value)
    if not isinstance(value, FunctionType) or not depth:
        return
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    inside = {name: cell.cell_contents for name, cell in cells if _has_content(cell)}
    for name in set(_names(value.__code__)):
        used = inside.get(name, value.__globals__.get(name))
        if isinstance(used, (ModuleType, FunctionType, partial)) or hasattr(used, "__wrapped__"):
            yield from _roots(used, depth - 1)
        elif callable(used):
            yield (getattr(used, "__module__", None) or "").partition(".")[0]


def _has_content(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
        return True
    except ValueError:  # not assigned yet
        return False


def _names(code: CodeType) -> Iterator[str]:
    """The global and closed-over names that a function's code, and what is defined inside it, uses."""
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
