"""Speed of kernels: `inspection` compiles without a GPU, `timing` times side by side, `tuning` searches configurations.

A kernel, an op and a case from `assay.verify` come in; compiled facts, times with their accuracy, and records go out.
`assay inspect`, `assay bench`, `assay tune` and `assay.judge` call it.
"""
