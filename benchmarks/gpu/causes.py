"""Which cause of an illegal memory access the outcomes of trials speak for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SHIPPED, OTHER, NEWER = "as shipped", "of Triton, the other", "newer"
FAILED = ("illegal", "wrong", "hang", "died")
RAN = "ran"
_WIDE = 8  # warps of the configurations in which two warpgroups share a narrow operand


@dataclass(frozen=True)
class Trial:
    """Cases of a kernel in one configuration of its autotuner, or, if empty, with the autotuner as it is.

    ``assembler`` is `SHIPPED`, `OTHER` or `NEWER`; ``descriptors``: whether the kernel may load by TMA;
    ``sanitized``: under compute-sanitizer.
    """

    kernel: str
    config: str
    warps: int = 0
    assembler: str = SHIPPED
    descriptors: bool = True
    sanitized: bool = False

    def __str__(self) -> str:
        extra = [] if self.descriptors else ["no descriptors"]
        extra += ["compute-sanitizer"] if self.sanitized else []
        return ", ".join([self.kernel, self.config or "its autotuner", f"ptxas {self.assembler}", *extra])


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    ``result``: "ran", one of `FAILED`, "pruned" (no case has the configuration), "refused" (it was not compiled),
    "error" (the trial itself went wrong) or "not tried". ``space``: the memory of compute-sanitizer's first finding,
    "shared", "global" or "local".
    """

    trial: Trial
    result: str
    cases: int = 0
    words: str = ""
    space: str = ""

    def __str__(self) -> str:
        result = f"{self.result} ({self.space})" if self.space else self.result
        return f"  {self.trial}: {result}, {self.cases} cases{f': {self.words}' if self.words else ''}"


@dataclass(frozen=True)
class Evidence:
    """Whether a kernel failed, or None where that was not tried.

    ``alone``: in one configuration, assembled as shipped; ``other``, ``newer``: the same by another assembler;
    ``together``: with the autotuner as it is; ``plain``: without descriptors. ``narrow``: whether only configurations
    of 8 warps failed, of 4 warps none. ``space``: as in `Outcome`.
    """

    alone: bool | None = None
    other: bool | None = None
    newer: bool | None = None
    together: bool | None = None
    plain: bool | None = None
    narrow: bool | None = None
    space: str = ""


COMPILER = "the machine code of the shipped ptxas: set TRITON_PTXAS_PATH to the one that ran"
NEWER_COMPILER = "the machine code of another ptxas than the shipped one: use the shipped one"
DESCRIPTORS = "loads by TMA descriptors: without them the same configuration ran"
TUNER = "the autotuner: each configuration ran alone, so what one leaves to another is at fault, such as a descriptor"
NARROW = "a wgmma at the end of shared memory: it failed by every ptxas, in shared memory or with 8 warps only"
ADDRESS = "an address of the kernel in global memory: it failed by every ptxas, with and without descriptors"
UNDECIDED = "undecided: it failed; run it with a ptxas of 13.3 or later (--ptxas) and under compute-sanitizer"
NOT_SEEN = "none: nothing failed"
NOT_TRIED = "unknown: too few trials ended"
CAUSES = (COMPILER, NEWER_COMPILER, DESCRIPTORS, TUNER, NARROW, ADDRESS, UNDECIDED, NOT_SEEN, NOT_TRIED)


def cause(e: Evidence) -> str:
    """Return the cause that the evidence speaks for, of `CAUSES`."""
    others = [e.other, e.newer]
    latest = e.other if e.newer is None else e.newer
    if e.alone:
        if latest is False:
            return COMPILER
        if e.plain is False:
            return DESCRIPTORS
        if e.newer is None:  # an assembler of 13.3 or later wasn't tried, the likeliest cause is open
            return UNDECIDED
        if e.space == "shared" or (e.narrow and not e.space):
            return NARROW
        return ADDRESS if e.space == "global" and e.plain is not None else UNDECIDED
    if e.alone is False and True in others:
        return NEWER_COMPILER
    if True in (*others, e.plain) or (e.together and e.alone is None):
        return UNDECIDED
    if e.together:
        return TUNER
    return NOT_SEEN if e.alone is False and e.together is False else NOT_TRIED


def evidence(outcomes: Iterable[Outcome]) -> Evidence:
    """Return the evidence of one kernel's outcomes."""
    outcomes = list(outcomes)
    alone = [o for o in outcomes if o.trial.config and o.trial.descriptors]
    shipped = [o for o in alone if o.trial.assembler == SHIPPED]
    failing = {o.trial.warps for o in shipped if _failed(o)}
    running = {o.trial.warps for o in shipped if o.result == RAN} - failing
    spaces = [o.space for o in shipped if o.space]
    return Evidence(
        alone=_any(shipped),
        other=_any(o for o in alone if o.trial.assembler == OTHER),
        newer=_any(o for o in alone if o.trial.assembler == NEWER),
        together=_any(o for o in outcomes if not o.trial.config),
        plain=_any(o for o in outcomes if o.trial.config and not o.trial.descriptors),
        narrow=failing == {_WIDE} if failing and running else None,
        space=spaces[0] if spaces else "",
    )


def _failed(outcome: Outcome) -> bool:
    return outcome.result in FAILED or bool(outcome.space)


def _any(outcomes: Iterable[Outcome]) -> bool | None:
    decided = list(_decided(outcomes))
    return any(decided) if decided else None


def _decided(outcomes: Iterable[Outcome]) -> Iterator[bool]:
    for outcome in outcomes:
        if _failed(outcome) or outcome.result == RAN:
            yield _failed(outcome)


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the outcomes as a Markdown table."""
    rows = ["| kernel | configuration | ptxas | TMA | sanitizer | outcome | cases | |", "|" + "---|" * 8]
    for outcome in outcomes:
        trial, words = outcome.trial, outcome.words.replace("|", "\\|")
        cells = [trial.kernel, trial.config or "autotuner", trial.assembler, "yes" if trial.descriptors else "no"]
        result = f"{outcome.result} ({outcome.space})" if outcome.space else outcome.result
        cells += ["yes" if trial.sanitized else "no", result, str(outcome.cases), f"`{words}`" if words else ""]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
