"""Power: which known faults an examination, or a test with a plain tolerance, would have caught.

Every suspect of a spec is run as a kernel, in float32 inside, and examined. What gets through names the input that
would have been needed. The kernel without a fault is examined first: a check that it fails catches nothing.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from assay.golden.arithmetic import Real
from assay.golden.errors import unknown
from assay.golden.inputs.values import torch_dtype
from assay.verify.calls import Finding
from assay.verify.errors import SettingError
from assay.verify.examination import examine
from assay.verify.inputs.cases import Case, build
from assay.verify.inputs.sampler import seeded, with_values
from assay.verify.question import Question, ask
from assay.verify.suspects import suspects_of
from assay.verify.suspects.evaluation import evaluate, kernel_of
from assay.verify.suspects.suspect import FAMILIES, Suspect
from assay.verify.verdict import write_whole

_CHECK = re.compile(r"\s*(allclose|assert_close)\s*(?:\(\s*([^,()]+?)\s*,\s*([^,()]+?)\s*\))?\s*")
_ALLCLOSE = (1e-5, 1e-8)
_ASSERT_CLOSE = {
    "float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7),
}  # fmt: skip  # torch.testing.assert_close's defaults
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Tried:
    """One suspect under one examination.

    ``kind`` is its failure's, ``cases`` how many it took; ``against`` says whether the plain check caught it too.
    """

    name: str
    family: str
    description: str
    origin: str
    needs: str
    caught: bool
    kind: str = ""
    cases: int = 0
    against: bool | None = None


@dataclass(frozen=True)
class PowerReport:
    """What became of every suspect that the options and dtypes of a campaign admit."""

    spec: str
    dtype: str
    contract: str
    examples: int
    trials: tuple[Tried, ...]
    against: str = ""
    seconds: float = 0.0

    @property
    def caught(self) -> int:
        """How many suspects were caught."""
        return sum(trial.caught for trial in self.trials)

    @property
    def by_family(self) -> dict[str, tuple[int, int]]:
        """(caught, tried) by fault family, in the order of `FAMILIES`."""
        return _by_family(self.trials, lambda trial: trial.caught)

    @property
    def by_family_against(self) -> dict[str, tuple[int, int]]:
        """The same for the plain check that was compared; empty where none was."""
        return _by_family(self.trials, lambda trial: bool(trial.against)) if self.against else {}

    @property
    def survivors(self) -> tuple[Tried, ...]:
        """The suspects that were not caught."""
        return tuple(trial for trial in self.trials if not trial.caught)

    def as_dict(self) -> dict[str, Any]:
        """Plain data (schema: docs/suspects.md)."""
        plain = ("spec", "dtype", "contract", "examples", "against", "seconds")
        content = {name: getattr(self, name) for name in plain}
        rates = {name: {"caught": caught, "of": of} for name, (caught, of) in self.by_family.items()}
        for name, (caught, _) in self.by_family_against.items():
            rates[name]["against"] = caught
        return content | {
            "caught": self.caught,
            "of": len(self.trials),
            "by_family": rates,
            "survivors": [trial.name for trial in self.survivors],
            "trials": [vars(trial) for trial in self.trials],
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON, also written to ``path`` where given."""
        text = json.dumps(self.as_dict(), indent=2)
        if path is not None:
            write_whole(path, text)
        return text

    def __str__(self) -> str:
        return text_report(self)


def power(
    op: str,
    *,
    examples: int = 50,
    families: Sequence[str] | None = None,
    against: str = "",
    progress: Progress | None = None,
    **settings: Any,
) -> PowerReport:
    """Examine every suspect of spec ``op`` that these settings admit.

    ``settings`` are dtype, out_dtype, options, shapes, contract, seed and layouts, as `assay.verify.examine` takes
    them. ``families`` are the fault families to try, all where left out.
    ``against`` is a plain check to compare with: "allclose(rtol, atol)" or "assert_close(rtol, atol)" of a float64
    reference on normal numbers of one size, with torch's own tolerances where they are left out. ``progress(name, done,
    of)`` is called before each suspect. Raises as `examine` does, and `SettingError` on an ``against`` that can't be
    read, and where the kernel without a fault does not pass the examination, or fails the plain check.
    """
    started = time.perf_counter()
    settings["examples"] = examples
    question = ask(kernel_of(None, op), op, **settings)
    out_dtype = question.sampler.out_dtype
    tolerances = _tolerances(against) if against else None
    for family in families or ():
        if family not in FAMILIES:
            raise SettingError(f"families: {unknown('family', family, FAMILIES)}")
    suspects = [suspect for suspect in _admitted(question, op) if suspect.family in (families or FAMILIES)]
    _require_a_pass(question, op, settings, against, tolerances)
    trials = []
    for place, suspect in enumerate(suspects):
        if progress is not None:
            progress(suspect.name, place, len(suspects))
        verdict = examine(kernel_of(suspect, op, out_dtype), op, shrinking=False, **settings)
        trials.append(
            Tried(
                suspect.name,
                suspect.family,
                suspect.description,
                suspect.origin,
                suspect.needs,
                caught=verdict.failure is not None and suspect.shows(verdict.failure.kind),
                kind=verdict.failure.kind if verdict.failure else "",
                cases=verdict.cases,
                against=None if tolerances is None else _plain_check_fails(question, suspect, tolerances),
            )
        )
    return PowerReport(
        op,
        question.dtype,
        str(question.bench.contract),
        examples,
        tuple(trials),
        against,
        time.perf_counter() - started,
    )


def _require_a_pass(
    question: Question,
    op: str,
    settings: Mapping[str, Any],
    against: str,
    check: tuple[str, tuple[float, float] | None] | None,
) -> None:
    """Raise `SettingError` unless the kernel without a fault, in float32 inside, passes what suspects are put to."""
    verdict = examine(kernel_of(None, op, question.sampler.out_dtype), op, shrinking=False, **settings)
    if not verdict.passed:
        why = verdict.failure.message if verdict.failure is not None else verdict.note
        raise SettingError(
            f"power: {op} in {question.dtype} under {question.bench.contract}: expected that the kernel without a "
            f"fault, in float32 inside, passes; got {verdict.outcome} ({why}), so that a rate would tell nothing; "
            "ask in float32 or narrower, or under a contract that float32 keeps"
        )
    if check is not None and _plain_check_fails(question, None, check):
        raise SettingError(
            f"power: against={against!r} fails the kernel without a fault ({op} in {question.dtype}), so that a rate "
            "would tell nothing; ask with larger tolerances"
        )


def _admitted(question: Question, op: str) -> list[Suspect]:
    """The suspects that some set of the options admits, and that break the contract asked for."""
    sampler, choose = question.sampler, seeded(0)
    cases = [sampler.case(choose, style="tile", options=options) for options in sampler.option_sets()]
    kept = question.bench.contract.changed()
    return [
        suspect
        for suspect in suspects_of(op)
        if any(suspect.concerns(case) for case in cases)
        and not (suspect.contract and all(kept.get(name) == value for name, value in suspect.contract.items()))
    ]


def _tolerances(text: str) -> tuple[str, tuple[float, float] | None]:
    """The check that ``text`` names, and its tolerances."""
    expected = f"against={text!r}; expected allclose(1e-2,1e-2) or assert_close(1e-2,1e-2): rtol and atol"
    found = _CHECK.fullmatch(text)
    if found is None:
        raise SettingError(expected)
    name, rtol, atol = found.groups()
    try:
        return name, None if rtol is None else (float(rtol), float(atol))
    except ValueError:
        raise SettingError(expected) from None


def _plain_check_fails(
    question: Question, suspect: Suspect | None, check: tuple[str, tuple[float, float] | None]
) -> bool:
    """Whether a comparison with a float64 reference on normal numbers of one size catches the suspect (None: no fault).

    It is made once for each set of options, and any of them may catch it.
    """
    kernel = kernel_of(suspect, question.definition.name, question.sampler.out_dtype)
    call = question.bench.call
    for options in question.sampler.option_sets():
        case = question.sampler.case(seeded(question.sampler.seed), style="tile", options=options)
        case = with_values(case, "normal", layouts={}, protocol="once", memory="plain", unused="plain")
        inputs = build(case)
        outputs = type(call)(kernel, call.listed)(case, inputs)
        if isinstance(outputs, Finding):
            if suspect is None or suspect.shows(outputs.kind):
                return True
        elif _differ(case, inputs.guarded, outputs, check):
            return True
    return False


def _differ(case: Case, guarded: Any, outputs: tuple[Any, ...], check: tuple[str, tuple[float, float] | None]) -> bool:
    name, stated = check
    values = {tensor: part.tensor for tensor, part in guarded.items()}
    right = evaluate(None, case, values, Real)
    for got, want, dtype in zip(outputs, right, case.result_dtypes, strict=True):
        rtol, atol = stated or (_ALLCLOSE if name == "allclose" else _ASSERT_CLOSE.get(dtype, (0.0, 0.0)))
        stored = want.to(torch_dtype(dtype)).double()
        if not torch.allclose(got.double(), stored, rtol=rtol, atol=atol, equal_nan=name == "assert_close"):
            return True
    return False


def _by_family(trials: Sequence[Tried], hit: Callable[[Tried], bool]) -> dict[str, tuple[int, int]]:
    found = {}
    for family in FAMILIES:
        here = [trial for trial in trials if trial.family == family]
        if here:
            found[family] = (sum(map(hit, here)), len(here))
    return found


def text_report(report: PowerReport) -> str:
    """The report that a terminal shows."""
    lines = [f"power of {report.examples} examples: {report.spec} in {report.dtype}, {report.contract}"]
    header = f"  {'fault family':16} {'caught':>9}"
    lines.append(header + (f"   {report.against}" if report.against else ""))
    rows = [*report.by_family.items(), ("all", (report.caught, len(report.trials)))]
    plain = report.by_family_against
    for family, (caught, of) in rows:
        line = f"  {family:16} {caught:4} / {of:<3}{caught / max(of, 1):5.0%}"
        if report.against:
            other = plain[family][0] if family in plain else sum(bool(trial.against) for trial in report.trials)
            line += f"   {other:4} / {of:<3}{other / max(of, 1):5.0%}"
        lines.append(line)
    if report.survivors:
        lines.append("  not caught:")
    for trial in report.survivors:
        lines.append(f"    {trial.name}: {trial.description}")
        lines.append(f"      would need {trial.needs}")
    return "\n".join(lines)
