"""`assay survey`: every kernel of a table against its contract."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Option

from assay.cli import settings
from assay.cli.progress import console, console_table, examined, note, report_error
from assay.runtime.engines import engine_named, part_of
from assay.runtime.files import locked, write_text_atomically
from assay.runtime.pool import worker_count
from assay.runtime.results import installed_version
from assay.verify.errors import SettingError

if TYPE_CHECKING:
    from assay.verify.campaign.survey import Row

_TIMEOUT = 30.0  # seconds for one call of a kernel
_SILENT = 300.0  # seconds without a message after which a worker is stopped
_PIPED_WIDTH = 160  # columns if standard output is no terminal
_COLOURS = {"PASS": "green", "WARN": "yellow", "FAIL": "red", "NOT HERE": "dim", "NOT RUN": "dim"}
_TABLE = '"others", kernels of other packages; or a file in the form of configs/survey.toml.'
_STRICT = "Exit with 1 unless every kernel that is here passed."


def survey(
    effort: settings.Effort = "quick",
    examples: settings.Examples = None,
    seed: settings.Seed = 0,
    device: settings.Device = "cpu",
    out: Annotated[Path, Option(file_okay=False, help="Folder of index.html and survey.json.")] = Path("report"),
    only: Annotated[str, Option(help="Only kernels whose name contains this.")] = "",
    table: Annotated[str | None, Option(help=_TABLE)] = None,
    budget: settings.Budget = None,
    strict: Annotated[bool, Option("--strict", help=_STRICT)] = False,
    anew: settings.Anew = False,
    engine: settings.EngineName = "local",
    part: settings.Part = "",
    ops: settings.Ops = None,
) -> int:
    """Every kernel of the survey table against its contract, in each of its dtypes.

    Exits with 0 when it ran to its end, whatever it found: the kernels are mostly other people's. The reports are
    written anew after each examination. Stopped, it goes on where it was: verdicts that the folder holds of the same
    kernels, sources and settings are not made again.
    """
    started = time.monotonic()
    with engine_named(engine, worker_count(), preload="assay.verify.campaign.survey", timeout=_SILENT) as workers:
        from assay.verify.campaign.cache import keep, known, name_of
        from assay.verify.campaign.cache import kept as stored
        from assay.verify.campaign.survey import not_run, plan, row_of, run
        from assay.verify.campaign.table import entries
        from assay.verify.harness.frameworks import check_device

        check_device(device)
        chosen = [
            replace(entry, dtypes=entry.survey_dtypes or entry.dtypes)
            for entry in entries(table)
            if only.lower() in entry.name.lower()
        ]
        if not chosen:
            raise SettingError(f"--only {only!r}: no kernel's name contains that; `assay survey` without it lists all")
        request = {"effort": effort, "examples": examples, "seed": seed, "device": device}
        jobs = plan(chosen, **request, timeout=_TIMEOUT, threads=1)
        names = [name_of(job) for job in jobs]  # before any run, so that they identify the current sources
        kept = out / "kept"  # the reusable verdicts
        before = {} if anew else known(kept, jobs)
        if before:
            note(f"{len(before)} of {len(jobs)} verdicts were in {kept}")
        rows = [before.get(index) or not_run(job, "not yet") for index, job in enumerate(jobs)]
        number, of = part_of(part, len(jobs))
        left = [index for index in range(number - 1, len(jobs), of) if index not in before]
        out.mkdir(parents=True, exist_ok=True)

        def write() -> tuple[Path, Path]:
            """Write the reports of all that the folder holds: other parts of the survey may write to it too."""
            with locked(out):
                for index, row in enumerate(rows):
                    if row.outcome == "NOT RUN" and not anew and (verdict := stored(kept, jobs[index], names[index])):
                        rows[index] = row_of(jobs[index], verdict)
                return _write(out, rows, request, time.monotonic() - started)

        write()  # fails early if the folder can't be written

        def show(position: int, row: Row) -> None:
            index = left[position]
            rows[index] = row
            if row.verdict is not None:
                keep(kept, jobs[index], row.verdict, names[index])
            write()

        until = float("inf") if budget is None else started + budget
        todo = [jobs[index] for index in left]
        interrupted = examined(todo, run(todo, workers, until=until), show)
    taken = time.monotonic() - started
    page, data = write()
    _print(rows, f"{taken:.0f} s, {page}, {data}")
    if interrupted:
        done = sum(row.outcome != "NOT RUN" for row in rows)
        words = f"interrupted; {done} of {len(jobs)} examinations are done, and stand in {data}"
        return report_error(f"{words}; the same command goes on from there", status=130)
    mistakes = [row for row in rows if row.outcome == "ERROR"]
    for row in mistakes:
        note(f"{row.entry.name} {row.dtype}: {row.reason}")
    if mistakes:
        return 2
    return int(strict and any(row.outcome not in ("PASS", "WARN", "NOT HERE") for row in rows))


def _write(out: Path, rows: Sequence[Row], request: dict[str, Any], taken: float) -> tuple[Path, Path]:
    import torch

    from assay.verify.campaign.page import survey_page, tally

    if request["device"].startswith("cuda"):
        machine = torch.cuda.get_device_name(request["device"])
    else:
        machine = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {platform.system()}"
    shown = {
        "assay": installed_version("kernel-assay"),
        "torch": torch.__version__,
        "machine": machine,
        "made": datetime.now().astimezone().isoformat(" ", timespec="minutes"),
    }
    results = {"seconds": round(taken, 1), "counts": tally(rows), "rows": [row.as_dict() for row in rows]}
    content = shown | request | results
    fuzzed = "" if request["examples"] is None else f", {request['examples']} fuzzed"
    shown |= {"effort": f"{request['effort']}{fuzzed}, seed {request['seed']}", "took": f"{taken:.0f} s"}
    page = write_text_atomically(out / "index.html", survey_page(rows, shown))
    return page, write_text_atomically(out / "survey.json", json.dumps(content, indent=1, allow_nan=False))


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
        name, verdict = row.entry.name if row.entry.name != before else "", row.verdict
        cells = (name, row.dtype, str(verdict.cases) if verdict else "", ratio(verdict.worst) if verdict else "")
        table.add_row(*map(Text, cells), Text(row.outcome, _COLOURS.get(row.outcome, "yellow")), Text(row.words))
        before = row.entry.name
    out = console(_PIPED_WIDTH)
    out.print(table)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in tally(rows).items())
    out.print(Text(f"\n{counts}; {where}"), soft_wrap=True)
