"""Pallas kernels, one op a file: kernel, call, and a thin wrapper that checks its arguments.

Import the function from its file: ``from assay.kernels.pallas.softmax import softmax``. Each takes and returns jax
arrays. On a CPU it runs in Pallas' interpret mode, on a TPU it is compiled from the same source.
The contract of each stands in ``configs/contracts/pallas.toml``.
"""
