"""Triton kernels of this repository; a folder named `kernels` doesn't conflict with assay's package."""
