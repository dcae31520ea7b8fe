"""The sanitizer: every access to memory of an interpreted kernel is checked against the tensors that it was given.

A pointer argument carries the number of its tensor in the 16 bits above an address (as in HWASan, arXiv 1802.09517), so
that arithmetic on pointers keeps it, and an access is checked against the tensor that it was derived from. Findings are
raised as `SanitizerError` at the access; a store out of bounds is not made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter as plain

from assay.interpreter.allocations import Allocation, Allocations, bytes_at, span
from assay.interpreter.faults import SanitizerError
from assay.interpreter.ordering import Ordering
from assay.interpreter.shadow import Shadow
from assay.interpreter.small_floats import Array

_SHIFT = np.uint64(48)  # user space ends at 2^47
_ADDRESS = np.uint64(2**48 - 1)
_MOST_TENSORS = 2**15
_MOST_SHADOWED = 2**30  # bytes of a storage; larger ones are checked for their bounds alone
_MOST_LOCKS = 64  # addresses of one atomic operation that order programs one by one

MEMORY = plain._interpreter
"""The memory of Triton's interpreter itself."""

_ACQUIRES = (MEMORY.MEM_SEMANTIC.ACQUIRE, MEMORY.MEM_SEMANTIC.ACQUIRE_RELEASE)
_RELEASES = (MEMORY.MEM_SEMANTIC.RELEASE, MEMORY.MEM_SEMANTIC.ACQUIRE_RELEASE)


class Sanitizer:
    """What is known across launches: the tensors that were made, and what was found.

    Of ``tensors`` the extent is their own; of every other tensor it is its storage, or what those of ``tensors`` span
    that lie in it.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.finding: SanitizerError | None = None
        self.launches = 0
        self.allocations = Allocations()
        self._listed: set[tuple[int, int]] = set()
        self._spanned: dict[int, tuple[int, int]] = {}
        for tensor in tensors:
            storage, (low, high) = tensor.untyped_storage().data_ptr(), span(tensor)
            before = self._spanned.get(storage, (low, high))
            self._spanned[storage] = min(low, before[0]), max(high, before[1])
            self._listed.add((low, high))

    @contextlib.contextmanager
    def launching(self, kernel: str, programs: int) -> Iterator[Launch]:
        """One launch: inside it, what the interpreter loads and stores is checked."""
        self.launches += 1
        launch = Launch(self, kernel, programs)
        before = plain._interpreter
        plain._interpreter = launch
        try:
            yield launch
        except SanitizerError as error:
            self.finding = self.finding or error
            raise
        finally:
            plain._interpreter = before

    def memory(self, tensor: torch.Tensor) -> tuple[int, int, Allocation | None]:
        """The addresses that a tensor may share with others, and the allocation that they lie in where it is known."""
        storage = tensor.untyped_storage()
        allocation = self.allocations.find(storage)
        if allocation is not None:
            return allocation.low, allocation.high, allocation
        base = storage.data_ptr()
        low, high = self._spanned.get(base, (base, base + storage.nbytes()))
        return low, high, None

    def extent(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The addresses that belong to a tensor."""
        low, high, allocation = self.memory(tensor)
        own = span(tensor)
        return own if allocation is None and own in self._listed else (low, high)


@dataclass(frozen=True)
class _Region:
    """The memory that a pointer argument stands for."""

    name: str
    first: int
    low: int
    high: int
    allocation: Allocation | None
    shadow: Shadow | None
    _views: dict[np.dtype[Any], Array] = field(default_factory=dict)

    def elements(self, addresses: Array, dtype: np.dtype[Any]) -> tuple[Array, Array] | None:
        """The memory as an array, and where the elements at ``addresses`` stand in it; None if they lie askew."""
        view = self._views.get(dtype)
        if view is None:
            whole = self.high - (self.high - self.low) % dtype.itemsize
            view = self._views[dtype] = bytes_at(self.low, whole).view(dtype)
        offsets = (addresses - np.uint64(self.low)).view(np.int64)
        if dtype.itemsize == 1:
            return view, offsets
        if (offsets & (dtype.itemsize - 1)).any():
            return None
        return view, offsets >> (dtype.itemsize.bit_length() - 1)


class Launch:
    """Stands in for the memory of Triton's interpreter while a kernel runs."""

    def __init__(self, sanitizer: Sanitizer, kernel: str, programs: int) -> None:
        self._sanitizer = sanitizer
        self._kernel = kernel
        self._several = programs > 1
        self._ordering = Ordering()
        self._regions: list[_Region | None] = [None]
        self._shadows: dict[int, Shadow] = {}
        self._program: tuple[int, ...] = (0, 0, 0)
        self._semantic: Any = None  # of an atomic operation under way

    def __getattr__(self, name: str) -> Any:
        return getattr(MEMORY, name)

    def tag(self, name: str, tensor: Any) -> np.uint64:
        """The bits that mark pointers into ``tensor``, the argument of that name."""
        tensor = getattr(tensor, "base", tensor)  # of a tensor that is seen as another dtype
        if not isinstance(tensor, torch.Tensor) or len(self._regions) >= _MOST_TENSORS:
            return np.uint64(0)
        low, high, allocation = self._sanitizer.memory(tensor)
        shadow = None
        if self._several and high - low <= _MOST_SHADOWED:
            shadow = self._shadows.get(low)
            if shadow is None:
                shadow = self._shadows[low] = Shadow(low, high - low, tensor.element_size(), self._ordering)
        self._regions.append(_Region(name, tensor.data_ptr(), *self._sanitizer.extent(tensor), allocation, shadow))
        return np.uint64(len(self._regions) - 1) << _SHIFT

    def begin(self, program: tuple[int, ...]) -> None:
        """A program begins."""
        self._program = program
        if self._several:
            self._ordering.begin(program)

    @contextlib.contextmanager
    def atomically(self, semantic: Any) -> Iterator[None]:
        """Inside it, loads and stores are parts of an atomic operation."""
        self._semantic = semantic
        try:
            yield
        finally:
            self._semantic = None

    # the memory's own functions

    def load(self, pointers: Array, mask: Array, other: Array, dtype: Any) -> Array:
        """As the interpreter's, checked."""
        width = np.dtype(dtype).itemsize
        if self._semantic is not None:
            return MEMORY.load(self.enter_atomic(pointers, mask, width, self._semantic), mask, other, dtype)
        loaded, is_known = np.array(other, dtype, order="C"), other.shape == pointers.shape
        for region, addresses, chosen in self._parts(pointers, mask, width, "loads"):
            found = region.elements(addresses, loaded.dtype) if region is not None else None
            is_known = is_known and found is not None
            if is_known and found is not None:
                loaded.reshape(-1)[chosen] = found[0][found[1]]
            if region is None:
                continue
            self._check_written(region, addresses, width)
            if region.shadow is not None:
                self._check_order(region, "store", "loads", addresses, width, region.shadow.unseen(addresses, width))
                self._check_order(region, "atomic", "loads", addresses, width)
                region.shadow.note("load", addresses, width)
        return loaded if is_known else MEMORY.load(pointers & _ADDRESS, mask, other, dtype)

    def store(self, pointers: Array, values: Array, mask: Array) -> None:
        """As the interpreter's, checked. Programs may store the same bits to one place."""
        width = values.dtype.itemsize
        if self._semantic is not None:
            MEMORY.store(self.enter_atomic(pointers, mask, width, self._semantic, reads=False), values, mask)
            return
        targets: list[tuple[Array, Array, Any]] | None = []
        for region, addresses, chosen in self._parts(pointers, mask, width, "stores to"):
            found = region.elements(addresses, values.dtype) if region is not None else None
            if found is None or targets is None:
                targets = None
            else:
                targets.append((*found, chosen))
            if region is None:
                continue
            unwritten = region.allocation.written(addresses, width) if region.allocation is not None else False
            if region.shadow is not None:
                self._check_order(region, "atomic", "stores to", addresses, width)
                changed = _changed(found, addresses, values.reshape(-1)[chosen]) | unwritten
                for kind in ("store", "load") if changed.any() else ():
                    segments = np.where(changed, region.shadow.conflicts(kind, addresses, width), 0)
                    self._check_order(region, kind, "stores to", addresses, width, segments)
                region.shadow.enter_store(addresses, width, changed)
        if targets is None:
            MEMORY.store(pointers & _ADDRESS, values, mask)
            return
        for view, places, chosen in targets:
            view[places] = values.reshape(-1)[chosen]

    def atomic_rmw(self, operation: Any, pointers: Array, values: Array, mask: Array, semantic: Any) -> Array:
        """As the interpreter's, checked."""
        addresses = self.enter_atomic(pointers, mask, values.dtype.itemsize, semantic)
        return MEMORY.atomic_rmw(operation, addresses, values, mask, semantic)

    def atomic_cas(self, pointers: Array, expected: Array, values: Array, semantic: Any) -> Array:
        """As the interpreter's, checked."""
        everywhere = np.ones(pointers.shape, bool)
        addresses = self.enter_atomic(pointers, everywhere, values.dtype.itemsize, semantic)
        return MEMORY.atomic_cas(addresses, expected, values, semantic)

    def enter_atomic(self, pointers: Array, mask: Array, width: int, semantic: Any, *, reads: bool = True) -> Array:
        """The addresses of an atomic operation, checked; it orders programs as ``semantic`` says."""
        for region, addresses, _ in self._parts(pointers, mask, width, "atomically stores to"):
            if region is None:
                continue
            if reads:
                self._check_written(region, addresses, width)
            if region.allocation is not None:
                region.allocation.written(addresses, width)
            if region.shadow is None:
                continue
            locks = addresses.tolist() if len(addresses) <= _MOST_LOCKS else [region.low]
            if semantic in _ACQUIRES:
                self._ordering.acquire(locks)
            for kind in ("store", "load"):
                self._check_order(region, kind, "atomically stores to", addresses, width)
            region.shadow.note("atomic", addresses, width)
            if semantic in _RELEASES:
                self._ordering.release(locks)
        return pointers & _ADDRESS

    # checks

    def _parts(
        self, pointers: Array, mask: Array, width: int, verb: str
    ) -> Iterator[tuple[_Region | None, Array, Any]]:
        """The active lanes by region: (region, None for no argument's; addresses; which lanes these are)."""
        lanes = pointers.reshape(-1)
        on = np.asarray(mask).reshape(-1)  # Triton 3.6 gives a descriptor's as a memoryview
        chosen: Any = slice(None) if on.all() else on
        active = lanes[chosen]
        if not active.size:
            return
        low, high = active.min(), active.max()
        if low >> _SHIFT == high >> _SHIFT:
            region = self._bounded(active, int(low), int(high), width, verb)
            yield region, active & _ADDRESS, chosen
            return
        tags = lanes >> _SHIFT
        for tag in np.unique(active >> _SHIFT):
            chosen = on & (tags == tag)
            part = lanes[chosen]
            region = self._bounded(part, int(part.min()), int(part.max()), width, verb)
            yield region, part & _ADDRESS, chosen

    def _bounded(self, pointers: Array, low: int, high: int, width: int, verb: str) -> _Region | None:
        """The region that ``pointers`` from ``low`` to ``high`` stay within; None if they are no argument's."""
        kind = "crash" if verb == "loads" else "out_of_bounds_write"
        tag = low >> int(_SHIFT)
        if tag >= len(self._regions):
            raise self._fault(kind, "", 0, f"{verb} an address that belongs to no tensor")
        region = self._regions[tag]
        if region is None:
            return None
        if (low & int(_ADDRESS)) < region.low or (high & int(_ADDRESS)) + width > region.high:
            addresses = (pointers & _ADDRESS).astype(np.int64)
            outside = addresses[(addresses < region.low) | (addresses + width > region.high)]
            index = (int(outside[0]) - region.first) // width
            begin, end = (region.low - region.first) // width, (region.high - region.first) // width
            has = f"its memory holds elements {begin} to {end - 1}" if end > begin else "it has none"
            if begin <= index + 2**32 < end:
                has += f"; element {index + 2**32} was meant, whose offset has wrapped around in 32 bits"
            what = f"{verb} element {index} of {region.name}, out of bounds: {has}"
            raise self._fault(kind, region.name, index, what)
        return region

    def _check_written(self, region: _Region, addresses: Array, width: int) -> None:
        if region.allocation is None:
            return
        found = region.allocation.still_unwritten(addresses, width)
        if found.any():
            index = self._index(region, addresses, found, width)
            what = f"loads element {index} of {region.name}, which nobody has written"
            raise self._fault("unwritten_output", region.name, index, what)

    def _check_order(
        self, region: _Region, kind: str, verb: str, addresses: Array, width: int, segments: Array | None = None
    ) -> None:
        """Raise for accesses of a kind by other programs, in ``segments`` if given, that nothing orders."""
        assert region.shadow is not None
        if segments is None:
            segments = region.shadow.conflicts(kind, addresses, width)
        if not segments.any():
            return
        at = int(np.flatnonzero(segments)[0])
        index = (int(addresses[at]) - region.first) // width
        other = self._ordering.program(int(segments[at]))
        did = {"store": "stored to", "load": "loaded", "atomic": "stored to atomically"}[kind]
        what = f"{verb} element {index} of {region.name}, which program {other} has {did}, in no certain order"
        raise self._fault("nondeterministic", region.name, index, what)

    def _index(self, region: _Region, addresses: Array, found: Array, width: int) -> int:
        return (int(addresses[np.flatnonzero(found)[0]]) - region.first) // width

    def _fault(self, kind: str, tensor: str, index: int, what: str) -> SanitizerError:
        return SanitizerError(kind, tensor, index, self._program, what, self._kernel)


def _changed(found: tuple[Array, Array] | None, addresses: Array, values: Array) -> Array:
    """Where other bits than these are at these addresses, which ``found`` says as places in an array. [elements]"""
    if found is None:
        now = MEMORY.load(addresses, np.ones(len(addresses), bool), np.zeros_like(values), values.dtype)
    else:
        now = found[0][found[1]]
    bits = f"u{values.dtype.itemsize}"
    return np.asarray(np.ascontiguousarray(now).view(bits) != np.ascontiguousarray(values).view(bits))
