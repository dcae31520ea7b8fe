"""What a kernel reads: inputs are changed a part at a time, and the outputs that change are compared with the golden's.

A part of an input that changes the golden and no bit of the output isn't read; one that changes outputs whose goldens
stay the same bit for bit is read where it should not be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from assay.golden.signature import TensorSpec
from assay.runtime.errors import AssayError
from assay.runtime.tensors import same_numbers
from assay.verify.cases.case import Case, all_contents
from assay.verify.cases.sampler import with_values
from assay.verify.comparison.error_map import indices_in_words
from assay.verify.comparison.oracle import Oracle
from assay.verify.explanation.fault_budget import FaultBudget
from assay.verify.explanation.fault_models.fault_tolerance import Observation, observation_of
from assay.verify.findings import Fact, Picture
from assay.verify.harness.runner import KernelHarness

Tensor = torch.Tensor

_MOST_EDITED = 4096  # elements of an input that one call changes
_WHOLE = ("simplex", "sorted", "spd")  # domains that a change of a part would leave
_LEVELS = ("read", "not read", "read without need")
_MOST_SIZE = 160  # along a dimension that is gone through index by index


@dataclass(frozen=True)
class _Effect:
    """Which elements of each output change as a part of an input does: those of the kernel, and those of the golden.

    ``surely`` marks goldens that move by more than both their tolerances, ``still`` those that keep every bit.
    """

    changed: tuple[Tensor, ...]
    surely: tuple[Tensor, ...]
    still: tuple[Tensor, ...]

    @property
    def is_ignored(self) -> bool:
        """Whether the golden surely changes, and no output does."""
        return any(map(_any, self.surely)) and not any(map(_any, self.changed))

    @property
    def strays(self) -> list[Tensor]:
        """The elements that change and should not."""
        return [changed & still for changed, still in zip(self.changed, self.still, strict=True)]


def reads(harness: KernelHarness, observations: Sequence[Observation], aspect: str, budget: FaultBudget) -> list[Fact]:
    """Return what isn't read, and what is read where it should not be, in the smallest of the calls that has several
    indices along most dimensions."""
    base = max(observations, key=_telling)
    facts = []
    for tensor in base.case.signature.tensors:
        if budget.is_over():
            break
        if tensor.is_integer or not _may_be_edited(base.case, tensor):
            continue
        facts += [Fact("reads", words, aspect, shown) for words, shown in _of_tensor(harness, base, tensor, budget)]
    again = harness.outputs(base.case) if facts else None
    if again is None or not all(map(same_numbers, again, base.outputs)):  # what changed were calls, not inputs
        return []
    return facts


def _telling(observation: Observation) -> tuple[int, float]:
    """Rank calls: many dimensions with several indices first, and then few elements."""
    sizes = observation.case.sizes.values()
    return sum(size > 2 for size in sizes), -math.prod(max(size, 1) for size in sizes)


def _may_be_edited(case: Case, tensor: TensorSpec) -> bool:
    return 0 < math.prod(case.shape(tensor)) <= _MOST_EDITED and case.layouts.get(tensor.name, "") != "expanded"


def _of_tensor(
    harness: KernelHarness, base: Observation, tensor: TensorSpec, budget: FaultBudget
) -> Iterator[tuple[str, Picture | None]]:
    """Yield in words what of one input isn't read, and where it is read without need, with a picture of all indices."""
    shape = base.case.shape(tensor)
    whole = _effect(harness, base, tensor, torch.ones(shape, dtype=torch.bool))
    if whole is None:
        return
    if whole.is_ignored:
        ordinary = _effect(harness, base, tensor, torch.ones(shape, dtype=torch.bool), ordinary=True)
        if ordinary is None or ordinary.is_ignored:  # else these numbers are beyond where anything changes
            yield f"{tensor.name} is not read: nothing changes with it", None
        return
    for axis, name in enumerate(tensor.dims if tensor.role not in _WHOLE else ()):
        size = shape[axis]
        if not 1 < size <= _MOST_SIZE:
            continue
        ignored: list[bool | None] = [None] * size  # None: the golden doesn't surely change
        strayed = [False] * size
        example = ""
        for index in range(size):
            if budget.is_over():
                return
            mask = torch.zeros(shape, dtype=torch.bool)
            mask.select(axis, index).fill_(True)
            effect = _effect(harness, base, tensor, mask)
            if effect is None:
                continue
            if effect.is_ignored or any(map(_any, effect.changed)):
                ignored[index] = effect.is_ignored
            strays = list(_unneeded(base, tensor, mask, effect.strays))
            strayed[index] = bool(strays)
            if strays and not example:
                number, part = strays[0]
                output = base.case.signature.returns[number]
                position = [int(each) for each in part.nonzero()[0]]
                example = f"e.g. {output.name}{position} of {name} {index}"
        at = f"in a call of {_sizes(base.case)}"
        levels = [2 if stray else 1 if skipped else 0 for skipped, stray in zip(ignored, strayed, strict=True)]
        points = tuple((float(index), float(level)) for index, level in enumerate(levels))
        picture = Picture(f"{name} of {tensor.name}", "", points, levels=_LEVELS)
        if any(ignored):
            yield f"{tensor.name} is not read at {indices_in_words(_filled(ignored), name)}, {at}", picture
        if any(strayed):
            words = f"{tensor.name} at {indices_in_words(strayed, name)} changes outputs that don't depend on it "
            yield f"{words}({example}), {at}", None if any(ignored) else picture
        if any(ignored) or any(strayed):
            return  # along one dimension: along others the same would be told again


def _unneeded(
    base: Observation, tensor: TensorSpec, mask: Tensor, strays: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield the outputs with elements among the ``strays`` that don't depend on the marked elements at all.

    A golden may keep every bit because what changes is too small, or masked by a larger number: with NaN it would not.
    """
    if not any(map(_any, strays)):
        return
    nan = tuple((tensor.name, tuple(position), math.nan) for position in mask.nonzero().tolist())
    case = replace(base.case, edits=(*base.case.edits, *nan))
    try:
        limits = Oracle(base.contract).tolerances(case, all_contents(case), base.chosen)
    except AssayError:
        return
    for number, (part, before, after) in enumerate(zip(strays, base.limits, limits, strict=True)):
        part = part & after.judged & (before.golden == after.golden)
        if _any(part):
            yield number, part


def _filled(marks: Sequence[bool | None]) -> list[bool]:
    """Return the marks; an unknown one counts as marked between two known neighbours that both are."""
    below, above = ([bool(mark) for mark in _carried(some)] for some in (marks, marks[::-1]))
    return [one and two for one, two in zip(below, above[::-1], strict=True)]


def _carried(marks: Sequence[bool | None]) -> Iterator[bool | None]:
    """Yield the marks, each unknown one as the last known before it."""
    last: bool | None = None
    for mark in marks:
        last = last if mark is None else mark
        yield last


def _effect(
    harness: KernelHarness, base: Observation, tensor: TensorSpec, mask: Tensor, *, ordinary: bool = False
) -> _Effect | None:
    """Return what a change of the marked elements does, to ``ordinary`` numbers or to others of their distribution;
    None if that call can't be made or judged."""
    case, own = base.case, all_contents(base.case)[tensor.name]
    drawn = replace(case, seed=case.seed + 1_009, edits=())
    other = all_contents(with_values(drawn, "normal") if ordinary else drawn)[tensor.name]
    edits = tuple(
        (tensor.name, tuple(int(each) for each in position), float(other[tuple(position)].double()))
        for position in mask.nonzero()
        if float(other[tuple(position)].double()) != float(own[tuple(position)].double())
    )
    if not edits:
        return None
    try:
        seen = observation_of(harness, replace(case, edits=(*case.edits, *edits)))
    except AssayError:  # the reference refuses, or leaves open, what the change makes of it
        return None
    if seen is None or seen.chooses_wrongly:
        return None
    changed, surely, still = [], [], []
    for old, new, before, after in zip(base.outputs, seen.outputs, base.limits, seen.limits, strict=True):
        differ = torch.zeros(old.shape, dtype=torch.bool) if same_numbers(old, new) else _differ(old, new)
        moved = (before.golden - after.golden).abs()
        judged = before.judged & after.judged
        changed.append(differ)
        shows = judged & old.double().isfinite()  # NaN stays NaN, whatever is read
        surely.append(shows & (moved > 4 * (before.pre_store_radius + after.pre_store_radius) + _gap(before.golden)))
        still.append((before.golden == after.golden) & (before.pre_store_radius == after.pre_store_radius) & judged)
    return _Effect(tuple(changed), tuple(surely), tuple(still))


def _differ(old: Tensor, new: Tensor) -> Tensor:
    one, two = old.double(), new.double()
    return (one != two) & ~(one.isnan() & two.isnan())


def _gap(golden: Tensor) -> Tensor:
    return golden.abs() * 2.0**-6  # a change that a store in eight bits would show


def _any(mask: Tensor) -> bool:
    return bool(mask.any())


def _sizes(case: Case) -> str:
    return ", ".join(f"{symbol}={size}" for symbol, size in case.sizes.items())
