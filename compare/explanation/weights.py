"""Differences between the weights of two runs: a cast or a narrower format is a choice, anything else a fault."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from assay.compare.runs.run import Run
from assay.compare.structure import Parameter

_QUANTISED = 0.2
"""Relative root mean square error up to which a weight counts as quantised: of 4-bit formats with scales it is about
0.1."""


@dataclass(frozen=True)
class Difference:
    words: str
    is_fault: bool


def difference_of(parameter: Parameter, authority: Run, run: Run) -> Difference | None:
    """Return how a parameter of a run differs from the authority's; None if it doesn't."""
    if run is authority:
        return None
    right, own = (each.parameter(parameter.module, parameter.name) for each in (authority, run))
    name = f"{parameter.module}.{parameter.name}"
    if right is None:
        return None
    if own is None:
        return Difference(f"{name} is missing", is_fault=True)
    if right.shape != own.shape:
        return Difference(f"{name} has the shape {list(own.shape)}, expected {list(right.shape)}", is_fault=True)
    if torch.equal(right.double(), own.double()):
        return None
    narrow = own.dtype if own.dtype.itemsize <= right.dtype.itemsize else right.dtype
    if torch.equal(right.to(narrow), own.to(narrow)):
        return Difference(f"{name} in {str(own.dtype).removeprefix('torch.')}", is_fault=False)
    error, size = (own.double() - right.double()), right.double()
    relative = float(error.norm() / size.norm()) if float(size.norm()) else float("inf")
    factor = float((own.double() * size).sum() / size.pow(2).sum()) if float(size.norm()) else 0.0
    if abs(factor - 1) > 0.01 and float((own.double() - factor * size).norm()) < 1e-2 * float(size.norm()):
        return Difference(f"{name} is {factor:.6g} times that of the other run", is_fault=True)
    if relative < _QUANTISED and _is_coarser(right, own) and not _has_a_wrong_block(right.double(), own.double()):
        return Difference(f"{name} is quantised, off by {relative:.2g} in the root mean square", is_fault=False)
    if right.dim() == 2 and right.shape[0] == right.shape[1] and torch.equal(right.double().T, own.double()):
        return Difference(f"{name} is transposed", is_fault=True)
    where = _wrong_rows(right.double(), own.double())
    return Difference(f"{name} differs by {relative:.2g} in the root mean square{where}", is_fault=True)


def _is_coarser(right: torch.Tensor, own: torch.Tensor) -> bool:
    """Return whether a weight has far fewer different numbers in its first block of 128 x 128, as one in a format
    has."""
    some = [x.reshape(len(x), -1)[:128, :128].flatten().tolist() for x in (right, own)]
    return len(set(some[1])) < 0.6 * len(set(some[0]))


def _has_a_wrong_block(right: torch.Tensor, own: torch.Tensor, size: int = 16) -> bool:
    """Return whether some block of a matrix is off by far more than the others: its scale is another's."""
    if right.dim() != 2 or min(right.shape) < size:
        return False
    rows, columns = (length // size * size for length in right.shape)

    def blocks(x: torch.Tensor) -> torch.Tensor:
        return x[:rows, :columns].reshape(rows // size, size, columns // size, size).pow(2).sum((1, 3)).sqrt()

    relative = blocks(own - right) / blocks(right).clamp(min=1e-30)
    return bool(relative.max() > 4 * relative.median().clamp(min=1e-3))


def _wrong_rows(right: torch.Tensor, own: torch.Tensor) -> str:
    wrong = (right != own).reshape(len(right), -1).any(-1).nonzero()[:, 0]
    if len(wrong) == len(right) or not len(wrong):
        return ""
    return f", in rows {int(wrong[0])} to {int(wrong[-1])}"
