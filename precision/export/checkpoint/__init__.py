"""Quantised checkpoints that equal the simulation, in the compressed-tensors format: written, and loaded again.

writing (with folding and pieces) · reading.
"""

from assay.precision.export.checkpoint.reading import load_checkpoint, packed_zero_points
from assay.precision.export.checkpoint.writing import Written, unstorable, write_checkpoint

__all__ = ["Written", "load_checkpoint", "packed_zero_points", "unstorable", "write_checkpoint"]
