"""Models to audit, and the tokens to audit them with: `load` takes what a user names, `batches_of` cuts a text."""

from assay.precision.loading.model import Kind, Loaded, bundled, load
from assay.precision.loading.text import batches_of

__all__ = ["Kind", "Loaded", "batches_of", "bundled", "load"]
