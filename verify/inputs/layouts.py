"""Layouts: how a tensor lies in memory, always inside a guarded buffer.

Whatever the layout, the tensor is a view into a larger buffer of its own. All bytes of the buffer that are not
elements of the tensor (the zones before and after, the gaps between strided elements) hold a pattern; after a call
they must hold it still.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

LAYOUTS = ("contiguous", "transposed", "sliced", "offset", "strided", "expanded")

_GUARD = 64  # elements before and after
_PATTERN = 0xFF  # NaN in every float format, -1 in every signed integer


@dataclass(frozen=True)
class Guarded:
    """A tensor inside its buffer, and the buffer's bytes before the call."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    before: torch.Tensor

    def damage(self) -> str | None:
        """ "input_mutated" or "out_of_bounds_write" where the bytes have changed, else None."""
        now = self.buffer.view(torch.uint8)
        if torch.equal(now, self.before):
            return None
        item = self.buffer.element_size()
        changed = (now != self.before).reshape(-1, item).any(-1)
        inside = torch.zeros(changed.shape[0], dtype=torch.bool, device=changed.device)
        inside.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()).fill_(True)
        return "out_of_bounds_write" if bool((changed & ~inside).any()) else "input_mutated"

    def refill(self, values: torch.Tensor) -> Guarded:
        """Other values in the same memory."""
        return _filled(self.tensor, self.buffer, values)


def tied_axes(layout: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The axes along which a layout makes all elements one: an expanded tensor's first axis longer than one."""
    if layout != "expanded":
        return ()
    return next(((axis,) for axis, size in enumerate(shape[:-1]) if size > 1), ())


def place(values: torch.Tensor, layout: str, device: torch.device | str) -> Guarded:
    """``values`` in memory as ``layout`` says."""
    shape = tuple(values.shape)
    strides, first, span = _geometry(shape, layout)
    buffer = torch.empty(2 * _GUARD + span, dtype=values.dtype, device=device)
    buffer.view(torch.uint8).fill_(_PATTERN)
    return _filled(buffer.as_strided(shape, strides, _GUARD + first), buffer, values)


def _filled(tensor: torch.Tensor, buffer: torch.Tensor, values: torch.Tensor) -> Guarded:
    if tensor.numel():
        index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
        tensor[index].copy_(values[index])
    return Guarded(tensor, buffer, buffer.view(torch.uint8).clone())


def _geometry(shape: tuple[int, ...], layout: str) -> tuple[list[int], int, int]:
    """Strides, offset of the first element, and number of elements spanned."""
    order = list(range(len(shape)))
    padding, step, first = 0, 1, 0
    if layout == "transposed" and len(shape) >= 2:
        order[-2:] = reversed(order[-2:])
    elif layout == "sliced":
        padding = 3
    elif layout == "offset":
        first = 1
    elif layout == "strided":
        step = 2
    strides = [0] * len(shape)
    stride = step
    for place_, axis in enumerate(reversed(order)):
        strides[axis] = stride
        stride *= max(shape[axis], 1) + (padding if place_ == 0 else 0)
    for axis in tied_axes(layout, shape):
        strides[axis] = 0
    return strides, first, first + stride + 1
