"""`assay survey`: every kernel of a table against its contract."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from assay.cli import settings
from assay.cli.progress import console, console_table, examined, report_error, report_known
from assay.cli.settings import Ops
from assay.runtime.engines import engine_named, part_of
from assay.runtime.pool import worker_count
from assay.runtime.results import installed_version
from assay.verify.errors import SettingError

if TYPE_CHECKING:
    from assay.verify.campaign.survey import Row
    from assay.verify.campaign.table import Entry

_TIMEOUT = 30.0  # seconds for one call of a kernel
_SILENT = 300.0  # seconds without a message after which a worker is stopped
_PIPED_WIDTH = 160  # columns if standard output is no terminal
_KEPT = "kept"  # folder of reusable verdicts, below that of the reports
_COLOURS = {"PASS": "green", "WARN": "yellow", "FAIL": "red", "NOT HERE": "dim", "NOT RUN": "dim"}


def survey(
    effort: settings.Effort = "quick",
    examples: settings.Examples = None,
    seed: settings.Seed = 0,
    device: settings.Device = "cpu",
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of index.html and survey.json.")] = Path("report"),
    only: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
    table: Annotated[
        str | None,
        typer.Option(help='"others", kernels of other packages; or a file in the form of configs/survey.toml.'),
    ] = None,
    budget: settings.Budget = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 unless every kernel that is here passed.")
    ] = False,
    anew: settings.Anew = False,
    engine: Annotated[str, typer.Option(help="local, or ray: at RAY_ADDRESS, or started here.")] = "local",
    part: Annotated[str, typer.Option(help="3/10: examine the third of ten parts only; the folder joins them.")] = "",
    ops: Ops = None,
) -> int:
    """Every kernel of the survey table against its contract, in each of its dtypes.

    Exits with 0 when it ran to its end, whatever it found: the kernels are mostly other people's. The reports are
    written anew after each examination. Stopped, it goes on where it was: verdicts that the folder holds of the same
    kernels, sources and settings are not made again.
    """
    started = time.monotonic()
    with engine_named(engine, worker_count(), preload="assay.verify.campaign.survey", timeout=_SILENT) as workers:
        from assay.verify.campaign.cache import keep, known, name_of
        from assay.verify.campaign.survey import not_run, plan, run
        from assay.verify.campaign.table import entries
        from assay.verify.harness.frameworks import check_device

        check_device(device)
        request = {"effort": effort, "examples": examples, "seed": seed, "device": device}
        jobs = plan(_chosen(entries(table), only), **request, timeout=_TIMEOUT, threads=1)
        names = [name_of(job) for job in jobs]  # before any run, so that they identify the current sources
        before = {} if anew else known(out / _KEPT, jobs)
        report_known(before, jobs, out / _KEPT)
        rows = [before.get(index) or not_run(job, "not yet") for index, job in enumerate(jobs)]
        number, of = part_of(part, len(jobs))
        left = [index for index in range(number - 1, len(jobs), of) if index not in before]
        until = float("inf") if budget is None else started + budget
        _write(out, rows, request, 0.0)  # fails early if the folder can't be written

        def show(position: int, row: Row) -> None:
            index = left[position]
            rows[index] = row
            if row.verdict is not None:
                keep(out / _KEPT, jobs[index], row.verdict, names[index])
            _write(out, rows, request, time.monotonic() - started)

        todo = [jobs[index] for index in left]
        interrupted = examined(todo, run(todo, workers, until=until), show) < len(todo)
    taken = time.monotonic() - started
    page, data = _write(out, rows, request, taken)
    _print(rows, f"{taken:.0f} s, {page}, {data}")
    if interrupted:
        done = sum(row.outcome != "NOT RUN" for row in rows)
        words = f"interrupted; {done} of {len(jobs)} examinations are done, and stand in {data}"
        return report_error(f"{words}; the same command goes on from there", status=130)
    return _status(rows, strict)


def _chosen(table: Sequence[Entry], only: str) -> list[Entry]:
    chosen = [
        replace(entry, dtypes=entry.survey_dtypes or entry.dtypes)
        for entry in table
        if only.lower() in entry.name.lower()
    ]
    if not chosen:
        raise SettingError(f"--only {only!r}: no kernel's name contains that; `assay survey` without it lists all")
    return chosen


def _status(rows: Sequence[Row], strict: bool) -> int:
    mistakes = [row for row in rows if row.outcome == "ERROR"]
    for row in mistakes:
        print(f"assay: {row.entry.name} {row.dtype}: {row.reason}", file=sys.stderr)
    if mistakes:
        return 2
    return int(strict and any(row.outcome not in ("PASS", "WARN", "NOT HERE") for row in rows))


def _write(out: Path, rows: Sequence[Row], request: dict[str, Any], taken: float) -> tuple[Path, Path]:
    import torch

    from assay.runtime.files import write_text_atomically
    from assay.verify.campaign.page import survey_page, tally

    shown = {
        "assay": installed_version("kernel-assay"),
        "torch": torch.__version__,
        "machine": _machine(request["device"]),
        "made": datetime.now().astimezone().isoformat(" ", timespec="minutes"),
    }
    results = {"seconds": round(taken, 1), "counts": tally(rows), "rows": [row.as_dict() for row in rows]}
    content = shown | request | results
    fuzzed = "" if request["examples"] is None else f", {request['examples']} fuzzed"
    shown |= {"effort": f"{request['effort']}{fuzzed}, seed {request['seed']}", "took": f"{taken:.0f} s"}
    page = write_text_atomically(out / "index.html", survey_page(rows, shown))
    return page, write_text_atomically(out / "survey.json", json.dumps(content, indent=1, allow_nan=False))


def _machine(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {platform.system()}"


def _print(rows: Sequence[Row], where: str) -> None:
    from assay.verify.campaign.page import tally
    from assay.verify.report.html import ratio

    table = console_table(
        (
            ("kernel", {"overflow": "fold", "min_width": 20}),
            ("dtype", {"no_wrap": True}),
            ("cases", {"justify": "right"}),
            ("worst", {"justify": "right", "no_wrap": True}),
            ("outcome", {"no_wrap": True}),
            ("first violation (sizes not listed are 1)", {"overflow": "fold", "min_width": 30}),
        )
    )
    before = ""
    for row in rows:
        verdict = row.verdict
        table.add_row(
            Text(row.entry.name if row.entry.name != before else ""),
            Text(row.dtype),
            Text(str(verdict.cases) if verdict else ""),
            Text(ratio(verdict.worst) if verdict else ""),
            Text(row.outcome, _COLOURS.get(row.outcome, "yellow")),
            Text(row.words),
        )
        before = row.entry.name
    out = console(_PIPED_WIDTH)
    out.print(table)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in tally(rows).items())
    out.print(Text(f"\n{counts}; {where}"), soft_wrap=True)
