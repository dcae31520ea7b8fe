"""Measurements: ``./dev bench [golden | examine | zoo | order | lengths | explanations | launches] ...``,
the first three by default.

docs/evidence.toml lists most of them as claims. `order` rewrites configs/case_order.toml.
"""

import platform
import sys
import time
from dataclasses import replace
from pathlib import Path

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


def examination() -> None:
    """Measure the processor time of examining each available kernel, quick and usual: one dtype, one thread."""
    from assay.verify.campaign.table import entries
    from assay.verify.harness.target import load_target

    torch.set_num_threads(1)
    row = "{:44} {:28} {:>24} {:>24}".format
    print(row("kernel", "op", *(f"{effort}: cases, seconds" for effort in ("quick", "usual"))))
    for entry in entries():
        if entry.absence("cpu"):
            continue
        kernel, dtype = load_target(entry.target), (entry.survey_dtypes or entry.dtypes)[0]
        cells = []
        for effort in ("quick", "usual"):
            started = time.process_time()
            verdict = examination_of(kernel, replace(entry.settings, dtype=dtype, effort=effort))
            cells.append(f"{verdict.outcome} {verdict.cases} {time.process_time() - started:5.1f}")
        print(row(entry.name, entry.settings.spec, *cells), flush=True)


def zoo() -> None:
    """Check that the correct kernels of the tests pass and the faulty ones fail, with thorough effort."""
    from tests.zoo import FAULTY, HONEST

    torch.set_num_threads(1)
    for entries, wanted in ((HONEST, True), (FAULTY, False)):
        wrong, cases = [], 0
        for entry in track(entries, console=console, description="honest" if wanted else "faulty"):
            settings = {"effort": "thorough", "strict": True, "every_aspect": wanted, **entry.examine}
            verdict = examine(entry.kernel, entry.spec, **settings)
            cases += verdict.cases
            if verdict.passed is not wanted:
                wrong.append(entry.name)
                console.print(f"{'flagged' if wanted else 'missed'}: {entry.name}: {verdict.repro or verdict.outcome}")
        verb = "honest kernels flagged" if wanted else "faulty kernels missed"
        console.print(f"{verb}: {len(wrong)} of {len(entries)} in {cases:,} cases {wrong}")


def lengths() -> None:
    """Run correct kernels of the tests at growing lengths; count those with errors that rounding hardly explains."""
    from assay.verify.examination.plan import make_plan
    from assay.verify.examination.run import Run
    from assay.verify.settings import Settings
    from tests.zoo import HONEST

    torch.set_num_threads(1)
    flagged, examinations = [], 0
    for seed in range(4):
        for entry in track(HONEST, console=console, description=f"seed {seed}"):
            settings = Settings(entry.spec, **(entry.examine | {"examples": 0, "seed": seed}))
            tally = Run(make_plan(entry.kernel, settings), lambda phase, done, of: None).execute(("lengths",))
            examinations += 1
            flagged += [entry.name] if tally.suspect or tally.broken else []
    console.print(f"honest kernels suspect or broken: {len(flagged)} in {examinations} examinations {flagged}")


def order() -> None:
    """Find the fixed cases that find the most faults per second, and write configs/case_order.toml."""
    from benchmarks.verify.case_order import measure

    measure(console)


def explanations() -> None:
    """Check explanations over a sample of fault models and of kernels of other styles, for four minutes."""
    from benchmarks.verify.explanations import measure

    measure(console)


def launches() -> None:
    """Measure the host's time of calls of bundled kernels, ordinary and replayed."""
    from benchmarks.gpu.launches import measured

    console.print(measured())


TASKS = {"golden": golden, "examine": examination, "zoo": zoo}
BY_NAME_ONLY = {"order": order, "lengths": lengths, "explanations": explanations, "launches": launches}


def main() -> int:
    """Run the tasks named on the command line."""
    names = sys.argv[1:] or list(TASKS)
    tasks = TASKS | BY_NAME_ONLY
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
