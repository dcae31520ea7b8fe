"""What a GPU's compiler makes of Triton kernels, found out without a GPU: `assay inspect`.

In: a kernel, as `assay verify` takes it, and an architecture. Out: of each launch and each tuning configuration the
registers, spills, shared memory, instructions and amounts of work, and what is wrong with them in words.
"""
