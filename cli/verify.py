"""`assay verify`: the bundled kernels, kernels by name, or any function that can be imported."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from assay.cli import settings
from assay.cli.progress import examined, note, report_error
from assay.runtime.engines import engine_named, part_of
from assay.runtime.modules import is_module
from assay.runtime.pool import Pool, worker_count
from assay.runtime.records import plain
from assay.verify.errors import SettingError, TargetError

if TYPE_CHECKING:
    from assay.verify.campaign.survey import Job, Row
    from assay.verify.campaign.table import Entry

_ARGUMENT = (
    "package.module:function, a campaign's TOML file, or the name of a kernel of the survey or a part of it; "
    "all bundled ones if none."
)
_REFERENCE = "A PyTorch function or module that it is held against, in place of --spec."
_TENSORS = "What --reference takes and gives, e.g. 'x[T,D], weight[D] -> y[T,D]'."
_VARIANTS = "Only list what the kernels run at which sizes: programs, their constants, paths of host code."
_OUT = "Folder for the reports; verdicts that it holds of the same kernels are not made again."
_SUMMARY = 'Append a table in Markdown, e.g. to "$GITHUB_STEP_SUMMARY".'
_PRELOAD = "assay.verify.campaign.survey"
_SILENT = 300.0  # seconds without a message after which a worker of another engine is stopped
_BUNDLED = ("assay", "pallas", "cuda")  # the bundled kernels' groups in the survey's table


def verify(
    targets: Annotated[list[str] | None, Argument(metavar="TARGET...", help=_ARGUMENT)] = None,
    spec: settings.SpecName = "",
    reference: Annotated[list[str] | None, Option(metavar="MODULE:FUNCTION", help=_REFERENCE)] = None,
    tensors: Annotated[str, Option(help=_TENSORS)] = "",
    dtype: settings.Dtypes = None,
    option: settings.Options = None,
    shape: settings.Shapes = None,
    at: settings.At = None,
    contract: settings.ContractFields = None,
    out_dtype: settings.OutDtype = "",
    layout: settings.Layouts = None,
    framework: settings.Framework = "",
    effort: settings.Effort = "",
    examples: settings.Examples = None,
    seed: settings.Seed = 0,
    device: settings.Device = "cpu",
    faithful: settings.Faithful = "",
    pretend: settings.Pretend = "",
    emission: settings.Emission = "",
    refuses: settings.Refuses = None,
    timeout: settings.Timeout = 30.0,
    isolate: settings.Isolate = False,
    memory: settings.Memory = 4.0,
    strict: settings.Strict = False,
    at_once: settings.Jobs = 0,
    engine: settings.EngineName = "local",
    part: settings.Part = "",
    out: Annotated[Path | None, Option(file_okay=False, help=_OUT)] = None,
    as_json: settings.AsJson = False,
    summary: Annotated[Path | None, Option(metavar="FILE", help=_SUMMARY)] = None,
    ops: settings.Ops = None,
    variants: Annotated[bool, Option("--variants", help=_VARIANTS)] = False,
) -> int:
    """Examine kernels against the contract of what they implement.

    TARGET is package.module:function, examined as --spec says (modules of the current folder count), or the name of a
    kernel of `assay survey`, or a TOML file of such entries. For those a table says what isn't given here: spec,
    dtypes, options, shapes, contract. Without TARGET all bundled kernels are examined, with quick effort, in the dtypes
    that a survey takes.
    """
    if summary is not None and (not summary.parent.is_dir() or summary.is_dir()):
        why = "it is a folder" if summary.is_dir() else f"there is no folder {summary.parent}"
        raise SettingError(f"--summary {summary}: {why}; expected a file that can be written")
    local = engine == "local"  # then one process starts until the number of examinations is known
    with (
        Pool(1, preload=_PRELOAD, quiet=False)
        if local
        else engine_named(engine, at_once or None, preload=_PRELOAD, timeout=_SILENT)
    ) as running:
        from assay.interpreter import check_emulated
        from assay.verify.campaign.cache import keep, known, name_of
        from assay.verify.campaign.survey import plan, run
        from assay.verify.examination.repro import with_repeated
        from assay.verify.harness.frameworks import check_device

        check_device("cpu" if pretend else device)
        check_emulated(faithful, pretend, emission)
        spec = _question(spec, reference, tensors)
        chosen = [entry for target in targets for entry in entries_of(target, spec)] if targets else _bundled(spec)
        said = {"out_dtype": out_dtype, "layouts": layout, "framework": framework, "isolate": isolate, "memory": memory}
        said |= {"strict": strict} if strict else {}
        jobs = plan(
            settings.adapted_entries(chosen, dtype, option, shape, contract, at, refuses, **said),
            effort=effort or ("usual" if targets else "quick"),
            examples=examples,
            seed=seed,
            device=device,
            timeout=timeout,
            faithful=faithful,
            pretend=pretend,
            emission=emission,
        )
        number, of = part_of(part, len(jobs))
        jobs = jobs[number - 1 :: of]
        if variants:
            return _list_variants(jobs, as_json)
        names = [name_of(job) for job in jobs] if out is not None else []  # of the current sources
        rows = known(out, jobs) if out is not None else {}
        if rows:
            note(f"{len(rows)} of {len(jobs)} verdicts were in {out}")
        left = [index for index in range(len(jobs)) if index not in rows]
        count = min(at_once or worker_count(), len(left))
        if isinstance(running, Pool):
            running.resize(count)
        if count > 1 or not local:
            jobs = [replace(job, threads=1) for job in jobs]

        def show(position: int, row: Row) -> None:
            index = left[position]
            if row.verdict is not None and not row.verdict.passed and not any(map(_fails, rows.values())):
                row = replace(row, verdict=with_repeated(row.verdict))  # of a run's first failure
            rows[index] = row
            if out is not None and row.verdict is not None:
                note(f"wrote {keep(out, jobs[index], row.verdict, names[index])}")

        todo = [jobs[index] for index in left]
        interrupted = examined(todo, run(todo, running), show)
    ordered = [rows[index] for index in sorted(rows)]  # those so far are reported in any case
    status = _report(ordered, as_json, named=bool(targets)) if ordered or not interrupted else 130
    if summary is not None:
        _summarize(summary, ordered)
    if interrupted:
        return report_error(f"interrupted; {len(rows)} of {len(jobs)} examinations are done", status=130)
    return status


def _fails(row: Row) -> bool:
    return row.verdict is not None and not row.verdict.passed


def _list_variants(jobs: Sequence[Job], as_json: bool) -> int:
    """Print what each kernel runs at which sizes; return the exit status."""
    from assay.verify.campaign.survey import variants_of_job
    from assay.verify.report.text import variants_in_words

    listed, missing = [], 0
    for job in jobs:
        if reason := job.entry.absence(job.settings.device):
            missing = report_error(reason)
            continue
        observed = variants_of_job(job)
        words = {"kernel": job.entry.name, "dtype": job.settings.dtype_name}
        listed.append(words | {"variants": [plain(vars(variant)) for variant in observed]})
        if not as_json:
            print("\n".join([f"{job.entry.name} in {job.settings.dtype_name}", *variants_in_words(observed)]))
    if as_json:
        print(json.dumps(listed, indent=2))
    return missing


def _question(spec: str, reference: list[str] | None, tensors: str) -> str:
    """Return the name of the question: that of ``--spec``, or of a reference and its tensors."""
    if not reference:
        if tensors:
            raise SettingError(f"--tensors {tensors!r}: of what? expected --reference module:function beside it")
        return spec
    if spec:
        raise SettingError(f"--spec {spec} --reference {reference[0]}: expected one of them")
    for name in reference:
        if ":" not in name:
            raise SettingError(f"--reference {name}: expected module:function")
    if not tensors:
        raise SettingError(
            f"--reference {reference[0]}: expected --tensors, what it takes and gives, e.g. 'x[T,D], w[D] -> y[T,D]'"
        )
    return f"{'|'.join(reference)}({' '.join(tensors.split())})"


def _summarize(path: Path, rows: Sequence[Row]) -> None:
    """Append the table of all installed kernels; raises `SettingError` if the file can't be written."""
    from assay.verify.report.summary import Line, append, line_of

    lines = [
        line_of(row.verdict)
        if row.verdict
        else Line(row.entry.name, row.entry.settings.definition.name, row.dtype, row.outcome, words=row.reason)
        for row in rows
        if row.verdict is not None or row.outcome != "NOT HERE"
    ]
    try:
        append(path, lines)
    except OSError as error:
        raise SettingError(f"--summary {path}: {error.strerror}; expected a file that can be written") from None


def _bundled(op: str) -> list[Entry]:
    from assay.verify.campaign.table import entries

    if op:
        raise SettingError(f"--spec {op}: of what? e.g. assay verify my.kernels:{op} --spec {op} --dtype bfloat16")
    return [
        replace(entry, dtypes=entry.survey_dtypes or entry.dtypes) for entry in entries() if entry.group in _BUNDLED
    ]


def entries_of(target: str, op: str) -> list[Entry]:
    """Return the entries of a target: a function, or kernels of the survey. Raises `TargetError`."""
    from assay.golden.registry import spec, specs
    from assay.verify.campaign.table import Entry, entries
    from assay.verify.settings import Settings

    if not target.strip():
        raise TargetError("target '': expected package.module:function, a TOML file, or a kernel of `assay survey`")
    if target.endswith(".toml"):
        if op:
            raise SettingError(f"--spec {op}: {target} says what its kernels implement; leave --spec out")
        return list(entries(target))
    table = entries()
    if ":" in target:
        listed = [entry for entry in table if entry.target == target and op in ("", entry.settings.spec)]
        if not op and not listed:
            near = ", ".join(difflib.get_close_matches(target.rpartition(":")[2], specs(), n=4, cutoff=0.0))
            raise SettingError(
                f"verify: {target} needs --spec, the op that it computes; of {len(specs())} ops e.g. {near}"
            )
        return listed or [Entry(target, target, Settings(spec(op, target).qualified_name))]
    result = [entry for entry in table if entry.name == target] or [
        entry for entry in table if target.lower() in entry.name.lower()
    ]
    if is_module(target) and target not in (entry.name for entry in result):
        beside = f"; or a longer part of a name of the survey, e.g. {result[0].name!r}" if result else ""
        raise TargetError(
            f"target {target!r} is a module; which function of it? expected {target}:function --spec NAME{beside}"
        )
    if not result:
        close = difflib.get_close_matches(target, [entry.name.rpartition(".")[2] for entry in table], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TargetError(f"target {target!r}; expected package.module:function, or a kernel of `assay survey`{hint}")
    if op:
        raise SettingError(f"--spec {op}: the survey's table says what {result[0].name} implements; leave --spec out")
    return result


def _report(rows: Sequence[Row], as_json: bool, *, named: bool) -> int:
    """Print the verdicts; return the exit status. A kernel that isn't installed counts only if it was ``named``."""
    verdicts = [row.verdict for row in rows if row.verdict is not None]
    if as_json:
        print(json.dumps([verdict.as_dict() for verdict in verdicts], indent=2))
    elif verdicts:
        print("\n\n".join(map(str, verdicts)))
    missing = [row for row in rows if row.verdict is None]
    for row in missing:
        report_error(row.reason if named else f"{row.entry.name}: {row.reason}")
        if row.trace:
            print(row.trace, file=sys.stderr)
    if any(named or row.outcome != "NOT HERE" for row in missing) or not verdicts:
        return 2
    return int(not all(verdict.passed for verdict in verdicts))
