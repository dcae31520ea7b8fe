"""Measurements behind docs/evidence.md: ``./dev bench [golden | examine | zoo] ...`` (all if none is named)."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from assay.verify import examine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

console = Console()


def golden() -> None:
    """Goldens: against plain float64, against mpmath and Arb at 25 digits, and the memory they take."""
    from benchmarks.goldens import certified, digits, memory

    for measure in (certified, digits, memory):
        console.print(measure())


def examination() -> None:
    """`examine` of torch's own kernels, 200 examples, default settings."""
    kernels: list[tuple[str, str, Callable[..., torch.Tensor], dict[str, object]]] = [
        ("torch.softmax", "softmax", lambda x: torch.softmax(x, -1), {}),
        ("torch.mm", "gemm", torch.mm, {}),
        (
            "scaled_dot_product_attention",
            "attention",
            lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            {},
        ),
    ]
    table = Table("kernel", "dtype", "outcome", "cases", "worst ratio", "seconds", title="examine, 200 examples")
    for name, op, kernel, settings in kernels:
        for dtype in ("float32", "bfloat16"):
            verdict = examine(kernel, op, dtype=dtype, **settings)
            cells = (verdict.outcome, str(verdict.cases), f"{verdict.worst:.3g}", f"{verdict.seconds:.1f}")
            table.add_row(name, dtype, *cells)
    console.print(table)


def zoo() -> None:
    """The honest kernels of the tests must pass, the faulty ones fail, at 200 examples and default settings."""
    from tests.verify.zoo import FAULTY, HONEST

    torch.set_num_threads(1)
    for entries, wanted in ((HONEST, True), (FAULTY, False)):
        wrong, cases = [], 0
        for entry in track(entries, console=console, description="honest" if wanted else "faulty"):
            verdict = examine(entry.kernel, entry.spec, **entry.examine)
            cases += verdict.cases
            if verdict.passed is not wanted:
                wrong.append(entry.name)
                console.print(f"{'flagged' if wanted else 'missed'}: {entry.name}: {verdict.repro or verdict.outcome}")
        verb = "honest kernels flagged" if wanted else "faulty kernels missed"
        console.print(f"{verb}: {len(wrong)} of {len(entries)} in {cases:,} cases {wrong}")


TASKS = {"golden": golden, "examine": examination, "zoo": zoo}


def main() -> int:
    """Run the tasks named on the command line."""
    names = sys.argv[1:] or list(TASKS)
    foreign = [name for name in names if name not in TASKS]
    if foreign:
        print(f"bench: unknown task {foreign[0]!r}; there are: {', '.join(TASKS)}", file=sys.stderr)
        return 2
    console.print(f"python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in names:
        TASKS[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
