"""Kernels with one planted fault each, and in a table of their own those that never come back."""

from __future__ import annotations

from .entry import Faulty
from .faulty_attention import FAULTY_ATTENTION
from .faulty_attention_backward import FAULTY_ATTENTION_BACKWARD
from .faulty_backward import FAULTY_BACKWARD
from .faulty_conduct import FAULTY_CONDUCT, HANGING
from .faulty_decode import FAULTY_DECODE
from .faulty_elementwise import FAULTY_ELEMENTWISE
from .faulty_gemm import FAULTY_GEMM
from .faulty_limits import FAULTY_LIMITS
from .faulty_loss import FAULTY_LOSS
from .faulty_merge import FAULTY_MERGE
from .faulty_microscaling import FAULTY_MICROSCALING
from .faulty_moe import FAULTY_MOE
from .faulty_norm import FAULTY_NORM
from .faulty_quantize import FAULTY_QUANTIZE
from .faulty_quantized import FAULTY_QUANTIZED
from .faulty_softmax import FAULTY_SOFTMAX
from .faulty_unary import FAULTY_UNARY
from .faulty_varlen import FAULTY_VARLEN

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
    *FAULTY_UNARY,
    *FAULTY_BACKWARD,
    *FAULTY_LOSS,
    *FAULTY_ATTENTION_BACKWARD,
    *FAULTY_QUANTIZE,
    *FAULTY_MICROSCALING,
    *FAULTY_VARLEN,
    *FAULTY_MERGE,
    *FAULTY_CONDUCT,
    *FAULTY_LIMITS,
)
