"""Schemes: what an assignment can choose for a site, simulated to the bit.

scheme (the table of names) · quantizer (how a tensor may be stored: scales, codes, values) · fitting (parameters for
one site, rotation) · ggml (its block types, by its own code).
"""

from assay.precision.schemes.fitting import FakeQuantizer, Moments
from assay.precision.schemes.quantizer import Quantizer, Scales, store
from assay.precision.schemes.scheme import SCHEMES, Scheme, Split, scheme_named

__all__ = ["SCHEMES", "FakeQuantizer", "Moments", "Quantizer", "Scales", "Scheme", "Split", "scheme_named", "store"]
