"""Evaluation block by block: what is made on the way stays in a processor's cache, and takes no fresh memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from assay.golden.arithmetic.ball import Ball

_BLOCK = 2**15
"""Numbers in a block: some ten arrays of float64 of that many fit a second-level cache."""
_WORTHWHILE = 4 * _BLOCK


def in_blocks(function: Callable[..., Any], numbers: Sequence[Any], whole: int = 0) -> Any:
    """``function(*numbers)``, which is independent along all axes but the last ``whole``, evaluated a block at a time.

    ``numbers`` are balls, broadcast against one another, and anything else, which is passed as it is. The result is a
    ball, or a tuple of them, of their common shape but for the last ``whole`` axes.
    """
    balls = [number for number in numbers if isinstance(number, Ball)]
    shape = np.broadcast_shapes(*(ball.shape for ball in balls))  # torch's takes ten times as long
    if math.prod(shape) < _WORTHWHILE:
        return function(*numbers)
    made: list[_Joined] = []
    for place in _places(shape[: len(shape) - whole], math.prod(shape[len(shape) - whole :])):
        parts = [_part(number, place, len(shape)) if isinstance(number, Ball) else number for number in numbers]
        found = function(*parts)
        results = found if isinstance(found, tuple) else (found,)
        made = made or [_Joined(result, shape, len(place)) for result in results]
        for joined, result in zip(made, results, strict=True):
            joined.put(place, result)
    balls = [joined.ball() for joined in made]
    return tuple(balls) if isinstance(found, tuple) else balls[0]


def _places(shape: Sequence[int], width: int) -> list[tuple[slice, ...]]:
    """Slices of the leading axes, each of about as many numbers as a block has; ``width`` numbers stay together."""
    axes: list[list[slice]] = []
    inner = math.prod(shape) * width
    for size in shape:
        inner //= size
        step = max(_BLOCK // inner, 1)
        axes.append([slice(first, min(first + step, size)) for first in range(0, size, step)])
        if step > 1:
            break
    return list(itertools.product(*axes))


def _part(number: Ball, place: tuple[slice, ...], axes: int) -> Ball:
    """What of a ball belongs to a block; an axis of one is shared by all."""
    missing = axes - len(number.shape)

    def cut(part: torch.Tensor) -> torch.Tensor:
        key = [slice(None) if size == 1 else along for size, along in zip(number.shape, place[missing:], strict=False)]
        return part[tuple(key)]

    rad = None if number.rad is None else cut(torch.broadcast_to(number.rad, number.shape))
    return Ball(cut(number.mid), rad, number.model)


class _Joined:
    """The blocks of a result, in one ball."""

    def __init__(self, first: Ball, shape: Sequence[int], cut: int) -> None:
        self.model = first.model
        self.mid = torch.empty((*shape[:cut], *first.shape[cut:]), dtype=torch.float64)
        self.rad: torch.Tensor | None = None

    def put(self, place: tuple[slice, ...], part: Ball) -> None:
        self.mid[place] = part.mid
        if part.rad is not None:
            if self.rad is None:
                self.rad = torch.zeros_like(self.mid)
            self.rad[place] = part.rad

    def ball(self) -> Ball:
        return Ball(self.mid, self.rad, self.model)
