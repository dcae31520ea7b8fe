"""Kernels of other libraries under the signatures of the ops, as `assay survey` calls them: none of them is ours.

In: an op's tensors in the order of its signature, its options as keywords. Out: what the library's kernel gives.
Called by the survey through `configs/survey.toml`, and by tests.
pytorch, pytorch_attention (kernels of PyTorch) · pytorch_eager (compositions as model code writes them) · liger.
"""
