"""Where a failure begins: the size from which on a kernel is wrong, or the multiples at which it isn't."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_STEPS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)  # tiles, vectors and groups of kernels
_LEAST = 2  # sizes of each kind that show a pattern of multiples


def beginning(right: Sequence[int], wrong: Sequence[int], is_wrong: Callable[[int, int], bool | None]) -> str:
    """Return in words, after the name of a size, where calls are wrong; empty if there is no simple rule.

    ``right`` and ``wrong`` are sizes that were tried. ``is_wrong(size, draw)`` tries another one, or one with other
    data; None: it can't be tried. A boundary is bisected, and both sides of it are tried with two further draws.
    """
    if not right or not wrong:
        return ""
    if max(right) < min(wrong) or max(wrong) < min(right):
        rising = max(right) < min(wrong)
        ends = (max(right), min(wrong)) if rising else (max(wrong), min(right))
        boundary = _bisected(*ends, lambda size: None if (it := is_wrong(size, 0)) is None else it == rising)
        if boundary is None:
            return ""
        below, above = boundary
        draws = [(is_wrong(below, draw), is_wrong(above, draw)) for draw in (1, 2)]
        if any(pair != (not rising, rising) for pair in draws):
            return ""
        first, second = ("right", "wrong") if rising else ("wrong", "right")
        return f"{first} up to {below:,}, {second} from {above:,} on"
    if min(len(right), len(wrong)) < _LEAST:
        return ""
    for step in _STEPS:
        multiples = {size % step == 0 for size in right}
        if len(multiples) == 1 and {size % step == 0 for size in wrong} == {not next(iter(multiples))}:
            return f"wrong where it is {'no' if True in multiples else 'a'} multiple of {step}"
    return ""


def _bisected(low: int, high: int, is_above: Callable[[int], bool | None]) -> tuple[int, int] | None:
    """Return the neighbouring sizes between which the answer changes; None if one can't be tried."""
    while high - low > 1:
        middle = (low + high) // 2
        above = is_above(middle)
        if above is None:
            return None
        low, high = (low, middle) if above else (middle, high)
    return low, high
