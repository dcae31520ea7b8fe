"""What an examination has seen so far, as a sum over its cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from assay.verify.comparison.error_map import map_of, summed
from assay.verify.comparison.result import UNDECIDED, Result, by_reason
from assay.verify.findings import Aspect


@dataclass(frozen=True)
class Tally:
    """How many cases were decided and elements judged, by phase, the largest ratio, and what each aspect showed.

    ``at`` says of each large case what was judged of it, ``not_interpreted`` what the interpreter can't do,
    ``refused`` how many cases the kernel refused as it documents, by its words.
    ``judged_of`` counts judged elements by output, ``left_out`` the others by output and reason; ``nonzero`` adds up
    each case's share of judged elements that should be other than zero, so that one large case of zeros is one case.

    A broken or suspect aspect has its first failure, and the map of where that output is wrong.
    """

    cases: int = 0
    worst: float = 0.0
    judged: int = 0
    nonzero: float = 0.0
    unjudged: int = 0
    unresolved: int = 0
    judged_of: Counter[str] = field(default_factory=Counter)
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    phases: Mapping[str, int] = field(default_factory=dict)
    histogram: tuple[int, ...] = ()
    aspects: Mapping[str, Aspect] = field(default_factory=dict)
    at: tuple[str, ...] = ()
    not_interpreted: tuple[str, ...] = ()
    refused: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(phase: str, result: Result, aspects: Iterable[str]) -> Tally:
        """What one case of a phase showed, of these aspects."""
        status = "kept" if result.failure is None else "broken"
        aspect = Aspect(status, 1, result.worst, result.failure, map=map_of(result))
        return Tally(
            cases=1,
            worst=result.worst,
            judged=result.judged,
            nonzero=result.nonzero / max(result.judged, 1),
            unjudged=result.unjudged,
            unresolved=result.unresolved,
            judged_of=result.judged_of,
            left_out=result.left_out,
            phases={phase: 1},
            histogram=result.histogram,
            aspects=dict.fromkeys(aspects, aspect),
            at=(result.sampled,) if result.sampled else (),
        )

    @property
    def broken(self) -> set[str]:
        """The names of the broken aspects."""
        return {name for name, aspect in self.aspects.items() if aspect.status == "broken"}

    @property
    def suspect(self) -> list[str]:
        """The names of the suspect aspects."""
        return [name for name, aspect in self.aspects.items() if aspect.status == "suspect"]

    @property
    def undecided(self) -> str:
        """Why the reference's own numbers leave open what is right, where that is so of a tenth of all elements."""
        reasons = {reason: n for reason, n in by_reason(self.left_out).items() if reason.startswith(UNDECIDED)}
        left = sum(reasons.values())
        if left <= _UNDECIDED_SHARE * (self.judged + left):
            return ""
        return f"{left} of {self.judged + left} elements, {max(reasons, key=lambda reason: reasons[reason])}"

    @property
    def mostly_left_out(self) -> str:
        """Of which output more than half isn't judged, and why; empty where of none."""
        for output in dict.fromkeys(output for output, _ in self.left_out):
            reasons = {reason: count for (name, reason), count in self.left_out.items() if name == output}
            left, judged = sum(reasons.values()), self.judged_of[output]
            if left > judged:
                words = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
                return f"{left} of {left + judged} elements of {output} were not judged: {words}"
        return ""

    def __add__(self, other: Tally) -> Tally:
        phases, aspects = dict(self.phases), dict(self.aspects)
        for name, aspect in other.aspects.items():
            aspects[name] = _together(aspects[name], aspect) if name in aspects else aspect
        for name, cases in other.phases.items():
            phases[name] = phases.get(name, 0) + cases
        return Tally(
            **{name: getattr(self, name) + getattr(other, name) for name in _COUNTS},
            worst=max(self.worst, other.worst),
            phases=phases,
            histogram=summed(self.histogram, other.histogram),
            aspects=aspects,
            at=self.at + other.at,
            not_interpreted=self.not_interpreted + other.not_interpreted,
        )


def _together(before: Aspect, after: Aspect) -> Aspect:
    first = max(before, after, key=lambda aspect: _RISING.index(aspect.status))  # the earlier of equals
    return replace(first, cases=before.cases + after.cases, worst=max(before.worst, after.worst))


_RISING = ("not tried", "kept", "suspect", "broken")
_UNDECIDED_SHARE = 0.1
_COUNTS = ("cases", "judged", "nonzero", "unjudged", "unresolved", "judged_of", "left_out", "refused")
