"""Triton kernels of this repository; a folder named `kernels` does not get into assay's way, nor assay into its."""
