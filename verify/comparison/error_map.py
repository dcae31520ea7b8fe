"""What an examination's errors look like: a histogram of ratios, and a map of the first output that is wrong.

A ratio is |y - golden| / radius; above 1 the contract is broken (`assay.verify.comparison.judge`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from assay.verify.comparison.error_pattern import region_in_words
from assay.verify.comparison.result import Result
from assay.verify.findings import EDGES, MAP_SHAPE, STEPS, ErrorMap, extent


def histogram(ratio: torch.Tensor, unjudged: int) -> tuple[int, ...]:
    """How many judged elements lie in each bin of `EDGES`.

    ``ratio`` is float64, without NaN, and 0 for the ``unjudged`` elements. Infinite ratios are in the last bin.
    """
    bins = ratio.clamp(max=1.0).mul_(STEPS).ceil_().to(torch.uint8)  # many times faster than a search among the edges
    if ratio.numel() and float(ratio.max()) > 1:
        for edge in EDGES[STEPS:]:
            bins += ratio > edge
    counts = torch.bincount(bins.reshape(-1), minlength=len(EDGES) + 1).tolist()
    counts[0] -= unjudged
    return tuple(counts)


def summed(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Two histograms as one; an empty one counts nothing."""
    if not first or not second:
        return first or second
    return tuple(map(sum, zip(first, second, strict=True)))


def map_of(result: Result) -> ErrorMap | None:
    """The map of the output that a result's failure names; None where no element was judged wrong."""
    if result.failure is None or result.ratio is None:
        return None
    name = result.failure.output
    dims = next(tensor.dims for tensor in result.case.signature.returns if tensor.name == name)
    return error_map(name, result.ratio, dims)


def error_map(output: str, ratio: torch.Tensor, dims: Sequence[str]) -> ErrorMap:
    """The map of an output called ``output`` from the ``ratio`` of each element (float64, NaN where not judged).

    ``dims`` name the output's dimensions. Blocks have powers of two as sizes, as kernels' tiles do.
    """
    shape = tuple(ratio.shape)
    rows, columns = extent(shape)
    tall, wide = (_block(size, most) for size, most in zip((rows, columns), MAP_SHAPE, strict=True))
    matrix = ratio.reshape(rows, columns).nan_to_num(nan=-1.0, posinf=math.inf)
    padding = (0, -columns % wide, 0, -rows % tall)
    padded = torch.nn.functional.pad(matrix, padding, value=-1.0)
    blocks = padded.reshape(padded.shape[0] // tall, tall, padded.shape[1] // wide, wide).amax(dim=(1, 3))
    cells = tuple(tuple(_three_digits(value) for value in row) for row in blocks.tolist())
    return ErrorMap(output, shape, (tall, wide), cells, region_in_words(ratio > 1, dims))


def _block(size: int, most: int) -> int:
    """The smallest power of two of which at most ``most`` cover ``size``."""
    return 1 << (max(1, -(-size // most)) - 1).bit_length()


def _three_digits(ratio: float) -> float | None:
    if ratio < 0:
        return None
    rounded = float(f"{ratio:.3g}")
    return 1.01 if rounded <= 1 < ratio else rounded
