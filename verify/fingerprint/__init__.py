"""Fingerprints: numerical properties of a kernel (accumulator, rounding, order of sums), found by probing its results.

`fingerprint(kernel, op, dtype=...)` returns a `Card` of `Trait`s; each has a value and the evidence for it, or the
reason why the results don't show it. `subject` calls the kernel, `reductions` presents chosen terms to the sum inside
an op, `accumulator` and `tree` read that sum, and `values` reads stores, special values, repetition and batches.
"""

from assay.verify.fingerprint.card import Card, Trait
from assay.verify.fingerprint.reading import fingerprint

__all__ = ["Card", "Trait", "fingerprint"]
