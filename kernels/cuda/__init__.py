"""Kernels in CUDA C++, one op a file: a source in `sources/`, compiled in the first call, and a Python wrapper.

For tensors on a GPU NVRTC compiles them (`pip install kernel-assay[cuda]`), for tensors on a CPU the system's C++
compiler, with `sources/host.cuh` for CUDA's built-in names: that is for verification, not for speed.
"""
