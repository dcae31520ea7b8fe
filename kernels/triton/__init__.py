"""Triton kernels, an op and its gradient a file: kernels, launch, custom operators, functions that check arguments.

Import a function from its file: ``from assay.kernels.triton.softmax import softmax``. Kernels are compiled on a GPU or,
from the same source, interpreted on a CPU (inside ``assay.interpreter.faithful()``). ``NAME_backward`` is the gradient
of ``NAME``, which autograd uses: softmaxes, norms, SwiGLU, rope, convolution, selective scan, cross-entropy, attention,
mixtures of experts and their routing have one. Each is also an operator of `torch.library` in the namespace ``assay``,
opaque to `torch.compile` and `torch.export`. The contract of each is in ``configs/contracts/triton.toml``.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_EARLIER_PATHS = {  # modules that were merged, and where their functions are now
    "gemm_mxfp8": "gemm_scaled",
    "gemm_nvfp4": "gemm_scaled",
    "layernorm_backward": "layernorm",
    "rmsnorm_backward": "rmsnorm",
    "selective_scan_backward": "selective_scan",
    "softmax_backward": "softmax",
    "swiglu_backward": "swiglu",
}


def _alias(name: str, target: str) -> ModuleType:
    """Return a module that imports ``target`` only when one of its functions is used."""
    module = ModuleType(f"{__name__}.{name}")

    def import_function(attribute: str) -> Any:
        if attribute.startswith("__"):  # `inspect.getmodule` asks every module for its __file__
            raise AttributeError(attribute)
        return getattr(import_module(f"{__name__}.{target}"), attribute)

    vars(module)["__getattr__"] = import_function
    return module


sys.modules.update({f"{__name__}.{name}": _alias(name, target) for name, target in _EARLIER_PATHS.items()})
