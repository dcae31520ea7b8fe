"""Compiles Triton kernels for a GPU's architecture, without a GPU, and reports on the code: `assay inspect`.

In: a kernel, as `assay verify` takes it, and an architecture. Out, for each launch and each tuning configuration:
registers, spills, shared memory, instructions, amounts of work, and findings in words.
"""
