"""Fingerprints: what a kernel does inside, read from outside by probes.

`fingerprint(kernel, op, dtype=...)` gives a `Card` of `Trait`s; each says what was seen, and how, or that the kernel's
results don't show it. `subject` calls the kernel, `reductions` presents chosen terms to the sum inside an op,
`accumulator` and `tree` read that sum, `values` stores, special values, repetition and batches.
"""

from assay.verify.fingerprint.card import Card, Trait
from assay.verify.fingerprint.reading import fingerprint

__all__ = ["Card", "Trait", "fingerprint"]
