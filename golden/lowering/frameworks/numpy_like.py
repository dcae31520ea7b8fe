"""A NumPy function as a function of torch tensors, by NumPy's own array protocol.

An `_Array` stands for a tensor: what NumPy is asked to do with it is done by `torch._numpy`, PyTorch's implementation
of NumPy's functions, whose parts are PyTorch's operations.
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


def from_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of NumPy arrays as one of torch tensors, with options as keywords; its results as torch tensors."""

    def torch_function(*tensors: torch.Tensor, **options: Any) -> Any:
        results = function(*map(_Array, tensors), **options)
        return tree_map(lambda part: part.tensor if isinstance(part, _Array) else part, results)

    torch_function.__module__, torch_function.__qualname__ = function.__module__, function.__qualname__
    torch_function.__name__ = getattr(function, "__name__", "reference")
    return torch_function


class _Array(NDArrayOperatorsMixin):
    """A tensor that NumPy takes for an array."""

    __array_priority__ = 1000

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """What the ufunc gives, or the array that it is told to write to (``out=``, and in ``y += x``)."""
        outs = kwargs.pop("out", None)
        names = {"__call__": "", "reduce": {"add": "sum", "multiply": "prod", "maximum": "amax", "minimum": "amin"}}
        found = names.get(method)
        name = ufunc.__name__ if found == "" else found.get(ufunc.__name__) if isinstance(found, dict) else None
        if outs is None:
            return _computed(name or f"{ufunc.__name__}.{method}", inputs, kwargs)
        mask = kwargs.pop("where", True) if method == "__call__" else True
        results = _computed(name or f"{ufunc.__name__}.{method}", inputs, kwargs)
        several = results if isinstance(results, tuple) else (results,)
        kept = tuple(
            result if out is None else _written(out, result, mask) for out, result in zip(outs, several, strict=True)
        )
        return kept if isinstance(results, tuple) else kept[0]

    def __array_function__(self, function: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        home = function.__module__.removeprefix("numpy").lstrip(".")
        return _computed(f"{home}.{function.__name__}".lstrip("."), args, kwargs)

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
    """Raise `MissingOperation` where results are to be written to an array of NumPy's own, which can't hold them."""
    if isinstance(out, np.ndarray):
        mend = "make it of an argument, as by numpy.zeros_like(x), or write y = y + x in place of y += x"
        raise MissingOperation(
            f"numpy: expected an array that holds numbers to write to, got one of NumPy's own; {mend}"
        )


def _written(out: Any, result: Any, mask: Any) -> Any:
    """``out`` with a result written into it, where the mask allows, by NumPy's rules of shapes and of dtypes."""
    _check_out(out)
    value = result.tensor if isinstance(result, _Array) else torch.as_tensor(result)
    if not torch.can_cast(value.dtype, out.tensor.dtype):
        raise TypeError(f"numpy: cannot cast from {value.dtype} to the {out.tensor.dtype} of the array to write to")
    wide = torch.broadcast_shapes(value.shape, out.tensor.shape)  # type: ignore[no-untyped-call]
    if wide != out.tensor.shape:
        raise ValueError(f"numpy: a result of {tuple(value.shape)} does not fit an array of {tuple(out.tensor.shape)}")
    if mask is not True:
        chosen = mask.tensor if isinstance(mask, _Array) else torch.as_tensor(mask)
        value = torch.where(chosen, value, out.tensor)
    out.tensor.copy_(value)
    return out


def _computed(name: str, args: Sequence[Any], kwargs: Any) -> Any:
    found: Any = torch_numpy
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise MissingOperation(f"numpy.{name} has no counterpart in torch._numpy; write the reference without it")
    return _call(found, args, kwargs)


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _check_out(kwargs.get("out"))
    return tree_map(_wrapped, function(*_unwrapped(list(args)), **_unwrapped(kwargs)))


def _unwrapped(value: Any) -> Any:
    def one(part: Any) -> Any:
        if isinstance(part, _Array):
            return torch_numpy.ndarray(part.tensor)
        if isinstance(part, (np.ndarray, np.generic)):
            return torch_numpy.ndarray(torch.as_tensor(part))
        return getattr(torch_numpy, part.__name__, part) if isinstance(part, type) else part

    return tree_map(one, value)


def _wrapped(value: Any) -> Any:
    return _Array(value.tensor) if isinstance(value, torch_numpy.ndarray) else value
