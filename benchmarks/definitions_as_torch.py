"""What built-in definitions would be as PyTorch functions: their radii, and what an evaluation takes.

Run: ``python benchmarks/definitions_as_torch.py``. For each op that is one function of PyTorch: the radii of golden and
tolerance as a reference over those of its definition (median and most), and the time of each on 64 rows of 96 numbers.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from assay.golden.arithmetic import BallArithmetic
from assay.golden.evaluation.binding import run
from assay.golden.evaluation.golden import golden_of
from assay.golden.reference import reference_spec
from assay.golden.registry import Spec, spec
from benchmarks.references import MODEL

_TIMES = 50
_POSITIVE = ("log", "log2", "log1p", "sqrt", "rsqrt")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in ("exp", "exp2", "expm1", "tanh", "erf", "sigmoid", "reciprocal")},
    **{name: getattr(torch, name) for name in ("sin", "cos", *_POSITIVE)},
    "softplus": F.softplus,
    "gelu": F.gelu,
    "silu": F.silu,
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
}


def evaluated(definition: Spec, xp: BallArithmetic, x: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The radii, and the median of the microseconds that an evaluation takes."""
    options = {"approximate": "none"} if definition.name == "gelu" and definition.options else {}
    radius = golden_of(run(definition, xp, (x,), options)[0]).radius
    taken = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        run(definition, xp, (x,), options)
        taken.append(time.perf_counter() - started)
    return radius, statistics.median(taken) * 1e6


def main() -> None:
    """Print a line for each op."""
    torch.set_num_threads(1)
    numbers = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * 3
    for name, function in FUNCTIONS.items():
        x = numbers.abs() + 0.01 if name in _POSITIVE else numbers
        tensors = "x[R,N] -> y[R]" if name == "logsumexp" else "x[R,N] -> y[R,N]"
        reference = reference_spec(function, tensors, name=f"{name}_as_torch")
        print(f"{name:12}", end="")
        for what, xp in (("golden", BallArithmetic()), ("tolerance", BallArithmetic(MODEL))):
            (own, own_time), (its, its_time) = (evaluated(one, xp, x) for one in (spec(name), reference))
            ratio = (its / own)[own > 0]
            middle, most = (float(ratio.median()), float(ratio.max())) if ratio.numel() else (1.0, 1.0)
            print(f"  {what} {middle:.2f} to {most:.2f} times as wide, {own_time:4.0f} -> {its_time:4.0f} us", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
