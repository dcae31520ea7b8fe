"""Quantised checkpoints that equal the simulation: written in the compressed-tensors format, and loaded again.

In: a model, an assignment and the fitted quantisation parameters. Out: a folder that engines load. Called by
`exporting` and by users. writing (with storable, folding, pieces, folder) · reading.
"""

from assay.precision.export.checkpoint.reading import load_checkpoint, packed_zero_points
from assay.precision.export.checkpoint.storable import unstorable
from assay.precision.export.checkpoint.writing import Written, write_checkpoint

__all__ = ["Written", "load_checkpoint", "packed_zero_points", "unstorable", "write_checkpoint"]
