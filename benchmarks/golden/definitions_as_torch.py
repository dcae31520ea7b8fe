"""What built-in definitions would be as PyTorch functions: their radii, and what an evaluation takes.

Run: ``python benchmarks/golden/definitions_as_torch.py``, with a second size as ``... 1024 512``. For each op that is a
short function of PyTorch, over rows of numbers (64 of 96, or as given): the radii of golden and tolerance as a
reference over those of its definition (median and most), and the median time of each. Inputs are normal numbers in
float32 and options the defaults: it says nothing of special values or of other dtypes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from assay.golden.arithmetic import BallArithmetic
from assay.golden.evaluation.binding import run
from assay.golden.evaluation.golden import golden_of
from assay.golden.lowering import reference_spec
from assay.golden.registry import Spec, spec
from benchmarks.golden.references import MODEL

_POSITIVE = ("log", "log2", "log1p", "sqrt", "rsqrt")
_ROWS = "x[R,N] -> y[R,N]"


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _swiglu_backward(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    opened = torch.sigmoid(gate)
    return dy * up * opened * (1 + gate * (1 - opened)), dy * (gate * opened)


def _rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    **{
        name: (getattr(torch, name), _ROWS) for name in ("exp", "exp2", "expm1", "tanh", "erf", "sigmoid", "reciprocal")
    },
    **{name: (getattr(torch, name), _ROWS) for name in ("sin", "cos", *_POSITIVE)},
    "softplus": (F.softplus, _ROWS),
    "gelu": (lambda x: F.gelu(x), _ROWS),
    "silu": (F.silu, _ROWS),
    "softmax": (lambda x: torch.softmax(x, -1), _ROWS),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), _ROWS),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), "x[R,N] -> y[R]"),
    "swiglu": (lambda gate, up: F.silu(gate) * up, "gate[R,N], up[R,N] -> y[R,N]"),
    "geglu": (lambda gate, up: F.gelu(gate) * up, "gate[R,N], up[R,N] -> y[R,N]"),
    "swiglu_backward": (_swiglu_backward, "gate[R,N], up[R,N], dy[R,N] -> dgate[R,N], dup[R,N]"),
    "softmax_backward": (lambda y, dy: y * (dy - (y * dy).sum(-1, keepdim=True)), "y[R,N], dy[R,N] -> dx[R,N]"),
    "layernorm": (lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), "x[R,N], weight[N], bias[N] -> y[R,N]"),
    "rmsnorm": (_rmsnorm, "x[R,N], weight[N] -> y[R,N]"),
    "l2norm": (lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6), _ROWS),
    "rope": (_rope, "x[B,S,H,D], cos[S,D/2]=angle, sin[S,D/2]=angle -> y[B,S,H,D]"),
    "embedding": (lambda table, ids: table[ids], "table[V,D], ids:int64[T]=index(V) -> y[T,D]"),
    "cross_entropy": (
        lambda logits, target: F.cross_entropy(logits, target),
        "logits[T,V], target:int64[T]=label(V,-100) -> loss:float32[]",
    ),
    "gemm": (torch.matmul, "a[M,K], b[K,N] -> c[M,N]"),
    "linear": (F.linear, "x[M,K], weight[N,K], bias[N] -> y[M,N]"),
}


def inputs_of(name: str, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """Arguments of the op over ``rows`` of ``columns`` numbers; normal, spread by 3 where exponentials are taken."""
    draws = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=draws)

    x = normal(rows, columns) * 3
    several: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
        "swiglu": lambda: (x, normal(rows, columns)),
        "geglu": lambda: (x, normal(rows, columns)),
        "swiglu_backward": lambda: (x, normal(rows, columns), normal(rows, columns)),
        "softmax_backward": lambda: (torch.softmax(x, -1), normal(rows, columns)),
        "layernorm": lambda: (x, normal(columns), normal(columns)),
        "rmsnorm": lambda: (x, normal(columns)),
        "rope": lambda: (x.reshape(1, rows, -1, 32), *(normal(rows, 16).sin() for _ in range(2))),
        "embedding": lambda: (x, torch.randint(rows, (rows,), generator=draws)),
        "cross_entropy": lambda: (x, torch.randint(columns, (rows,), generator=draws)),
        "gemm": lambda: (x, normal(columns, columns)),
        "linear": lambda: (x, normal(columns, columns), normal(columns)),
    }
    if name in several:
        return several[name]()
    return (x.abs() + 0.01 if name in _POSITIVE else x,)


def evaluated(
    definition: Spec, xp: BallArithmetic, given: tuple[torch.Tensor, ...], times: int
) -> tuple[torch.Tensor, float]:
    """The radii of all results, and the median of the microseconds that an evaluation takes."""
    radius = torch.cat([golden_of(result).radius.flatten() for result in run(definition, xp, given, {})])
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        run(definition, xp, given, {})
        taken.append(time.perf_counter() - started)
    return radius, statistics.median(taken) * 1e6


def main(rows: int, columns: int) -> None:
    """Print a line for each op."""
    torch.set_num_threads(1)
    times = 50 if rows * columns < 2**16 else 5
    for name, (function, tensors) in FUNCTIONS.items():
        given = inputs_of(name, rows, columns)
        reference = reference_spec(function, tensors, name=f"{name}_as_torch")
        print(f"{name:16}", end="")
        for what, xp in (("golden", BallArithmetic()), ("tolerance", BallArithmetic(MODEL))):
            (own, own_time), (its, its_time) = (evaluated(one, xp, given, times) for one in (spec(name), reference))
            ratio = (its / own)[own > 0]
            wide = f"{ratio.median():.2f} to {ratio.max():.2f} times as wide" if ratio.numel() else "no longer exact"
            same = "as wide to the bit" if torch.equal(own, its) else wide
            print(f"  {what} {same}, {own_time:.0f} -> {its_time:.0f} us", end=";")
        print(flush=True)


if __name__ == "__main__":
    main(*(int(size) for size in sys.argv[1:3] or (64, 96)))
