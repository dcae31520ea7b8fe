"""The architecture that kernels are compiled for, and the resources of its multiprocessors."""

from __future__ import annotations

import re
from dataclasses import dataclass

from assay.formats.devices import DEFAULT_CUDA_DEVICE, CudaProperties, cuda_device_named, devices
from assay.verify.errors import SettingError

MOST_REGISTERS = 255  # of a thread: CUDA C++ Programming Guide, technical specifications
TENSOR_MEMORY = 512  # columns of a multiprocessor of compute capability 10.0: PTX ISA, tcgen05.alloc
_RESERVED = (
    1 << 10
)  # bytes of shared memory reserved in each block, from compute capability 8.0: CUDA Programming Guide
_ALLOCATED = 256  # registers are allocated to a warp in this unit: CUDA occupancy calculator


@dataclass(frozen=True)
class Arch:
    """An architecture by its name in ptxas, and the device whose properties count for it."""

    name: str
    device: CudaProperties

    @property
    def capability(self) -> int:
        """Return the compute capability as Triton has it: 90 for 9.0."""
        return self.device.major * 10 + self.device.minor

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory that a block can have."""
        return self.device.shared_memory_per_block_optin

    def occupancy(self, threads: int, registers: int, shared: int) -> float:
        """Return the share of a multiprocessor's warps that can be resident, 0 if no block fits.

        Arguments: threads per block, registers per thread, bytes of shared memory per block. The formula is that of
        the occupancy calculator of CUDA's toolkit.
        """
        device = self.device
        warps = -(-threads // device.warp_size)
        of_a_warp = -(-max(registers, 1) * device.warp_size // _ALLOCATED) * _ALLOCATED
        taken = shared + (_RESERVED if device.major >= 8 else 0)
        most = device.max_threads_per_multi_processor // device.warp_size
        blocks = min(
            most // warps,
            device.regs_per_multiprocessor // of_a_warp // warps,
            device.shared_memory_per_multiprocessor // taken if taken else most,
            device.max_blocks_per_multi_processor,
        )
        return blocks * warps / most if shared <= self.shared and threads <= device.max_threads_per_block else 0.0


def arch_named(text: str) -> Arch:
    """Return the architecture of ``sm_90a``, ``sm_90`` or a device such as ``h200``. Raises `SettingError`."""
    capabilities = {name: device.capability for name, device in devices().items() if device.cuda is not None}
    matched = re.fullmatch(r"sm_(\d+)[af]?", text.lower())
    if text.lower() in capabilities:
        device = text.lower()
    elif matched and int(matched[1]) in capabilities.values():
        of_it = [name for name, capability in capabilities.items() if capability == int(matched[1])]
        device = next((name for name in of_it if name in _USUAL), of_it[0])
    else:
        known = sorted({_name(capability) for capability in capabilities.values()}, key=lambda name: (len(name), name))
        raise SettingError(
            f"--arch {text}: unknown; expected one of {', '.join(known)}, or a device: {', '.join(capabilities)}"
        )
    result = cuda_device_named(device)
    return Arch(_name(result.major * 10 + result.minor), result)


_USUAL = (DEFAULT_CUDA_DEVICE, "l40s")  # preferred among devices of one capability


def _name(capability: int) -> str:
    """Return the name that Triton gives ptxas, with the suffix of architecture-specific features (wgmma, tcgen05)."""
    return f"sm_{capability}{'a' if capability >= 90 else ''}"


__all__ = ["MOST_REGISTERS", "TENSOR_MEMORY", "Arch", "arch_named"]
