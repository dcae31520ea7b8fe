"""`assay verify`: the bundled kernels, kernels by name, or any function that can be imported."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli import settings
from assay.cli.progress import Ticker, complain
from assay.golden.isolate import Workers, worker_count
from assay.verify.errors import SettingError, TargetError

if TYPE_CHECKING:
    from assay.verify.survey import Job, Row
    from assay.verify.survey_table import Entry

_ARGUMENT = (
    "package.module:function, a campaign's TOML file, or the name of a kernel of the survey or a part of it; "
    "all bundled ones if none."
)
_BUNDLED = ("assay", "pallas")  # their groups in the survey's table


def verify(
    targets: Annotated[list[str] | None, typer.Argument(metavar="TARGET...", help=_ARGUMENT)] = None,
    spec: Annotated[str, typer.Option(help="What package.module:function implements, e.g. softmax.")] = "",
    dtype: Annotated[list[str] | None, typer.Option(help="bfloat16, or q=float16,k=bfloat16; may be repeated.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="causal=none,bottom_right: values to vary over; may be repeated.")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="D=64,128 or Sq=1:300 (as Python's range); may be repeated.")
    ] = None,
    contract: Annotated[
        list[str] | None, typer.Option(help="A contract's name, or field=value; may be repeated.")
    ] = None,
    out_dtype: Annotated[str, typer.Option(help="Dtype of the result, where it isn't the inputs'.")] = "",
    layout: Annotated[
        list[str] | None, typer.Option(help="Memory layouts that the kernel takes, where not all.")
    ] = None,
    framework: Annotated[
        str, typer.Option(help="torch (the default), numpy, jax or cupy: what the kernel is called with.")
    ] = "",
    examples: Annotated[int, typer.Option(min=0, help="Fuzzed cases, beside the fixed phases.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the examination.")] = 0,
    device: Annotated[str, typer.Option(help="Where the kernel runs.")] = "cpu",
    faithful: Annotated[
        str, typer.Option(metavar="DEVICE", help="h200, b200, ...: its tensor cores in Triton's dots, on a CPU.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=0.01, help="Seconds for one call; 10 more where no alarm is heard.")
    ] = 30.0,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Each kernel in a process of its own: what it dies of is a finding.")
    ] = False,
    memory: Annotated[float, typer.Option(min=0.01, help="GiB that an isolated kernel may hold.")] = 4.0,
    at_once: Annotated[int, typer.Option("--jobs", min=0, help="Examinations at a time; 0: one for each core.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the reports; verdicts that it holds of the same kernels are not made again."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON instead.")] = False,
    summary: Annotated[
        Path | None, typer.Option(metavar="FILE", help='Append a table in Markdown, e.g. to "$GITHUB_STEP_SUMMARY".')
    ] = None,
) -> int:
    """Examine kernels against the contract of what they implement.

    TARGET is package.module:function, examined as --spec says (modules of the current folder count), or the name of a
    kernel of `assay survey`, or a TOML file of such entries. For those a table says what isn't given here: spec,
    dtypes, options, shapes, contract. Without TARGET all bundled kernels are examined.
    """
    if summary is not None and not summary.parent.is_dir():
        raise SettingError(
            f"--summary {summary}: there is no folder {summary.parent}; expected a file that can be written"
        )
    with Workers(1, preload="assay.verify.survey", quiet=False) as workers:
        from assay.verify.interpreter import check_emulated
        from assay.verify.kept import keep, name_of
        from assay.verify.question import check_device
        from assay.verify.survey import plan, run

        check_device(device)
        check_emulated(faithful)
        extra: dict[str, Any] = {"framework": framework} if framework else {}
        extra |= {"out_dtype": out_dtype} if out_dtype else {}
        extra |= {"layouts": layout} if layout else {}
        extra |= {"isolate": True, "memory": memory} if isolate else {}
        chosen = [entry for target in targets for entry in entries_of(target, spec)] if targets else _bundled(spec)
        entries = [_adapted(entry, dtype or [], option or [], shape or [], contract or [], extra) for entry in chosen]
        jobs = plan(entries, examples=examples, seed=seed, device=device, timeout=timeout, faithful=faithful)
        names = [name_of(job) for job in jobs] if out is not None else []  # of the sources as they are now
        rows = _known(jobs, out)
        left = [place for place in range(len(jobs)) if place not in rows]
        count = min(at_once or worker_count(), len(left))
        if count > 1:
            workers.grow(count)
            jobs = [replace(job, threads=1) for job in jobs]
        interrupted = False
        with Ticker("examined", len(left), sum(jobs[place].effort for place in left)) as ticker:
            try:
                for position, row in run([jobs[place] for place in left], workers):
                    place = left[position]
                    rows[place] = row
                    if out is not None and row.verdict is not None:
                        print(f"assay: wrote {keep(out, jobs[place], row.verdict, names[place])}", file=sys.stderr)
                    ticker.advance(jobs[place].effort)
            except KeyboardInterrupt:  # what is known is told
                interrupted = True
    ordered = [rows[place] for place in sorted(rows)]
    status = _report(ordered, as_json, named=bool(targets)) if ordered or not interrupted else 130
    if summary is not None:
        _summarize(summary, ordered)
    if interrupted:
        return complain(f"interrupted; {len(rows)} of {len(jobs)} examinations are done", status=130)
    return status


def _summarize(path: Path, rows: Sequence[Row]) -> None:
    """Append the table of all kernels that are here; `SettingError` where the file can't be written."""
    from assay.verify.summary import Line, append, line_of

    lines = [
        line_of(row.verdict)
        if row.verdict
        else Line(row.entry.name, row.entry.spec, row.dtype, row.outcome, words=row.reason)
        for row in rows
        if row.verdict is not None or row.outcome != "NOT HERE"
    ]
    try:
        append(path, lines)
    except OSError as error:
        raise SettingError(f"--summary {path}: {error.strerror}; expected a file that can be written") from None


def _known(jobs: Sequence[Job], out: Path | None) -> dict[int, Row]:
    """The rows of jobs whose verdicts the folder holds already, by place."""
    from assay.verify.kept import kept
    from assay.verify.survey import Row

    found = {place: kept(out, job) for place, job in enumerate(jobs)} if out is not None else {}
    rows = {
        place: Row(jobs[place].entry, jobs[place].dtype_name or verdict.dtype, verdict.outcome, verdict)
        for place, verdict in found.items()
        if verdict is not None
    }
    if rows:
        print(f"assay: {len(rows)} of {len(jobs)} verdicts were in {out}", file=sys.stderr)
    return rows


def _bundled(op: str) -> list[Entry]:
    """The kernels that come along."""
    from assay.verify.survey_table import entries

    if op:
        raise SettingError(f"--spec {op}: of what? e.g. assay verify my.kernels:{op} --spec {op} --dtype bfloat16")
    return [entry for entry in entries() if entry.group in _BUNDLED]


def entries_of(target: str, op: str) -> list[Entry]:
    """What a target means: a function, or kernels of the survey."""
    from assay.golden.registry import spec, specs
    from assay.verify.survey_table import Entry, entries

    if target.endswith(".toml"):
        if op:
            raise SettingError(f"--spec {op}: {target} says what its kernels implement; leave --spec out")
        return list(entries(target))
    table = entries()
    if ":" in target:
        listed = [entry for entry in table if entry.target == target and op in ("", entry.spec)]
        if not op and not listed:
            raise SettingError(f"verify: {target} needs --spec; the specs are {', '.join(specs())}")
        return listed or [Entry(name=target, target=target, spec=spec(op).name)]
    found = [entry for entry in table if entry.name == target] or [
        entry for entry in table if target.lower() in entry.name.lower()
    ]
    if not found:
        close = difflib.get_close_matches(target, [entry.name.rpartition(".")[2] for entry in table], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TargetError(f"target {target!r}; expected package.module:function, or a kernel of `assay survey`{hint}")
    if op:
        raise SettingError(f"--spec {op}: the survey's table says what {found[0].name} implements; leave --spec out")
    return found


def _adapted(
    entry: Entry,
    dtype: Sequence[str],
    option: Sequence[str],
    shape: Sequence[str],
    contract: Sequence[str],
    extra: dict[str, Any],
) -> Entry:
    """The entry with what the command line says otherwise."""
    from assay.golden.registry import spec
    from assay.verify.contract import contract_from_table
    from assay.verify.survey_table import contract_named

    fields = settings.contract(contract, contract_named)
    contract_from_table(fields)
    return replace(
        entry,
        dtypes=settings.dtypes(dtype) or entry.dtypes,
        options={**entry.options, **settings.options(spec(entry.spec), option)},
        settings={**entry.settings, **extra, "shapes": {**entry.settings.get("shapes", {}), **settings.shapes(shape)}},
        contract=fields if contract else entry.contract,
    )


def _report(rows: Sequence[Row], as_json: bool, *, named: bool) -> int:
    """Print the verdicts; the exit status. A kernel that isn't here matters only if it was ``named``."""
    verdicts = [row.verdict for row in rows if row.verdict is not None]
    if as_json:
        print(json.dumps([verdict.as_dict() for verdict in verdicts], indent=2))
    elif verdicts:
        print("\n\n".join(map(str, verdicts)))
    missing = [row for row in rows if row.verdict is None]
    for row in missing:
        print(f"assay: {'' if named else f'{row.entry.name}: '}{' '.join(row.reason.split())}", file=sys.stderr)
        if row.trace:
            print(row.trace, file=sys.stderr)
    if any(named or row.outcome != "NOT HERE" for row in missing) or not verdicts:
        return 2
    return int(not all(verdict.passed for verdict in verdicts))
