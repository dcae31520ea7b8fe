"""Pallas kernels, one op and its gradient in a file: kernels, calls, and a thin wrapper that checks its arguments.

Import the function from its file: ``from assay.kernels.pallas.softmax import softmax``. Each takes and returns jax
arrays, and works under ``jax.jit``, ``jax.vmap`` and ``jax.grad``. Lowered for a TPU it is compiled by Mosaic; lowered
for a CPU the same source runs in Pallas' interpret mode (`calls.call`). Blocks are tiles of a TPU's vector memory, 8
rows of 128 elements in float32 and 16 in bfloat16, or extend to the end of the array. Some kernels have another grid
for GPUs (`gpu` lists them), which Triton compiles; lowering the others for CUDA raises NotImplementedError. Contracts
are in ``configs/contracts/pallas.toml``.
"""
