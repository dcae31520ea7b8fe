"""Devices of ``configs/devices.toml``: peak rates and memory, CUDA's properties, and models of tensor cores."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from assay.configs import table
from assay.formats.accumulator import Accumulator, accumulator_named
from assay.runtime.errors import SettingError, unknown

DEFAULT_CUDA_DEVICE = "h200"

_KIB, _MIB = 1 << 10, 1 << 20
# Equal for every compute capability from 7.0 on (CUDA C++ Programming Guide, technical specifications).
_WARP_SIZE, _MAX_THREADS_PER_BLOCK, _REGISTERS = 32, 1024, 65536
_STATIC_SHARED = 48 * _KIB  # shared memory of a block without opt-in
_WGMMA_ROWS, _WARP_GROUP, _WGMMA_TERMS = 64, 4, 32


@dataclass(frozen=True)
class CudaProperties:
    """A device with the names of ``torch.cuda.get_device_properties``, in bytes and kHz; ``key`` is its row's name."""

    key: str
    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    max_threads_per_multi_processor: int
    max_blocks_per_multi_processor: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int
    shared_memory_per_block: int = _STATIC_SHARED
    max_threads_per_block: int = _MAX_THREADS_PER_BLOCK
    regs_per_multiprocessor: int = _REGISTERS
    warp_size: int = _WARP_SIZE
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0

    @staticmethod
    def of(properties: Any) -> CudaProperties:
        """Return the record of ``torch.cuda.get_device_properties``; what that lacks, as of the default device."""
        usual = cuda_device_named(DEFAULT_CUDA_DEVICE)
        names = [each.name for each in fields(CudaProperties) if each.name != "key"]
        known = {name: getattr(properties, name, getattr(usual, name)) for name in names}
        return CudaProperties(key=str(properties.name).lower(), **known)

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor

    @property
    def uuid(self) -> uuid.UUID:
        """Return a constant identifier of the emulated device."""
        return uuid.uuid5(uuid.NAMESPACE_OID, f"pretended {self.key}")

    @property
    def driver_properties(self) -> dict[str, Any]:
        """Return the properties under the names of Triton's driver."""
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


@dataclass(frozen=True)
class TensorCores:
    """The tensor cores of a device: accumulator models by kind of operands, see ``configs/tensor_cores.toml``."""

    name: str
    units: Mapping[str, Accumulator]
    imprecise: int = 0

    def converts_fp8(self, shape: tuple[int, ...], warps: int, promotion: int) -> bool:
        """Return whether Triton computes an FP8 dot with a result of this shape in float16."""
        wgmma_tiles = shape[-2] % _WGMMA_ROWS == 0 and warps % _WARP_GROUP == 0 and len(shape) == 2
        promotes_early = bool(self.imprecise) and promotion < _WGMMA_TERMS
        return "small" in self.units and (promotes_early or not wgmma_tiles)


@dataclass(frozen=True)
class Device:
    """A row of ``configs/devices.toml``, in operations/s, bytes/s, bytes and seconds."""

    name: str
    title: str
    bandwidth: float
    memory: float
    rates: Mapping[str, float]
    """Dense peak by arithmetic that the hardware supports; empty if no datasheet is cited."""
    microscaling: bool = False
    """Matrix products accept a scale per 16 or 32 elements."""
    achievable: float = 1.0
    """Share of rates and bandwidth that programs reach: a parameter, 1.0 if no measurement is cited."""
    launch: float = 0.0
    """Seconds of overhead of each op: a parameter, 0.0 if no measurement is cited."""
    source: str = ""
    capability: int = 0
    """NVIDIA's compute capability times ten; 0 for other vendors."""
    cuda: CudaProperties | None = None
    tensor_cores: TensorCores | None = None


@cache
def devices() -> Mapping[str, Device]:
    """Return all devices by name, in the order of the table."""
    rows: dict[str, dict[str, Any]] = dict(table("devices"))
    limits = rows.pop("limits")
    units = table("tensor_cores")
    return {name: _device(name, row, limits, units) for name, row in rows.items()}


def _device(name: str, row: Mapping[str, Any], limits: Mapping[str, Any], units: Mapping[str, Any]) -> Device:
    cuda = tensor_cores = None
    if "cuda" in row:
        cuda = _cuda_properties(name, row, limits)
        models = units[row["tensor_cores"]]
        named = {operands: accumulator_named(model) for operands, model in models.items() if operands != "imprecise"}
        tensor_cores = TensorCores(name, named, models.get("imprecise", 0))
    figures = {
        "title": row.get("title") or row["cuda"]["name"],
        "rates": {arithmetic: rate * 1e12 for arithmetic, rate in row.get("rates", {}).items()},
        "bandwidth": row["bandwidth"] * 1e9,
        "memory": row["memory"] * 1e9,
    }
    return Device(name=name, **{**row, **figures, "cuda": cuda, "tensor_cores": tensor_cores})


def _cuda_properties(key: str, row: Mapping[str, Any], limits: Mapping[str, Any]) -> CudaProperties:
    cuda, (major, minor) = row["cuda"], divmod(row["capability"], 10)
    limit = limits[f"{major}.{minor}"]
    shared_of_multiprocessor, shared_of_block = limit["shared"]
    return CudaProperties(
        key=key,
        name=cuda["name"],
        major=major,
        minor=minor,
        multi_processor_count=cuda["multiprocessors"],
        total_memory=row["memory"] * 10**9,
        L2_cache_size=cuda["cache"] * _MIB,
        max_threads_per_multi_processor=limit["threads"],
        max_blocks_per_multi_processor=limit["blocks"],
        shared_memory_per_multiprocessor=shared_of_multiprocessor * _KIB,
        shared_memory_per_block_optin=shared_of_block * _KIB,
        clock_rate=cuda["clock"] * 1000,
        memory_clock_rate=round(row["bandwidth"] * 10**9 / (2 * cuda["bus"] / 8) / 1000),  # two transfers a clock
        memory_bus_width=cuda["bus"],
    )


def cuda_device_named(name: str) -> CudaProperties:
    """Return the CUDA device of that name, in any case. Raises `SettingError` with the known names."""
    return _part_named("cuda", name, "device to pretend", "cuda")


def tensor_cores_named(name: str) -> TensorCores:
    """Return the tensor cores of a device by its name, in any case. Raises `SettingError` with the known names."""
    return _part_named("tensor_cores", name, "device of the interpreter")


def tensor_cores_of_capability(major: int, minor: int) -> TensorCores | None:
    """Return the tensor cores of the first device of this compute capability; None if the table has none."""
    wanted = 10 * major + minor
    return next((row.tensor_cores for row in devices().values() if row.capability == wanted), None)


def _part_named(part: str, name: str, what: str, *others: str) -> Any:
    known = {row.name: getattr(row, part) for row in devices().values() if getattr(row, part) is not None}
    if name.lower() not in known:
        raise SettingError(unknown(what, name, [*others, *known]))
    return known[name.lower()]
