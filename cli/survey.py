"""`assay survey`: every kernel of a table against its contract."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from assay.cli.progress import Ticker, complain
from assay.golden.isolate import Workers, worker_count
from assay.verify.errors import SettingError

if TYPE_CHECKING:
    from assay.verify.survey import Row
    from assay.verify.survey_table import Entry

_TIMEOUT = 30.0  # seconds for one call of a kernel
_PIPED_WIDTH = 160
_COLOURS = {"PASS": "green", "FAIL": "red", "NOT HERE": "dim", "NOT RUN": "dim"}


def survey(
    examples: Annotated[
        int, typer.Option(min=0, help="Fuzzed cases per kernel and dtype, beside the fixed phases.")
    ] = 20,
    seed: Annotated[int, typer.Option(help="Seed of every examination.")] = 0,
    device: Annotated[str, typer.Option(help="Where the kernels run.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder of index.html and survey.json.")] = Path("report"),
    only: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
    table: Annotated[
        Path | None, typer.Option(help="A table of your own kernels, in the form of configs/survey.toml.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--time", min=0, help="Begin no further kernel after so many seconds.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 unless every kernel that is here passed.")
    ] = False,
) -> int:
    """Every kernel of the survey table against its contract, in each of its dtypes.

    Exits with 0 when it ran to its end, whatever it found: the kernels are mostly other people's. The reports are
    written anew after each examination.
    """
    started = time.monotonic()
    with Workers(worker_count(), preload="assay.verify.survey") as workers:
        from assay.verify.question import check_device
        from assay.verify.survey import not_run, plan, run
        from assay.verify.survey_table import entries

        check_device(device)
        jobs = plan(
            _chosen(entries(table), only), examples=examples, seed=seed, device=device, timeout=_TIMEOUT, threads=1
        )
        rows = [not_run(job, "not yet") for job in jobs]
        until = float("inf") if seconds is None else started + seconds
        about = {"examples": examples, "seed": seed, "device": device}
        done, interrupted = 0, False
        _write(out, rows, about, 0.0)  # where that can't be done, nobody waits to learn it
        with Ticker("examined", len(jobs), sum(job.effort for job in jobs)) as ticker:
            try:
                for place, row in run(jobs, workers, until=until):
                    rows[place] = row
                    done += 1
                    ticker.advance(jobs[place].effort)
                    _write(out, rows, about, time.monotonic() - started)
            except KeyboardInterrupt:
                interrupted = True
    taken = time.monotonic() - started
    page, data = _write(out, rows, about, taken)
    _print(rows, f"{taken:.0f} s, {page}, {data}")
    if interrupted:
        return complain(f"interrupted; {done} of {len(jobs)} examinations are done, and stand in {data}", status=130)
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
    return int(strict and any(row.outcome not in ("PASS", "NOT HERE") for row in rows))


def _write(out: Path, rows: Sequence[Row], settings: dict[str, Any], taken: float) -> tuple[Path, Path]:
    """Both reports; their paths."""
    import torch

    from assay.verify.report import survey_page, tally
    from assay.verify.verdict import write_whole

    about = {
        "assay": version("kernel-assay"),
        "torch": torch.__version__,
        "machine": _machine(settings["device"]),
        "made": datetime.now().astimezone().isoformat(" ", timespec="minutes"),
    }
    content = (
        about
        | settings
        | {
            "seconds": round(taken, 1),
            "counts": tally(rows),
            "rows": [row.as_dict() for row in rows],
        }
    )
    shown = about | {
        "examples": f"{settings['examples']} fuzzed, seed {settings['seed']}",
        "took": f"{taken:.0f} s",
    }
    page = write_whole(out / "index.html", survey_page(rows, shown))
    return page, write_whole(out / "survey.json", json.dumps(content, indent=1, allow_nan=False))


def _machine(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {platform.system()}"


def _print(rows: Sequence[Row], where: str) -> None:
    """The table, and under it what it amounts to."""
    from assay.verify.report import ratio, tally

    console = Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name, settings in (
        ("kernel", {"overflow": "fold", "min_width": 20}),
        ("dtype", {"no_wrap": True}),
        ("cases", {"justify": "right"}),
        ("worst", {"justify": "right", "no_wrap": True}),
        ("outcome", {"no_wrap": True}),
        ("first violation (sizes not listed are 1)", {"overflow": "fold", "min_width": 30}),
    ):
        table.add_column(name, **settings)
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
    console.print(table)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in tally(rows).items())
    console.print(Text(f"\n{counts}; {where}"), soft_wrap=True)
