"""Speed of kernels: `inspection` compiles without a GPU, `timing` compares kernels, `tuning` searches configurations.

In: kernels, ops and cases of `assay.verify`. Out: compiled facts, times with their accuracy, and records. Called by
`assay inspect`, `assay bench`, `assay tune` and `assay.judge`.
"""
