"""Pallas kernels, one op a file with its gradient: kernels, calls, and a thin wrapper that checks its arguments.

Import the function from its file: ``from assay.kernels.pallas.softmax import softmax``. Each takes and returns jax
arrays, and works under ``jax.jit``, ``jax.vmap`` and ``jax.grad``. Lowered for a TPU it is compiled by Mosaic, lowered
for a CPU it runs in Pallas' interpret mode, from the same source (`calls.call`). Blocks are tiles of a TPU's vector
memory, 8 rows of 128 elements in float32 and 16 in bfloat16, or reach to the end of the array. Lowered for CUDA some
have a grid of their own (`gpu` names them), which Triton compiles, and the others are refused. The contract of each
kernel stands in ``configs/contracts/pallas.toml``.
"""
