"""`assay judge`: solutions of kernel benchmarks, one or a list of them."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from assay.cli import settings
from assay.cli.progress import ProgressBar, note, report_error
from assay.judge import TEMPORARY
from assay.runtime.engines import engine_named, part_of
from assay.runtime.errors import AssayError
from assay.runtime.files import remove_abandoned
from assay.runtime.pool import Raised, core_count, run_alone
from assay.runtime.process import Lost
from assay.verify.errors import SettingError

_PASSED = ("PASS", "WARN")
_PRELOAD = "assay.judge.procedure"


def judge(
    problem: Annotated[
        str,
        Argument(
            metavar="PROBLEM",
            help="A KernelBench file, a FlashInfer Trace definition, a folder with reference.py, or of robust-kbench.",
        ),
    ] = "",
    solution: Annotated[str, Argument(metavar="SOLUTION", help="Its solution: a file, or a folder.")] = "",
    effort: settings.Effort = "",
    seed: settings.Seed = 0,
    device: settings.Device = "cpu",
    contract: settings.ContractFields = None,
    timeout: Annotated[
        float, Option(min=0.01, max=settings.LONGEST, help="Seconds for one question to the solution.")
    ] = 30.0,
    memory: Annotated[
        float, Option(min=0.01, max=settings.MOST_MEMORY, help="GiB that the solution's process may hold.")
    ] = 8.0,
    sandbox: Annotated[
        str, Option(metavar="auto|bwrap|none", help="Where the solution runs; auto: in a sandbox, if there is one.")
    ] = "auto",
    require_sandbox: Annotated[bool, Option("--require-sandbox", help="As --sandbox bwrap.")] = False,
    timed: Annotated[bool, Option("--timing/--no-timing", help="Time it beside the reference.")] = True,
    compiled: Annotated[
        bool | None,
        Option("--compiled/--no-compiled", help="Beside torch.compile of it too; left out: not at quick effort."),
    ] = None,
    trial: Annotated[str, Option(metavar="LINE", help="One call alone, as a verdict's repeat line has it.")] = "",
    trace: Annotated[
        Path | None, Option(metavar="FILE", help="Write the verdict as traces of FlashInfer Bench, too.")
    ] = None,
    as_json: settings.AsJson = False,
    list_: Annotated[
        Path | None,
        Option("--list", metavar="FILE.jsonl", help='Lines {"problem": PATH, "solution": PATH}, each judged.'),
    ] = None,
    jobs: Annotated[
        int,
        Option(min=0, max=settings.MOST_JOBS, help="Of a list: solutions judged at a time; 0: one for each core."),
    ] = 0,
    engine: Annotated[str, Option(help="Of a list, where it is judged: local, or ray.")] = "local",
    part: Annotated[str, Option(help="Of a list, 3/10: only the third of ten parts of it.")] = "",
    out: Annotated[
        Path | None,
        Option(
            metavar="FILE.jsonl",
            dir_okay=False,
            help="Of a list: add the verdicts here; those that it holds are not made.",
        ),
    ] = None,
) -> int:
    """Judge a solution of a kernel benchmark's problem: its numbers by the derived tolerance, its sizes, its conduct.

    The solution runs in a process of its own. The verdict names the recognised cheats (docs/judge.md).
    """
    if contract and (len(contract) > 1 or "=" in contract[0]):
        raise SettingError(f"--contract {contract[0]!r}; judge takes a contract's name, e.g. transformers")
    options: dict[str, Any] = {
        "effort": effort or ("quick" if list_ is not None else "usual"),
        "seed": seed,
        "device": device,
        "contract": contract[0] if contract else None,
        "timeout": timeout,
        "memory": memory,
        "timed": timed,
        "compiled": compiled,
        "sandbox": "bwrap" if require_sandbox else sandbox,
    }
    if list_ is not None:
        if problem or trial or trace:
            raise SettingError("--list: judges the lines of its file; leave PROBLEM, --trial and --trace out")
        return _listed(list_, options, out, jobs=jobs or core_count(), engine=engine, part=part)
    if not (problem and solution):
        raise SettingError(
            "judge: expected PROBLEM and SOLUTION, e.g. assay judge problem.py solution.py, or --list FILE"
        )
    settings.check_ours("--trace", trace, '{"definition": ')
    item = problem, solution, {**options, "trial": trial}, trace
    try:
        answer = run_alone(_one, item, preload=_PRELOAD, timeout=3600.0, quiet=False)
    finally:
        remove_abandoned(TEMPORARY)  # the process that judged is ended without a chance to do it
    if isinstance(answer, Lost):
        from assay.judge.batch import lost_words

        return report_error(lost_words(answer), status=2 if answer.note else 1)
    if isinstance(answer, Raised):
        raise answer.again(AssayError)
    text, line, passed = answer
    print(line if as_json else text)
    return int(not passed)


def _one(item: tuple[str, str, dict[str, Any], Path | None], heartbeat: Any) -> tuple[str, str, bool]:
    """Return a verdict as text and as JSON, and whether it passes, in a worker."""
    from assay.judge.problems.running import watched
    from assay.judge.procedure import judge
    from assay.judge.trace import write_traces

    problem, solution, options, trace = item
    with watched(report=heartbeat):
        verdict = judge(problem, solution, **options)
    if trace is not None:
        write_traces(trace, verdict)
    return str(verdict), verdict.to_line(), verdict.passed


def _listed(path: Path, options: dict[str, Any], out: Path | None, *, jobs: int, engine: str, part: str) -> int:
    """Judge the solutions in a list; lines go to ``out``, or to standard output."""
    from assay.judge.batch import SILENT, add, items, run, stored

    every = items(path, options)
    number, of = part_of(part, len(every))
    every = every[number - 1 :: of]
    known = stored(out) if out is not None else set()
    left = [item for item in every if item.key not in known]
    if len(left) < len(every):
        note(f"{len(every) - len(left)} of {len(every)} verdicts were in {out}")
    counts = Counter[str]()
    workers = engine_named(engine, max(min(jobs, len(left)), 1), preload=_PRELOAD, timeout=SILENT)
    with workers, ProgressBar("judged", len(left)) as bar, suppress(KeyboardInterrupt):
        for _, line in run(left, workers):
            if out is not None:
                add(out, line)
            else:
                print(json.dumps(line, separators=(",", ":"), allow_nan=False), flush=True)
            counts[line["outcome"]] += 1
            bar.advance()
    remove_abandoned(TEMPORARY)
    words = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()) or "none"
    note(f"judged {counts.total()}: {words}")
    if counts.total() < len(left):
        return report_error(f"interrupted; {counts.total()} of {len(left)} are done", status=130)
    return int(any(outcome not in _PASSED for outcome in counts))
