"""Kernels for a CPU: an op as PyTorch functions in float32, which torch.compile makes C++ of (`compiling.compiled`).

In: tensors of an op and its options; strided ones are copied first. Out: tensors, rounded once, without gradients. The
first call for new dtypes and options compiles, for all sizes but those of one: seconds, once a machine, since torch
keeps what it compiled. Contracts stand in ``configs/contracts/cpu.toml``.
"""
