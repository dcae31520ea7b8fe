"""`assay audit`: which number format each part of a model may have, under budgets of error, bytes and time."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from assay.cli import settings
from assay.cli.audit_options import (
    CONTEXT,
    QUICK,
    USUAL,
    Context,
    Device,
    assignment_of,
    bytes_of,
    check_names,
    exports_of,
    lacking,
    loaded_of,
    over_positions,
    pace_of,
    span,
    verified,
)
from assay.cli.progress import ProgressBar, note, report_error
from assay.formats.errors import UnknownOption
from assay.precision.errors import BadAssignment
from assay.runtime.deadline import Deadline
from assay.runtime.environment import standard_environment
from assay.runtime.errors import AssayError
from assay.runtime.files import locked, write_text_atomically
from assay.runtime.records import LARGEST_SEED

if TYPE_CHECKING:
    from assay.precision.auditing import Audit
    from assay.precision.cache import Cache
    from assay.precision.choice.recommendation import Assignment
    from assay.precision.export import Exported
    from assay.precision.loading import Loaded
    from assay.precision.report import record

_LONG = 10.0
"""Seconds above which the estimated duration of an audit is printed beforehand."""
_LONGEST = 256
"""Default tokens of a sequence."""


_MODEL = (
    "A directory of Hugging Face's form, a bundled model (stdlib-llama, stdlib-mixtral), or package.module:factory, "
    "a function that gives a torch.nn.Module and its tokenizer."
)
_OUT = "Folder for audit.json, report.html and what is computed."
_CHECK = "Text that the choice is judged on; else a quarter of --text is held out."
_MAX_KL = "Largest error, in the metric's unit: nats per token for kl."
_MAX_TIME = "Longest decode step on the target, by the roofline; of encoders, pass."
_TARGET = "h200, llama.cpp, llama.cpp@h200, ...: whose formats are chosen from."
_LINES = "Every line of the text is a sequence: for encoders."
_MAX_MEMORY = "Most bytes of weights in memory, in float32: 2GB; the others are read."
_QUICK = "Measure less: intervals are wider and promise less."
_EXACT = "Predict from every row of every weight, not from a sample of large ones'."
_COMPARE = "Two assignments, or two audit.json: which is better, and by how much."
_EXPORT = "A target of docs/exports.md, such as vllm, or all; may be repeated."
_VERIFY_EXPORT = "Read an export as its readers do."


@standard_environment()
def audit(
    model: Annotated[str, Argument(metavar="MODEL", help=_MODEL)],
    text: Annotated[Path, Option(metavar="FILE", help="Text like that which the model will see, in UTF-8.")],
    out: Annotated[Path, Option(metavar="DIR", file_okay=False, help=_OUT)],
    check: Annotated[Path | None, Option(metavar="FILE", help=_CHECK)] = None,
    max_kl: Annotated[float | None, Option(metavar="X", help=_MAX_KL)] = None,
    max_bytes: Annotated[str, Option(metavar="N", help="Most bytes of weights: 800MB, 3.2GB, 1.5GiB.")] = "",
    max_time: Annotated[float | None, Option(metavar="MS", help=_MAX_TIME)] = None,
    target: Annotated[str, Option(metavar="NAME", help=_TARGET)] = "",
    metric: Annotated[str, Option(metavar="kl|relative", help="kl; relative for encoders.")] = "",
    formats: Annotated[str, Option(metavar="A,B,...", help="Names of schemes, where not all.")] = "",
    sequence: Annotated[int | None, Option(min=2, help="Tokens of a sequence; 256, or what fits.")] = None,
    sequences: Annotated[int, Option(min=1, help="How many sequences.")] = 64,
    batch: Annotated[int, Option(min=1, help="Sequences that run at once.")] = 8,
    lines: Annotated[bool, Option("--lines", help=_LINES)] = False,
    context: Context = None,
    max_memory: Annotated[str, Option(metavar="N", help=_MAX_MEMORY)] = "",
    device: Device = "cpu",
    quick: Annotated[bool, Option("--quick", help=_QUICK)] = False,
    budget: settings.Budget = None,
    exact: Annotated[bool, Option("--exact", help=_EXACT)] = False,
    anew: settings.Anew = False,
    compare: Annotated[tuple[Path, Path] | None, Option(metavar="A B", help=_COMPARE)] = None,
    export: Annotated[list[str] | None, Option(metavar="FORMAT", help=_EXPORT)] = None,
    verify_export: Annotated[
        Path | None, Option(metavar="DIR", is_eager=True, callback=verified, help=_VERIFY_EXPORT)
    ] = None,
    checkpoint: Annotated[bool, Option("--checkpoint", help="Write a quantised checkpoint too.")] = False,
    trust: Annotated[bool, Option("--trust", help="Run code that comes with the model.")] = False,
    seed: Annotated[int, Option(min=0, max=LARGEST_SEED, help="Of the random cotangents and assignments.")] = 0,
) -> int:
    """Predict and measure what each format costs at each part of a model, and choose.

    Without a budget the weights may have half of their bytes. Exits with 1 where the budgets can't be met; then the
    closest assignment and the budgets that bind are printed.
    """
    size, memory = bytes_of("--max-bytes", max_bytes), bytes_of("--max-memory", max_memory)
    wanted, bound = exports_of(export or [])
    if quick and budget is not None:
        raise UnknownOption("--quick and --budget both say how much is measured; give one of them")
    for flag, limit in (("--budget", budget), ("--max-kl", max_kl), ("--max-bytes", size), ("--max-time", max_time)):
        if limit is not None and not limit > 0:
            raise UnknownOption(f"{flag} {limit:g}; expected a number above 0")
    if check is not None and check.exists() and text.exists() and check.samefile(text):
        raise UnknownOption(f"--check {check} is --text; give a text of its own, or leave --check away")
    if compare and (wanted or checkpoint):
        raise UnknownOption("--compare writes no exports; leave --export and --checkpoint away, or --compare")
    from assay.precision.auditing import audit as examine
    from assay.precision.baseline import baselines
    from assay.precision.cache import Cache, fingerprint
    from assay.precision.choice.roofline import Shape
    from assay.precision.export import allow_unfused, unexportable
    from assay.precision.report import record

    names = [name.strip() for name in formats.split(",") if name.strip()] or None
    timed = max_time is not None
    names_examined, menu = check_names(names, target, metric, timed=timed, exports=bound, checkpoint=checkpoint)
    assignments = [assignment_of(path) for path in compare or ()]
    loaded = loaded_of(model, memory, device, trust=trust, checkpoint=checkpoint)
    if lost := [name for name in names or () if name not in menu]:
        note(f"left out of --formats, since not every export holds it: {', '.join(lost)}")
    metric = metric or ("relative" if loaded.kind == "encoder" else "kl")
    decodes = loaded.kind not in ("encoder", "classifier")
    length = sequence or min(_LONGEST, loaded.positions or _LONGEST)
    batches, held_out = loaded.parts(text, check, sequence=length, sequences=sequences, batch=batch, lines=lines)
    deadline = Deadline(math.inf if budget is None else budget)
    pace, effort = pace_of(loaded.model, batches, held_out, menu), QUICK if quick else USUAL
    estimated = pace.whole(effort) if budget is None else budget
    if estimated >= _LONG and not compare:
        shorter = "" if quick or budget is not None else f"; --quick, about {span(pace.whole(QUICK))}"
        note(f"takes about {span(estimated)}{shorter}")
    unfused = allow_unfused(target or None, bound)
    depends_on = len(batches), metric, names_examined, target, unfused, seed, exact
    digest = fingerprint(loaded.model, [*batches, *(held_out or ())], *depends_on)
    kept = Cache(out / "kept", digest, fresh=anew)
    if not anew and kept.stored_key not in ("", kept.fingerprint):
        words = "another model, text, set of options that what is measured depends on, or version of assay"
        note(f"{kept.folder} is of {words}: nothing is taken from it")
    shape = replace(Shape.of(loaded.model), context=context or CONTEXT)
    with _stoppable(kept), Stages() as stages:
        result = examine(
            loaded.model,
            batches,
            metric,
            names_examined,
            target or None,
            check=held_out,
            seed=seed,
            bits=loaded.stored.itemsize * 8,
            shape=shape,
            progress=stages,
            cache=kept,
            unfused=unfused,
            exact=exact,
        )
        if budget is not None:
            pace = pace.confirmed(result)
            effort = pace.within(left := deadline.left)
            if pace.left(effort) > left:
                note(f"the least takes {span(pace.left(effort))} from here on")
        result.calibrate(effort.count)
        if assignments:
            return _compare(result, [str(path) for path in compare or ()], assignments, out, decodes)
        result.limit(menu)
        limits = {"error": max_kl, "bytes": size, "time": None if max_time is None else max_time / 1e3}
        assumed = all(limit is None for limit in limits.values())
        if assumed:
            limits["bytes"] = result.cost({}).bytes / 2
        began = time.monotonic()
        sites = {str(site): site for site in result.sites}
        fixed = unexportable(result.model, sites, wanted, checkpoint, target or None)  # no export can quantise these
        time_of = "max_time" if decodes else "max_prefill"
        chosen = result.recommend(limits["error"], limits["bytes"], fixed=fixed, **{time_of: limits["time"]})
        most = math.inf if max_kl is None else max_kl
        simple = baselines(result, chosen, fixed=fixed, max_error=most, caches=decodes)
        front = result.pareto(effort.points)
        result.seconds["choosing"] = time.monotonic() - began
        began = time.monotonic()
        stages("measuring the front", 0, 1)
        for (*_, assignment), error in zip(front, result.measure_together([each[-1] for each in front]), strict=True):
            assignment.measured = error
        stages("measuring the front", 1, 1)
        result.seconds["measuring"] += time.monotonic() - began
        curve = over_positions(result, chosen, loaded, check or text, context)
    if kept.reused:
        note(f"{kept.reused} of the errors were measured before, in {kept.folder}")
    stored = str(loaded.stored).removeprefix("torch.")
    about = {
        "model": record.Model(loaded.name, loaded.kind, stored, sum(p.numel() for p in result.model.parameters())),
        "data": _data(text, batches),
        "held_out": None if held_out is None else _data(check or text, held_out),
        "baselines": simple,
        "positions": curve,
        "settings": record.Settings(
            metric=result.metric.name,
            unit=result.metric.unit,
            target=result.target,
            formats=names or [],
            context=shape.context,
            budgets=record.Budgets(**{name: limit for name, limit in limits.items() if limit is not None}),
            assumed=assumed,
            fixed=fixed,
        ),
        "fingerprint": digest,
        "command": shlex.join(["assay", *sys.argv[1:]]),
    }
    try:
        exported = _exported(result, loaded, chosen, out / "export", wanted, checkpoint)
    except AssayError:  # the results so far are reported in any case
        _report(result, chosen, front, about, _exported(result, loaded, chosen, out / "export", [], False), out)
        raise
    _report(result, chosen, front, about, exported, out)
    short = lacking(exported, bound, size, lambda held: result.cost(held).bytes)
    return int(not chosen.met or bool(short) or bool(exported and exported.refused))


def _data(text: Path, batches: Sequence[Mapping[str, Any]]) -> record.Data:
    from assay.precision.report import record

    sequences = sum(len(each["input_ids"]) for each in batches)
    return record.Data(str(text), sequences, tokens=sum(int(each["attention_mask"].sum()) for each in batches))


class Stages(ExitStack):
    """Progress of an audit's stages, with one bar per stage; a context manager."""

    _stage = ""
    _bar: ProgressBar | None = None

    def __call__(self, stage: str, done: int, count: int) -> None:
        """Show that ``done`` of ``count`` steps of a stage are done."""
        if stage != self._stage or self._bar is None:
            self.close()
            self._stage, self._bar = stage, self.enter_context(ProgressBar(stage, count))
        self._bar.advance()
        if done >= count:
            self.close()
            self._bar = None


@contextmanager
def _stoppable(kept: Cache) -> Iterator[None]:
    """On an interruption inside the block, print one line on where the results so far are."""
    try:
        yield
    except KeyboardInterrupt:
        there = kept.folder.is_dir()
        what = f"what was measured is in {kept.folder}, and is reused" if there else "nothing was measured yet"
        raise typer.Exit(report_error(f"stopped; {what}", status=130)) from None


def _exported(
    result: Audit, loaded: Loaded, chosen: Mapping[str, str], folder: Path, formats: Sequence[str], checkpoint: bool
) -> Exported | None:
    """Write the exports into a folder, replacing those of an earlier audit, and load the readable ones again.

    A difference between an export's error and that of its simulation is reported on standard error.
    """
    from assay.precision.export import clear, export, reloaded

    if not formats and not checkpoint:
        if clear(folder):
            note(f"removed from {folder} what an earlier audit exported")
        return None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent):  # another audit may export to the same folder
        exported = export(
            result.model,
            chosen,
            folder,
            formats,
            sites={str(site): site for site in result.sites},
            fits=result.fits,
            source=loaded.path,
            dtype=loaded.stored,
            target=result.target,
            checkpoint=checkpoint,
            overwrite=True,
            partial=True,
        )
        parts = []
        for part in exported.parts:
            again = reloaded(result, part)
            if again is not None and not again.agrees:
                note(f"{part.format}: {again.words}")
            parts.append(replace(part, loaded=again))
    return replace(exported, parts=tuple(parts))


def _report(
    result: Audit,
    chosen: Assignment,
    front: Sequence[Any],
    about: Mapping[str, Any],
    exported: Exported | None,
    out: Path,
) -> None:
    """Write audit.json and report.html, and print the summary; export notes go to standard error."""
    from assay.precision.auditing import advise
    from assay.precision.report import content_of, page, summary

    parts = exported.parts if exported else ()
    content = content_of(result, chosen, front, advise(result), parts, **about)
    paths = [
        write_text_atomically(out / "audit.json", json.dumps(content, indent=1, allow_nan=False) + "\n"),
        write_text_atomically(out / "report.html", page(content)),
    ]
    paths += [path for part in parts for path in part.paths]
    print(summary(content, [str(path) for path in paths]))
    for words in exported.notes if exported else ():
        note(words)


def _compare(
    result: Audit, names: Sequence[str], assignments: Sequence[Mapping[str, str]], out: Path, decodes: bool
) -> int:
    """Predict and measure two assignments, print which is better, and write compare.json."""
    from assay.precision.report.comparison import compared, in_lines

    for name, assignment in zip(names, assignments, strict=True):
        try:
            result.checked(assignment)
        except AssayError as error:
            raise BadAssignment(f"{name}: {error}") from None
    content = compared(result, names, assignments, decodes=decodes)
    path = write_text_atomically(out / "compare.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    print(in_lines(content))
    print(f"  wrote       {path}")
    return 0
