"""Sizes at which a problem is judged: small, odd, edge and wide ones, and the given ones if this machine can run them.

The cost of a choice of sizes, and whether the reference accepts it, are found on meta tensors, so that no memory of a
GPU's size is ever allocated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from assay.judge.problems.problem import Problem, ProblemError, ProblemTimeout, Sizes
from assay.judge.problems.running import limited

_LEAST = 4  # smaller numbers are kernel sizes, strides, axes
_CANDIDATE = 16  # from here on a number is an extent
_HELD = 2**44  # elements: 16 TiB in bytes
_EDGES = (33, 129)  # one more than usual blocks of 32 and 128
_ROUNDS = (16, 8, 32, 64, 128)  # bounds of small sizes, in the order in which they are tried
_TRIES = 40  # further sizes that are tried to meet a limit
_NUMBERED = 2**21  # elements of real arguments, for a reference that reads numbers and can't run on meta tensors
_NUMBERED_SIZE = 64  # the largest size of arguments that can't be made on the meta device


@dataclass(frozen=True)
class Extent:
    """The cost of a call: elements of arguments, parameters and results, and operations of its products."""

    elements: int
    operations: int

    def within(self, limit: Extent) -> bool:
        """Return whether the cost is within ``limit``."""
        return self.elements <= limit.elements and self.operations <= limit.operations


@dataclass(frozen=True)
class Choice:
    """Sizes at which a problem is judged; ``kind`` says which they are.

    "small"; "odd" (small, and no size a multiple of what it was); "edge" (one more than blocks of 32 and of 128);
    "wide" (one size after the other large); "given"; "near" (as much of the given ones as this machine copes with).
    """

    kind: str
    sizes: Sizes
    extent: Extent


class _WithoutMemory(TorchFunctionMode):
    """Creates all tensors on the meta device, whatever device they are requested on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _makers():
            kwargs["device"] = "meta"
            kwargs.pop("generator", None)
            kwargs.pop("pin_memory", None)
        elif getattr(func, "__name__", "") in ("cuda", "cpu", "pin_memory"):
            return args[0]
        elif getattr(func, "__name__", "") == "to":
            args = (args[0], *(part for part in args[1:] if not isinstance(part, torch.device | str)))
            kwargs.pop("device", None)
            if len(args) == 1 and not kwargs:
                return args[0]
        return func(*args, **kwargs)


@cache
def _makers() -> frozenset[Any]:
    from torch.utils._device import _device_constructors

    return frozenset(_device_constructors())


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Create tensors without memory inside."""
    with torch.no_grad(), _WithoutMemory():
        yield


def extent(problem: Problem, sizes: Sizes) -> Extent:
    """Return the cost of a call at these sizes. Raises `ProblemError` if the reference rejects them."""
    try:
        with without_memory():
            return _extent(problem, sizes)
    except _Unanswered as error:  # a reference that reads numbers
        if error.elements > _NUMBERED:
            raise ProblemError(f"{problem.path}: the reference doesn't take {_shown(sizes)}: {error}") from None
    except ProblemTimeout:
        raise
    except Exception as error:
        if any(type(size) is int and size > _NUMBERED_SIZE for size in sizes.values()):
            raise ProblemError(f"{problem.path}: no arguments of {_shown(sizes)}: {error}") from None
    try:
        with torch.no_grad():
            return _extent(problem, sizes)
    except ProblemTimeout:
        raise
    except Exception as error:
        raise ProblemError(f"{problem.path}: the reference doesn't take {_shown(sizes)}: {error}") from None


class _Unanswered(Exception):
    """The reference failed on meta tensors with arguments of ``elements`` elements."""

    def __init__(self, error: Exception, elements: int) -> None:
        super().__init__(str(error))
        self.elements = elements


def _extent(problem: Problem, sizes: Sizes) -> Extent:
    """Return the cost of a call on the present kind of tensors. Raises `_Unanswered`, or an error of making them."""
    from torch.utils.flop_counter import FlopCounterMode

    instance = problem.make(sizes, 0)
    arguments = instance.draw(0)
    state = list(instance.module.state_dict().values()) if instance.module is not None else []
    elements = _elements((arguments, state))
    with FlopCounterMode(display=False) as counter:
        try:
            with limited(problem.path, "the reference"):
                results = instance.reference(*arguments)
        except ProblemTimeout:
            raise
        except Exception as error:
            raise _Unanswered(error, elements) from None
    return Extent(elements + _elements(results), counter.get_total_flops())


def _elements(tree: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _shown(sizes: Sizes) -> dict[str, Any]:
    return {name: value for name, value in sizes.items() if name[:1] != "@"}


def known_extent(problem: Problem, sizes: Sizes) -> Extent | None:
    """Return `extent`, or None if the reference rejects the sizes."""
    if not problem.wanted(sizes):
        return None
    try:
        return extent(problem, sizes)
    except ProblemTimeout:
        raise
    except Exception:
        return None


def _halved(value: int, most: int) -> int:
    """Return the value halved until it is at most ``most``."""
    while value > most and value >= 2 * _LEAST:
        value = (value + 1) // 2
    return value


def small(problem: Problem, given: Sizes, limit: Extent) -> Choice | None:
    """Return small sizes: all reduced together, then one by one, within ``limit`` if possible."""
    names = [name for name in problem.changeable if int(given.get(name, 0)) >= _CANDIDATE]
    best: Choice | None = None
    for most in _ROUNDS:
        sizes = {**given, **{name: _halved(given[name], most) for name in names}}
        if sizes == dict(given) and best is not None:
            break
        result = known_extent(problem, sizes)
        if result is not None and (best is None or result.elements < best.extent.elements):
            best = Choice("small", sizes, result)
        if best is not None and (best.extent.within(limit) or most >= 32):
            break
    if best is None:
        start = known_extent(problem, given)
        best = Choice("small", given, start) if start is not None else None
    if best is None or best.extent.within(limit):
        return best
    batch = [name for name in outermost(problem, given)[:1] if name not in names]
    return _lessened(problem, best, [*batch, *names], limit)


def _lessened(problem: Problem, choice: Choice, names: Iterable[str], limit: Extent) -> Choice:
    """Halve one size after the other, the largest first, until the cost is within the limit or can't be reduced."""
    stuck: set[str] = set()
    for _ in range(_TRIES):
        if choice.extent.within(limit):
            break
        open_ = [name for name in names if name not in stuck and choice.sizes[name] > 2]
        if not open_:
            break
        name = max(open_, key=lambda name: choice.sizes[name])
        sizes = {**choice.sizes, name: (choice.sizes[name] + 1) // 2}
        result = known_extent(problem, sizes)
        if result is None or (
            result.elements >= choice.extent.elements and result.operations >= choice.extent.operations
        ):
            stuck.add(name)
        else:
            choice = replace(choice, sizes=sizes, extent=result)
    return choice


def odd(problem: Problem, base: Choice, limit: Extent) -> Choice | None:
    """Return the small sizes, each one larger if the reference accepts it."""
    sizes, result = dict(base.sizes), base.extent
    names = [name for name in problem.changeable if int(sizes.get(name, 0)) >= _LEAST]
    together = {**sizes, **{name: sizes[name] + 1 for name in names}}
    whole = known_extent(problem, together)
    if names and whole is not None and whole.within(limit):
        return Choice("odd", together, whole)
    for name in names:
        tried = {**sizes, name: sizes[name] + 1}
        now = known_extent(problem, tried)
        if now is not None and now.within(limit):
            sizes, result = tried, now
    return Choice("odd", sizes, result) if sizes != dict(base.sizes) else None


def edge(problem: Problem, base: Choice, given: Sizes, limit: Extent) -> Choice | None:
    """Return the small sizes with extents one more than a block: 129 for the one given largest, 33 for others."""
    known = {name: given[name] for name in problem.changeable if type(given.get(name)) is int}
    names = sorted((name for name in known if known[name] >= _EDGES[0]), key=lambda name: known[name])
    short = dict.fromkeys(names, _EDGES[0])
    long = {name: _EDGES[1] for name in names[-1:] if known[name] >= _EDGES[1]}
    for edges in ({**short, **long}, short):
        sizes = {**base.sizes, **edges}
        result = known_extent(problem, sizes) if names else None
        if result is not None and result.within(limit):
            return Choice("edge", sizes, result)
    choice = replace(base, kind="edge")
    for name in reversed(names):
        sizes = {**choice.sizes, name: _EDGES[0]}
        result = known_extent(problem, sizes)
        if result is not None and result.within(limit):
            choice = replace(choice, sizes=sizes, extent=result)
    return choice if choice.sizes != base.sizes else None


def wide(problem: Problem, base: Choice, given: Sizes, limit: Extent) -> Choice | None:
    """Return the small sizes except one that is as large as possible, at most as given."""
    best: Choice | None = None
    for name in problem.changeable:
        value = base.sizes.get(name, 0)
        if not isinstance(value, int) or not _LEAST <= value < given[name]:
            continue
        for size in (given[name], given[name] // 4, given[name] // 16):
            if size <= value:
                break
            sizes = {**base.sizes, name: size}
            result = known_extent(problem, sizes)
            if result is not None and result.within(limit):
                if best is None or result.elements > best.extent.elements:
                    best = Choice("wide", sizes, result)
                break
    return best


def near(problem: Problem, given: Sizes, limit: Extent) -> Choice | None:
    """Return the given sizes if a call is within ``limit``, else the nearest: outermost sizes are reduced first.

    Raises `ProblemError` for sizes that no machine holds.
    """
    whole = known_extent(problem, given)
    if whole is None:
        return None
    if whole.elements > _HELD:
        words = f"{_shown(given)} has {whole.elements:,} elements"
        raise ProblemError(f"{problem.path}: expected sizes that a machine holds, at most 2^44 elements; {words}")
    if whole.within(limit):
        return Choice("given", given, whole)
    order = outermost(problem, given)
    choice = Choice("near", given, whole)
    for name in order:
        while choice.sizes[name] >= 2 and not choice.extent.within(limit):
            sizes = {**choice.sizes, name: (choice.sizes[name] + 1) // 2}
            result = known_extent(problem, sizes)
            if result is None or result.elements >= choice.extent.elements:
                break
            choice = replace(choice, sizes=sizes, extent=result)
        if choice.extent.within(limit):
            return choice
    return None


def outermost(problem: Problem, given: Sizes) -> list[str]:
    """Return the changeable sizes by their axis in the arguments' shapes, batch sizes first."""
    try:
        with without_memory():
            leaves = tree_leaves(problem.make(given, 0).draw(0))
    except Exception:  # arguments that can't be made without memory
        return []
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    names = [name for name in problem.changeable if isinstance(given.get(name), int) and given[name] >= _LEAST]

    def outermost_axis(name: str) -> tuple[int, str]:
        results = [shape.index(given[name]) for shape in shapes if given[name] in shape]
        return (min(results, default=9), name)

    return [name for name in sorted(names, key=outermost_axis) if outermost_axis(name)[0] < 9]


def sizes_text(choice: Choice, given: Sizes) -> str:
    """Return in words the sizes that may change."""
    shown = {name: value for name, value in choice.sizes.items() if isinstance(value, int) and name in given}
    return ", ".join(f"{name}={value}" for name, value in list(shown.items())[:8])


def limits(effort: str, device: str = "cpu") -> Mapping[str, Extent]:
    """Return the largest cost of calls for each kind of sizes; of given ones goldens are evaluated on ``device``."""
    more = {"quick": 1, "usual": 4, "thorough": 16}[effort]
    given = Extent(2**20, 2**29) if torch.device(device).type == "cpu" else Extent(2**24, 2**37)
    return {
        "small": Extent(2**15 * more, 2**23 * more),
        "wide": Extent(2**17 * more, 2**25 * more),
        "given": Extent(given.elements * more, given.operations * more),
    }
