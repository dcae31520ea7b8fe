"""Systems of equations, inverses, determinants and Cholesky's factor, by elimination in the arithmetic.

The pivot is the entry whose certain magnitude is largest; the results don't depend on it, their radii do. The contract
allows the spread of this elimination: other orders stay inside on well-conditioned matrices.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from assay.golden.lowering.dispatch import Lowering
from assay.golden.lowering.rule_table import rule

Tensor = torch.Tensor


def _matrices(ctx: Lowering, x: Tensor) -> tuple[list[Any], tuple[int, ...]]:
    """Return the matrices of a batch, and the batch's shape."""
    flat = ctx.number(x).reshape((math.prod(x.shape[:-2]), *x.shape[-2:]))
    return [flat[index] for index in range(int(flat.shape[0]))], tuple(x.shape[:-2])


def _batched(ctx: Lowering, parts: list[Any], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    number = ctx.xp.stack(parts, 0) if parts else ctx.xp.exact(torch.zeros(shape, dtype=torch.float64))
    return ctx.wrap(number.reshape(shape), dtype)


def _broadcast_batches(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    return a.expand(*lead, *a.shape[-2:]).clone(), b.expand(*lead, *b.shape[-2:]).clone()


def _eliminate(xp: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Return the solution of a x = b, and the determinant of a, by elimination with partial pivots."""
    size = int(a.shape[0])
    rows = [xp.concatenate([a[i : i + 1], b[i : i + 1]], 1) for i in range(size)]
    determinant = xp.exact(torch.ones(1, 1, dtype=torch.float64))
    for column in range(size):
        magnitudes = []
        for i in range(column, size):
            low, high = xp.enclosure(rows[i][:, column : column + 1])
            magnitudes.append(float(torch.maximum(low, -high)))
        pivot = column + max(range(len(magnitudes)), key=magnitudes.__getitem__)
        if pivot != column:
            rows[column], rows[pivot] = rows[pivot], rows[column]
            determinant = -determinant
        head = rows[column][:, column : column + 1]
        determinant = determinant * head
        for i in range(column + 1, size):
            factor = rows[i][:, column : column + 1] / head
            rest = rows[i][:, column + 1 :] - rows[column][:, column + 1 :] * factor
            rows[i] = xp.concatenate([rows[i][:, : column + 1], rest], 1)
    solution: list[Any] = [None] * size
    for i in reversed(range(size)):
        right = rows[i][:, size:]
        for j in range(i + 1, size):
            right = right - solution[j] * rows[i][:, j : j + 1]
        solution[i] = right / rows[i][:, i : i + 1]
    return (xp.concatenate(solution, 0) if solution else b), determinant


def _integers(*shape: int) -> Tensor:
    """Return zero error codes; or no pivots: those are for backward passes, which aren't lowered from them."""
    return torch.zeros(shape, dtype=torch.int32)


@rule("linalg_inv_ex")
def _inverse(ctx: Lowering, x: Tensor, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    matrices, lead = _matrices(ctx, x)
    identity = ctx.xp.exact(torch.eye(x.shape[-1], dtype=torch.float64))
    inverses = [_eliminate(ctx.xp, a, identity)[0] for a in matrices]
    return _batched(ctx, inverses, tuple(x.shape), x.dtype), _integers(*lead)


@rule("_linalg_solve_ex")
def _solve(
    ctx: Lowering, a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with ctx:
        is_vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and tuple(b.shape) == tuple(a.shape[:-1]))
        right = b.unsqueeze(-1) if is_vector else b
        if not left:
            a, right = a.mT, right.mT
        a, right = _broadcast_batches(a, right)
    (matrices, lead), (sides, _) = _matrices(ctx, a), _matrices(ctx, right)
    solutions = [_eliminate(ctx.xp, m, v)[0] for m, v in zip(matrices, sides, strict=True)]
    result = _batched(ctx, solutions, tuple(right.shape), b.dtype)
    with ctx:
        result = result if left else result.mT
        result = result.squeeze(-1) if is_vector else result
    return result, a, _integers(0), _integers(*lead)


def _determinants(ctx: Lowering, x: Tensor) -> Tensor:
    matrices, lead = _matrices(ctx, x)
    no_columns = ctx.xp.exact(torch.zeros(x.shape[-1], 0, dtype=torch.float64))
    return _batched(ctx, [_eliminate(ctx.xp, a, no_columns)[1] for a in matrices], lead, x.dtype)


@rule("_linalg_det")
def _determinant(ctx: Lowering, x: Tensor) -> tuple[Tensor, ...]:
    return _determinants(ctx, x), x, _integers(0)


@rule("_linalg_slogdet")
def _log_determinant(ctx: Lowering, x: Tensor) -> tuple[Tensor, ...]:
    determinant = _determinants(ctx, x)
    with ctx:
        return determinant.sign(), determinant.abs().log(), x, _integers(0)


def _substitute(xp: Any, a: Any, b: Any, upper: bool, unit: bool) -> Any:
    """Solve a triangular system."""
    size = int(a.shape[0])
    solution: dict[int, Any] = {}
    for i in reversed(range(size)) if upper else range(size):
        right = b[i : i + 1]
        if solution:
            solved = sorted(solution)
            row = xp.concatenate([a[i : i + 1, j : j + 1] for j in solved], 1)
            right = right - xp.matmul(row, xp.concatenate([solution[j] for j in solved], 0))
        solution[i] = right if unit else right / a[i : i + 1, i : i + 1]
    return xp.concatenate([solution[i] for i in range(size)], 0) if size else b


@rule("linalg_solve_triangular")
def _solve_triangular(
    ctx: Lowering, a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    with ctx:
        if not left:
            a, b, upper = a.mT, b.mT, not upper
        a, b = _broadcast_batches(a, b)
    (matrices, _), (sides, _) = _matrices(ctx, a), _matrices(ctx, b)
    solutions = [_substitute(ctx.xp, m, v, upper, unitriangular) for m, v in zip(matrices, sides, strict=True)]
    result = _batched(ctx, solutions, tuple(b.shape), b.dtype)
    with ctx:
        return result if left else result.mT


@rule("triangular_solve")
def _triangular_solve(
    ctx: Lowering, b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    with ctx:
        matrix, is_upper = (a.mT, not upper) if transpose else (a, upper)
    return _solve_triangular(ctx, matrix, b, upper=is_upper, unitriangular=unitriangular), a


def _cholesky_factor(xp: Any, a: Any) -> Any:
    """Return Cholesky's lower factor, row by row."""
    size = int(a.shape[0])
    zero = xp.exact(torch.zeros(1, 1, dtype=torch.float64))
    rows: list[list[Any]] = []
    for i in range(size):
        row: list[Any] = []
        for j in range(i + 1):
            entry = a[i : i + 1, j : j + 1]
            for k in range(j):
                entry = entry - row[k] * (rows[j][k] if j < i else row[k])
            row.append(xp.function("sqrt", entry) if i == j else entry / rows[j][j])
        rows.append(row + [zero] * (size - 1 - i))
    return xp.concatenate([xp.concatenate(row, 1) for row in rows], 0) if rows else a


@rule("linalg_cholesky_ex")
def _cholesky_ex(ctx: Lowering, x: Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    with ctx:
        x = x.mT if upper else x  # the other triangle isn't read
    matrices, lead = _matrices(ctx, x)
    result = _batched(ctx, [_cholesky_factor(ctx.xp, a) for a in matrices], tuple(x.shape), x.dtype)
    with ctx:
        return (result.mT if upper else result), _integers(*lead)


@rule("cholesky")
def _cholesky(ctx: Lowering, x: Tensor, upper: bool = False) -> Tensor:
    return _cholesky_ex(ctx, x, upper=upper)[0]


@rule("cholesky_solve")
def _cholesky_solve(ctx: Lowering, b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    with ctx:
        lower = factor.mT if upper else factor
        half = torch.linalg.solve_triangular(lower, b, upper=False)
        return torch.linalg.solve_triangular(lower.mT, half, upper=True)


@rule("cholesky_inverse")
def _cholesky_inverse(ctx: Lowering, factor: Tensor, upper: bool = False) -> Tensor:
    with ctx:
        return _cholesky_solve(ctx, torch.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)
