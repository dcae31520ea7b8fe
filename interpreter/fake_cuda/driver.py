"""Triton's driver of the emulated device: it has properties and loads no binary."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from assay.formats.devices import CudaProperties
from assay.interpreter.fake_cuda.tensors import DEVICE
from assay.interpreter.replacing import Change

_BENCHMARK_CACHE = 1 << 20  # bytes cleared before each measured call; a GPU's cache of 256 MB would only cost time


class Driver:
    """`triton.runtime.driver.active` with one device."""

    def __init__(self, device: Callable[[], CudaProperties]) -> None:
        self._device = device
        self.utils = SimpleNamespace(
            get_device_properties=lambda index: device().driver_properties,
            get_device_capability=lambda index: device().capability,
            get_current_device=lambda: 0,
            set_current_device=lambda index: None,
            get_default_stream=lambda index: 0,
            load_binary=_refuse,
            unload_module=lambda module: None,
        )
        self.launcher_cls = _refuse

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, index: int) -> None:
        pass

    def get_current_stream(self, index: int | None = None) -> int:
        return 0

    def get_device_capability(self, index: int = 0) -> tuple[int, int]:
        capability: tuple[int, int] = self._device().capability
        return capability

    def get_current_target(self) -> GPUTarget:
        device = self._device()
        return GPUTarget("cuda", device.major * 10 + device.minor, device.warp_size)

    def get_active_torch_device(self) -> torch.device:
        return DEVICE

    def get_device_interface(self) -> Any:
        return torch.cuda

    def map_python_to_cpp_type(self, ty: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(ty))

    def get_benchmarker(self) -> Callable[..., Any]:
        from triton.testing import do_bench

        return do_bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(_BENCHMARK_CACHE // 4, dtype=torch.int32, device=DEVICE)

    def clear_cache(self, cache: torch.Tensor) -> None:
        cache.zero_()


def changes(device: Callable[[], CudaProperties]) -> list[Change]:
    """Return the changes to Triton's runtime."""
    config: Any = triton.runtime.driver
    driver = Driver(device)
    return [(config, name, driver) for name in ("_active", "active", "_default", "default") if name in vars(config)]


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("pretend_cuda() has no GPU to load a binary on; launch kernels inside faithful(pretend='cuda')")
