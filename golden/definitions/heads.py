"""Sequences head by head, as linear attention and the delta rule see them: decays, and what lies ahead."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N

SIZES = {
    "D": (8, 16, 32, 64),
    "Dv": (8, 16, 24, 64),
    "H": (1, 2, 3),
    "B": (1, 2),
    "T": (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65),
}


def by_head(xp: Arithmetic[N], x: N) -> N:
    """[B, T, H, ...] as [B, H, T, ...]."""
    return xp.stack([x[:, :, head] for head in range(x.shape[2])], 1)


def by_place(xp: Arithmetic[N], x: N) -> N:
    """[B, H, T, ...] as [B, T, H, ...]."""
    return xp.stack([x[:, head] for head in range(x.shape[1])], 2)


def places_ahead(xp: Arithmetic[N, Idx], length: int) -> Idx:
    """How far each place lies ahead of another: [one, the other], negative where it lies behind."""
    place = xp.integers(range(length))
    ahead: Idx = place[None, :] - place[:, None]
    return ahead


def decays(xp: Arithmetic[N, Idx], gates: N, seen: Idx) -> N:
    """exp of the sum of ``gates`` [..., T] from one place, without it, to another: [..., T, T]; 1 what is not seen."""
    levels = xp.cumsum(gates)
    return xp.exp(xp.where(seen, levels[..., :, None] - levels[..., None, :], 0.0))


def touched(xp: Arithmetic[N], values: N, *others: N) -> Any:
    """Columns of ``values``, heads of ``others`` [B, H, T, .] with NaN or an infinity, which may reach others."""
    columns = (~xp.is_finite(values)).any(2)[:, :, None, :]
    for x in others:
        columns = columns | (~xp.is_finite(x)).any(-1).any(-1)[..., None, None]
    return columns
