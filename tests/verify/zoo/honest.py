"""Kernels that keep the default contract of their spec, for all inputs that it judges."""

from __future__ import annotations

from .entry import Entry
from .honest_attention_table import ATTENTION
from .honest_decode import DECODE
from .honest_elementwise import ELEMENTWISE
from .honest_gemm import GEMM
from .honest_moe import MOE
from .honest_norm import NORM
from .honest_quantized import QUANTIZED
from .honest_softmax import SOFTMAX

HONEST: tuple[Entry, ...] = (*SOFTMAX, *NORM, *ELEMENTWISE, *GEMM, *QUANTIZED, *ATTENTION, *DECODE, *MOE)
