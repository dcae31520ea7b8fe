"""Measure the finding power of examinations: what a sample of faulty kernels shows of efforts, phases and factors.

Each faulty kernel is examined at each effort up to its first failure, and then all cases of a usual effort are tried
on it, each by itself. A find is marginal for a phase, or for a level of a factor (`assay.verify.cases.factors`), if all
cases that fail are of it: without it the fault would be missed. Honest kernels are examined as a whole.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from assay.golden.evaluation.golden import Golden
from assay.interpreter import emulated_device, faithful
from assay.runtime.deadline import thread_clock
from assay.verify.cases.case import Case
from assay.verify.cases.factors import Covering
from assay.verify.comparison.result import Result
from assay.verify.examination.plan import make_plan
from assay.verify.examination.procedure import examination
from assay.verify.examination.run import Run
from assay.verify.reference import spec_name_of
from assay.verify.settings import Settings

SAMPLE = 48
"""How many faulty kernels are drawn by default; of honest ones a fourth of it."""
_HONEST = 4
_THOROUGH = 4  # one in this many faulty kernels is examined at thorough effort too
_LONGEST = 25.0  # processor seconds after which no more cases of a usual effort are tried on one kernel
_NAMED = 8  # levels of factors in the table
_SPANS = (0.25, 0.5, 0.75, 1.0)  # shares of pairs at which finds are counted
_WITHOUT_RESULT = ("refused", "not_interpreted")  # failures that say nothing about the kernel

Item = tuple[str, str, Callable[[], tuple[Any, Settings]]]
"""Where a kernel comes from, its name, and a function that returns it with the settings of its examination."""


@dataclass
class Watched(Run):
    """A run in which every case counts by itself: no failure ends it or takes an aspect from later cases."""

    tried: list[tuple[str, Case, bool]] = field(default_factory=list)
    """The phase of each case, the case, and whether it failed."""
    seconds: float = _LONGEST
    cut_short: bool = False
    """Whether a case was left out, as the processor seconds were over."""
    covering: Covering | None = None
    share: float | None = None
    """The share of pairs that the cases up to the first failure covered."""

    def attempt(self, phase: str, case: Case, goldens: tuple[Golden, ...] | None = None) -> Result | None:
        """Try a case and note whether it fails."""
        if thread_clock()[0] - self.started[0] > self.seconds:
            self.cut_short = True
            return None
        tied = self.plan.sampler.tied(case)
        result = replace(self.harness, goldens=goldens if tied == case else None).try_case(tied)
        failed = result.failure is not None and result.failure.kind not in _WITHOUT_RESULT
        self.tried.append((phase, tied, failed))
        if self.share is None:
            self.covering = self.covering or Covering(self.factors)
            self.covering.add(tied)
            if failed:
                covered, feasible = self.covering.pairs
                self.share = covered / max(feasible, 1)
        return result if result.failure is None else None


@dataclass(frozen=True)
class Measured:
    """What was measured of one kernel: by effort the outcome, processor seconds and share of pairs covered.

    ``needed`` are the phase and the levels of factors that all failing cases share, ``share`` the pairs covered up to
    the first of them. ``cut``: time ended before the last case.
    """

    source: str
    name: str
    honest: bool
    outcome: Mapping[str, str]
    seconds: Mapping[str, float]
    coverage: Mapping[str, float]
    needed: Sequence[tuple[str, str]] = ()
    share: float | None = None
    cut: bool = False

    def fails(self, effort: str) -> bool:
        """Whether an examination of this effort fails the kernel."""
        return self.outcome.get(effort) == "FAIL"


def faulty() -> Iterator[Item]:
    """Yield the faulty kernels, of each source in random order, and the sources by turns."""
    from tests.verify.explained import OTHERS
    from tests.verify.fault_cases import pairs, settings_for
    from tests.verify.references import CASES
    from tests.zoo import FAULTY

    def of_model(op: str, fault: Any) -> tuple[Any, Settings]:
        from assay.verify.explanation.fault_models.evaluation import kernel_of

        return kernel_of(fault, op), Settings(op, **settings_for(op, fault) or {})

    yield from _by_turns(
        [("zoo", each.name, partial(_of_entry, each)) for each in FAULTY],
        [("other styles", f"{o.op} {o.name}", partial(_of_other, o)) for o in OTHERS],
        [
            ("fault models", f"{op} {model.name}", partial(of_model, op, model))
            for op, model in pairs()
            if settings_for(op, model) is not None
        ],
        [
            ("references", f"{case.name} {name}", partial(_of_reference, case, kernel))
            for case in CASES
            for name, kernel in case.faulty.items()
        ],
    )


def honest() -> Iterator[Item]:
    """Yield the honest kernels likewise."""
    from tests.verify.references import CASES
    from tests.zoo import HONEST

    yield from _by_turns(
        [("zoo", each.name, partial(_of_entry, each)) for each in HONEST],
        [("references", case.name, partial(_of_reference, case, case.honest)) for case in CASES],
    )


def _of_entry(entry: Any) -> tuple[Any, Settings]:
    return entry.kernel, Settings(entry.spec, strict=True, **entry.examine)


def _of_other(other: Any) -> tuple[Any, Settings]:
    with faithful() if find_spec("triton") else nullcontext():
        return other.kernel, Settings(other.op, dtype=other.dtype, faithful=emulated_device(), **other.settings)


def _of_reference(case: Any, kernel: Any) -> tuple[Any, Settings]:
    return kernel, Settings(spec_name_of(case.reference, case.tensors), dtype=case.dtype, **case.asked)


def _by_turns(*lists: list[Item]) -> Iterator[Item]:
    draw = random.Random(_seed)
    for each in lists:
        draw.shuffle(each)
    yield from (item for turn in zip_longest(*lists) for item in turn if item is not None)


_seed = 0
_sample = SAMPLE


@cache
def drawn() -> list[tuple[Item, bool]]:
    """Return the sample, and whether each is honest."""
    wrong = [(item, False) for item, _ in zip(faulty(), range(_sample), strict=False)]
    right = [(item, True) for item, _ in zip(honest(), range(max(_sample // _HONEST, 1)), strict=False)]
    return wrong + right


def measured(index: int) -> Measured:
    """Measure one kernel of the sample."""
    (source, name, made), is_honest = drawn()[index]
    kernel, settings = made()
    efforts = ["quick", "usual"] + ["thorough"] * (not is_honest and index % _THOROUGH == 0)
    outcome, seconds, coverage = dict[str, str](), dict[str, float](), dict[str, float]()
    for effort in efforts:
        began = time.process_time()
        own = replace(settings, effort=effort, shrinking=False, every_aspect=is_honest)
        verdict = examination(kernel, own)
        outcome[effort], seconds[effort] = verdict.outcome, time.process_time() - began
        if verdict.outcome != "FAIL":  # the others end with their first failure
            coverage[effort] = float(verdict.coverage)
    result = Measured(source, name, is_honest, outcome, seconds, coverage)
    if is_honest:
        return result
    run = Watched(make_plan(kernel, replace(settings, effort="usual")), lambda *_: None)
    run.execute()
    failing = [(phase, case) for phase, case, failed in run.tried if failed]
    names = list(run.factors.levels)
    sets = [{("phase", phase), *(names[number] for number in run.factors.levels_of(case))} for phase, case in failing]
    needed = sorted(set.intersection(*sets)) if sets else []
    return replace(result, needed=needed, share=run.share, cut=run.cut_short)


def summary(results: Sequence[Measured]) -> dict[str, Any]:
    """Return the figures of the table by name."""
    wrong, right = ([each for each in results if each.honest is kind] for kind in (False, True))
    figures: dict[str, Any] = {"faulty": len(wrong), "honest": len(right)}
    for effort in ("quick", "usual", "thorough"):
        own = [each for each in wrong if effort in each.outcome]
        undecided = [e.name for e in right if e.outcome.get(effort, "PASS") not in ("PASS", "WARN", "FAIL")]
        count, taken = sum(each.fails(effort) for each in own), sum(each.seconds[effort] for each in own)
        covered = [each.coverage[effort] for each in results if effort in each.coverage]
        figures[effort] = {
            "found": count,
            "of": len(own),
            "seconds": round(taken, 1),
            "finds a second": round(count / taken, 3) if taken else 0.0,
            "pairs covered (median of whole runs)": round(median(covered), 3) if covered else None,
            "honest flagged": [each.name for each in right if each.fails(effort)],
            "honest undecided": undecided,
            "missed": [each.name for each in own if not each.fails(effort)],
        }
    for source in dict.fromkeys(each.source for each in wrong):
        own = [each for each in wrong if each.source == source]
        figures[f"of {source}"] = {e: [sum(x.fails(e) for x in own), len(own)] for e in ("quick", "usual")}
    reached = [each.share for each in wrong if each.share is not None]
    figures["found by share of pairs"] = {str(end): sum(share <= end for share in reached) for end in _SPANS}
    needed = Counter((factor, level) for each in wrong for factor, level in each.needed)
    figures["finds of one phase alone"] = {
        name: count for (kind, name), count in needed.most_common() if kind == "phase"
    }
    kinds = Counter(kind for each in wrong for kind in {_kind(factor) for factor, _ in each.needed} - {"phase"})
    figures["finds of one level alone, by factor"] = dict(kinds.most_common())
    levels = Counter(f"{level} as {_kind(factor)}" for factor, level in needed.elements() if factor != "phase")
    figures["finds of one level alone"] = dict(levels.most_common(_NAMED))
    figures["cut"] = [each.name for each in wrong if each.cut]
    return figures


def _kind(factor: str) -> str:
    """Return a factor's kind, "size" of "size of N"; the names of symbols and tensors are the op's own."""
    return factor.partition(" ")[0] if factor.startswith(("size of", "option", "values of", "layout of")) else factor


def shown(figures: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Table:
    """Return a table of the figures, beside those of an earlier run."""
    table = Table("", "now", *(["before"] if before else []), title="finding power")
    for name, value in figures.items():
        rows = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, inner in rows:
            old = (before or {}).get(name)
            old = old.get(key, "") if isinstance(old, Mapping) else old
            table.add_row(f"{name}: {key}" if key else name, _cell(inner), *([_cell(old)] if before else []))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list) and (not value or isinstance(value[0], str)):
        return f"{len(value)}" + (": " + ", ".join(value) if value else "")
    return " of ".join(map(str, value)) if isinstance(value, list) else str(value)


def measure(
    console: Console,
    side_by_side: Callable[[Callable[[int], Any], int], Iterator[Any]],
    *,
    sample: int = SAMPLE,
    seed: int = 0,
    out: Path,
    against: Path | None = None,
) -> bool:
    """Measure a sample of ``seed``, print the table, and write all as JSON; return whether no honest one is flagged.

    ``against`` is such a file of another commit, of the same sample, whose figures stand beside these.
    """
    global _sample, _seed
    _sample, _seed = sample, seed
    results = list(side_by_side(measured, len(drawn())))
    figures = summary(results)
    before = json.loads(against.read_text(encoding="utf-8")) if against is not None else None
    if before is not None and (before["sample"], before["seed"]) != (sample, seed):
        console.print(f"{against} is of sample {before['sample']}, seed {before['seed']}: the kernels differ")
    console.print(shown(figures, before and before["figures"]))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    content = {
        "commit": commit.stdout.strip(),
        "sample": sample,
        "seed": seed,
        "figures": figures,
        "kernels": list(map(asdict, results)),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return not any(figures[effort]["honest flagged"] for effort in ("quick", "usual"))
