"""The host's time of a call of a bundled kernel, ordinary and replayed: `./dev bench launches`.

Without a GPU kernels are compiled for an H100 and a stand-in for Triton's launcher does nothing; with one the time
contains the launcher, and not the kernel, which runs meanwhile.
"""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from assay.kernels.triton.attention import attention
from assay.kernels.triton.attention_decode import attention_decode
from assay.kernels.triton.gemm import gemm
from assay.kernels.triton.gemm_fp8 import gemm_fp8
from assay.kernels.triton.moe import moe
from assay.kernels.triton.quantize import quantize_fp8
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.rmsnorm import rmsnorm
from assay.kernels.triton.softmax import softmax
from assay.kernels.triton.swiglu import swiglu

_CALLS, _SERIES = 500, 7  # calls of a series, of which the fastest counts: other processes only add time


class StandInDriver:
    """Triton's driver of an H100 whose launcher counts launches and does nothing."""

    def __init__(self) -> None:
        self.launches = 0
        properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda name, kernel, shared, device: (1, 1, 32, 0, 1024),
            unload_module=lambda module: None,
        )
        self.launcher_cls = lambda source, metadata: self._launch

    def _launch(self, *arguments: Any) -> None:
        self.launches += 1

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def map_python_to_cpp_type(self, ty: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(ty))

    def get_benchmarker(self) -> Callable[..., Any]:
        return lambda call, quantiles: [
            1.0,
            1.0,
            1.0,
        ]  # an autotuner takes the first configuration and compiles no other

    def get_empty_cache_for_benchmark(self) -> None:
        return None


def calls(device: str) -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    """Return the timed functions and their arguments."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, device=device, dtype=torch.int32)

    x, y, weight = normal(8, 4096), normal(8, 4096), normal(4096)
    a, b = normal(1024, 1024), normal(1024, 1024)
    e4m3, scale = torch.float8_e4m3fn, torch.ones((), device=device)
    q, k, v = (normal(1, heads, 1024, 128) for heads in (16, 4, 4))
    pages = torch.arange(64, device=device, dtype=torch.int32).view(4, 16)
    lengths = torch.full((4,), 1000, device=device, dtype=torch.int32)
    experts = (normal(64, 1024), normal(8, 1024, 1024), normal(8, 1024, 512))
    return {
        "softmax [8, 4096]": (softmax, (x,)),
        "rmsnorm [8, 4096]": (rmsnorm, (x, weight)),
        "swiglu [8, 4096]": (swiglu, (x, y)),
        "quantize_fp8 [8, 4096]": (quantize_fp8, (x,)),
        "gemm 1024^3": (gemm, (a, b)),
        "gemm 1 row": (gemm, (a[:1], b)),
        "gemm_fp8 1024^3": (gemm_fp8, (a.to(e4m3), b.to(e4m3), scale, scale.clone())),
        "attention [1, 16, 1024, 128]": (attention, (q, k, v)),
        "attention_decode 4 x 1000": (
            attention_decode,
            (normal(4, 16, 128), normal(64, 64, 4, 128), normal(64, 64, 4, 128), pages, lengths),
        ),
        "moe 64 tokens, 8 experts": (moe, (*experts, torch.rand(64, 2, device=device), integers(8, 64, 2))),
    }


def measured() -> Table:
    """Return the table of microseconds: of an ordinary call, of a replayed one, and the launches of a call."""
    stand_in = None if torch.cuda.is_available() else StandInDriver()
    if stand_in is not None:
        driver.set_active(stand_in)
    where = (
        f"Triton's launcher on {torch.cuda.get_device_name()}" if stand_in is None else "launcher replaced by nothing"
    )
    table = Table("call", "launches", "ordinary, us", "replayed, us", title=f"host time of a call, {where}")
    with torch.no_grad():
        for name, (function, arguments) in calls("cpu" if stand_in else "cuda").items():
            ordinary = function.__wrapped__  # type: ignore[attr-defined]
            fast = replayed(ordinary)
            for _ in range(3):
                fast(*arguments)
            before = stand_in.launches if stand_in else 0
            fast(*arguments)
            launches = str(stand_in.launches - before) if stand_in else ""
            table.add_row(name, launches, *(f"{microseconds(f, arguments):.1f}" for f in (ordinary, fast)))
    return table


def microseconds(function: Callable[..., Any], arguments: tuple[torch.Tensor, ...]) -> float:
    """Return the least mean time of a call over several series."""
    series = []
    for _ in range(_SERIES):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(_CALLS):
            function(*arguments)
        series.append((time.perf_counter() - began) / _CALLS)
    return 1e6 * min(series)
