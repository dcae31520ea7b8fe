"""Memory layouts of tensors, always inside a guarded buffer.

Whatever the layout, the tensor is a view into a larger buffer of its own. All bytes of the buffer outside the tensor's
elements (the zones before and after, the gaps between strided elements) hold a pattern, which must be unchanged after a
call.

"far" has the addresses of a tensor of more than 2^31 elements without its memory: rows 2^30 elements apart in address
space that is only reserved. Stride and row number fit into 32 bits; their product, from the third row on, doesn't. An
offset that wraps reads zeros within the same space.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

LAYOUTS = ("contiguous", "transposed", "sliced", "offset", "strided", "expanded", "far")

_GUARD = 64  # elements before and after: more than a vector access
_PATTERN = 0xFF  # NaN in every float format, -1 in every signed integer
_SEPARATION = 2**30 + 4096  # elements between far rows: row 2 is beyond 2^31; not 2^30, so that wraps miss all rows
_WRAPPED = 2**31  # elements before and after them, where wrapped offsets land
_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python's mmap names from 3.13 on
_MOST_FAR = 2**38  # bytes of address space that a far tensor may take


@dataclass(frozen=True)
class Guarded:
    """A tensor inside its buffer, and the buffer's bytes before the call; for a far tensor, one buffer row for each
    row."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    before: torch.Tensor

    def damage(self) -> str | None:
        """ "input_mutated" or "out_of_bounds_write" where the bytes have changed, else None."""
        now = self.buffer.view(torch.uint8)
        if torch.equal(now, self.before):
            return None
        item = self.buffer.element_size()
        changed = (now != self.before).reshape(*self.buffer.shape, item).any(-1)
        inside = torch.zeros(changed.shape, dtype=torch.bool, device=changed.device)
        if self.buffer.dim() == 1:
            inside.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()).fill_(True)
        else:
            inside[:, _GUARD:-_GUARD] = True
        return "out_of_bounds_write" if bool((changed & ~inside).any()) else "input_mutated"

    def refill(self, values: torch.Tensor) -> Guarded:
        """Return the same memory, filled with other values."""
        return _filled(self.tensor, self.buffer, values)


def tied_axes(layout: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the axes along which a layout makes all elements one: an expanded tensor's first axis longer than one."""
    if layout != "expanded":
        return ()
    return next(((axis,) for axis, size in enumerate(shape[:-1]) if size > 1), ())


def with_layout(values: torch.Tensor, layout: str, device: torch.device | str) -> Guarded:
    """Return ``values`` in memory of this ``layout``."""
    shape = tuple(values.shape)
    if layout == "far":
        far = _far(values, device)
        if far is not None:
            return far
    strides, first, span = _geometry(shape, layout)
    buffer = torch.empty(2 * _GUARD + span, dtype=values.dtype, device=device)
    buffer.view(torch.uint8).fill_(_PATTERN)
    return _filled(buffer.as_strided(shape, strides, _GUARD + first), buffer, values)


def far_axis(shape: Sequence[int]) -> int | None:
    """Return the axis along which a far tensor's rows are spread, the last but one; None if it has too few rows."""
    return len(shape) - 2 if len(shape) > 1 and shape[-2] > 2 and all(shape) else None


def _far(values: torch.Tensor, device: torch.device | str) -> Guarded | None:
    """Return ``values`` as a far tensor, or None if they have too few rows or there is no address space."""
    shape, item = tuple(values.shape), values.element_size()
    axis = far_axis(shape)
    if axis is None or torch.device(device).type != "cpu" or sys.platform != "linux":
        return None
    strides, inner = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        strides[dim] = _SEPARATION if dim == axis else inner
        inner *= 1 if dim == axis else shape[dim]
    span = _WRAPPED * 2 + _SEPARATION * shape[axis]
    if inner + 2 * _GUARD > _SEPARATION or span * item > _MOST_FAR:
        return None
    try:
        # shared, though with nobody: an isolated kernel's limit counts private pages whether they are touched or not
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE
        space = torch.frombuffer(mmap.mmap(-1, span * item, flags=flags), dtype=values.dtype)
    except OSError:  # a limit on address space
        return None
    rows = space.as_strided((shape[axis], inner + 2 * _GUARD), (_SEPARATION, 1), _WRAPPED - _GUARD)
    rows.view(torch.uint8).fill_(_PATTERN)
    return _filled(space.as_strided(shape, strides, _WRAPPED), rows, values)


def _filled(tensor: torch.Tensor, buffer: torch.Tensor, values: torch.Tensor) -> Guarded:
    if tensor.numel():
        index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
        tensor[index].copy_(values[index])
    return Guarded(tensor, buffer, buffer.view(torch.uint8).clone())


def _geometry(shape: tuple[int, ...], layout: str) -> tuple[list[int], int, int]:
    """Return the strides, the offset of the first element, and the number of elements spanned."""
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
    for position, axis in enumerate(reversed(order)):
        strides[axis] = stride
        stride *= max(shape[axis], 1) + (padding if position == 0 else 0)
    for axis in tied_axes(layout, shape):
        strides[axis] = 0
    return strides, first, first + stride + 1
