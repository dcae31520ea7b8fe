"""`assay bench`: one table of speed and accuracy, of calls that are judged as they are timed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from assay.cli import settings
from assay.cli.progress import console, console_table
from assay.runtime.files import write_text_atomically
from assay.verify.errors import BenchError

if TYPE_CHECKING:
    from assay.bench.timing.contest import Record
    from assay.bench.timing.gate import Change
    from assay.cli.bench_runs import Timed
    from assay.verify.campaign.table import Entry

_PIPED_WIDTH = 200  # columns if standard output is no terminal
_COMPARED_RUNS = 7  # the full ranges of 7 and 7 runs exclude a zero shift wrongly in 1 of 1,716 comparisons
_ANSWERED_BY = "assay.cli.bench_runs"


def bench(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET...",
            help="package.module:function, a kernel of the survey or a part of its name, or a table's TOML file; what "
            "can be timed here of those that come along if none. Or a kernel benchmark's problem and its solutions, "
            "FlashInfer Trace's among them.",
        ),
    ] = None,
    spec: Annotated[str, typer.Option(help="What package.module:function implements, e.g. softmax.")] = "",
    dtype: settings.Dtypes = None,
    option: settings.Options = None,
    at: settings.Sizes = None,
    layout: settings.TensorLayouts = None,
    contract: settings.ContractFields = None,
    device: settings.Device = "cpu",
    against: Annotated[
        str, typer.Option(metavar="usual|none|all", help="What else of the same op is timed beside.")
    ] = "usual",
    compiles: Annotated[
        bool, typer.Option("--compiled/--no-compiled", help="PyTorch's own by torch.compile, too.")
    ] = True,
    seconds: Annotated[float, typer.Option(min=0.01, help="Of each kernel at each case in a run.")] = 0.5,
    rounds: Annotated[int, typer.Option(min=1, help="In which kernels take turns in a run.")] = 5,
    runs: Annotated[
        int | None, typer.Option(min=1, help="Processes, one after another; 1, or 7 with --save and --compare.")
    ] = None,
    cold: Annotated[
        bool | None, typer.Option("--cold/--warm", help="Caches without the inputs; --cold on a GPU, else --warm.")
    ] = None,
    graph: Annotated[bool, typer.Option("--graphs", help="Replays of CUDA graphs, in place of launches.")] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE.json|FOLDER", help="Keep the record; in a folder, beside others.")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json|FOLDER", help="Is it slower than that record, or a folder's newest one?"),
    ] = None,
    resolution: Annotated[
        float, typer.Option(min=0.001, help='A change so large must be ruled out for "same": 0.03 is 3 %.')
    ] = 0.03,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Roofline, accuracy, and the history of --save's folder.")
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Nsight Compute's CSV or Proton's .hatchet of these kernels; repeatable."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Write what solutions gave as traces of FlashInfer Bench.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.md", dir_okay=False, help="Write a page in Markdown, too.")
    ] = None,
    as_json: settings.AsJson = False,
    ops: settings.Ops = None,
) -> int:
    """Time kernels by turns with what else does the same, judging the calls that are timed.

    Each call has other numbers than the one before, and some are judged; of a kernel that is wrong in one no time is
    told. Exits with 1 where a kernel was wrong, or became slower than --compare says.
    """
    from assay.bench.inspection.calls import Request
    from assay.bench.timing.contest import TimingOptions, history, machine
    from assay.bench.timing.gate import compared
    from assay.bench.timing.page import change_words
    from assay.bench.timing.profile import counters
    from assay.cli.bench_runs import is_problem, of_kernels, of_solutions
    from assay.verify.cases.at_shape import read_sizes
    from assay.verify.harness.frameworks import check_device

    if against not in ("usual", "none", "all"):
        raise BenchError(f"--against {against}; expected usual, none or all")
    check_device(device)
    past = [one for one in history(compare) if one.machine == machine(device)] if compare is not None else []
    if compare is not None and not past:
        raise BenchError(f"--compare {compare}: holds no record of this machine ({machine(device)})")
    measured = [line for path in profile or () for line in counters(path)]
    on_gpu = device.startswith("cuda")
    options = TimingOptions(device, seconds, rounds, on_gpu if cold is None else cold, graph)
    count = runs or (_COMPARED_RUNS if save is not None or compare is not None else 1)
    if targets and is_problem(targets[0]):
        without = ("--spec", spec), ("--dtype", dtype), ("--option", option), ("--at", at), ("--layout", layout)
        if given := [name for name, value in (*without, ("--contract", contract), ("--graphs", graph)) if value]:
            raise BenchError(f"{given[0]}: a problem states its own sizes and reference; leave it out")
        request = {"device": device, "seconds": seconds, "compiled": compiles}
        asked_about = targets
        timed = of_solutions(targets[0], targets[1:], request, count, trace)
    elif trace is not None:
        raise BenchError("--trace: expected a FlashInfer Trace definition and its solutions, got kernels")
    else:
        sizes = Request(tuple(read_sizes(text, "--at") for text in at or ()), settings.tensor_layouts(layout))
        kernels = _chosen(targets or [], spec, dtype, option, contract, device)
        asked_about = [kernel.target for kernel in kernels]
        timed = of_kernels(kernels, sizes, options, count, against=against, compiles=compiles)
    record = _recorded(timed, device, asked_about)
    changes: list[Change] = []
    if past:
        changes = compared(past[-1], record, past, resolution=resolution)
    if save is not None:
        print(f"assay: wrote {record.save(save)}", file=sys.stderr)
    _report(record, changes, as_json=as_json)
    if not as_json:
        for words in [*map(change_words, changes), *measured]:
            print(words)
    if out is not None:
        from assay.bench.timing.page import markdown

        print(f"assay: wrote {write_text_atomically(out, markdown(record, changes))}", file=sys.stderr)
    if plot is not None:
        from assay.bench.timing.plots import plots

        known = history(save) if save is not None and save.is_dir() else [*past, record]
        print(f"assay: wrote {write_text_atomically(plot, plots(known))}", file=sys.stderr)
    wrong = any(line.outcome == "FAIL" for line in record.lines)
    return int(wrong or any(change.answer == "slower" for change in changes))


def _chosen(
    targets: Sequence[str],
    spec: str,
    dtype: Sequence[str] | None,
    option: Sequence[str] | None,
    contract: Sequence[str] | None,
    device: str,
) -> list[Entry]:
    from assay.cli.verify import entries_of
    from assay.verify.campaign.table import entries

    if not targets:
        groups = ("assay", "cuda") if device.startswith("cuda") else ("torch", "torch-composed")
        results = [
            replace(entry, dtypes=entry.survey_dtypes or entry.dtypes[:1])
            for entry in entries()
            if entry.group in groups and not entry.absence(device)
        ]
    else:
        results = [entry for target in targets for entry in entries_of(target, spec)]
    return [
        replace(
            entry,
            dtypes=settings.dtypes(dtype or ()) or entry.dtypes,
            settings=settings.adapted(entry.settings, option, None, contract),
        )
        for entry in results
    ]


def _recorded(timed: Timed, device: str, targets: Sequence[str]) -> Record:
    from assay.bench.timing.contest import Record, machine, versions
    from assay.runtime.results import contents, result_key

    files = [contents(target) for target in targets if Path(target).exists()]

    return Record(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        machine=machine(device),
        device=device,
        clock=timed.clock,
        peak=timed.peak,
        command=" ".join(["assay", *sys.argv[1:]]),
        versions=versions(),
        lines=tuple(timed.lines),
        key=result_key(files, _ANSWERED_BY, targets=targets)[:16],
    )


def _commit() -> str:
    """Return the commit of the current folder, with + if files differ from it; empty outside of a repository."""
    try:
        request = {"capture_output": True, "text": True, "check": True, "timeout": 10}
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **request).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **request).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{head}{'+' if changed else ''}"


def _report(record: Record, changes: Sequence[Change], *, as_json: bool) -> None:
    from assay.bench.timing import page

    if as_json:
        print(page.as_json(record, changes))
        return
    out = console(_PIPED_WIDTH)
    out.print(f"{record.machine}; {record.clock}", soft_wrap=True, highlight=False)
    for case, same in page.by_case(record.lines):
        out.print(Text(f"\n{case}", style="bold"), soft_wrap=True)
        out.print(console_table(page.HEAD, (page.row(line, same[0].seconds) for line in same)))
