"""Adapters of kernels of PyTorch and Liger-Kernel to the signatures of the specs, named by `configs/survey.toml`."""
