"""What `triton.runtime.driver.active` is in the pretended world."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from assay.interpreter.cuda_devices import CudaDevice
from assay.interpreter.pretended_tensors import DEVICE
from assay.interpreter.replacing import Change

_CACHE = 1 << 20  # bytes that a benchmark of Triton's clears before each call


class Driver:
    """A driver that knows its device, and loads no binary."""

    def __init__(self, device: Callable[[], CudaDevice]) -> None:
        self._device = device
        self.utils = SimpleNamespace(
            get_device_properties=lambda index: device().of_the_driver,
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
        """Whether there is a device."""
        return True

    def get_current_device(self) -> int:
        """Its index."""
        return 0

    def set_current_device(self, index: int) -> None:
        """There is but one."""

    def get_current_stream(self, index: int | None = None) -> int:
        """The default stream."""
        return 0

    def get_device_capability(self, index: int = 0) -> tuple[int, int]:
        """The compute capability."""
        capability: tuple[int, int] = self._device().capability
        return capability

    def get_current_target(self) -> GPUTarget:
        """What a kernel is compiled for."""
        device = self._device()
        return GPUTarget("cuda", device.major * 10 + device.minor, device.warp_size)

    def get_active_torch_device(self) -> torch.device:
        """The device as torch names it."""
        return DEVICE

    def get_device_interface(self) -> Any:
        """torch's module of such devices."""
        return torch.cuda

    def map_python_to_cpp_type(self, ty: str) -> str:
        """A type's name in C++."""
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(ty))

    def get_benchmarker(self) -> Callable[..., Any]:
        """What measures a kernel: the time that its interpretation takes."""
        from triton.testing import do_bench

        return do_bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Memory to clear before each call."""
        return torch.empty(_CACHE // 4, dtype=torch.int32, device=DEVICE)

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Clear it."""
        cache.zero_()


def changes(device: Callable[[], CudaDevice]) -> list[Change]:
    """What is replaced in Triton's runtime."""
    config: Any = triton.runtime.driver
    ours = Driver(device)
    return [(config, name, ours) for name in ("_active", "active", "_default", "default") if name in vars(config)]


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("pretend_cuda() has no GPU to load a binary on; launch kernels inside faithful(pretend='cuda')")
