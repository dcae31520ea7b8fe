"""The order of the fixed cases: those first that find the most faults a second.

It is measured (``./dev bench order``, into configs/case_order.toml), greedily, over kernels with one planted fault
each: every next kind of case is the one that finds the most faults not found yet per second. A kind says what a case
has that an ordinary call hasn't, whatever the op.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from assay.configs import table
from assay.golden.inputs.distributions import EVERY, EXACT, EXTREME, MIDPOINTS
from assay.verify.cases.case import Case
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.cases.sampler import SMALL, TILE

Fixed = tuple[str, Case]
"""The name of a phase, and one of its cases."""

_THEMES = EXTREME | {*EXACT, MIDPOINTS, EVERY, "zeros", "positive"}


def kind_of(fixed: Fixed) -> str:
    """The phase, what its case has that an ordinary call hasn't, and how large it is."""
    phase, case = fixed
    layout = next((name for name in case.layouts.values() if name != LAYOUTS[0]), "")
    told = (
        phase,
        *sorted(_THEMES & set(case.values.values())),
        *sorted({str(value) for _, _, value in case.edits}),
        *(word for word in (case.protocol, case.memory, case.unused) if word not in ("once", "plain")),
        layout,
        _extent(case),
    )
    return " ".join(filter(None, told))


def _extent(case: Case) -> str:
    if 0 in case.sizes.values():
        return "empty"
    size = max(case.sizes.values(), default=0)
    return "small" if size <= SMALL[-1] else "tile" if size <= TILE[-1] else "long"


@cache
def _measured() -> tuple[dict[str, int], frozenset[str]]:
    """The rank of each kind, and the kinds that a quick effort tries."""
    measured = table("case_order")
    kinds = measured["kinds"]
    return {kind: rank for rank, kind in enumerate(kinds)}, frozenset(kinds[: measured["quick"]])


def arranged(cases: Iterable[Fixed], effort: str) -> list[Fixed]:
    """The cases in this order, as they came where nothing was measured.

    Of a quick effort only those of the best kinds, of each phase's best one, and some more (`_always`), the sets of
    options in turn (`_in_turn`).
    """
    ranks, quick = _measured()
    ordered = sorted(cases, key=lambda fixed: ranks.get(kind_of(fixed), len(ranks)))
    if effort != "quick":
        return ordered
    best = {phase: kind_of((phase, case)) for phase, case in reversed(ordered)}
    return _in_turn([fixed for fixed in ordered if kind_of(fixed) in quick | {best[fixed[0]]} or _always(fixed)])


def _always(fixed: Fixed) -> bool:
    """Cases of a promise that few contracts make, a row alone has the bits that it has among others; whole tiles, which
    kernels have a way of their own for; a peak in the last place; factors over all of their range, of either sign and
    zero."""
    phase, case = fixed
    factors = phase == "range" and bool({"vast", "cycled"} & set(case.values.values()))
    return case.protocol == "alone" or phase == "aligned" or (phase == "seams" and bool(case.edits)) or factors


def _in_turn(cases: list[Fixed]) -> list[Fixed]:
    """The cases, sets of options in turn: of those that differ in their options, and sizes, alone one in place of all.

    Each kind of case comes with one of the sets, each set with many kinds; whole tiles come with all of them.
    """
    alike: dict[tuple[object, ...], list[Fixed]] = {}
    for fixed in cases:
        phase, case = fixed
        if phase != "aligned":
            ends = tuple((name, not any(index)) for name, index, _ in case.edits)
            alike.setdefault((kind_of(fixed), *sorted(case.values.items()), *ends), []).append(fixed)
    left_out = set()
    for turn, group in enumerate(alike.values()):
        sets = len({repr(case.options) for _, case in group})
        left_out |= {id(fixed) for at, fixed in enumerate(group) if at % sets != (turn + at // sets) % sets}
    return [fixed for fixed in cases if id(fixed) not in left_out]
