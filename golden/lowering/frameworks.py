"""Which framework a reference is written with, and its form in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

_CALL_DEPTH = 4  # of helper functions whose names are looked at


def in_torch(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reference that is written with PyTorch itself, another as the same function of torch tensors."""
    framework = framework_of(reference)
    if framework == "jax":
        from assay.golden.lowering.jaxpr import from_jax

        return from_jax(reference)
    if framework == "numpy":
        from assay.golden.lowering.numpy_arrays import from_numpy

        return from_numpy(reference)
    return reference


def framework_of(reference: Callable[..., Any]) -> str:
    """Return "jax", "numpy" or "torch": where the names that a function and its helpers use come from.

    JAX comes before PyTorch and PyTorch before NumPy, for functions of the former use the latter too.
    """
    packages = set(_packages(reference, _CALL_DEPTH))
    if packages & {"jax", "jaxlib"}:
        return "jax"
    return "numpy" if "numpy" in packages and "torch" not in packages else "torch"


def _packages(value: Any, depth: int) -> Iterator[str]:
    """Yield the packages that a function and its helpers come from or use."""
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
    closed_over = {name: cell.cell_contents for name, cell in cells if _has_content(cell)}
    for name in set(_names(value.__code__)):
        used = closed_over.get(name, value.__globals__.get(name))
        if isinstance(used, (ModuleType, FunctionType, partial)) or hasattr(used, "__wrapped__"):
            yield from _packages(used, depth - 1)
        elif callable(used):
            yield (getattr(used, "__module__", None) or "").partition(".")[0]


def _has_content(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
        return True
    except ValueError:  # not assigned yet
        return False


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global and closed-over names that a function's code, nested functions included, uses."""
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
