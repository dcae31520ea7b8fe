"""Memory that was allocated and not filled: which of its elements nobody has written yet."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from assay.interpreter.small_floats import Array
from assay.runtime.dispatch import ALLOCATIONS, AllocationMode

_MOST_WATCHED = 2**28  # bytes of an allocation; larger ones count as written


@dataclass
class Allocation:
    """A fresh tensor: the addresses that it spans, and for each element whether it is still ``unwritten``.

    ``held`` is what its memory held at first: what has changed since was written by somebody who wasn't watched.
    """

    storage: StorageWeakRef
    low: int
    high: int
    width: int
    unwritten: Array
    held: Array

    def elements(self, addresses: Array, width: int) -> Array:
        """The elements that ``width`` bytes at each address belong to: [addresses] or [addresses, elements of each]."""
        first = (addresses - np.uint64(self.low)).astype(np.int64) // self.width
        return first if width <= self.width else first[:, None] + np.arange(width // self.width)

    def written(self, addresses: Array, width: int) -> Array:
        """A store to these addresses; which of them held what nobody had written. [addresses]"""
        elements = self.elements(addresses, width)
        first = self.unwritten[elements].reshape(len(addresses), -1).any(axis=1)
        self.unwritten[elements] = False
        return np.asarray(first)

    def still_unwritten(self, addresses: Array, width: int) -> Array:
        """Which loads of these addresses find what nobody has written. [addresses]"""
        elements = self.elements(addresses, width)
        if self.unwritten[elements].any():
            now = bytes_at(self.low, self.high).reshape(-1, self.width)
            self.unwritten &= (now == self.held).all(axis=1)
        return np.asarray(self.unwritten[elements].reshape(len(addresses), -1).any(axis=1))


class Allocations(AllocationMode):
    """Inside it, uninitialised tensors are remembered, and what torch writes into them."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, Allocation] = {}

    def called(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        """Remember a fresh tensor, or what was written into one."""
        if func in ALLOCATIONS:
            self._remember(result)
        elif self._known and isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._filled(given.get(argument.name))
        return result

    def find(self, storage: torch.UntypedStorage) -> Allocation | None:
        """The allocation that is this storage, or lies in it, if it came about here."""
        found = self._known.get(storage.data_ptr())
        if found is not None and found.storage.expired():
            del self._known[storage.data_ptr()]
            return None
        return found

    def _remember(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.numel():
            return
        low, high = span(tensor)
        if high - low > _MOST_WATCHED:
            return
        width = tensor.element_size()
        storage = tensor.untyped_storage()
        unwritten = np.ones((high - low) // width, bool)
        held = bytes_at(low, high).reshape(-1, width).copy()
        self._known[storage.data_ptr()] = Allocation(StorageWeakRef(storage), low, high, width, unwritten, held)

    def _filled(self, values: Any) -> None:
        """Torch has written these tensors."""
        for tensor in tree_leaves(values):
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or not tensor.numel():
                continue
            found = self.find(tensor.untyped_storage())
            if found is None:
                continue
            if tensor.element_size() != found.width:
                low, high = span(tensor)
                found.unwritten[(low - found.low) // found.width : -((found.low - high) // found.width)] = False
                continue
            first = (tensor.data_ptr() - found.low) // found.width
            if first >= 0 and span(tensor)[1] <= found.high:
                cells = torch.from_numpy(found.unwritten)
                cells.as_strided(tensor.shape, tensor.stride(), first).fill_(False)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to the one after its last."""
    low = tensor.data_ptr()
    if not tensor.numel():
        return low, low
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (last + 1) * tensor.element_size()


def bytes_at(low: int, high: int) -> Array:
    """The memory from one address to another."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
