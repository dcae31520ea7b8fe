"""Kernels in CUDA C++, one op a file: sources, compiled when first needed, and a wrapper that checks its arguments.

On a GPU NVRTC compiles them (`pip install kernel-assay[cuda]`). For tensors on a CPU the same source goes to the
system's C++ compiler, with `sources/host.cuh` for CUDA's built-in names: that is for examinations, not for speed.
"""
