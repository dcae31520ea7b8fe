"""Stand-ins for kernels that lose their device: they raise what PyTorch, Triton and JAX raise, and end or hang.

After an error that loses the device each later call in the same process fails in the same way, as it does on CUDA.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from assay.kernels.libraries.pytorch import softmax as honest
from assay.verify.harness import call

GRACE = 0.2
call.GRACE = GRACE  # in the processes that examine it; a test puts back what holds in its own

WIDE = 20  # columns; wider rows are not kept
ERRORS = {
    "torch": "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' in the docs.",
    "assertion": "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`.",
    "launch": "CUDA error: unspecified launch failure",
    "triton": "Triton Error [CUDA]: misaligned address",
    "jax": "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered",
}
_lost: list[str] = []


def softmax(x: Tensor) -> Tensor:
    """Keep its contract."""
    _calls()
    return honest(x)


def _calls() -> None:
    """Write the process of each call, and whether launches block there, into the file CALLS, if that is a variable."""
    if path := os.environ.get("CALLS"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {os.environ.get('CUDA_LAUNCH_BLOCKING', '0')}\n")


def _losing(name: str) -> Callable[[Tensor], Tensor]:
    def kernel(x: Tensor) -> Tensor:
        _calls()
        if x.shape[-1] > WIDE:
            _lost.append(name)
        if _lost:
            kind = torch.AcceleratorError if name == "torch" else RuntimeError
            raise kind(ERRORS[_lost[0]])
        return honest(x)

    kernel.__name__ = kernel.__qualname__ = f"loses_by_{name}"
    return kernel


loses_by_torch, loses_by_assertion = _losing("torch"), _losing("assertion")
loses_by_launch, loses_by_triton, loses_by_jax = _losing("launch"), _losing("triton"), _losing("jax")


def aborts(x: Tensor) -> Tensor:
    """End as a C++ extension does whose check of an error fails."""
    _calls()
    if x.shape[-1] > WIDE:
        os.write(2, b"terminate called after throwing an instance of 'c10::AcceleratorError'\n")
        os.write(2, b"  what():  CUDA error: an illegal memory access was encountered\nframe #0: somewhere\n")
        os.abort()
    return honest(x)


def leaves(x: Tensor) -> Tensor:
    _calls()
    if x.shape[-1] > WIDE:
        os._exit(3)
    return honest(x)


def hangs(x: Tensor) -> Tensor:
    """Wait for what never ends, without an alarm."""
    _calls()
    if x.shape[-1] > WIDE:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        time.sleep(3600)
    return honest(x)


def loses_after_others(x: Tensor) -> Tensor:
    """Lose the device at a wide row, unless the process is new: by what earlier calls have left."""
    _calls()
    _lost.append("call")
    if x.shape[-1] > WIDE and len(_lost) > 1:
        raise RuntimeError(ERRORS["launch"])
    return honest(x)


def refuses(x: Tensor) -> Tensor:
    """Have a configuration for wide rows that needs more than the device has, as Triton's compiler finds."""
    from triton.runtime.errors import OutOfResources

    if x.shape[-1] > WIDE:
        compiler = {"__name__": "triton.compiler.compiler", "error": OutOfResources(262144, 232448, "shared memory")}
        exec("raise error", compiler)
    return honest(x)
