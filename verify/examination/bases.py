"""Base cases for the fixed phases: one drawn case for each style of sizes and each option set."""

from __future__ import annotations

from collections.abc import Iterator

from assay.verify.cases.case import Case
from assay.verify.cases.sampler import MOST_ELEMENTS, MOST_WORK, Sampler, seeded

MOST_OPTION_SETS = 4  # each set multiplies the fixed cases; of more sets this many are drawn
_MOST = {
    "small": (MOST_ELEMENTS, MOST_WORK, 32),
    "tile": (2**15, 2**21, 32),  # smaller, as there are many of these cases
    "any": (MOST_ELEMENTS, MOST_WORK, 8),
}
"""The most elements and work of a case, and the divisor of an interpreter's steps."""


def bases(
    sampler: Sampler, purpose: str, styles: tuple[str, ...], *, most: int = MOST_OPTION_SETS, draws: int = 1
) -> Iterator[Case]:
    """Yield a case for each style and option set, the cheapest of ``draws``; ``most`` sets, drawn at random if there
    are more.

    Cases with a size of 0 or 1 are taken only if nothing else was drawn: a row of one element hides most faults.
    """
    choose = seeded(hash_of(purpose, sampler.seed))
    sets = sampler.option_sets()
    for style in styles:
        sized = sampler.limited(*_MOST[style])
        option_sets = sets if len(sets) <= most else [choose(sets) for _ in range(most)]
        for options in option_sets:
            drawn = [sized.case(choose, style=style, options=dict(options)) for _ in range(draws)]
            yield min(drawn, key=lambda c: (min(c.sizes.values(), default=2) < 2, sized.cost(c.sizes)))


def hash_of(purpose: str, seed: int) -> int:
    """Return a seed for this purpose."""
    return seed * 1_000_003 + sum((index + 1) * ord(letter) for index, letter in enumerate(purpose))
