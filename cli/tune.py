"""`assay tune`: the fastest configuration of a kernel that keeps its contract."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Argument, Option

from assay.cli import settings
from assay.cli.inspect import compiling
from assay.cli.progress import console, console_table, note, report_error
from assay.runtime.engines import engine_named
from assay.runtime.records import plain
from assay.verify.errors import TuneError

if TYPE_CHECKING:
    from assay.bench.tuning.record import Candidate, Record
    from assay.bench.tuning.space import Space
    from assay.verify.campaign.table import Entry
    from assay.verify.settings import Settings

_PIPED_WIDTH = 200  # columns if standard output is no terminal
_PRELOAD = "assay.verify.campaign.survey"
_SILENT = 600.0  # seconds without a message after which a worker is stopped
_HEAD = ("choice", "outcome", "time", "error/allowed", "bits", "registers", "spilled", "shared KiB", "")


_TARGET = "package.module:function; its autotuner's configurations count."
_CHOICE = "BLOCK_M=64,128: values of a keyword that the function takes; may be repeated."
_SPACE = "The same as a file: [choices], and a list `without`."
_ARCH = "What is compiled for where no GPU is; sm_90a, or the device's own."
_MOST_ERROR = "A winner's largest error, as a share of what the contract allows."
_OUT = "The record; kept, it answers the same question again."
_REPLAY = "Run a record's search again: does it still hold?"


def tune(
    target: Annotated[str, Argument(metavar="[TARGET]", help=_TARGET)] = "",
    spec: Annotated[str, Option(help="What it implements, e.g. gemm.")] = "",
    choice: Annotated[list[str] | None, Option(help=_CHOICE)] = None,
    space: Annotated[Path | None, Option(metavar="FILE.toml", help=_SPACE)] = None,
    dtype: settings.Dtype = "",
    option: settings.Options = None,
    at: settings.Sizes = None,
    layout: settings.TensorLayouts = None,
    contract: settings.ContractFields = None,
    device: settings.Device = "cpu",
    arch: Annotated[str, Option(help=_ARCH)] = "",
    effort: settings.Effort = "quick",
    most_error: Annotated[float, Option(min=0.0, max=1.0, help=_MOST_ERROR)] = 1.0,
    seconds: Annotated[float, Option(min=0.01, help="Of each candidate's calls that are timed at a size.")] = 0.5,
    rounds: Annotated[int, Option(min=1, help="In which candidates take turns.")] = 5,
    at_once: settings.Jobs = 0,
    engine: settings.EngineName = "local",
    out: Annotated[Path | None, Option(metavar="FILE.json", dir_okay=False, help=_OUT)] = None,
    anew: settings.Anew = False,
    replay: Annotated[Path | None, Option(metavar="FILE.json", help=_REPLAY)] = None,
    as_json: settings.AsJson = False,
    ops: settings.Ops = None,
) -> int:
    """Find the fastest configuration of a kernel that keeps its contract.

    Candidates are pruned by the compiler, examined, and timed in calls that are judged; a wrong one can't win. Without
    a GPU a Triton kernel's candidates are ordered by a model of their compiled code, and none is timed; none wins where
    the model finds the same work in several.
    Exits with 1 where no candidate keeps the contract, or a replay finds something else than its record says.
    """
    from assay.bench.tuning.record import Question, read
    from assay.bench.tuning.searching import Search, changed
    from assay.verify.harness.frameworks import check_device

    settings.check_ours("--out", out if anew else None, '{\n "tune": ')
    if (replay is None) == (not target):
        raise TuneError("tune: expected a TARGET, package.module:function, or --replay FILE.json")
    before = read(replay) if replay is not None else None
    if before is not None:
        question = before.question
    else:
        entry, chosen = _kernel(target, spec, dtype, option, contract)
        request = settings.request(at, layout)
        question = Question(
            target=entry.target,
            spec=chosen.spec,
            space=_space(choice, space),
            sizes=tuple(map(dict, request.sizes)),
            settings={n: value for n, value in chosen.as_table().items() if n not in ("spec", "effort", "device")},
            layouts=dict(request.layouts or {}),
            device=device,
            arch=arch,
            effort=effort,
            most_error=most_error,
            seconds=seconds,
            rounds=rounds,
        )
    check_device(question.device)
    with compiling(), engine_named(engine, at_once or None, preload=_PRELOAD, timeout=_SILENT) as workers:
        search = Search(question, workers, note)
        record = None
        if out is not None and out.exists() and not anew:
            record = read(out)
            if (record.question.target, record.question.spec) != (question.target, question.spec):
                raise TuneError(
                    f"--out {out}: holds a search of {record.question.target}; name another file, or --anew"
                )
            if record.key != search.key():
                record = None
        if record is None:
            record = search.run()
            if out is not None:
                note(f"wrote {record.save(out)}")
        else:
            note(f"{out} holds the answer (--anew searches again)")
    if as_json:
        print(json.dumps(plain(vars(record)), indent=1))
    else:
        _report(record)
    if before is not None:
        differences = changed(before, record)
        print("\n".join(differences) if differences else "holds: every candidate and winner is as it was")
        return int(bool(differences))
    if record.winners or any(one.outcome == "PASS" for one in record.candidates):
        return 0
    return report_error("no candidate keeps the contract", status=1)


def _space(choices: Sequence[str] | None, path: Path | None) -> Space:
    from assay.bench.tuning.space import Space, read_space

    if path is not None:
        if choices:
            raise TuneError(f"--space {path} --choice {choices[0]}: expected one of them")
        return read_space(path)
    values = {}
    for text in choices or ():
        name, parts = settings.pair("--choice", text, "a parameter", "BLOCK_M=64,128")
        values[name] = [settings.literal(part) for part in parts]
    return Space(values)


def _kernel(
    target: str, spec: str, dtype: str, option: settings.Texts, contract: settings.Texts
) -> tuple[Entry, Settings]:
    from assay.cli.verify import entries_of

    (entry, *others) = entries_of(target, spec)
    if others or ":" not in entry.target:
        raise TuneError(f"tune: {target} means several kernels; expected one package.module:function")
    kind = settings.one_dtype(dtype) if dtype else entry.dtypes[0]
    return entry, settings.usual_dtype(settings.adapted(entry.settings, option, None, contract), kind)


def _report(record: Record) -> None:
    out = console(_PIPED_WIDTH)
    cases = dict.fromkeys(one.case for one in record.candidates)
    for case in cases:
        own = [one for one in record.candidates if one.case == case]
        own.sort(key=lambda one: (one.outcome not in ("PASS", "SLOWER"), one.time))
        out.print(Text(f"\n{case}", style="bold"), soft_wrap=True)
        out.print(console_table(_HEAD, map(_row, own)))
    for winner in record.winners:
        sizes = ", ".join(f"{name}={size}" for name, size in winner.sizes.items())
        how = "measured" if winner.measured else "by the model, not measured"
        out.print(Text(f"up to {sizes}: {winner.choice} ({how})"), soft_wrap=True)
    if not record.winners and any(one.outcome == "PASS" for one in record.candidates):
        out.print(Text("no winner: the model can't tell the candidates apart; time them on a GPU"), soft_wrap=True)


def _row(one: Candidate) -> tuple[str, ...]:
    from assay.bench.timing.page import duration

    time = duration(one.seconds) or (f"~{duration(one.modelled)} (model)" if one.modelled else "")
    return (
        str(one.choice),
        f"{one.outcome}{' (front)' if one.front else ''}",
        time,
        f"{one.worst:.2g}" if one.worst is not None else "",
        f"{one.bits:.1f}" if one.bits is not None else "",
        str(one.registers or ""),
        str(one.spilled) if one.spilled is not None else "",
        f"{one.shared / 1024:.3g}" if one.shared is not None else "",
        one.why,
    )
