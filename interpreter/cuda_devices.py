"""What a pretended device answers about itself: the rows of ``configs/cuda_devices.toml``."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import cache
from typing import Any

from assay.configs import table
from assay.runtime.errors import SettingError, unknown

USUAL = "h200"
"""The device that is pretended where none is named."""

_KIB, _MIB = 1 << 10, 1 << 20
_WARP, _THREADS_OF_A_BLOCK, _REGISTERS = 32, 1024, 65536  # of every compute capability from 7.0 on
_STATIC_SHARED = 48 * _KIB  # what a block may have without asking for more


@dataclass(frozen=True)
class CudaDevice:
    """The properties of a device, under the names of ``torch.cuda.get_device_properties``; ``key`` is that of its row.

    Bytes, and kHz; of memory two transfers a clock.
    """

    key: str
    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    max_threads_per_multi_processor: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int
    shared_memory_per_block: int = _STATIC_SHARED
    max_threads_per_block: int = _THREADS_OF_A_BLOCK
    regs_per_multiprocessor: int = _REGISTERS
    warp_size: int = _WARP
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        return self.major, self.minor

    @property
    def uuid(self) -> uuid.UUID:
        """An identifier, the same one each time."""
        return uuid.uuid5(uuid.NAMESPACE_OID, f"pretended {self.key}")

    @property
    def driver_properties(self) -> dict[str, Any]:
        """The properties under the names that Triton's driver gives them."""
        return {
            "max_shared_mem": self.shared_memory_per_block_optin,
            "max_num_regs": self.regs_per_multiprocessor,
            "multiprocessor_count": self.multi_processor_count,
            "warpSize": self.warp_size,
            "sm_clock_rate": self.clock_rate,
            "mem_clock_rate": self.memory_clock_rate,
            "mem_bus_width": self.memory_bus_width,
            "arch": f"sm_{self.major}{self.minor}",
        }


@cache
def cuda_device_named(name: str) -> CudaDevice:
    """The device of that name, in any case; `SettingError`, listing those that there are, for an unknown one."""
    rows: dict[str, dict[str, Any]] = table("cuda_devices")
    known = [key for key in rows if key != "limits"]
    key = name.lower()
    if key not in known:
        raise SettingError(unknown("device to pretend", name, ["cuda", *known]))
    row, (major, minor) = rows[key], rows[key]["capability"]
    limits = rows["limits"][f"{major}.{minor}"]
    of_all, of_block = limits["shared"]
    return CudaDevice(
        key=key,
        name=row["name"],
        major=major,
        minor=minor,
        multi_processor_count=row["multiprocessors"],
        total_memory=row["memory"] * 10**9,
        L2_cache_size=row["cache"] * _MIB,
        max_threads_per_multi_processor=limits["threads"],
        shared_memory_per_multiprocessor=of_all * _KIB,
        shared_memory_per_block_optin=of_block * _KIB,
        clock_rate=row["clock"] * 1000,
        memory_clock_rate=round(row["bandwidth"] * 10**9 / (2 * row["bus"] / 8) / 1000),
        memory_bus_width=row["bus"],
    )
