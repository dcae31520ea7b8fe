"""In words, where an output is wrong: ranges, periods and shares of rows and columns, each of them simply true."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_FEW = 4  # so many places are listed one by one


def region_in_words(broken: torch.Tensor, dims: Sequence[str]) -> str:
    """Where the elements of ``broken`` (bool, not all False) are True; ``dims`` name its dimensions.

    One dimension has elements, two have rows and columns; of more each goes by its name. Places count from 0.
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
    """What one place along an axis is called, and many."""
    if len(dims) == 1:
        return "element", "elements"
    if len(dims) == 2:
        return (("row", "rows"), ("column", "columns"))[axis]
    return dims[axis], dims[axis]


def _hit(broken: torch.Tensor, axis: int) -> list[bool]:
    """Whether anything is broken at each place along an axis."""
    others = tuple(other for other in range(broken.ndim) if other != axis)
    results: list[bool] = (broken.any(dim=others) if others else broken).tolist()
    return results


def _percent(count: int, total: int) -> str:
    share = 100 * count / total
    return "less than 0.1 %" if share < 0.1 else f"{share:.1f} %" if share < 10 or share > 99 else f"{share:.0f} %"


def _phrase(hit: list[bool], name: tuple[str, str]) -> str:
    """Some but not all places along an axis."""
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
    """The smallest step after which all places repeat, their number at most: Knuth, Morris, Pratt's prefix function."""
    borders, length = [0], 0
    for result in hit[1:]:
        while length and hit[length] != result:
            length = borders[length - 1]
        length += hit[length] == result
        borders.append(length)
    return len(hit) - length


def _pattern(broken: torch.Tensor) -> str:
    """What else can be said of a matrix that is neither right nor wrong in whole rows and columns."""
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
