"""Models to audit and the tokens to audit them with: `load` loads a model by name, `batches_of` tokenises a text.

loader (kinds of targets, checks of every model) · pretrained (Hugging Face directories) · loaded (also texts) · quiet
"""

from assay.precision.loading.loaded import Kind, Loaded, batches_of, parts_of
from assay.precision.loading.loader import bundled, exceeds_limit, load

__all__ = ["Kind", "Loaded", "batches_of", "bundled", "exceeds_limit", "load", "parts_of"]
