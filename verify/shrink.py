"""Shrinking: the smallest case that still fails in the same way.

Inputs are functions of (seed, tensor, coordinates): cutting a dimension leaves the elements that remain as they were,
which is what makes greedy shrinking work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from assay.verify.inputs.cases import Case
from assay.verify.inputs.distributions import INTEGERS, ROLES
from assay.verify.inputs.sampler import Sampler
from assay.verify.result import Failure

_SIMPLE = ("integers", "ties", "powers", "one_hot", "normal")
_ZERO_LIMIT = 64  # tensors with more elements than this are not shrunk element by element


def shrink(
    failure: Failure,
    attempt: Callable[[Case], Failure | None],
    sampler: Sampler,
    *,
    trials: int = 300,
    seconds: float = 8.0,
) -> Failure:
    """The smallest failure of the same kind that greedy steps reach within so many trials and seconds."""
    deadline, left = time.monotonic() + seconds, trials
    progress = True
    while progress:
        progress = False
        for candidate in _steps(failure, sampler):
            if left == 0 or time.monotonic() > deadline:
                return failure
            left -= 1
            smaller = attempt(candidate)
            if smaller is not None and smaller.kind == failure.kind:
                failure, progress = smaller, True
                break
    return failure


def _steps(failure: Failure, sampler: Sampler) -> Iterator[Case]:
    """Simpler cases, the greatest simplification first: shapes, options, layouts, distributions, single elements."""
    case = failure.case
    yield from _smaller_sizes(case, sampler)
    if case.protocol != "once":
        yield replace(case, protocol="once")
    if case.memory != "plain":
        yield replace(case, memory="plain")
    yield from _simpler_options(case, sampler)
    for name, layout in case.layouts.items():
        if layout != "contiguous":
            yield replace(case, layouts={**case.layouts, name: "contiguous"})
    yield from _simpler_values(case)
    yield from islice(_fewer_elements(failure), 120)


def _smaller_sizes(case: Case, sampler: Sampler) -> Iterator[Case]:
    for symbol, size in sorted(case.sizes.items(), key=lambda item: -item[1]):
        step = sampler.step(case.signature, symbol, case.sizes)
        dependants = [name for name, partner in sampler.definition.multiples.items() if partner == symbol]
        given = sampler.shapes.get(symbol) or sampler.definition.sizes.get(symbol)
        options = (
            sorted({s for s in given if s < size and s % step == 0})
            if given is not None
            else sorted({step, size // 4 // step * step, size // 2 // step * step, size - step} & set(range(1, size)))
        )
        for smaller in options:
            sizes = {**case.sizes, symbol: smaller}
            for name in dependants:
                if name in sizes and symbol != "g":
                    sizes[name] = max(1, sizes[name] // size) * smaller
            if all(
                sizes[n] % max(sizes[p], 1) == 0
                for n, p in sampler.definition.multiples.items()
                if n in sizes and p in sizes
            ):
                yield replace(case, sizes=sizes)
                if symbol not in case.definition.multiples.values() and not case.edits:
                    first = case.origin.get(symbol, 0) + size - smaller
                    yield replace(case, sizes=sizes, origin={**case.origin, symbol: first})


def _simpler_options(case: Case, sampler: Sampler) -> Iterator[Case]:
    signature = case.definition.signature_text
    for name, values in sampler.options.items():
        if case.options[name] != values[0] and isinstance(signature, str):
            yield replace(case, options={**case.options, name: values[0]})


def _simpler_values(case: Case) -> Iterator[Case]:
    for tensor in case.signature.tensors:
        names = INTEGERS if tensor.is_integer else tuple(ROLES[tensor.role])
        simple = names[:1] if tensor.role != "real" else tuple(name for name in _SIMPLE if name in names)
        now = case.values.get(tensor.name, names[0])
        if now == "zeros":  # nothing is simpler
            continue
        for name in simple:
            if name == now:
                break
            yield replace(case, values={**case.values, tensor.name: name})


def _fewer_elements(failure: Failure) -> Iterator[Case]:
    """Single elements set to zero, in tensors of numbers that are small by now."""
    case = failure.case
    edited = {(name, index) for name, index, _ in case.edits}
    for tensor in case.signature.tensors:
        shape = case.shape(tensor)
        count = 1
        for size in shape:
            count *= size
        if tensor.role != "real" or count > _ZERO_LIMIT or case.values.get(tensor.name) == "zeros":
            continue
        yield replace(case, values={**case.values, tensor.name: "zeros"})
        for flat in range(count):
            index = []
            for size in reversed(shape):
                flat, place = divmod(flat, size)
                index.append(place)
            at = tuple(reversed(index))
            if (tensor.name, at) not in edited:
                yield replace(case, edits=(*case.edits, (tensor.name, at, 0.0)))
