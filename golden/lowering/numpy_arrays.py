"""A NumPy function as a function of torch tensors, by NumPy's own array protocol.

Operations on an `_Array` are done by `torch._numpy`, PyTorch's implementation of NumPy's functions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from torch.utils._pytree import tree_map

from assay.golden.errors import MissingOperation

torch_numpy: Any = importlib.import_module("torch._numpy")  # not public, and without types
_REDUCTIONS = {"add": "sum", "multiply": "prod", "maximum": "amax", "minimum": "amin"}


def from_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of NumPy arrays as one of torch tensors; its options stay keywords."""

    def torch_function(*tensors: torch.Tensor, **options: Any) -> Any:
        results = function(*map(_Array, tensors), **options)
        return tree_map(lambda part: part.tensor if isinstance(part, _Array) else part, results)

    torch_function.__module__, torch_function.__qualname__ = function.__module__, function.__qualname__
    torch_function.__name__ = getattr(function, "__name__", "reference")
    return torch_function


class _Array(NDArrayOperatorsMixin):
    """A torch tensor that NumPy takes for an array."""

    __array_priority__ = 1000

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Return the ufunc's result, or the arrays of ``out=`` (which ``y += x`` gives too) once written."""
        outs = kwargs.pop("out", None)
        names = {"__call__": ufunc.__name__, "reduce": _REDUCTIONS.get(ufunc.__name__)}
        name = names.get(method) or f"{ufunc.__name__}.{method}"
        if outs is None:
            return _compute(name, inputs, kwargs)
        mask = kwargs.pop("where", True) if method == "__call__" else True
        results = _compute(name, inputs, kwargs)
        several = results if isinstance(results, tuple) else (results,)
        written = tuple(
            result if out is None else _write(out, result, mask) for out, result in zip(outs, several, strict=True)
        )
        return written if isinstance(results, tuple) else written[0]

    def __array_function__(self, function: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        module = function.__module__.removeprefix("numpy").lstrip(".")
        return _compute(f"{module}.{function.__name__}".lstrip("."), args, kwargs)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise MissingOperation(
            "numpy.asarray of a number: a reference must compute with NumPy's own functions alone, in arrays that are "
            "made of its arguments (numpy.zeros_like(x))"
        )

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch_numpy.ndarray(self.tensor), name)
        return _wrapped(value) if not callable(value) else lambda *args, **kwargs: _call(value, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        return _call(torch_numpy.ndarray(self.tensor).__getitem__, (key,), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        torch_numpy.ndarray(self.tensor)[_unwrapped(key)] = _unwrapped(value)

    def __len__(self) -> int:
        return len(self.tensor)

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __int__(self) -> int:
        return int(self.tensor)

    def __float__(self) -> float:
        return float(self.tensor)


def _check_out(out: Any) -> None:
    """Raise `MissingOperation` if results should be written to an array of NumPy's own, which can't hold them."""
    if isinstance(out, np.ndarray):
        mend = "make it of an argument, as by numpy.zeros_like(x), or write y = y + x in place of y += x"
        raise MissingOperation(
            f"numpy: expected an array that holds numbers to write to, got one of NumPy's own; {mend}"
        )


def _write(out: Any, result: Any, mask: Any) -> Any:
    """Write a result into ``out`` where the mask allows, by NumPy's rules of shapes and dtypes."""
    _check_out(out)
    value = result.tensor if isinstance(result, _Array) else torch.as_tensor(result)
    if not torch.can_cast(value.dtype, out.tensor.dtype):
        raise TypeError(f"numpy: cannot cast from {value.dtype} to the {out.tensor.dtype} of the array to write to")
    shape = torch.broadcast_shapes(value.shape, out.tensor.shape)  # type: ignore[no-untyped-call]
    if shape != out.tensor.shape:
        raise ValueError(f"numpy: a result of {tuple(value.shape)} does not fit an array of {tuple(out.tensor.shape)}")
    if mask is not True:
        chosen = mask.tensor if isinstance(mask, _Array) else torch.as_tensor(mask)
        value = torch.where(chosen, value, out.tensor)
    out.tensor.copy_(value)
    return out


def _compute(name: str, args: Sequence[Any], kwargs: Any) -> Any:
    function: Any = torch_numpy
    for part in name.split("."):
        function = getattr(function, part, None)
    if function is None:
        raise MissingOperation(f"numpy.{name} has no counterpart in torch._numpy; write the reference without it")
    return _call(function, args, kwargs)


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _check_out(kwargs.get("out"))
    return tree_map(_wrapped, function(*_unwrapped(list(args)), **_unwrapped(kwargs)))


def _unwrapped(value: Any) -> Any:
    def unwrap(part: Any) -> Any:
        if isinstance(part, _Array):
            return torch_numpy.ndarray(part.tensor)
        if isinstance(part, (np.ndarray, np.generic)):
            return torch_numpy.ndarray(torch.as_tensor(part))
        return getattr(torch_numpy, part.__name__, part) if isinstance(part, type) else part

    return tree_map(unwrap, value)


def _wrapped(value: Any) -> Any:
    return _Array(value.tensor) if isinstance(value, torch_numpy.ndarray) else value
