"""The numbers of a small failing case: what went in, and what came out beside what is right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from assay.verify.inputs.cases import Case, all_contents
from assay.verify.result import Result

MOST = 64
"""Tensors with more elements than this aren't shown."""

AROUND = 12
"""Of an output that has more, so many about the failing element are."""


@dataclass(frozen=True)
class Numbers:
    """An input's elements, in row-major order."""

    name: str
    shape: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """An output's elements in row-major order from the ``first`` on, beside the goldens, with their ratios.

    A ratio is None where the element isn't judged.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    got: tuple[float, ...]
    golden: tuple[float, ...]
    ratio: tuple[float | None, ...]

    @property
    def pairs(self) -> list[tuple[float, float, float | None]]:
        """What came, what is right and the ratio of each element."""
        return list(zip(self.got, self.golden, self.ratio, strict=True))

    def index(self, place: int) -> tuple[int, ...]:
        """The coordinates of the element that stands at ``place`` of the lists."""
        flat, found = self.first + place, []
        for size in reversed(self.shape):
            flat, coordinate = divmod(flat, size)
            found.append(coordinate)
        return tuple(reversed(found))


@dataclass(frozen=True)
class Sample:
    """The small inputs of a failing case, and the output that is wrong, where it is a matter of numbers."""

    inputs: tuple[Numbers, ...]
    output: Comparison | None = None


def sample_of(case: Case, result: Result | None) -> Sample:
    """The numbers of a failing case; ``result`` is what trying it showed, where that is known."""
    small = [tensor.name for tensor in case.signature.tensors if math.prod(case.shape(tensor)) <= MOST]
    values = all_contents(case) if small else {}
    inputs = tuple(Numbers(name, tuple(values[name].shape), _numbers(values[name])) for name in small)
    return Sample(inputs, _comparison(result) if result is not None else None)


def _comparison(result: Result) -> Comparison | None:
    failure, ratio = result.failure, result.ratio
    if failure is None or ratio is None or not result.tolerances or ratio.shape != result.tolerances[-1].golden.shape:
        return None
    place = [tensor.name for tensor in result.case.signature.returns].index(failure.output)
    got, golden = result.outputs[place].detach().cpu(), result.tolerances[-1].golden
    flat = 0
    for coordinate, size in zip(failure.index, ratio.shape, strict=True):
        flat = flat * size + coordinate
    length = ratio.numel() if ratio.numel() <= MOST else AROUND
    first = max(0, min(flat - length // 2, ratio.numel() - length))
    shown = slice(first, first + length)
    return Comparison(
        failure.output,
        tuple(ratio.shape),
        first,
        _numbers(got.reshape(-1)[shown]),
        _numbers(golden.reshape(-1)[shown]),
        tuple(None if math.isnan(value) else value for value in _numbers(ratio.reshape(-1)[shown])),
    )


def _numbers(tensor: torch.Tensor) -> tuple[float, ...]:
    return tuple(tensor.double().reshape(-1).tolist())
