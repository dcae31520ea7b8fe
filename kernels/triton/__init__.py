"""Triton kernels, one op a file: kernel, launch, custom op, and a thin wrapper that checks its arguments.

Import the function from its file: ``from assay.kernels.triton.softmax import softmax``. Each is compiled on a GPU and,
from the same source, interpreted on a CPU (inside ``assay.interpreter.faithful()``, whose numbers are right).
``NAME_backward`` is the gradient of ``NAME``, which autograd takes: softmaxes, norms, SwiGLU, rope, convolution,
cross-entropy, attention, mixtures of experts and their routing have one.
Each is also an operator of `torch.library` in the namespace ``assay``, which `torch.compile` and `torch.export` keep
whole. The contract of each stands in ``configs/contracts/triton.toml``.
"""
