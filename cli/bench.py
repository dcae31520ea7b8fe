"""`assay bench`: one table of speed and accuracy, of calls that are judged as they are timed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Argument, Option

from assay.cli import settings
from assay.cli.progress import console, console_table, note
from assay.runtime.files import write_text_atomically
from assay.runtime.results import contents, result_key
from assay.verify.errors import BenchError

if TYPE_CHECKING:
    from assay.bench.timing.contest import Record
    from assay.verify.campaign.table import Entry

_PIPED_WIDTH = 200  # columns if standard output is no terminal
_COMPARED_RUNS = 7  # the full ranges of 7 and 7 runs exclude a zero shift wrongly in 1 of 1,716 comparisons
_ANSWERED_BY = "assay.cli.bench_runs"


_TARGETS = (
    "package.module:function, a kernel of the survey or a part of its name, or a table's TOML file; what can be timed "
    "here of those that come along if none. Or a kernel benchmark's problem and its solutions, FlashInfer Trace's too."
)
_RUNS = "Processes, one after another; 1, or 7 with --save and --compare."
_COLD = "Caches without the inputs; --cold on a GPU, else --warm."
_GRAPHS = "Time replays of CUDA graphs, or launches; by default graphs where the host takes longer than the device."
_RECORD = "FILE.json|FOLDER"
_COMPARE = "Is it slower than that record, or a folder's newest one?"
_RESOLUTION = 'A change so large must be ruled out for "same": 0.03 is 3 %.'
_PLOT = "Roofline, accuracy, and the history of --save's folder."
_PROFILE = "Nsight Compute's CSV or Proton's .hatchet of these kernels; repeatable."
_TRACE = "Write what solutions gave as traces of FlashInfer Bench."
Against = Annotated[str, Option(metavar="usual|none|all", help="What else of the same op is timed beside.")]


def bench(
    targets: Annotated[list[str] | None, Argument(metavar="TARGET...", help=_TARGETS)] = None,
    spec: settings.SpecName = "",
    dtype: settings.Dtypes = None,
    option: settings.Options = None,
    at: settings.Sizes = None,
    layout: settings.TensorLayouts = None,
    contract: settings.ContractFields = None,
    device: settings.Device = "cpu",
    against: Against = "usual",
    compiles: Annotated[bool, Option("--compiled/--no-compiled", help="PyTorch's own by torch.compile, too.")] = True,
    seconds: Annotated[float, Option(min=0.01, help="Of each kernel at each case in a run.")] = 0.5,
    rounds: Annotated[int, Option(min=1, help="In which kernels take turns in a run.")] = 5,
    runs: Annotated[int | None, Option(min=1, help=_RUNS)] = None,
    cold: Annotated[bool | None, Option("--cold/--warm", help=_COLD)] = None,
    graph: Annotated[bool | None, Option("--graphs/--launches", help=_GRAPHS)] = None,
    save: Annotated[Path | None, Option(metavar=_RECORD, help="Keep the record; in a folder, beside others.")] = None,
    compare: Annotated[Path | None, Option(metavar=_RECORD, help=_COMPARE)] = None,
    resolution: Annotated[float, Option(min=0.001, help=_RESOLUTION)] = 0.03,
    plot: Annotated[Path | None, Option(metavar="FILE.html", help=_PLOT)] = None,
    profile: Annotated[list[Path] | None, Option(metavar="FILE", help=_PROFILE)] = None,
    trace: Annotated[Path | None, Option(metavar="FILE.jsonl", help=_TRACE)] = None,
    out: settings.Page = None,
    as_json: settings.AsJson = False,
    ops: settings.Ops = None,
) -> int:
    """Time kernels by turns with what else does the same, judging the calls that are timed.

    Each call has other numbers than the one before, and some are judged; a kernel that is wrong in one has no time in
    the table. Exits with 1 where a kernel was wrong, or became slower than --compare says.
    """
    from assay.bench.timing import page
    from assay.bench.timing.contest import Record, TimingOptions, history, machine, versions
    from assay.bench.timing.gate import compared
    from assay.bench.timing.profile import counters
    from assay.cli.bench_runs import is_problem, of_kernels, of_solutions
    from assay.verify.harness.frameworks import check_device

    if against not in ("usual", "none", "all"):
        raise BenchError(f"--against {against}; expected usual, none or all")
    check_device(device)
    record_file = None if save is not None and save.is_dir() else save  # in a folder the record has a name of its own
    mine = (
        ("--save", record_file, '{\n "bench": '),
        ("--out", out, "# Speed and "),
        ("--plot", plot, "<!doctype html>"),
    )
    for flag, path, head in (*mine, ("--trace", trace, '{"definition": ')):
        settings.check_ours(flag, path, head)
    past = [one for one in history(compare) if one.machine == machine(device)] if compare is not None else []
    if compare is not None and not past:
        raise BenchError(f"--compare {compare}: holds no record of this machine ({machine(device)})")
    measured = [line for path in profile or () for line in counters(path)]
    options = TimingOptions(device, seconds, rounds, device.startswith("cuda") if cold is None else cold, graph)
    count = runs or (_COMPARED_RUNS if save is not None or compare is not None else 1)
    if targets and is_problem(targets[0]):
        without = ("--spec", spec), ("--dtype", dtype), ("--option", option), ("--at", at), ("--layout", layout)
        if given := [
            name for name, value in (*without, ("--contract", contract), ("--graphs", graph is not None)) if value
        ]:
            raise BenchError(f"{given[0]}: a problem states its own sizes and reference; leave it out")
        request = {"device": device, "seconds": seconds, "compiled": compiles}
        kernels_timed = targets
        timed = of_solutions(targets[0], targets[1:], request, count, trace)
    elif trace is not None:
        raise BenchError("--trace: expected a FlashInfer Trace definition and its solutions, got kernels")
    else:
        sizes = settings.request(at, layout)
        kernels = settings.adapted_entries(_chosen(targets, spec, device), dtype, option, None, contract)
        kernels_timed = [kernel.target for kernel in kernels]
        timed = of_kernels(kernels, sizes, options, count, against=against, compiles=compiles)
    files = [contents(target) for target in kernels_timed if Path(target).exists()]
    record = Record(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        machine=machine(device),
        device=device,
        clock=timed.clock,
        peak=timed.peak,
        command=shlex.join(["assay", *sys.argv[1:]]),
        versions=versions(),
        lines=tuple(timed.lines),
        key=result_key(files, _ANSWERED_BY, targets=kernels_timed)[:16],
    )
    changes = compared(past[-1], record, past, resolution=resolution) if past else []
    if save is not None:
        note(f"wrote {record.save(save)}")
    if as_json:
        print(page.as_json(record, changes))
    else:
        _print(record)
        for words in [*map(page.change_words, changes), *measured]:
            print(words)
    if out is not None:
        note(f"wrote {write_text_atomically(out, page.markdown(record, changes))}")
    if plot is not None:
        from assay.bench.timing.plots import plots

        known = history(save) if save is not None and save.is_dir() else [*past, record]
        note(f"wrote {write_text_atomically(plot, plots(known))}")
    wrong = any(line.outcome == "FAIL" for line in record.lines)
    return int(wrong or any(change.answer == "slower" for change in changes))


def _chosen(targets: Sequence[str] | None, spec: str, device: str) -> list[Entry]:
    from assay.cli.verify import entries_of
    from assay.verify.campaign.table import entries

    if targets:
        return [entry for target in targets for entry in entries_of(target, spec)]
    groups = ("assay", "cuda") if device.startswith("cuda") else ("torch", "torch-composed")
    return [
        replace(entry, dtypes=entry.survey_dtypes or entry.dtypes[:1])
        for entry in entries()
        if entry.group in groups and not entry.absence(device)
    ]


def _commit() -> str:
    """Return the commit of the current folder, with + if files differ from it; empty outside of a repository."""
    try:
        request = {"capture_output": True, "text": True, "check": True, "timeout": 10}
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **request).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **request).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{head}{'+' if changed else ''}"


def _print(record: Record) -> None:
    from assay.bench.timing import page

    out = console(_PIPED_WIDTH)
    out.print(f"{record.machine}; {record.clock}", soft_wrap=True, highlight=False)
    for case, same in page.by_case(record.lines):
        out.print(Text(f"\n{case}", style="bold"), soft_wrap=True)
        out.print(console_table(page.HEAD, (page.row(line, same[0].seconds) for line in same)))
