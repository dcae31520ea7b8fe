"""Measurements behind docs/evidence.md: ``./dev bench [golden | examine | zoo] ...`` (all if none is named)."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from assay.golden import evaluate
from assay.verify import examine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

console = Console()


def best_time(run: Callable[[], object], repeats: int = 7) -> float:
    """The least of several times, after one run that isn't counted."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def golden() -> None:
    """`evaluate`, value and radius, against plain float64 torch from the same float32 inputs."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1024, 1024, generator=generator) for _ in range(2))
    x = torch.randn(1024, 4096, generator=generator)
    q, k, v = (torch.randn(1, 8, 1024, 64, generator=generator) for _ in range(3))

    def plain_attention() -> torch.Tensor:
        scores = q.double() @ k.double().transpose(-1, -2) / 8
        return torch.softmax(scores, -1) @ v.double()

    rows = [
        ("gemm 1024^3", lambda: a.double() @ b.double(), lambda: evaluate("gemm", a, b)),
        ("softmax 1024x4096", lambda: torch.softmax(x.double(), -1), lambda: evaluate("softmax", x)),
        ("attention 8x1024x64", plain_attention, lambda: evaluate("attention", q, k, v)),
    ]
    table = Table("op", "plain float64 [ms]", "evaluate [ms]", "ratio", "goal", title="Goldens: value and radius")
    for name, plain, certified in rows:
        first, second = best_time(plain), best_time(certified)
        table.add_row(name, f"{first * 1e3:.1f}", f"{second * 1e3:.1f}", f"{second / first:.2f}", "<= 5")
    console.print(table)


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
    alarms = [entry.name for entry in HONEST if not examine(entry.kernel, entry.spec, **entry.examine).passed]
    missed = [entry.name for entry in FAULTY if examine(entry.kernel, entry.spec, **entry.examine).passed]
    console.print(f"honest kernels flagged: {len(alarms)} of {len(HONEST)} {alarms}")
    console.print(f"faulty kernels missed:  {len(missed)} of {len(FAULTY)} {missed}")


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
