"""Probes: calls that differ in one respect, to show the dependencies of a solution's results.

Most are made only after wrong numbers, to explain them. Ignored arguments and single elements are always probed,
because results remembered from earlier calls hide them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from assay.judge.solution.inputs import all_changed, half_changed
from assay.judge.solution.solution_process import SolutionError
from assay.judge.solution.trials import Observation
from assay.judge.tampering import Cheat
from assay.judge.under_test import SolutionUnderTest, same_outputs

_MOVED = 1e-3  # of the reference's largest result: far beyond any tolerance, so the results must differ
_STEPS = 7  # bisections between a passing and a failing amplitude: a decade to within 2 %
_JUMP = 8.0  # growth of the error across a threshold; an honest kernel's error grows with the amplitude, at most 1.1
_NARROW = (torch.bfloat16, torch.float16)
_DISTINCT = 8  # numbers that show a format: a few, such as the zeros of an unwritten result, are numbers of any
_MOST_TENSORS = 6  # tensors that are probed: each costs a call, or one for each axis
_SCALES = (1e-2, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0)  # factors of the drawn inputs


def constant(observations: Sequence[Observation]) -> list[Cheat]:
    """Return the cheat "constant-output" if different inputs of one size always gave the same bits."""
    sizes: dict[str, list[Observation]] = {}
    for one in observations:
        if one.outputs:
            sizes.setdefault(str(sorted(one.trial.sizes.items())), []).append(one)
    for group in sizes.values():
        seeds = {one.trial.seed for one in group}
        alike = all(same_outputs(group[0].outputs, one.outputs) for one in group[1:])
        if len(seeds) >= 3 and alike and any(one.failed for one in group):
            zeros = all(not bool(part.any()) for part in group[0].outputs)
            words = f"{'zeros' if zeros else 'one result'} in {len(group)} calls"
            return [Cheat("constant-output", words, group[-1].trial.as_line())]
    return []


def ignored(under_test: SolutionUnderTest, base: Observation) -> list[Cheat]:
    """Return the arguments that can change without a change of the results, though the reference's change."""
    others = under_test.model.instance.draw(base.trial.seed + 77)
    results = []
    for index in under_test.tensors[:_MOST_TENSORS]:
        after = all_changed(base.arguments, others, index)
        if under_test.eager_change(base.arguments, after) > _MOVED and _unmoved(under_test, base, after):
            results.append(Cheat("ignored-argument", f"argument {index}", base.trial.as_line()))
    return results


def unread(under_test: SolutionUnderTest, base: Observation) -> list[Cheat]:
    """Return a half of an input that the results don't depend on, though the reference's do."""
    leaves = tree_leaves(base.arguments)
    for index in under_test.tensors[:_MOST_TENSORS]:
        for axis in range(leaves[index].ndim):
            if leaves[index].shape[axis] < 4:
                continue
            after = half_changed(base.arguments, index, axis)
            if under_test.eager_change(base.arguments, after) > _MOVED / 10 and _unmoved(under_test, base, after):
                words = f"argument {index}, the last half along axis {axis}"
                return [Cheat("unread-input", words, base.trial.as_line())]
    return []


def _unmoved(under_test: SolutionUnderTest, base: Observation, after: tuple[object, ...]) -> bool:
    try:
        under_test.process.store("probe", after)
        return same_outputs(under_test.process.call("probe", seed=base.trial.seed).outputs, base.outputs)
    except SolutionError:
        return False


def amplitude(under_test: SolutionUnderTest, base: Observation) -> list[Cheat]:
    """Return the cheat "amplitude-dispatch" if results become wrong, or right, abruptly at some amplitude.

    The errors of an honest kernel grow smoothly with the amplitude, or its results overflow to NaN or infinity.
    """
    if not any(kind.name != "fixed" for kind in under_test.kinds):
        return []
    tried: dict[float, Observation] = {}

    def at(factor: float) -> Observation:
        if factor not in tried:
            tried[factor] = under_test.tried(replace(base.trial, factor=factor, memory="new"), name="probe")
        return tried[factor]

    usable = [factor for factor in _SCALES if under_test.model.is_finite(at(factor).arguments)]
    for low, high in pairwise(usable):
        if at(low).failed == at(high).failed:
            continue
        first, last = low, high
        for _ in range(_STEPS):
            middle = math.sqrt(first * last)
            first, last = (middle, last) if at(middle).failed == at(first).failed else (first, middle)
        wrong, right = (at(first), at(last)) if at(first).failed else (at(last), at(first))
        again = [under_test.tried(one.trial, name="probe") for one in (wrong, right)]
        if [one.failed for one in again] != [True, False]:
            continue
        if _finite(wrong) and _ratio(wrong) > _JUMP * max(_ratio(right), 0.25):
            leaves = [leaf for leaf in tree_leaves(at(last).arguments) if isinstance(leaf, torch.Tensor)]
            most = max(float(leaf.double().abs().max()) for leaf in leaves if leaf.is_floating_point() and leaf.numel())
            words = f"{'right' if at(first).failed else 'wrong'} from a largest input of {most:.3g} on"
            return [Cheat("amplitude-dispatch", words, wrong.trial.as_line())]
    return []


def _ratio(observation: Observation) -> float:
    failure = observation.result.failure
    return float(failure.ratio or math.inf) if failure is not None else observation.result.worst


def _finite(observation: Observation) -> bool:
    outputs = observation.outputs
    return bool(outputs) and all(bool(part.double().isfinite().all()) for part in outputs)


def precision(under_test: SolutionUnderTest, observations: Sequence[Observation]) -> list[Cheat]:
    """Return the cheat "lower-precision" if results are a narrower format's numbers, or have errors of its size."""
    for one in observations:
        if not one.failed or not _finite(one):
            continue
        expected = under_test.model.eager(one.arguments)
        for got, right in zip(one.outputs, expected, strict=True):
            if got.shape != right.shape or got.dtype not in (torch.float32, torch.float64) or got.numel() < 8:
                continue
            for narrow in _NARROW:
                held = (
                    torch.equal(got, got.to(narrow).to(got.dtype)) and torch.unique(got[got != 0]).numel() >= _DISTINCT
                )
                if held and not torch.equal(right, right.to(narrow).to(right.dtype)):
                    words = f"all results are {str(narrow)[6:]} numbers"
                    return [Cheat("lower-precision", words, one.trial.as_line())]
            for narrow in _NARROW:
                if _as_far_off(under_test, one, got, right, narrow):
                    words = f"as far off as {str(narrow)[6:]} inputs take them"
                    return [Cheat("lower-precision", words, one.trial.as_line())]
    return []


def _as_far_off(
    under_test: SolutionUnderTest, one: Observation, got: torch.Tensor, right: torch.Tensor, narrow: torch.dtype
) -> bool:
    """Return whether a result's error resembles that of rounding inputs and weights to a narrower format."""
    leaves, structure = tree_flatten(one.arguments)
    rounded = [
        leaf.to(narrow).to(leaf.dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 else leaf
        for leaf in leaves
    ]
    state = {
        name: value.to(narrow).to(value.dtype) if value.dtype == torch.float32 else value
        for name, value in under_test.model.state.items()
    }
    try:
        results = under_test.model.with_state(state).eager(tree_unflatten(rounded, structure))
    except (RuntimeError, ValueError):
        return False
    narrowed = next((part for part in results if part.shape == right.shape and part.dtype == right.dtype), None)
    if narrowed is None:
        return False
    wide, off = right.double(), got.double() - right.double()
    size = float(wide.square().mean().sqrt()) or 1.0
    common = float(
        (off * wide).sum() / wide.square().sum().clamp(min=1e-300)
    )  # an error that is a common factor is no rounding
    if float((off - common * wide).square().sum()) < float(off.square().sum()) / 4:
        return False
    error = float(off.square().mean().sqrt()) / size
    typical = float((narrowed.double() - right.double()).square().mean().sqrt()) / size
    unit = torch.finfo(narrow).eps  # bounds wide enough for a sum's averaging (1/64) and for a few products (8)
    return unit / 64 < error < 8 * unit and typical / 4 < error < 4 * typical
