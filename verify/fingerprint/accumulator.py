"""Probe the accumulator of a sum: its width, rounding and promotion interval, and the width of the operands.

The terms are a large one, a unit 2^-k of it, and the negative of the large one: the unit survives where the running sum
keeps k + 1 bits. The unit's position decides which partial sum it is added to, so positions with a wider accumulator
between narrower ones show a promotion. Sources: M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, *Numerical behavior of
NVIDIA tensor cores*, PeerJ CS 7:e330 (2021); FTTN, arXiv 2403.00232.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from assay.verify.fingerprint.subject import Product, Reduction, Unseen, in_bits

Tensor = torch.Tensor

LARGE = 14  # huge terms are 2^14, which float16 holds, as does the product of two e4m3 numbers
_BINADE = LARGE - 1
_BIG = 1.5 * 2.0**_BINADE  # in the middle of its binade, so that the spacing is the same above and below
_MOST_BITS = 34  # most bits that the probe tries
_SHORT, _LONG, _STEP = 64, 512, 8  # terms of the two sums; step between positions in the long one
_REPEATS = 8  # equal calls, whose sums differ with stochastic rounding


@dataclass(frozen=True)
class Width:
    """Bits that a running sum keeps: ``narrowest`` when the term at ``position`` is added, ``widest`` elsewhere.

    ``is_limit``: the probe can't show more bits, so there may be more. ``promotion``: the number of terms after which a
    wider sum takes over (0: none found).
    """

    narrowest: int
    widest: int
    position: int
    is_limit: bool
    promotion: int
    tried: int

    def __str__(self) -> str:
        return f"at least {self.narrowest} bits" if self.is_limit else in_bits(self.narrowest)


def width(reduction: Reduction, *, is_steady: bool = True) -> Width:
    """Return the accumulator's width, and that of promotions if the order ``is_steady``; raise `Unseen`."""
    limit = min(_MOST_BITS, reduction.reach - 1)
    short, limit = _profile(reduction, _SHORT, range(1, _SHORT - 1), limit)
    shown = {index: bits for index, bits in short.items() if bits < limit}
    if not shown:
        return Width(limit, limit, 0, True, 0, _SHORT)
    narrowest, widest = min(shown.values()), max(shown.values())
    result = Width(narrowest, widest, min(p for p, bits in shown.items() if bits == narrowest), False, 0, _SHORT)
    with suppress(Unseen):  # keep the width of the short sum if the long one fails
        if is_steady:
            promotion, wider = _promotion(reduction, limit, narrowest)
            return replace(result, widest=max(widest, wider), promotion=promotion, tried=_LONG)
    return result


def _promotion(reduction: Reduction, limit: int, narrowest: int) -> tuple[int, int]:
    """Return after how many terms a wider sum takes over, and its width."""
    coarse, limit = _profile(reduction, _LONG, range(3, _LONG - 1, _STEP), limit, narrowest)
    wide = [index for index, bits in coarse.items() if narrowest < bits < limit]
    if not wide:
        return 0, narrowest
    first = wide[0]
    fine, _ = _profile(reduction, _LONG, range(max(1, first - _STEP), first + 1), limit, narrowest)
    start = min(index for index, bits in fine.items() if bits > narrowest)
    return start, max(coarse[index] for index in wide)


def _profile(
    reduction: Reduction, terms: int, indices: Sequence[int], limit: int, least: int = 1
) -> tuple[dict[int, int], int]:
    """Return how many bits, from ``least`` up, a sum keeps of a unit at each position after a large first term.

    Also return the most bits that could be observed: ``limit``, or fewer if a smaller unit is lost even alone. Raise
    `Unseen` if no unit survives.
    """
    bits = torch.full((len(indices),), least)
    alive = torch.ones(len(indices), dtype=torch.bool)
    for shift in range(least, limit):
        unit = 2.0 ** (_BINADE - shift)
        rows = _rows(terms, indices, unit)
        if float(reduction.sums(_rows(terms, indices[:1], unit, 0.0))[0]) != unit:
            if shift == least:
                raise Unseen(f"a term of {unit:g} is lost all by itself, or not stored as it is")
            limit = shift
            break
        alive &= reduction.sums(rows) == unit
        if not bool(alive.any()):
            break
        bits = torch.where(alive, shift + 1, bits)
    return dict(zip(indices, bits.tolist(), strict=True)), limit


def _rows(terms: int, indices: Sequence[int], unit: float, large: float = _BIG) -> Tensor:
    rows = torch.zeros(len(indices), terms, dtype=torch.float64)
    rows[:, 0], rows[:, -1] = large, -large
    rows[torch.arange(len(indices)), torch.as_tensor(indices)] = unit
    return rows


_PATTERNS = {
    (1, 0, -1, 0, 1): "to nearest",
    (0, 0, -1, -1, 1): "toward zero",
    (0, 0, 0, 0, 0): "toward zero, each term when it is aligned",
    (0, 0, -1, -1, 0): "down",
    (1, 1, 0, 0, 1): "up",
}
"""Rounding by the change, in ulps, of a positive sum by 3/4, 1/4, -3/4 and -1/4 ulp, and of a negative one by 3/4."""


def rounding(reduction: Reduction, result: Width) -> str:
    """Return how the running sum is rounded; raise `Unseen`."""
    if result.is_limit:
        raise Unseen("no sum within the probe's reach was rounded")
    if result.narrowest < 3:
        raise Unseen(f"{result.narrowest} bits are too few")
    gap = 2.0 ** (_BINADE + 1 - result.narrowest)
    signed = [(0.75, 1), (0.25, 1), (-0.75, 1), (-0.25, 1), (0.75, -1)]
    rows = torch.cat([_rows(_SHORT, [result.position], part * gap, sign * _BIG) for part, sign in signed])
    seen = [reduction.sums(rows) / gap for _ in range(_REPEATS)]
    if any(not torch.equal(seen[0], other) for other in seen):
        return "stochastic"
    many = _rows(_SHORT, [result.position] * 64, 0.75 * gap)
    if len(set(reduction.sums(many).tolist())) > 1:
        return "stochastic"
    pattern = tuple(int(part) if part == part.round() else 99 for part in seen[0])
    if pattern not in _PATTERNS:
        raise Unseen(f"the sums of parts of an ulp follow no known rounding ({', '.join(f'{p:g}' for p in seen[0])})")
    if pattern != (1, 0, -1, 0, 1):
        return _PATTERNS[pattern]
    tie = float(reduction.sums(_rows(_SHORT, [result.position], 0.5 * gap))[0]) / gap
    return "to nearest, ties to even" if tie == 0 else "to nearest, ties away from zero"


def operands(reduction: Reduction, result: Width) -> str:
    """Return how many bits of the operands enter the products, and how the others are lost; raise `Unseen`."""
    if not isinstance(reduction, Product):
        raise Unseen("only one operand is the probe's own")
    precision = reduction.operand.precision
    least = 0
    for shift in range(1, precision):
        if _beyond_one(reduction, 2.0**-shift) != 2.0**-shift:
            break
        least = shift
    bits = least + 1
    if bits == precision:
        return f"all {bits} bits of {reduction.operand}"
    if bits >= result.narrowest:
        raise Unseen(f"the accumulator keeps no more than {result.narrowest} bits itself")
    gap = 2.0**-least
    loss = "rounded" if _beyond_one(reduction, 0.75 * gap) == gap else "truncated"
    return f"{loss} to {in_bits(bits, is_operand=True)}"


def _beyond_one(reduction: Product, part: float) -> float:
    """Return the kernel's (1 + part) - 1."""
    left = torch.zeros(16, dtype=torch.float64)
    left[0], left[1] = 1 + part, -1.0
    return float(reduction.operands(left, torch.ones(16, dtype=torch.float64)))
