"""Kernels to test the harness on: honest ones that it must pass, and copies with one fault each that it must reject.

Each family has its honest kernels, written with parts that may be replaced, and below them faults, most of which
replace a part. The fault models of each op (`assay.verify.explanation.fault_models`) are kernels too, which
tests/verify/test_fault_models.py examines; no fault here is one of them. Faulty kernels in styles of their own are in
`foreign` and `interpreted`.
"""

from . import attention, conduct, functions, merging, norms, products, quantizers, softmax
from .conduct import HANGING
from .entry import Entry, Faulty

FAMILIES = (softmax, norms, functions, products, attention, merging, quantizers)
HONEST: tuple[Entry, ...] = tuple(entry for family in FAMILIES for entry in family.HONEST)
FAULTY: tuple[Faulty, ...] = tuple(entry for family in (*FAMILIES, conduct) for entry in family.FAULTY)

__all__ = ["FAULTY", "HANGING", "HONEST", "Entry", "Faulty"]
