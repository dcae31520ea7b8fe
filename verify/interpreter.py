"""The interpreter under the name by which it is published: `assay.interpreter` is its home."""

from assay.interpreter import faithful

__all__ = ["faithful"]
