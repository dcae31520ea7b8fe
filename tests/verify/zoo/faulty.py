"""Kernels with one planted fault each that no fault model has, and in a table of their own those that never come back.

The fault models of each op (`assay.verify.explanation.fault_models`) are kernels too: tests/verify/test_fault_models.py
examines those. What stands here is written apart from them, most of it in the forms that real kernels have.
"""

from .entry import Faulty
from .faulty_attention import FAULTY_ATTENTION
from .faulty_conduct import FAULTY_CONDUCT, HANGING
from .faulty_limits import FAULTY_LIMITS
from .faulty_products import FAULTY_PRODUCTS
from .faulty_quantize import FAULTY_QUANTIZE
from .faulty_rows import FAULTY_ROWS
from .faulty_unary import FAULTY_UNARY

__all__ = ["FAULTY", "HANGING"]

FAULTY: tuple[Faulty, ...] = (
    *FAULTY_ROWS,
    *FAULTY_PRODUCTS,
    *FAULTY_QUANTIZE,
    *FAULTY_ATTENTION,
    *FAULTY_UNARY,
    *FAULTY_CONDUCT,
    *FAULTY_LIMITS,
)
