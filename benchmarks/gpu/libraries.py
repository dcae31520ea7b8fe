"""Time bundled kernels and PyTorch's own on the device: medians, with a check that outputs agree."""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from assay.kernels.triton.gemm import gemm
from assay.kernels.triton.layernorm import layernorm
from assay.kernels.triton.rmsnorm import rmsnorm
from assay.kernels.triton.softmax import softmax
from benchmarks.gpu.part import Part, main

_CLOSE = 2.0**-6  # of the largest output: two roundings to bfloat16 and sums in another order


def body(part: Part) -> None:
    """Report a row per op and size: median microseconds of both and their ratio; claim that outputs agree."""
    for rows, columns in [(8, 64)] if part.rehearsal else [(4096, 4096), (64, 16384)]:
        x = torch.randn(rows, columns, device=part.device).bfloat16()
        weight, bias = torch.randn(2, columns, device=part.device).bfloat16()
        pairs: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
            "softmax": (lambda x=x: softmax(x), lambda x=x: functional.softmax(x, -1)),
            "rmsnorm": (
                lambda x=x, w=weight: rmsnorm(x, w, eps=1e-6),
                lambda x=x, w=weight: functional.rms_norm(x, w.shape, w, 1e-6),
            ),
            "layernorm": (
                lambda x=x, w=weight, b=bias: layernorm(x, w, b, eps=1e-5),
                lambda x=x, w=weight, b=bias: functional.layer_norm(x, w.shape, w, b, 1e-5),
            ),
        }
        part.step(f"rows {rows} {columns}", partial(_rows, part, f"[{rows}, {columns}]", pairs))
    for size in (32,) if part.rehearsal else (1024, 8192):
        a, b = torch.randn(2, size, size, device=part.device).bfloat16()
        product = {"gemm": (lambda a=a, b=b: gemm(a, b), lambda a=a, b=b: a @ b)}
        part.step(f"product {size}", partial(_rows, part, f"[{size}, {size}]", product))


def _rows(part: Part, size: str, pairs: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]) -> None:
    with part.running():
        for op, (ours, theirs) in pairs.items():
            got, wanted = ours().double(), theirs().double()
            off = float((got - wanted).abs().max() / wanted.abs().max())
            times = [_microseconds(part, function) for function in (ours, theirs)]
            part.say(f"  {op} {size}: {times[0]:.1f} us, PyTorch {times[1]:.1f} us, ratio {times[0] / times[1]:.2f}")
            part.claim(f"{op} {size} agrees with PyTorch's", off <= _CLOSE, f"{off:.1e} of the largest output")


def _microseconds(part: Part, function: Callable[[], Tensor]) -> float:
    if not part.rehearsal:
        from triton.testing import do_bench

        return 1000 * float(do_bench(function, return_mode="median"))
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        function()
        taken.append(time.perf_counter() - began)
    return 1e6 * statistics.median(taken)


if __name__ == "__main__":
    main("libraries", body)
