"""The sanitizer: every memory access of an interpreted kernel is checked for bounds, initialisation and races.

A pointer argument carries the number of its tensor in the 16 bits above an address (as in HWASan, arXiv 1802.09517).
Pointer arithmetic preserves the tag, so an access is checked against the tensor that its pointer was derived from.
Findings are raised as `SanitizerError` at the access; a store out of bounds is not made.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter as plain

from assay.interpreter.errors import DependentPrograms, NotInterpreted, SanitizerError
from assay.interpreter.numerics.floats import Array
from assay.interpreter.races import Ordering, Samples, Shadow
from assay.runtime.dispatch import ALLOCATIONS, AllocationMode

_SHIFT = np.uint64(48)  # user space ends at 2^47
_ADDRESS = np.uint64(2**48 - 1)
_MAX_TENSORS = 2**15
_MAX_SHADOWED = 2**30  # bytes of a storage whose races are checked; its shadow is an int32 per element and kind
_MAX_LOCKS = 64  # addresses of one atomic operation that order programs individually
_MAX_WATCHED = 2**28  # bytes of an allocation that is watched; larger ones count as written
_MAX_CONTENDED = 2**20  # addresses of one line's atomics that are compared with those of other programs
_MOST_POLLS = 4096  # of a program that nothing but waiting ones can end
_MOST_WAITING = 32  # programs that wait, each inside of another
_PATIENCE = 64  # atomic operations on one address in a row after which a program seems to wait for another

MEMORY = plain._interpreter
"""The memory functions of Triton's interpreter."""

_ACQUIRES = (MEMORY.MEM_SEMANTIC.ACQUIRE, MEMORY.MEM_SEMANTIC.ACQUIRE_RELEASE)
_RELEASES = (MEMORY.MEM_SEMANTIC.RELEASE, MEMORY.MEM_SEMANTIC.ACQUIRE_RELEASE)


class Sanitizer:
    """The state that outlives a launch: allocated tensors, the first finding, the number of launches and of programs.

    A tensor of ``tensors`` may be accessed within its own span; any other within its storage, or within the span of
    those of ``tensors`` that share its storage. ``unloaded`` is the content of lanes that a load leaves without a
    value, their mask being false and no ``other`` given: "plain" (zero), "nan" or "huge".
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = (), unloaded: str = "plain") -> None:
        self.finding: SanitizerError | None = None
        self.launches = self.programs = 0
        self.unloaded = unloaded
        self.contended: dict[str, Contended] = {}
        """By source line, the atomic operations of several programs on one address."""
        self.unloaded_lines: dict[str, None] = {}
        """The source lines of loads that left lanes undefined, in order."""
        self.allocations = Allocations()
        self.samples: Samples | None = None
        """What incomplete launches stored; None if all programs of each have run."""
        self._spans: set[tuple[int, int]] = set()
        self._joint_spans: dict[int, tuple[int, int]] = {}
        for tensor in tensors:
            storage, (low, high) = tensor.untyped_storage().data_ptr(), span(tensor)
            before = self._joint_spans.get(storage, (low, high))
            self._joint_spans[storage] = min(low, before[0]), max(high, before[1])
            self._spans.add((low, high))

    @contextlib.contextmanager
    def launching(self, kernel: str, programs: int) -> Iterator[Launch]:
        """Check loads and stores of the interpreter inside: those of one launch."""
        self.launches += 1
        self.programs += programs
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
        """Return the addresses that a tensor may share with others, and their allocation if it is watched."""
        storage = tensor.untyped_storage()
        allocation = self.allocations.find(storage)
        if allocation is not None:
            return allocation.low, allocation.high, allocation
        base = storage.data_ptr()
        low, high = self._joint_spans.get(base, (base, base + storage.nbytes()))
        return low, high, None

    def extent(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the addresses that a kernel may access through a tensor."""
        low, high, allocation = self.memory(tensor)
        own = span(tensor)
        return own if allocation is None and own in self._spans else (low, high)

    def is_argument(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of those that the sanitizer was made for, or shares their memory."""
        return tensor.untyped_storage().data_ptr() in self._joint_spans


@dataclass
class Contended:
    """The atomic operations of one source line: ``words`` name it, and ``is_sum`` if floats are added."""

    words: str
    is_sum: bool
    shared: bool = False
    _addresses: list[tuple[tuple[int, ...], Array]] = field(default_factory=list)
    _count: int = 0

    def note(self, program: tuple[int, ...], addresses: Array) -> None:
        """Note an operation; ``shared`` becomes true if another program's has an address in common with it."""
        if self.shared or self._count > _MAX_CONTENDED:
            return
        self.shared = any(other != program and np.isin(addresses, seen).any() for other, seen in self._addresses)
        self._addresses.append((program, addresses))
        self._count += len(addresses)


def contended_lines(contended: Iterable[Contended]) -> str:
    """Return the source lines whose atomics depend on the order of programs, sums of floats first; empty if none do."""
    shared = [each for each in contended if each.shared]
    sums = [each for each in shared if each.is_sum]
    return ", ".join(dict.fromkeys(each.words for each in sums or shared))


@dataclass(frozen=True)
class _Region:
    """The memory of a pointer argument."""

    name: str
    first: int
    low: int
    high: int
    allocation: Allocation | None
    shadow: Shadow | None
    _views: dict[np.dtype[Any], Array] = field(default_factory=dict)

    def elements(self, addresses: Array, dtype: np.dtype[Any]) -> tuple[Array, Array] | None:
        """Return the memory as an array, and the indices of ``addresses`` in it; None if they are not aligned."""
        view = self._views.get(dtype)
        if view is None:
            end = self.high - (self.high - self.low) % dtype.itemsize
            view = self._views[dtype] = bytes_at(self.low, end).view(dtype)
        offsets = (addresses - np.uint64(self.low)).view(np.int64)
        if dtype.itemsize == 1:
            return view, offsets
        if (offsets & (dtype.itemsize - 1)).any():
            return None
        return view, offsets >> (dtype.itemsize.bit_length() - 1)

    def index(self, address: Any, width: int) -> int:
        """Return the index of an address, counted from the tensor's first element."""
        return (int(address) - self.first) // width


class Launch:
    """Replaces the memory functions of Triton's interpreter while a kernel runs."""

    def __init__(self, sanitizer: Sanitizer, kernel: str, programs: int) -> None:
        self._sanitizer = sanitizer
        self._kernel = kernel
        self._several = programs > 1
        self._ordering = Ordering()
        self._regions: list[_Region | None] = [None]
        self._shadows: dict[int, Shadow] = {}
        self._program: tuple[int, ...] = (0, 0, 0)
        self._semantic: Any = None  # of the current atomic operation
        self._last_polled: Array | None = None
        self._polls = 0
        self._is_complete = True
        self._waiting = 0  # programs that wait while another runs
        self._tensors: list[torch.Tensor] = []  # of a launch of which some programs run
        self.let_another_run: Callable[[], None] | None = None
        """Runs a program that hasn't begun, if there is one, while the present one waits."""

    def __getattr__(self, name: str) -> Any:
        return getattr(MEMORY, name)

    def tag(self, name: str, tensor: Any) -> np.uint64:
        """Return the bits that tag pointers into ``tensor``, the argument ``name``."""
        tensor = getattr(tensor, "base", tensor)  # of a tensor reinterpreted as another dtype
        if not isinstance(tensor, torch.Tensor) or len(self._regions) >= _MAX_TENSORS:
            return np.uint64(0)
        low, high, allocation = self._sanitizer.memory(tensor)
        shadow = None
        if self._several and high - low <= _MAX_SHADOWED:
            shadow = self._shadows.get(low)
            if shadow is None:
                shadow = self._shadows[low] = Shadow(low, high - low, tensor.element_size(), self._ordering)
        self._regions.append(_Region(name, tensor.data_ptr(), *self._sanitizer.extent(tensor), allocation, shadow))
        self._tensors.append(tensor)
        return np.uint64(len(self._regions) - 1) << _SHIFT

    def sample(self) -> None:
        """Note that not all programs will run."""
        self._is_complete = False
        self._sanitizer.samples = self._sanitizer.samples or Samples()

    def end(self) -> None:
        """End the launch: poison what programs that didn't run would have stored to fresh memory."""
        samples = self._sanitizer.samples
        if samples is None:
            return
        samples.end(is_complete=self._is_complete)
        for tensor, region in zip(self._tensors, self._regions[1:], strict=True):
            if region is not None and not self._is_complete and not self._sanitizer.is_argument(tensor):
                samples.poison(region.low, bytes_at(region.low, region.high), tensor.dtype, self._sanitizer.unloaded)

    def begin(self, program: tuple[int, ...]) -> None:
        self._program, self._last_polled = program, None
        if self._several:
            self._ordering.begin(program)

    def note_atomic(self, operation: str, pointers: Array, mask: Array, *, is_sum: bool) -> None:
        """Note an atomic operation for `contended_lines`."""
        if not self._several:
            return
        line = line_of_kernel()
        noted = self._sanitizer.contended.get(line)
        if noted is None:
            words = f"tl.{operation} at {line}"
            noted = self._sanitizer.contended[line] = Contended(words, is_sum)
        noted.note((self._sanitizer.launches, *self._program), pointers[np.asarray(mask)])

    def _wait(self, pointers: Array) -> None:
        """Let another program run if the present one only repeats this access, as one that waits for it does.

        Raises `NotInterpreted` if that one waits for a program that waits itself.
        """
        is_same = self._last_polled is not None and np.array_equal(self._last_polled, pointers)
        self._last_polled, self._polls = pointers, self._polls + 1 if is_same else 0
        if self._polls < _PATIENCE or self.let_another_run is None:
            return
        if (self._polls > _MOST_POLLS and self._waiting) or self._waiting > _MOST_WAITING:
            raise NotInterpreted("programs wait for each other in a way that the interpreter does not follow")
        before = self._program, self._semantic, self._waiting
        self._semantic, self._waiting, polls = None, self._waiting + 1, self._polls
        begun = self._ordering.segment
        with self._ordering.paused():
            self.let_another_run()
        self._program, self._semantic, self._waiting = before
        self._last_polled, self._polls = pointers, 0 if self._ordering.segment > begun + 1 else polls  # 0: one has run

    @contextlib.contextmanager
    def atomically(self, semantic: Any) -> Iterator[None]:
        """Treat loads and stores inside as parts of an atomic operation."""
        self._semantic = semantic
        try:
            yield
        finally:
            self._semantic = None

    def load(self, pointers: Array, mask: Array, other: Array, dtype: Any) -> Array:
        width = np.dtype(dtype).itemsize
        if self._semantic is not None:
            return MEMORY.load(self.enter_atomic(pointers, mask, width, self._semantic), mask, other, dtype)
        # Aligned accesses of tagged pointers are copied at once; any other is left to Triton, element by element.
        loaded, is_complete = np.array(other, dtype, order="C"), other.shape == pointers.shape
        for region, addresses, lanes in self._by_region(pointers, mask, width, "loads"):
            source = region.elements(addresses, loaded.dtype) if region is not None else None
            is_complete = is_complete and source is not None
            if is_complete and source is not None:
                loaded.reshape(-1)[lanes] = source[0][source[1]]
            if region is None:
                continue
            if self._sanitizer.samples is not None:
                self._sanitizer.samples.check_load(region.low, addresses, region.name)
            self._check_written(region, addresses, width)
            if region.shadow is not None:
                self._check_order(region, "store", "loads", addresses, width, region.shadow.unseen(addresses, width))
                self._check_order(region, "atomic", "loads", addresses, width)
                region.shadow.note("load", addresses, width)
        return loaded if is_complete else MEMORY.load(pointers & _ADDRESS, mask, other, dtype)

    def store(self, pointers: Array, values: Array, mask: Array) -> None:
        """Store, checked. Programs may store the same bits to one address."""
        width = values.dtype.itemsize
        if self._semantic is not None:
            MEMORY.store(self.enter_atomic(pointers, mask, width, self._semantic, reads=False), values, mask)
            return
        targets: list[tuple[Array, Array, Any]] | None = []
        for region, addresses, lanes in self._by_region(pointers, mask, width, "stores to"):
            target = region.elements(addresses, values.dtype) if region is not None else None
            if target is None or targets is None:
                targets = None
            else:
                targets.append((*target, lanes))
            if region is None:
                continue
            if self._sanitizer.samples is not None:
                self._sanitizer.samples.store(region.low, region.high, addresses, width)
            unwritten = region.allocation.write(addresses, width) if region.allocation is not None else False
            if region.shadow is not None:
                self._check_order(region, "atomic", "stores to", addresses, width)
                changed = _changed(target, addresses, values.reshape(-1)[lanes]) | unwritten
                for kind in ("store", "load") if changed.any() else ():
                    segments = np.where(changed, region.shadow.conflicts(kind, addresses, width), 0)
                    self._check_order(region, kind, "stores to", addresses, width, segments)
                region.shadow.enter_store(addresses, width, changed)
        if targets is None:
            MEMORY.store(pointers & _ADDRESS, values, mask)
            return
        for view, indices, lanes in targets:
            view[indices] = values.reshape(-1)[lanes]

    def atomic_rmw(self, operation: Any, pointers: Array, values: Array, mask: Array, semantic: Any) -> Array:
        addresses = self.enter_atomic(pointers, mask, values.dtype.itemsize, semantic)
        return MEMORY.atomic_rmw(operation, addresses, values, mask, semantic)

    def atomic_cas(self, pointers: Array, expected: Array, values: Array, semantic: Any) -> Array:
        everywhere = np.ones(pointers.shape, bool)
        addresses = self.enter_atomic(pointers, everywhere, values.dtype.itemsize, semantic)
        return MEMORY.atomic_cas(addresses, expected, values, semantic)

    def enter_atomic(self, pointers: Array, mask: Array, width: int, semantic: Any, *, reads: bool = True) -> Array:
        """Check an atomic operation, order programs as ``semantic`` says, and return the untagged addresses.

        Raises `DependentPrograms` if not all programs run.
        """
        if self._sanitizer.samples is not None:
            raise DependentPrograms(f"{self._kernel} has atomic operations")
        self._wait(pointers)
        for region, addresses, _ in self._by_region(pointers, mask, width, "atomically stores to"):
            if region is None:
                continue
            if reads:
                self._check_written(region, addresses, width)
            if region.allocation is not None:
                region.allocation.write(addresses, width)
            if region.shadow is None:
                continue
            locks = addresses.tolist() if len(addresses) <= _MAX_LOCKS else [region.low]
            if semantic in _ACQUIRES:
                self._ordering.acquire(locks)
            for kind in ("store", "load"):
                self._check_order(region, kind, "atomically stores to", addresses, width)
            region.shadow.note("atomic", addresses, width)
            if semantic in _RELEASES:
                self._ordering.release(locks)
        return pointers & _ADDRESS

    def _by_region(
        self, pointers: Array, mask: Array, width: int, verb: str
    ) -> Iterator[tuple[_Region | None, Array, Any]]:
        """Yield (region, addresses, lanes) of the active lanes; the region of untagged pointers is None."""
        flat = pointers.reshape(-1)
        on = np.asarray(mask).reshape(-1)  # Triton 3.6 passes a descriptor's mask as a memoryview
        lanes: Any = slice(None) if on.all() else on
        active = flat[lanes]
        if not active.size:
            return
        low, high = active.min(), active.max()
        if low >> _SHIFT == high >> _SHIFT:
            region = self._check_bounds(active, int(low), int(high), width, verb)
            yield region, active & _ADDRESS, lanes
            return
        tags = flat >> _SHIFT
        for tag in np.unique(active >> _SHIFT):
            lanes = on & (tags == tag)
            part = flat[lanes]
            region = self._check_bounds(part, int(part.min()), int(part.max()), width, verb)
            yield region, part & _ADDRESS, lanes

    def _check_bounds(self, pointers: Array, low: int, high: int, width: int, verb: str) -> _Region | None:
        """Return the region of ``pointers``, which span ``low`` to ``high``; None for untagged ones."""
        kind = "crash" if verb == "loads" else "out_of_bounds_write"
        tag = low >> int(_SHIFT)
        if tag >= len(self._regions):
            raise self._error(kind, "", 0, f"{verb} an address that belongs to no tensor")
        region = self._regions[tag]
        if region is None:
            return None
        if (low & int(_ADDRESS)) < region.low or (high & int(_ADDRESS)) + width > region.high:
            addresses = (pointers & _ADDRESS).astype(np.int64)
            outside = addresses[(addresses < region.low) | (addresses + width > region.high)]
            index = region.index(outside[0], width)
            begin, end = region.index(region.low, width), region.index(region.high, width)
            extent = f"its memory holds elements {begin} to {end - 1}" if end > begin else "it has none"
            if begin <= index + 2**32 < end:
                extent += f"; element {index + 2**32} was meant, whose offset has wrapped around in 32 bits"
            raise self._error(
                kind, region.name, index, f"{verb} element {index} of {region.name}, out of bounds: {extent}"
            )
        return region

    def _check_written(self, region: _Region, addresses: Array, width: int) -> None:
        if region.allocation is None:
            return
        unwritten = region.allocation.unwritten_loads(addresses, width)
        if unwritten.any():
            index = region.index(addresses[np.flatnonzero(unwritten)[0]], width)
            what = f"loads element {index} of {region.name}, which nobody has written"
            raise self._error("unwritten_output", region.name, index, what)

    def _check_order(
        self, region: _Region, kind: str, verb: str, addresses: Array, width: int, segments: Array | None = None
    ) -> None:
        """Raise for unordered accesses of a kind by other programs, in ``segments`` if they are known."""
        assert region.shadow is not None
        if segments is None:
            segments = region.shadow.conflicts(kind, addresses, width)
        if not segments.any():
            return
        first = int(np.flatnonzero(segments)[0])
        index = region.index(addresses[first], width)
        other = self._ordering.program(int(segments[first]))
        did = {"store": "stored to", "load": "loaded", "atomic": "stored to atomically"}[kind]
        what = f"{verb} element {index} of {region.name}, which program {other} has {did}, in no certain order"
        raise self._error("nondeterministic", region.name, index, what)

    def _error(self, kind: str, tensor: str, index: int, what: str) -> SanitizerError:
        return SanitizerError(kind, tensor, index, self._program, what, self._kernel)


def line_of_kernel() -> str:
    """Return the line of the kernel's source that is being interpreted, as file:line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(_INTERPRETERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


_INTERPRETERS = ("assay.interpreter", "triton", "functools", "contextlib")


def _changed(target: tuple[Array, Array] | None, addresses: Array, values: Array) -> Array:
    """Return which stores change bits. ``target`` is the memory as an array and indices, if known. [elements]"""
    if target is None:
        now = MEMORY.load(addresses, np.ones(len(addresses), bool), np.zeros_like(values), values.dtype)
    else:
        now = target[0][target[1]]
    bits = f"u{values.dtype.itemsize}"
    return np.asarray(np.ascontiguousarray(now).view(bits) != np.ascontiguousarray(values).view(bits))


@dataclass
class Allocation:
    """A fresh tensor: its addresses, and which of its elements are ``unwritten``.

    ``initial`` are its first contents: bytes that have changed since were written by code that is not watched.
    """

    storage: StorageWeakRef
    low: int
    high: int
    width: int
    unwritten: Array
    initial: Array

    def _elements(self, addresses: Array, width: int) -> Array:
        """Return the elements of ``width`` bytes at each address: [addresses] or [addresses, elements of each]."""
        first = (addresses - np.uint64(self.low)).astype(np.int64) // self.width
        return first if width <= self.width else first[:, None] + np.arange(width // self.width)

    def write(self, addresses: Array, width: int) -> Array:
        """Mark a store as written; return which addresses were unwritten before. [addresses]"""
        elements = self._elements(addresses, width)
        first = self.unwritten[elements].reshape(len(addresses), -1).any(axis=1)
        self.unwritten[elements] = False
        return np.asarray(first)

    def unwritten_loads(self, addresses: Array, width: int) -> Array:
        """Return which loads read unwritten elements. [addresses]"""
        elements = self._elements(addresses, width)
        if self.unwritten[elements].any():
            now = bytes_at(self.low, self.high).reshape(-1, self.width)
            self.unwritten &= (now == self.initial).all(axis=1)
        return np.asarray(self.unwritten[elements].reshape(len(addresses), -1).any(axis=1))


class Allocations(AllocationMode):
    """A dispatch mode that records uninitialised tensors and what torch writes into them."""

    def __init__(self) -> None:
        super().__init__()
        self._by_pointer: dict[int, Allocation] = {}

    def called(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        if func in ALLOCATIONS:
            self._record(result)
        elif self._by_pointer and isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            names = (argument.name for argument in func._schema.arguments)
            arguments = dict(zip(names, args, strict=False)) | kwargs
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._mark_written(arguments.get(argument.name))
        return result

    def find(self, storage: torch.UntypedStorage) -> Allocation | None:
        """Return the recorded allocation of a storage."""
        allocation = self._by_pointer.get(storage.data_ptr())
        if allocation is not None and allocation.storage.expired():
            del self._by_pointer[storage.data_ptr()]
            return None
        return allocation

    def _record(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.numel():
            return
        low, high = span(tensor)
        if high - low > _MAX_WATCHED:
            return
        width = tensor.element_size()
        storage = tensor.untyped_storage()
        unwritten = np.ones((high - low) // width, bool)
        initial = bytes_at(low, high).reshape(-1, width).copy()
        self._by_pointer[storage.data_ptr()] = Allocation(StorageWeakRef(storage), low, high, width, unwritten, initial)

    def _mark_written(self, values: Any) -> None:
        for tensor in tree_leaves(values):
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or not tensor.numel():
                continue
            allocation = self.find(tensor.untyped_storage())
            if allocation is None:
                continue
            low, high = span(tensor)
            first = (low - allocation.low) // allocation.width
            if tensor.element_size() != allocation.width:
                allocation.unwritten[first : -((allocation.low - high) // allocation.width)] = False
            elif first >= 0 and high <= allocation.high:
                flags = torch.from_numpy(allocation.unwritten)
                flags.as_strided(tensor.shape, tensor.stride(), first).fill_(False)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last."""
    low = tensor.data_ptr()
    if not tensor.numel():
        return low, low
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (last + 1) * tensor.element_size()


def bytes_at(low: int, high: int) -> Array:
    """Return the memory from one address to another, as a view."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
