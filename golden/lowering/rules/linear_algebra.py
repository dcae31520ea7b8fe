"""Systems of equations, inverses, determinants and Cholesky's factor, by elimination in the arithmetic.

A pivot is the entry of the largest magnitude that is certain; the results don't depend on which it is, their radii do.
What the contract allows is the spread of this elimination: other orders stay inside on well-conditioned matrices.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from assay.golden.lowering.evaluation import Evaluation
from assay.golden.lowering.table import rule

Tensor = torch.Tensor


def _matrices(evaluation: Evaluation, x: Tensor) -> tuple[list[Any], tuple[int, ...]]:
    number = evaluation.number(x)
    flat = number.reshape((math.prod(x.shape[:-2]), *x.shape[-2:]))
    return [flat[place] for place in range(int(flat.shape[0]))], tuple(x.shape[:-2])


def _joined(evaluation: Evaluation, parts: list[Any], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    number = evaluation.xp.stack(parts, 0) if parts else evaluation.xp.exact(torch.zeros(shape, dtype=torch.float64))
    return evaluation.made(number.reshape(shape), dtype)


def eliminated(xp: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """The solution of a x = b, and the determinant of a, by elimination with partial pivots."""
    size, width = int(a.shape[0]), int(b.shape[1])
    rows = [xp.concatenate([a[i : i + 1], b[i : i + 1]], 1) for i in range(size)]
    determinant = xp.exact(torch.ones(1, 1, dtype=torch.float64))
    for column in range(size):
        least = []
        for i in range(column, size):
            low, high = xp.enclosure(rows[i][:, column : column + 1])
            least.append(float(torch.maximum(low, -high)))
        pivot = column + max(range(len(least)), key=least.__getitem__)
        if pivot != column:
            rows[column], rows[pivot] = rows[pivot], rows[column]
            determinant = -determinant
        head = rows[column][:, column : column + 1]
        determinant = determinant * head
        for i in range(column + 1, size):
            factor = rows[i][:, column : column + 1] / head
            rest = rows[i][:, column + 1 :] - rows[column][:, column + 1 :] * factor
            rows[i] = xp.concatenate([rows[i][:, : column + 1], rest], 1)
    solved: list[Any] = [None] * size
    for i in reversed(range(size)):
        right = rows[i][:, size:]
        for j in range(i + 1, size):
            right = right - solved[j] * rows[i][:, j : j + 1]
        solved[i] = right / rows[i][:, i : i + 1]
    answer = xp.concatenate(solved, 0) if solved else b
    assert width == int(b.shape[1])
    return answer, determinant


def _nothing_wrong(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@rule("linalg_inv_ex")
def _inverse(evaluation: Evaluation, x: Tensor, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    parts, lead = _matrices(evaluation, x)
    one = evaluation.xp.exact(torch.eye(x.shape[-1], dtype=torch.float64))
    found = [eliminated(evaluation.xp, a, one)[0] for a in parts]
    return _joined(evaluation, found, tuple(x.shape), x.dtype), _nothing_wrong(lead)


@rule("_linalg_solve_ex")
def _solve(
    evaluation: Evaluation, a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with evaluation:
        vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and tuple(b.shape) == tuple(a.shape[:-1]))
        right = b.unsqueeze(-1) if vector else b
        if not left:
            a, right = a.mT, right.mT
        lead = torch.broadcast_shapes(a.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
        a = a.expand(*lead, *a.shape[-2:]).clone()
        right = right.expand(*lead, *right.shape[-2:]).clone()
    parts, _ = _matrices(evaluation, a)
    sides, _ = _matrices(evaluation, right)
    found = [eliminated(evaluation.xp, m, v)[0] for m, v in zip(parts, sides, strict=True)]
    result = _joined(evaluation, found, tuple(right.shape), b.dtype)
    with evaluation:
        result = result if left else result.mT
        result = result.squeeze(-1) if vector else result
    return result, a, torch.zeros(0, dtype=torch.int32), _nothing_wrong(tuple(lead))


def _determinants(evaluation: Evaluation, x: Tensor) -> Tensor:
    parts, lead = _matrices(evaluation, x)
    none = evaluation.xp.exact(torch.zeros(x.shape[-1], 0, dtype=torch.float64))
    return _joined(evaluation, [eliminated(evaluation.xp, a, none)[1] for a in parts], lead, x.dtype)


@rule("_linalg_det")
def _determinant(evaluation: Evaluation, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _determinants(evaluation, x), x, torch.zeros(0, dtype=torch.int32)


@rule("_linalg_slogdet")
def _log_determinant(evaluation: Evaluation, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = _determinants(evaluation, x)
    with evaluation:
        return found.sign(), found.abs().log(), x, torch.zeros(0, dtype=torch.int32)


def _triangular(xp: Any, a: Any, b: Any, upper: bool, unit: bool) -> Any:
    """The solution by substitution."""
    size = int(a.shape[0])
    solved: dict[int, Any] = {}
    for i in reversed(range(size)) if upper else range(size):
        right = b[i : i + 1]
        if solved:
            known = sorted(solved)
            row_of = xp.concatenate([a[i : i + 1, j : j + 1] for j in known], 1)
            right = right - xp.matmul(row_of, xp.concatenate([solved[j] for j in known], 0))
        solved[i] = right if unit else right / a[i : i + 1, i : i + 1]
    return xp.concatenate([solved[i] for i in range(size)], 0) if size else b


@rule("linalg_solve_triangular")
def _solve_triangular(
    evaluation: Evaluation, a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    with evaluation:
        if not left:
            a, b, upper = a.mT, b.mT, not upper
        lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
        a, b = a.expand(*lead, *a.shape[-2:]).clone(), b.expand(*lead, *b.shape[-2:]).clone()
    parts, sides = _matrices(evaluation, a)[0], _matrices(evaluation, b)[0]
    found = [_triangular(evaluation.xp, m, v, upper, unitriangular) for m, v in zip(parts, sides, strict=True)]
    result = _joined(evaluation, found, tuple(b.shape), b.dtype)
    with evaluation:
        return result if left else result.mT


@rule("triangular_solve")
def _triangular_solve(
    evaluation: Evaluation,
    b: Tensor,
    a: Tensor,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Tensor, Tensor]:
    with evaluation:
        matrix, side = (a.mT, not upper) if transpose else (a, upper)
    found = _solve_triangular(evaluation, matrix, b, upper=side, unitriangular=unitriangular)
    return found, a


def _factor(xp: Any, a: Any) -> Any:
    """Cholesky's lower factor, row by row."""
    size = int(a.shape[0])
    zero = xp.exact(torch.zeros(1, 1, dtype=torch.float64))
    rows: list[list[Any]] = []
    for i in range(size):
        line: list[Any] = []
        for j in range(i + 1):
            entry = a[i : i + 1, j : j + 1]
            for k in range(j):
                entry = entry - line[k] * (rows[j][k] if j < i else line[k])
            line.append(xp.function("sqrt", entry) if i == j else entry / rows[j][j])
        rows.append(line + [zero] * (size - 1 - i))
    return xp.concatenate([xp.concatenate(line, 1) for line in rows], 0) if rows else a


@rule("linalg_cholesky_ex")
def _cholesky(
    evaluation: Evaluation, x: Tensor, *, upper: bool = False, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    with evaluation:
        x = x.mT if upper else x  # the other triangle isn't read
    parts, lead = _matrices(evaluation, x)
    result = _joined(evaluation, [_factor(evaluation.xp, a) for a in parts], tuple(x.shape), x.dtype)
    with evaluation:
        return (result.mT if upper else result), _nothing_wrong(lead)


@rule("cholesky")
def _plain_cholesky(evaluation: Evaluation, x: Tensor, upper: bool = False) -> Tensor:
    return _cholesky(evaluation, x, upper=upper)[0]


@rule("cholesky_solve")
def _cholesky_solve(evaluation: Evaluation, b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    with evaluation:
        lower = factor.mT if upper else factor
        half = torch.linalg.solve_triangular(lower, b, upper=False)
        return torch.linalg.solve_triangular(lower.mT, half, upper=True)


@rule("cholesky_inverse")
def _cholesky_inverse(evaluation: Evaluation, factor: Tensor, upper: bool = False) -> Tensor:
    with evaluation:
        return _cholesky_solve(evaluation, torch.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)
