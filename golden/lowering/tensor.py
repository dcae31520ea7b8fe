"""A tensor whose content are numbers of an arithmetic, and with which PyTorch computes.

A `NumberTensor` is a box, which holds the numbers of a memory, and a geometry, its own sizes, strides and offset: views
share the box. Its dtype is the nominal one, so that PyTorch promotes types as it does in eager mode. Masks and integers
that a radius leaves open are such tensors too, with 0, 1 or what lies between in place of False and True.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


class Box:
    """A memory: ``number``, whose elements in row-major order are its content, and ``stage``.

    A number that is given as a function is made where it is first asked for: places of maxima, which few ask for.
    ``stage`` names a rounding that a kernel may make at what the box holds; it is made where the number is used, and
    not where it is returned, for a result is rounded into its dtype anyway. ``as_operand`` makes of the number what is
    known of it where it is used: one beyond a format's range is right where it is returned. ``weights``: shares of a
    softmax, by whose sum a kernel may divide after the product that they enter.
    """

    __slots__ = ("_number", "as_operand", "rounded", "stage", "weights")

    def __init__(
        self, number: Any, stage: str = "", as_operand: Callable[[Any], Any] | None = None, *, weights: bool = False
    ) -> None:
        self._number = number
        self.stage = stage
        self.as_operand = as_operand
        self.weights = weights
        self.rounded: Any = None  # what both make of the number, once it was asked for

    @property
    def number(self) -> Any:
        """The numbers of the memory."""
        if callable(self._number):
            self._number = self._number()
        return self._number

    @number.setter
    def number(self, number: Any) -> None:
        self._number = number


class NumberTensor(torch.Tensor):
    """Numbers of the arithmetic of an evaluation, as a tensor; `Evaluation.run` computes with it."""

    box: Box
    evaluation: Any

    @staticmethod
    def __new__(
        cls, evaluation: Any, box: Box, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
    ) -> NumberTensor:
        made: NumberTensor = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset, dtype=dtype
        )
        made.box, made.evaluation = box, evaluation
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the superclass has a placeholder
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        holder = next(leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        with holder.evaluation:
            return func(*args, **(kwargs or {}))

    def tolist(self) -> Any:
        """Python's numbers, each of which must be known."""
        return [part.tolist() for part in self] if self.ndim else self.item()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"NumberTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def covers(tensor: torch.Tensor, count: int) -> bool:
    """Whether the tensor is its whole box of ``count`` numbers, in order."""
    return tensor.numel() == count and tensor.storage_offset() == 0 and tensor.is_contiguous()


def strided(array: Any, size: Sequence[int], stride: Sequence[int], offset: int) -> Any:
    """A view of a flat array, torch's or numpy's; of one whose elements share memory, of a copy."""
    if isinstance(array, np.ndarray):
        whole = np.ascontiguousarray(array).view(type(array))
        steps = [place * whole.itemsize for place in stride]
        return np.lib.stride_tricks.as_strided(whole[offset:], tuple(size), steps, subok=True)
    flat = array.contiguous()
    return torch.as_strided(flat, size, stride, int(flat.storage_offset()) + offset)


def read(tensor: NumberTensor, *, unrounded: bool = False) -> Any:
    """The numbers of a tensor, of its shape; ``unrounded``: without the rounding that is still to come."""
    box, xp = tensor.box, tensor.evaluation.xp
    number = box.number if unrounded else settled(box, xp)
    shape = tuple(tensor.shape)
    count = math.prod(number.shape)
    if covers(tensor, count):
        return number if tuple(number.shape) == shape else number.reshape(shape)
    stride, offset = tensor.stride(), int(tensor.storage_offset())
    return xp.rearranged(lambda arrays: strided(arrays[0].reshape(-1), shape, stride, offset), [number])


def settled(box: Box, xp: Any) -> Any:
    """The number of a box as an operand, rounded if a rounding was still to come."""
    if not box.stage and box.as_operand is None:
        return box.number
    if box.rounded is None:
        number = box.number if box.as_operand is None else box.as_operand(box.number)
        box.rounded = xp.round(number, box.stage) if box.stage else number
    return box.rounded


def write(tensor: NumberTensor, number: Any, stage: str = "") -> None:
    """Set what the tensor's places hold, for all views of its box."""
    box, xp = tensor.box, tensor.evaluation.xp
    shape = tuple(tensor.shape)
    whole = tuple(box.number.shape)
    if tuple(number.shape) != shape:
        number = broadcast(xp, number, shape)
    if covers(tensor, math.prod(whole)):
        box.number, box.stage, box.rounded, box.as_operand, box.weights = number, stage, None, None, False
        return
    stride, offset = tensor.stride(), int(tensor.storage_offset())

    def change(arrays: Sequence[Any]) -> Any:
        old, new = arrays
        flat = old.reshape(-1).copy() if isinstance(old, np.ndarray) else old.reshape(-1).clone()
        view = strided(flat, shape, stride, offset)
        if isinstance(flat, np.ndarray):
            view[...] = new
        else:
            view.copy_(new)
        return flat.reshape(whole)

    if box.stage not in ("", stage) or box.as_operand is not None:
        box.number, box.stage, box.as_operand = settled(box, xp), "", None
    box.number = xp.rearranged(change, [box.number, number])
    box.stage, box.rounded, box.weights = stage or box.stage, None, False


def broadcast(xp: Any, number: Any, shape: Sequence[int]) -> Any:
    """The number expanded to a shape."""
    return xp.rearranged(lambda arrays: xp.native.broadcast_to(arrays[0], tuple(shape)), [number])
