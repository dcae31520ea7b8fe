"""Kernels that keep their entry's contract, the default one where it names none, for all inputs that it judges."""

from .entry import Entry
from .honest_attention_backward import ATTENTION_BACKWARD
from .honest_attention_table import ATTENTION
from .honest_backward import BACKWARD
from .honest_decode import DECODE
from .honest_elementwise import ELEMENTWISE
from .honest_gemm import GEMM
from .honest_loss import LOSS
from .honest_merge import MERGE
from .honest_microscaling import MICROSCALING
from .honest_moe import MOE
from .honest_norm import NORM
from .honest_quantize import QUANTIZE
from .honest_quantized import QUANTIZED
from .honest_softmax import SOFTMAX
from .honest_unary import UNARY
from .honest_varlen import VARLEN

HONEST: tuple[Entry, ...] = (
    *SOFTMAX,
    *NORM,
    *ELEMENTWISE,
    *GEMM,
    *QUANTIZED,
    *ATTENTION,
    *DECODE,
    *MOE,
    *UNARY,
    *BACKWARD,
    *LOSS,
    *ATTENTION_BACKWARD,
    *QUANTIZE,
    *MICROSCALING,
    *VARLEN,
    *MERGE,
)
