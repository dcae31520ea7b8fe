"""Kernels with one planted fault each, and in a table of their own those that never come back."""

from __future__ import annotations

from .entry import Faulty
from .faulty_attention import FAULTY_ATTENTION
from .faulty_conduct import FAULTY_CONDUCT, HANGING
from .faulty_decode import FAULTY_DECODE
from .faulty_elementwise import FAULTY_ELEMENTWISE
from .faulty_gemm import FAULTY_GEMM
from .faulty_moe import FAULTY_MOE
from .faulty_norm import FAULTY_NORM
from .faulty_quantized import FAULTY_QUANTIZED
from .faulty_softmax import FAULTY_SOFTMAX

__all__ = ["FAULTY", "HANGING"]

FAULTY: tuple[Faulty, ...] = (
    *FAULTY_SOFTMAX,
    *FAULTY_NORM,
    *FAULTY_ELEMENTWISE,
    *FAULTY_GEMM,
    *FAULTY_QUANTIZED,
    *FAULTY_ATTENTION,
    *FAULTY_DECODE,
    *FAULTY_MOE,
    *FAULTY_CONDUCT,
)
