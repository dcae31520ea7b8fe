"""Models to audit, and the tokens to audit them with: `load` takes what a user names, `batches_of` cuts a text.

In: a name, a directory, a file or an object. Out: a `Loaded`, checked and in eval mode. Called by `assay audit` and by
users; `quiet` by whoever loads other packages.

loader (what a name means, what every model must have) · pretrained (Hugging Face directories) · casting
(weights held in 16 bits) · user_code (factories, exported programs, pickles) · loaded · text · quiet.
"""

from assay.precision.loading.loaded import Kind, Loaded
from assay.precision.loading.loader import bundled, exceeds_limit, load
from assay.precision.loading.text import batches_of, parts_of

__all__ = ["Kind", "Loaded", "batches_of", "bundled", "exceeds_limit", "load", "parts_of"]
