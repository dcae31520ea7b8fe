"""Schemes: what an assignment can put at a site, and how it is simulated to the bit.

scheme (the table of names) · quantizer (how a tensor may be stored) · storage (scales, codes, values) · fitting
(what is chosen for one site) · hadamard · rounding.
"""

from assay.precision.schemes.fitting import Moments, Stored
from assay.precision.schemes.quantizer import Quantizer
from assay.precision.schemes.scheme import SCHEMES, Scheme, Split, scheme_named
from assay.precision.schemes.storage import Scales, store

__all__ = ["SCHEMES", "Moments", "Quantizer", "Scales", "Scheme", "Split", "Stored", "scheme_named", "store"]
