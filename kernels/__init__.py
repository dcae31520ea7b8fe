"""Kernels under test, one op a file, by what they are written in; of ours they import nothing outside of this room.

In: tensors and options of an op. Out: tensors. Called by `configs/survey.toml`, by tests and by users directly.
triton · pallas · cuda (ours) · parallel (ours, for every rank of a group) · libraries (adapters of other
libraries' kernels) · models (`replace` puts ours in).
"""

from assay.kernels.models import Replacement, replace

__all__ = ["Replacement", "replace"]
