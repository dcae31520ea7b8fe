"""Kernels: bundled ones in Triton, Pallas and CUDA C++, layers for groups of ranks, and adapters of other libraries'.

`configs/survey.toml` names each by its import path. ``replace`` puts the Triton kernels into a model of transformers.
"""

from assay.kernels.models import Replacement, replace

__all__ = ["Replacement", "replace"]
