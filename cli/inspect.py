"""`assay inspect`: the code that a GPU's compiler makes of Triton kernels, found out without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Argument, Option

from assay.cli import settings
from assay.cli.progress import ProgressBar, console, console_table, note, report_error
from assay.runtime.files import write_text_atomically
from assay.runtime.pool import Pool, Raised, worker_count
from assay.runtime.process import Lost
from assay.runtime.results import installed_version
from assay.verify.errors import SettingError, TargetError

if TYPE_CHECKING:
    from assay.bench.inspection.arch import Arch
    from assay.bench.inspection.inspecting import Job
    from assay.bench.inspection.page import Inspected
    from assay.verify.campaign.table import Entry

_PIPED_WIDTH = 220  # columns if standard output is no terminal
_BUNDLED = "assay"  # the bundled kernels' group in the survey's table


_TARGETS = (
    "package.module:function, a package or a kernel that `assay survey` knows, or a table's TOML file; "
    "all bundled Triton kernels if none."
)
_INPUTS = "In place of --spec: what gives the arguments of a call."
_EACH = "A row for each configuration, where several are inspected."
_PRUNED = "In the JSON, also what a tuner's own pruning leaves out at these sizes."


def inspect(
    targets: Annotated[list[str] | None, Argument(metavar="TARGET...", help=_TARGETS)] = None,
    arch: Annotated[str, Option(help="sm_80, sm_90a, sm_100a, ...; or a device: a100, h200, ...")] = "sm_90a",
    spec: settings.SpecName = "",
    inputs: Annotated[str, Option(metavar="MODULE:FUNCTION", help=_INPUTS)] = "",
    dtype: settings.Dtypes = None,
    option: settings.Options = None,
    at: settings.Sizes = None,
    layout: settings.TensorLayouts = None,
    each: Annotated[bool, Option("--each", help=_EACH)] = False,
    pruned: Annotated[bool, Option("--pruned", help=_PRUNED)] = False,
    as_json: settings.AsJson = False,
    out: settings.Page = None,
    strict: Annotated[bool, Option("--strict", help="Exit with 1 for any finding.")] = False,
    ops: settings.Ops = None,
) -> int:
    """What a GPU's compiler makes of Triton kernels: registers, spills, tensor cores, loads. No GPU is needed.

    Every launch, in every configuration of its tuner, is compiled for --arch by Triton and its own ptxas; none runs.
    Of several kernels those dtypes are taken that a survey takes; of one all that are listed.
    Exits with 1 where a kernel doesn't compile, or no configuration of it fits the device.
    """
    settings.check_ours("--out", out, "# Compiled for ")
    jobs = _jobs(targets or [], spec, inputs, arch, dtype, option, at, layout)
    if not jobs:
        raise TargetError("inspect: none of these kernels is here; `assay survey` says how to install them")
    from assay.bench.inspection.arch import arch_named
    from assay.bench.inspection.page import Inspected

    device = arch_named(arch)
    with compiling(), Pool(worker_count(), preload="assay.bench.inspection.inspecting") as pool:
        answers = _answers([replace(job, arch=device.name, pruned=pruned) for job in jobs], pool)
    every = [
        Inspected(job.name, job.dtype, tuple(answer))
        if isinstance(answer, list)
        else Inspected(job.name, job.dtype, (), answer.message)
        for job, answer in zip(jobs, answers, strict=True)
    ]
    wrong = [isinstance(answer, Raised) and answer.user_error for answer in answers]
    said = dict.fromkeys(one.problem for one, mistaken in zip(every, wrong, strict=True) if mistaken)
    every = [one for one, mistaken in zip(every, wrong, strict=True) if not mistaken]
    if as_json and every:
        content = {
            **{name: installed_version(package) for name, package in (("assay", "kernel-assay"), ("triton", "triton"))},
            "arch": device.name,
            "device": device.device.name,
            "limits": {"shared": device.shared, "registers": device.device.regs_per_multiprocessor},
            "kernels": [one.as_dict(device) for one in every],
        }
        print(json.dumps(content, indent=1))
    elif every:
        _print(every, device, each=each or len(every) == 1)
    if out is not None and every:
        import triton

        from assay.bench.inspection.page import markdown

        command = shlex.join(["assay", *filter(None, sys.argv[1:])])
        page = markdown(every, device, f"Triton {triton.__version__}", command)
        note(f"wrote {write_text_atomically(out, page)}")
    if said:
        return max(report_error(message) for message in said)
    results = [finding for one in every for _, finding in one.findings(device)]
    return int(any(finding.fatal or strict for finding in results) or any(one.problem for one in every))


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Remove TRITON_INTERPRET for processes started inside the block: nothing can be compiled with it."""
    before = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def _answers(jobs: Sequence[Job], pool: Pool) -> list[Any]:
    """Return the result of each job; if there are fewer jobs than workers, each is compiled in shares."""
    from assay.bench.inspection.inspecting import inspect_job, merged

    shares = max(worker_count() // len(jobs), 1)
    split = [replace(job, share=share, shares=shares) for job in jobs for share in range(shares)]
    results: list[Any] = [None] * len(split)
    with ProgressBar("inspected", len(split)) as bar:
        for index, answer in pool.run(inspect_job, split):
            results[index] = answer
            bar.advance()
    parts = [results[index : index + shares] for index in range(0, len(split), shares)]
    return [
        next((part for part in of_one if isinstance(part, (Raised, Lost))), None) or merged(of_one) for of_one in parts
    ]


def _jobs(
    targets: Sequence[str],
    op: str,
    inputs: str,
    arch: str,
    dtype: settings.Texts,
    option: settings.Texts,
    at: settings.Texts,
    layout: settings.Texts,
) -> list[Job]:
    """Return a job for each kernel and dtype; wrong options are reported before any compiler starts."""
    from assay.bench.inspection.calls import check_request
    from assay.bench.inspection.inspecting import Job

    request = settings.request(at, layout)
    if inputs:
        if op or len(targets) != 1 or ":" not in targets[0]:
            raise SettingError(f"--inputs {inputs}: expected one package.module:function beside it, and no --spec")
        return [Job(targets[0], targets[0], arch, request=request, inputs=inputs)]
    jobs = []
    entries = _entries(targets, op)
    for entry in entries:
        chosen = settings.adapted(entry.settings, option)
        for kind in settings.dtypes(dtype or ()) or (len(entries) > 1 and entry.survey_dtypes) or entry.dtypes:
            own = settings.usual_dtype(chosen, kind)
            check_request(own, request)
            jobs.append(Job(entry.name, entry.target, arch, own, request))
    return jobs


def _entries(targets: Sequence[str], op: str) -> list[Entry]:
    """Return the selected kernels that are installed."""
    from assay.cli.verify import entries_of
    from assay.verify.campaign.table import entries

    if not targets:
        if op:
            raise SettingError(f"--spec {op}: of what? e.g. assay inspect my.kernels:{op} --spec {op}")
        return [entry for entry in entries() if entry.group == _BUNDLED]
    results: list[Entry] = []
    known = [*entries(), *entries("others")]
    for target in targets:
        named = [entry for entry in known if entry.name == target] or [
            entry for entry in known if target.lower().replace("_", "-") in _names(entry)
        ]
        if ":" in target or target.endswith(".toml") or not named:
            named = entries_of(target, op)
        results += named
    once: dict[str, Entry] = {}
    for entry in results:
        if not replace(entry, devices=()).absence("cuda"):  # devices restrict runs only
            once.setdefault(f"{entry.target} {entry.dtypes} {entry.settings.options}", entry)
    return list(once.values())


def _names(entry: Entry) -> set[str]:
    """Return the names of a kernel's package: as a distribution, as a module, and as the table's group."""
    module = entry.target.partition(":")[0]
    top = module.partition(".")[0]
    names = (entry.package, entry.group, module, "" if top == "assay" else top)  # of which many are adapters
    return {name.lower().replace("_", "-") for name in names if name}


def _print(every: Sequence[Inspected], device: Arch, *, each: bool) -> None:
    from assay.bench.inspection.page import HEAD, finding_lines, rows

    table = console_table(HEAD)
    before = ""
    for one in every:
        for name, *rest in rows(one, each=each):
            table.add_row(*map(Text, (name if name != before else "", *rest)))
            before = name
    out = console(_PIPED_WIDTH)
    out.print(table)
    lines = [f"{one.title}: {words}" for one in every for words in finding_lines(one, device)]
    total = f"{len(lines)} finding{'' if len(lines) == 1 else 's'} on {device.name}"
    out.print(Text("\n".join(["", *lines, total])), soft_wrap=True)
