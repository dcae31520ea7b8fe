"""A tensor whose elements are numbers of an arithmetic, and on which PyTorch's operations run.

A `TracedTensor` is a geometry (sizes, strides, offset) over a `TracedMemory`, which views share. Its dtype is the
nominal one, so that PyTorch promotes types as in eager mode. Masks and integers that a radius leaves open are such
tensors too: 0, 1 or an interval between them in place of False and True.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


class TracedMemory:
    """The numbers of a memory in row-major order, and the rounding that is still pending.

    A number that is given as a function is computed on first use: positions of maxima, which few references read.
    ``stage`` names a rounding that a kernel may make. It is applied where the number is used and not where it is
    returned, for a result is rounded to its dtype anyway. ``as_operand`` maps the number to its bounds as an
    operand: one beyond a format's range is right as a result. ``is_softmax``: the elements are softmax probabilities,
    by whose sum a kernel may divide after the product that they enter. ``divided`` is set for the elements of a sum: it
    gives the sum of the terms that were divided by a number first.
    """

    __slots__ = ("_number", "as_operand", "divided", "is_softmax", "materialized", "stage")

    def __init__(
        self, number: Any, stage: str = "", as_operand: Callable[[Any], Any] | None = None, *, is_softmax: bool = False
    ) -> None:
        self._number = number
        self.stage = stage
        self.as_operand = as_operand
        self.is_softmax = is_softmax
        self.divided: Callable[[Any], Any] | None = None
        self.materialized: Any = None  # the operand after both, once it was read

    @property
    def number(self) -> Any:
        """The numbers of the memory."""
        if callable(self._number):
            self._number = self._number()
        return self._number

    @number.setter
    def number(self, number: Any) -> None:
        self._number = number


class TracedTensor(torch.Tensor):
    """A view of numbers of the arithmetic of the lowering ``ctx``, which computes with it."""

    memory: TracedMemory
    ctx: Any

    @staticmethod
    def __new__(
        cls, ctx: Any, memory: TracedMemory, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
    ) -> TracedTensor:
        tensor: TracedTensor = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset, dtype=dtype
        )
        tensor.memory, tensor.ctx = memory, ctx
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the superclass has a placeholder
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        traced = next(leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        with traced.ctx:
            return func(*args, **(kwargs or {}))

    def tolist(self) -> Any:
        """Return nested lists of Python numbers, each of which must be known exactly."""
        return [part.tolist() for part in self] if self.ndim else self.item()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TracedTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def _covers(tensor: torch.Tensor, count: int) -> bool:
    """Whether the tensor is all ``count`` numbers of its memory, in order."""
    return tensor.numel() == count and tensor.storage_offset() == 0 and tensor.is_contiguous()


def strided(array: Any, size: Sequence[int], stride: Sequence[int], offset: int) -> Any:
    """Return a view of a flat torch or NumPy array; of one whose elements share memory, a view of a copy."""
    if isinstance(array, np.ndarray):
        flat = np.ascontiguousarray(array).view(type(array))
        steps = [step * flat.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(flat[offset:], tuple(size), steps, subok=True)
    flat = array.contiguous()
    return torch.as_strided(flat, size, stride, int(flat.storage_offset()) + offset)


def read(tensor: TracedTensor, *, unrounded: bool = False) -> Any:
    """Return the numbers of a tensor, in its shape; ``unrounded``: without the pending rounding."""
    memory, xp = tensor.memory, tensor.ctx.xp
    number = memory.number if unrounded else materialize(memory, xp)
    shape = tuple(tensor.shape)
    if _covers(tensor, math.prod(number.shape)):
        return number if tuple(number.shape) == shape else number.reshape(shape)
    stride, offset = tensor.stride(), int(tensor.storage_offset())
    return xp.rearranged(lambda arrays: strided(arrays[0].reshape(-1), shape, stride, offset), [number])


def materialize(memory: TracedMemory, xp: Any) -> Any:
    """Return the number of a memory as an operand, with the pending rounding applied."""
    if not memory.stage and memory.as_operand is None:
        return memory.number
    if memory.materialized is None:
        number = memory.number if memory.as_operand is None else memory.as_operand(memory.number)
        memory.materialized = xp.round(number, memory.stage) if memory.stage else number
    return memory.materialized


def write(tensor: TracedTensor, number: Any, stage: str = "") -> None:
    """Overwrite the elements of a tensor, for all views of its memory."""
    memory, xp = tensor.memory, tensor.ctx.xp
    shape, memory_shape = tuple(tensor.shape), tuple(memory.number.shape)
    if tuple(number.shape) != shape:
        number = broadcast(xp, number, shape)
    if _covers(tensor, math.prod(memory_shape)):
        memory.number, memory.stage, memory.materialized = number, stage, None
        memory.as_operand, memory.is_softmax, memory.divided = None, False, None
        return
    stride, offset = tensor.stride(), int(tensor.storage_offset())

    def change(arrays: Sequence[Any]) -> Any:
        old, new = arrays
        flat = _copy(old.reshape(-1))
        view = strided(flat, shape, stride, offset)
        if isinstance(flat, np.ndarray):
            view[...] = new
        else:
            view.copy_(new)
        return flat.reshape(memory_shape)

    if memory.stage not in ("", stage) or memory.as_operand is not None:
        memory.number, memory.stage, memory.as_operand = materialize(memory, xp), "", None
    memory.number = xp.rearranged(change, [memory.number, number])
    memory.stage, memory.materialized, memory.is_softmax = stage or memory.stage, None, False
    memory.divided = None


def _copy(array: Any) -> Any:
    return array.clone() if isinstance(array, torch.Tensor) else array.copy()


def broadcast(xp: Any, number: Any, shape: Sequence[int]) -> Any:
    """Expand a number to a shape."""
    return xp.rearranged(lambda arrays: xp.native.broadcast_to(arrays[0], tuple(shape)), [number])


def permuted(xp: Any, number: Any, order: Sequence[int]) -> Any:
    """Permute the axes of a number, whose arrays are torch's or NumPy's."""

    def permute(arrays: Sequence[Any]) -> Any:
        (array,) = arrays
        return array.permute(*order) if isinstance(array, torch.Tensor) else array.transpose(*order)

    return xp.rearranged(permute, [number])


def axis_last(xp: Any, number: Any, axis: int) -> tuple[Any, list[int]]:
    """Move ``axis`` to the end; the second result is the permutation that moves it back."""
    order = list(range(len(number.shape)))
    order.append(order.pop(axis))
    return permuted(xp, number, order), [order.index(position) for position in range(len(order))]


def overwritten(xp: Any, number: Any, index: Any, values: Any) -> Any:
    """Return a copy of a number with ``values`` at ``index``."""

    def change(arrays: Sequence[Any]) -> Any:
        result = _copy(arrays[0])
        result[index] = arrays[1]
        return result

    return xp.rearranged(change, [number, values])
