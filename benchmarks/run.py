"""Measurements: ``./dev bench [golden | examine | zoo | order | power | lengths | explanations | launches |
compilations | compare] ...``, the first three by default.

docs/evidence.toml lists most of them as claims. `order` rewrites configs/case_order.toml. `compare` is
benchmarks/compare/run.py with ``--one``. `power` takes ``--sample N`` faulty kernels of ``--seed S``, writes
``--out FILE``, and shows the figures of another such file, ``--against FILE``.
"""

import argparse
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from assay.verify import examine
from assay.verify.examination.procedure import examination as examination_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

console = Console()


def golden() -> None:
    """Measure goldens against plain float64, against mpmath and Arb at 25 digits, and their memory."""
    from benchmarks.golden.speed import certified, digits, memory

    for measure in (certified, digits, memory):
        console.print(measure())


def side_by_side(function: Callable[[int], Any], count: int) -> Iterator[Any]:
    """Yield the results of a function of this module for each index below ``count``, by processes on all cores."""
    torch.set_num_threads(1)  # before the fork, which an OpenMP pool of threads would not survive
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        yield from track(pool.map(function, range(count)), console=console, total=count)


def examination() -> None:
    """Measure the processor time of examining a quarter of the kernels in one dtype, some at usual effort."""
    row = "{:44} {:28} {:>24} {:>24}".format
    console.print(row("kernel", "op", *(f"{effort}: cases, seconds" for effort in ("quick", "usual"))))
    for entry, cells in zip(available(), side_by_side(examined, len(available())), strict=True):
        console.print(row(entry.name, entry.settings.spec, *cells))


@cache
def available() -> list[Any]:
    """Return every fourth of the survey's kernels that run here."""
    from assay.verify.campaign.table import entries

    return [entry for entry in entries() if not entry.absence("cpu")][::4]


def examined(index: int) -> list[str]:
    """Return the outcome, cases and processor seconds of a kernel at each effort."""
    from assay.verify.harness.target import load_target

    entry, cells = available()[index], []
    usual = entry.name.startswith("assay.") and index % 3 == 0  # JAX compiles each case anew
    for effort in ("quick", "usual") if usual else ("quick",):
        dtype, started = (entry.survey_dtypes or entry.dtypes)[0], time.process_time()
        verdict = examination_of(load_target(entry.target), replace(entry.settings, dtype=dtype, effort=effort))
        cells.append(f"{verdict.outcome} {verdict.cases} {time.process_time() - started:5.1f}")
    return [*cells, ""][:2]


def zoo() -> None:
    """Check that every fourth correct kernel of the tests passes and every fourth faulty one fails, at usual effort."""
    from tests.zoo import FAULTY, HONEST

    honest, faulty = HONEST[::4], FAULTY[::4]
    results, failed = list(side_by_side(judged, len(honest) + len(faulty))), False
    for entries, wanted, verb in ((honest, True, "honest kernels flagged"), (faulty, False, "faulty kernels missed")):
        own, results = results[: len(entries)], results[len(entries) :]
        wrong = [
            (entry.name, message) for entry, (passed, _, message) in zip(entries, own, strict=True) if passed != wanted
        ]
        for name, message in wrong:
            console.print(f"{name}: {message}")
        cases = sum(cases for _, cases, _ in own)
        console.print(f"{verb}: {len(wrong)} of {len(entries)} in {cases:,} cases {[name for name, _ in wrong]}")
        failed |= bool(wrong)
    if failed:
        sys.exit(1)


def judged(index: int) -> tuple[bool, int, str]:
    """Return whether a kernel of the tests passes, the cases, and how to repeat a failure."""
    from tests.zoo import FAULTY, HONEST

    honest = HONEST[::4]
    entry = (*honest, *FAULTY[::4])[index]
    settings = {"effort": "usual", "strict": True, "every_aspect": index < len(honest), **entry.examine}
    verdict = examine(entry.kernel, entry.spec, **settings)
    return verdict.passed, verdict.cases, verdict.repro or verdict.outcome


def lengths() -> None:
    """Run correct kernels of the tests at growing lengths; count those with errors that rounding hardly explains."""
    from tests.zoo import HONEST

    seeds = 2
    flagged = [name for name in side_by_side(suspected, seeds * len(HONEST)) if name]
    console.print(f"honest kernels suspect or broken: {len(flagged)} in {seeds * len(HONEST)} examinations {flagged}")
    if flagged:
        sys.exit(1)


def suspected(index: int) -> str:
    """Return the name of an honest kernel whose errors at growing lengths are suspect, else nothing."""
    from assay.verify.examination.plan import make_plan
    from assay.verify.examination.run import Run
    from assay.verify.settings import Settings
    from tests.zoo import HONEST

    seed, index = divmod(index, len(HONEST))
    entry = HONEST[index]
    settings = Settings(entry.spec, **(entry.examine | {"examples": 0, "seed": seed}))
    tally = Run(make_plan(entry.kernel, settings), lambda phase, done, of: None).execute(("lengths",))
    return entry.name if tally.suspect or tally.broken else ""


def order() -> None:
    """Find the fixed cases that find the most faults per second, and write configs/case_order.toml."""
    from benchmarks.verify.case_order import measure

    measure(console)


def power() -> None:
    """Measure what share of a sample of faulty kernels is found, by effort, by phase and by factor."""
    from benchmarks.verify.power import measure

    if not measure(console, side_by_side, **POWER):
        sys.exit(1)


def explanations() -> None:
    """Check explanations over a sample of fault models and of kernels of other styles, for four minutes."""
    from benchmarks.verify.explanations import measure

    measure(console)


def launches() -> None:
    """Measure the host's time of calls of bundled kernels, ordinary and replayed."""
    from benchmarks.gpu.launches import measured

    console.print(measured())


def compilations() -> None:
    """Count what examinations on a device compile, launch and time, without one."""
    from benchmarks.gpu.compilations import available, pair, table

    console.print(table(side_by_side(pair, len(available()))))


def compare() -> None:
    """Judge comparisons of two runs: planted mismatches and honest pairs, each in one of its models."""
    from benchmarks.compare.run import main

    if main(["--one"]):
        sys.exit(1)


TASKS = {"golden": golden, "examine": examination, "zoo": zoo}
BY_NAME_ONLY = {"order": order, "lengths": lengths, "explanations": explanations, "launches": launches}
BY_NAME_ONLY |= {"compilations": compilations, "power": power, "compare": compare}
POWER: dict[str, Any] = {}
"""The options of `power`."""


def main() -> int:
    """Run the tasks named on the command line."""
    tasks = TASKS | BY_NAME_ONLY
    parser = argparse.ArgumentParser(prog="bench", description=f"tasks: {', '.join(tasks)}")
    parser.add_argument("tasks", nargs="*", metavar="TASK")
    parser.add_argument("--sample", type=int, default=48, metavar="N", help="faulty kernels of power; 8 take a minute")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--out", type=Path, default=Path("build/power.json"), metavar="FILE", help="figures of power")
    parser.add_argument("--against", type=Path, metavar="FILE", help="such a file of another commit")
    options = vars(parser.parse_args())
    names = options.pop("tasks") or list(TASKS)
    POWER.update(options)
    foreign = [name for name in names if name not in tasks]
    if foreign:
        print(f"bench: unknown task {foreign[0]!r}; there are: {', '.join(tasks)}", file=sys.stderr)
        return 2
    console.print(f"python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in names:
        tasks[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
