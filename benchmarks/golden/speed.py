"""Measure goldens: speed against plain float64, against mpmath and Arb at 25 digits, and memory."""

import subprocess
import sys
import timeit
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

from assay.golden import evaluate

_DIGITS = 25  # decimal digits of the goldens


def best_time(run: Callable[[], object], repeats: int = 7) -> float:
    """Return the least of several times, in seconds, after one run that isn't counted."""
    run()
    return min(timeit.repeat(run, number=1, repeat=repeats))


def certified() -> Table:
    """Compare `evaluate`, value and radius, with plain float64 torch on the same float32 inputs."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1024, 1024, generator=generator) for _ in range(2))
    x = torch.randn(1024, 4096, generator=generator)
    q, k, v = (torch.randn(1, 8, 1024, 64, generator=generator) for _ in range(3))
    moe = _mixture(generator)

    def plain_attention() -> torch.Tensor:
        scores = q.double() @ k.double().transpose(-1, -2) / 8
        return torch.softmax(scores, -1) @ v.double()

    rows: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        ("gemm 1024^3", lambda: a.double() @ b.double(), lambda: evaluate("gemm", a, b)),
        ("softmax 1024x4096", lambda: torch.softmax(x.double(), -1), lambda: evaluate("softmax", x)),
        ("attention 8x1024x64", plain_attention, lambda: evaluate("attention", q, k, v)),
        ("moe, 8 experts, 512x512x1024", lambda: plain_moe(*moe), lambda: evaluate("moe", *moe)),
    ]
    table = Table("op", "plain float64, ms", "evaluate, ms", "ratio", "goal", title="Goldens: value and radius")
    for name, plain, ours in rows:
        first, second = best_time(plain), best_time(ours)
        table.add_row(name, f"{first * 1e3:.1f}", f"{second * 1e3:.1f}", f"{second / first:.2f}", "<= 4")
    return table


def _mixture(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return a mixture's inputs: 512 tokens, two of 8 experts each."""
    tokens, width, inner, experts, choices = 512, 512, 1024, 8, 2
    x = torch.randn(tokens, width, generator=generator)
    gate_up = torch.randn(experts, 2 * inner, width, generator=generator) / width**0.5
    down = torch.randn(experts, width, inner, generator=generator) / inner**0.5
    weights = torch.rand(tokens, choices, generator=generator)
    ids = torch.randn(tokens, experts, generator=generator).topk(choices).indices.int()
    return x, gate_up, down, weights, ids


def plain_moe(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Compute the experts in float64, each over its own tokens."""
    x, gate_up, down, weights = x.double(), gate_up.double(), down.double(), weights.double()
    y = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        projected = x[token] @ gate_up[expert].T
        gate, up = projected.chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        y.index_add_(0, token, (hidden @ down[expert].T) * weights[token, choice][:, None])
    return y


def digits() -> Table:
    """Compare goldens of 25 digits with mpmath, measured on a sample of entries or rows and scaled, and with Arb."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    x = torch.randn(256, 1024, generator=generator)
    rows, columns = 4, 32
    dots = best_time(lambda: _dots(a[:rows], b[:, :columns]), 3) * (256 * 256) / (rows * columns)
    softmax = best_time(lambda: [_softmax(row.tolist()) for row in x[:rows]], 3) * 256 / rows
    product, bare = _arb_product(a, b)
    ours = best_time(lambda: evaluate("gemm", a, b, digits=_DIGITS))
    rowwise = best_time(lambda: evaluate("softmax", x, digits=_DIGITS))
    table = Table("op", "by", "ms", "times evaluate", "goal", title=f"Goldens of {_DIGITS} digits")
    for op, by, seconds, own, goal in (
        ("gemm 256^3", "evaluate", ours, ours, ""),
        ("", f"mpmath fdot, {rows * columns} entries, scaled", dots, ours, ">= 1000"),
        ("", "arb_mat, conversions counted", product, ours, "> 1"),
        ("", "arb_mat, the product alone", bare, ours, ""),
        ("softmax 256x1024", "evaluate", rowwise, rowwise, ""),
        ("", f"mpmath, {rows} rows, scaled", softmax, rowwise, ">= 50"),
    ):
        table.add_row(op, by, f"{seconds * 1e3:.1f}", f"{seconds / own:.1f}", goal)
    return table


def _context() -> object:
    import mpmath

    context = mpmath.MPContext()
    context.dps = _DIGITS + 5
    return context


def _dots(a: torch.Tensor, b: torch.Tensor) -> list[object]:
    """Return the matrix product by mpmath's dot product; conversions, some hundredths of the time, are included."""
    context: Any = _context()
    left = [[context.mpf(value) for value in row] for row in a.tolist()]
    right = [[context.mpf(value) for value in column] for column in b.T.tolist()]
    return [context.fdot(row, column) for row in left for column in right]


def _softmax(row: list[float]) -> list[object]:
    context: Any = _context()
    numbers = [context.mpf(value) for value in row]
    largest = max(numbers)
    weights = [context.exp(value - largest) for value in numbers]
    total = context.fsum(weights)
    return [weight / total for weight in weights]


def _arb_product(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of `arb_mat` with conversion of operands and result, and of the product alone."""
    from flint import arb_mat, ctx

    def convert() -> tuple[Any, Any]:
        return arb_mat(a.tolist()), arb_mat(b.tolist())

    def product() -> list[tuple[float, float, float]]:
        left, right = convert()
        return [_words(entry) for entry in (left * right).entries()]

    with ctx.workdps(_DIGITS + 10):
        left, right = convert()
        return best_time(product, 3), best_time(lambda: left * right, 3)


def _words(entry: Any) -> tuple[float, float, float]:
    high = float(entry.mid())
    rest = entry - high
    low = float(rest.mid())
    return high, low, float((rest - low).abs_upper())


_PEAK = """
import resource, sys, time
import torch
from assay.golden import evaluate
length = int(sys.argv[1])
q, k, v = (torch.randn(1, 8, length, 64) for _ in range(3))
start = time.perf_counter()
evaluate("attention", q, k, v, causal="bottom_right")
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def memory() -> Table:
    """Measure the largest resident set of a process that evaluates causal attention of 8 heads of 64."""
    table = Table("attention", "seconds", "peak GiB", "goal", title="Goldens: memory")
    for length in (4096, 8192):
        run = subprocess.run([sys.executable, "-c", _PEAK, str(length)], capture_output=True, text=True, check=True)
        seconds, peak = map(float, run.stdout.split())
        table.add_row(f"8x{length}x64", f"{seconds:.1f}", f"{peak:.2f}", "< 3")
    return table
