"""Exports read again by their readers' own code: which scheme each layer gets there, beside what it was to get.

In: the folder of an export. Out: a `Verified` for each of its files, and for what llama-quantize and mlx_lm made
of them in the same folder. Called by ``assay audit --verify-export`` and by users.

folder (all of it) · checkpoints (compressed-tensors) · torchao · gguf · mlx · verified (what is asked and answered).
"""

from assay.precision.export.verifying.folder import verify_export
from assay.precision.export.verifying.verified import Verified

__all__ = ["Verified", "verify_export"]
