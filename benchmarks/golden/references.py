"""What goldens and tolerances of references cost, and how tight they are.

Run: ``python benchmarks/golden/references.py [ELEMENTS]``. For simple references of about that many elements: the time
of the golden and of the tolerance together over that of PyTorch in float64, and the median of the allowed radius over
what PyTorch is off in float32.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from assay.formats.accumulator import accumulator_named
from assay.formats.format import format_named
from assay.golden.arithmetic import BallArithmetic, RoundingModel
from assay.golden.evaluation.binding import run
from assay.golden.evaluation.golden import golden_of
from assay.golden.lowering import reference_spec

MODEL = RoundingModel(
    format_named("float32"), accumulator_named("float32"), ulps={"exp": 2, "log": 2, "rsqrt": 2, "div": 2}
)

Reference = Callable[..., Any]


def references(elements: int) -> dict[str, tuple[Reference, str, tuple[torch.Tensor, ...]]]:
    """Simple references by name, with their tensors."""
    side = math.isqrt(elements)
    inner = 2 ** round(math.log2(max(side // 2, 2)))
    plane = max(math.isqrt(elements // 32), 4)
    x = torch.randn(side, side)
    image = torch.randn(2, 16, plane, plane)
    heads = torch.randn(1, 8, max(elements // 512, 8), 64)[:, :, :512]
    row = "x[T,D] -> y[T,D]"
    return {
        "relu": (F.relu, row, (x,)),
        "gelu": (F.gelu, row, (x,)),
        "silu": (F.silu, row, (x,)),
        "tanh": (torch.tanh, row, (x,)),
        "softmax": (lambda x: F.softmax(x, -1), row, (x,)),
        "log_softmax": (lambda x: F.log_softmax(x, -1), row, (x,)),
        "naive_softmax": (lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True), row, (x,)),
        "rms_norm": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), row, (x,)),
        "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), row, (x,)),
        "batch_norm": (
            lambda x: F.batch_norm(x, None, None, training=True), "x[N,C,H,W] -> y[N,C,H,W]", (image,)
        ),
        "sum": (lambda x: x.sum(-1), "x[T,D] -> y[T]", (x,)),
        "cumsum": (lambda x: x.cumsum(-1), row, (x,)),
        "max_pool": (lambda x: F.max_pool2d(x, 3, 1, 1), "x[N,C,H,W] -> y[N,C,H,W]", (image,)),
        "avg_pool": (lambda x: F.avg_pool2d(x, 3, 1, 1), "x[N,C,H,W] -> y[N,C,H,W]", (image,)),
        "mse": (F.mse_loss, "x[T,D], y[T,D] -> l[]", (x, torch.randn_like(x))),
        "matmul": (lambda a, b: a @ b, "a[M,K], b[K,N] -> c[M,N]", (x[:, :inner], torch.randn(inner, side))),
        "linear_gelu": (
            lambda x, w, b: F.gelu(F.linear(x, w, b)),
            "x[T,D], w[M,D], b[M] -> y[T,M]",
            (x[:, :inner], torch.randn(side, inner), torch.randn(side)),
        ),
        "conv": (
            lambda x, w: F.conv2d(x, w, padding=1), "x[N,C,H,W], w[O,C,3,3] -> y[N,O,H,W]",
            (image, torch.randn(16, 16, 3, 3)),
        ),
        "attention": (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
            "q[B,H,S,D], k[B,H,S,D], v[B,H,S,D] -> y[B,H,S,D]",
            (heads, torch.randn_like(heads), torch.randn_like(heads)),
        ),
    }  # fmt: skip


def seconds(function: Callable[[], Any], times: int = 3) -> float:
    """The least of a few runs."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        function()
        found.append(time.perf_counter() - started)
    return min(found)


def main(elements: int) -> None:
    """Print a line for each reference, and the medians."""
    torch.manual_seed(0)
    costs, widths = [], []
    for name, (reference, tensors, given) in references(elements).items():
        definition = reference_spec(reference, tensors, name=name)
        wide = [x.double() for x in given]
        eager = seconds(lambda: reference(*wide))  # noqa: B023  # called at once
        golden = seconds(lambda: run(definition, BallArithmetic(), given, {}))  # noqa: B023  # as above
        allowed = seconds(lambda: run(definition, BallArithmetic(MODEL), given, {}))  # noqa: B023  # as above
        exact = golden_of(run(definition, BallArithmetic(), given, {})[0])
        limits = golden_of(run(definition, BallArithmetic(MODEL), given, {})[0])
        off = (reference(*given).double() - exact.value).abs()
        certain = bool((off <= limits.radius + exact.radius + 2.0**-24 * exact.value.abs()).all())
        used = (limits.radius / off)[(off > 0) & limits.radius.isfinite()]
        width = float(used.median()) if used.numel() else math.nan
        cost = (golden + allowed) / eager
        costs.append(cost)
        if not math.isnan(width):
            widths.append(width)
        print(
            f"{name:14} {eager * 1e3:8.1f} ms in float64, golden {golden / eager:5.1f} times, tolerance "
            f"{allowed / eager:5.1f} times; radius over error {width:7.1f}{'' if certain else '  EAGER IS OUTSIDE'}",
            flush=True,
        )
    print(f"median cost {statistics.median(costs):.1f}, median radius over error {statistics.median(widths):.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2**20)
