"""Triton kernels, an op and its gradient a file: kernels, launch, custom operators, functions that check arguments.

Import a function from its file: ``from assay.kernels.triton.softmax import softmax``. Kernels are compiled on a GPU or,
from the same source, interpreted on a CPU (inside ``assay.interpreter.faithful()``). ``NAME_backward`` is the gradient
of ``NAME``, which autograd uses: softmaxes, norms, SwiGLU, rope, convolution, selective scan, cross-entropy, attention,
mixtures of experts and their routing have one. Each is also an operator of `torch.library` in the namespace ``assay``,
opaque to `torch.compile` and `torch.export`. The contract of each is in ``configs/contracts/triton.toml``.
"""

import importlib
import sys
from types import ModuleType

for _name in ("layernorm", "rmsnorm", "selective_scan", "softmax", "swiglu"):
    # Earlier import paths: NAME_backward was in a file of its own. The alias imports the file when first used.
    _alias = ModuleType(f"{__name__}.{_name}_backward", f"The gradients in `{__name__}.{_name}`.")
    _file = f"{__name__}.{_name}"
    _alias.__getattr__ = lambda attribute, file=_file: getattr(importlib.import_module(file), attribute)  # type: ignore[method-assign]
    sys.modules[_alias.__name__] = _alias
