"""Models to audit, and the tokens to audit them with: `load` loads a model by name, `batches_of` tokenises a text.

In: a name, a directory, a file or an object. Out: a `Loaded`, checked and in eval mode. Called by `assay audit` and by
users; `quiet` by every caller that loads other packages.

loader (kinds of targets, user code, checks of every model) · pretrained (Hugging Face directories, weights held in 16
bits) · loaded (also texts) · quiet.
"""

from assay.precision.loading.loaded import Kind, Loaded, batches_of, parts_of
from assay.precision.loading.loader import bundled, exceeds_limit, load

__all__ = ["Kind", "Loaded", "batches_of", "bundled", "exceeds_limit", "load", "parts_of"]
