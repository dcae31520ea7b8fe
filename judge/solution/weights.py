"""Parameters: redraws constant ones, and matches the solution's with the reference's by name or order."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

State = Mapping[str, torch.Tensor]
_SPREAD = 0.25  # of the constant, within which numbers are drawn: a scale stays near 1, a variance positive


def redrawn(state: State, seed: int) -> dict[str, torch.Tensor]:
    """Return the state with constant floating-point parameters redrawn; others stay.

    Around zero the numbers are uniform in +-`_SPREAD`, which is usual for parameters; around another constant within
    that share of it.
    """
    generator = torch.Generator().manual_seed(seed)
    results = {}
    for name, value in state.items():
        constant = value.dtype.is_floating_point and value.numel() > 0 and bool((value == value.flatten()[0]).all())
        if not constant or not bool(value.isfinite().all()):
            results[name] = value.clone()
            continue
        middle = float(value.flatten()[0])
        spread = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1
        results[name] = (middle + spread * _SPREAD * (abs(middle) or 1.0)).to(value.dtype)
    return results


def shared(reference: State, solution: State, unbound: Collection[str] = ()) -> dict[str, str] | None:
    """Map the solution's parameters to the reference's: by name, or by order if the shapes agree; None if neither.

    ``unbound`` tensors, plain attributes, are matched by name, or by the numbers that the constructor made; others are
    left out.
    """
    registered = {name: value for name, value in solution.items() if name not in unbound}
    result = _by_name_or_order(reference, registered)
    if result is None:
        return None
    left = {name: value for name, value in reference.items() if name not in result.values()}
    for name in (name for name in solution if name in unbound):
        same = [other for other, value in left.items() if value.shape == solution[name].shape]
        other = name if name in same else next((o for o in same if torch.equal(left[o], solution[name].cpu())), None)
        if other is not None:
            result[name] = other
            del left[other]
    return result


def _by_name_or_order(reference: State, solution: State) -> dict[str, str] | None:
    if all(name in reference and reference[name].shape == value.shape for name, value in solution.items()):
        return {name: name for name in solution}
    ours = [(name, value.shape) for name, value in reference.items()]
    theirs = [(name, value.shape) for name, value in solution.items()]
    if [shape for _, shape in ours] == [shape for _, shape in theirs]:
        return {name: other for (name, _), (other, _) in zip(theirs, ours, strict=True)}
    return None


def handed(state: State, names: Mapping[str, str], solution: State) -> dict[str, torch.Tensor]:
    """Return the state under the solution's names, in its dtypes."""
    return {name: state[other].to(solution[name].dtype) for name, other in names.items()}


def same_values(reference: State, solution: State, names: Mapping[str, str]) -> bool:
    """Return whether the solution's constructor made the reference's values."""
    return all(torch.equal(reference[other], solution[name].cpu()) for name, other in names.items())
