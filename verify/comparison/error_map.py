"""Error statistics of an examination: a histogram of ratios, a map of the first wrong output, and its wrong region in
words.

A ratio is |y - golden| / radius; above 1 the contract is broken (`assay.verify.comparison.judge`). The words name
ranges, periods and shares of rows and columns, each of which is true by itself. For a small failing case the inputs and
outputs themselves are shown beside the goldens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from assay.verify.cases.case import Case, all_contents
from assay.verify.comparison.result import Result
from assay.verify.findings import EDGES, MAP_SHAPE, MOST, STEPS, Comparison, ErrorMap, Numbers, Sample, extent

_FEW = 4  # the most indices that are listed one by one


def region_in_words(broken: torch.Tensor, dims: Sequence[str]) -> str:
    """Return in words where the elements of ``broken`` (bool, not all False) are True; ``dims`` name its dimensions.

    One dimension has elements, two have rows and columns; more go by their names. Indices count from 0.
    """
    count, total = int(broken.sum()), broken.numel()
    if count == total:
        return f"all {total} elements" if total > 1 else "the only element"
    axes = [(axis, _name(axis, dims)) for axis in range(broken.ndim) if broken.shape[axis] > 1]
    hits = [(_hit(broken, axis), name) for axis, name in axes]
    phrases = [_phrase(hit, name) for hit, name in hits if not all(hit)]
    share = f"{count} of {total} elements ({_percent(count, total)})"
    if count == math.prod(sum(hit) for hit, _ in hits):  # they fill the product of the places along each dimension
        return f"{share}: {'' if count == 1 else 'all of '}{', '.join(phrases)}"
    everywhere = " and ".join(f"every {one}" for _, (one, _) in hits)
    where = f"in {', '.join(phrases)}" if phrases else f"spread over {everywhere}"
    return share + ", " + where + (_pattern(broken) if broken.ndim == len(hits) == 2 else "")


def _name(axis: int, dims: Sequence[str]) -> tuple[str, str]:
    """Return the singular and plural names of an index along an axis."""
    if len(dims) == 1:
        return "element", "elements"
    if len(dims) == 2:
        return (("row", "rows"), ("column", "columns"))[axis]
    return dims[axis], dims[axis]


def _hit(broken: torch.Tensor, axis: int) -> list[bool]:
    """Return whether anything is broken at each index along an axis."""
    others = tuple(other for other in range(broken.ndim) if other != axis)
    results: list[bool] = (broken.any(dim=others) if others else broken).tolist()
    return results


def indices_in_words(hit: list[bool], name: str) -> str:
    """Return in words which indices along a dimension are marked, at least one of them."""
    return f"every {name}" if all(hit) else _phrase(hit, (name, name))


def _percent(count: int, total: int) -> str:
    share = 100 * count / total
    return "less than 0.1 %" if share < 0.1 else f"{share:.1f} %" if share < 10 or share > 99 else f"{share:.0f} %"


def _phrase(hit: list[bool], name: tuple[str, str]) -> str:
    """Describe some but not all indices along an axis."""
    one, many = name
    size, indices = len(hit), [index for index, result in enumerate(hit) if result]
    first, last, count = indices[0], indices[-1], len(indices)
    if count == 1:
        return f"{one} {first} (of {size})"
    if last - first + 1 == count:
        end = f" (the last {count})" if last == size - 1 else f" (the first {count})" if first == 0 else ""
        return f"{many} {first} to {last}{end}"
    period = period_of(hit)
    if period <= size // 2:
        within = [index for index in indices if index < period]
        if len(within) == 1:
            return f"{many} {first}, {first + period}, ... (one in {period})"
        if within[-1] - within[0] + 1 == len(within):
            return f"{many} {within[0]} to {within[-1]} of each {period}"
    if count <= _FEW:
        return f"{many} {', '.join(map(str, indices))}"
    return f"{count} of {size} {many}, between {first} and {last}"


def period_of(hit: list[bool]) -> int:
    """Return the smallest step after which all values repeat, at most their number (Knuth, Morris, Pratt's prefix
    function)."""
    borders, length = [0], 0
    for result in hit[1:]:
        while length and hit[length] != result:
            length = borders[length - 1]
        length += hit[length] == result
        borders.append(length)
    return len(hit) - length


def _pattern(broken: torch.Tensor) -> str:
    """Describe a matrix whose wrong elements aren't whole rows and columns."""
    rows, columns = broken.nonzero(as_tuple=True)
    for tile in (1 << power for power in range(min(broken.shape).bit_length() - 1)):
        on_diagonal = rows // tile == columns // tile
        if bool(on_diagonal.all()) and int(rows.min()) // tile < int(rows.max()) // tile:
            return "; on the diagonal" if tile == 1 else f"; within tiles of {tile} × {tile} on the diagonal"
    each = broken.sum(dim=1)
    most = int(each.max())
    if bool(((each != 0) & (each != most)).any()):
        return ""
    return f"; {most} in each row" if bool(each.all()) else f"; {most} in each of these rows"


def histogram(ratio: torch.Tensor, unjudged: int) -> tuple[int, ...]:
    """Return how many judged elements are in each bin of `EDGES`.

    ``ratio`` is float64, without NaN, and 0 for the ``unjudged`` elements. Infinite ratios are in the last bin.
    """
    bins = ratio.clamp(max=1.0).mul_(STEPS).ceil_().to(torch.uint8)  # many times faster than a search among the edges
    if ratio.numel() and float(ratio.max()) > 1:
        for edge in EDGES[STEPS:]:
            bins += ratio > edge
    counts = torch.bincount(bins.reshape(-1), minlength=len(EDGES) + 1).tolist()
    counts[0] -= unjudged
    return tuple(counts)


def map_of(result: Result) -> ErrorMap | None:
    """Return the map of the output that a result's failure names; None if no element was judged wrong."""
    if result.failure is None or result.ratio is None:
        return None
    name = result.failure.output
    dims = next(tensor.dims for tensor in result.case.signature.returns if tensor.name == name)
    return error_map(name, result.ratio, dims)


def error_map(output: str, ratio: torch.Tensor, dims: Sequence[str]) -> ErrorMap:
    """Return the map of ``output`` from the ``ratio`` of each element (float64, NaN if not judged).

    ``dims`` name the output's dimensions. Block sizes are powers of two, as those of kernels' tiles.
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
    """Return the smallest power of two of which at most ``most`` cover ``size``."""
    return 1 << (max(1, -(-size // most)) - 1).bit_length()


def _three_digits(ratio: float) -> float | None:
    if ratio < 0:
        return None
    rounded = float(f"{ratio:.3g}")
    return 1.01 if rounded <= 1 < ratio else rounded


AROUND = 12
"""Elements shown around the failing one, of an output with more than `MOST` elements."""


def sample_of(case: Case, result: Result | None) -> Sample:
    """Return the numbers of a failing case; ``result`` is the result of trying it, if known."""
    small = [tensor.name for tensor in case.signature.tensors if math.prod(case.shape(tensor)) <= MOST]
    values = all_contents(case) if small else {}
    inputs = tuple(Numbers(name, tuple(values[name].shape), _numbers(values[name])) for name in small)
    return Sample(inputs, _comparison(result) if result is not None else None)


def _comparison(result: Result) -> Comparison | None:
    failure, ratio = result.failure, result.ratio
    if failure is None or ratio is None or not result.tolerances or ratio.shape != result.tolerances[-1].golden.shape:
        return None
    index = [tensor.name for tensor in result.case.signature.returns].index(failure.output)
    got, golden = result.outputs[index].detach().cpu(), result.tolerances[-1].golden
    flat = int(torch.arange(ratio.numel()).reshape(ratio.shape)[failure.index])
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
