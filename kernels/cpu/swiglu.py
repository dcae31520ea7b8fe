"""SwiGLU of two matrices, element by element.

N. Shazeer, *GLU Variants Improve Transformer*, 2020.
"""

from __future__ import annotations

import torch
from torch import Tensor

from assay.kernels.cpu.compiling import compiled, composed
from assay.kernels.triton.arguments import FLOATING, check, check_cap


@composed
def swiglu(gate: Tensor, up: Tensor, *, limit: float | None = None) -> Tensor:
    """gate / (1 + exp(-gate)) * up of gate[R,N] and up[R,N], computed in float32.

    With a limit, gate <= limit and abs(up) <= limit first; NaN stays NaN. Both are float32, bfloat16 or float16, not
    necessarily the same; the result has gate's dtype. Raises TypeError or ValueError, naming the argument, for another
    dtype or shape, or a limit that is not positive.
    """
    check(gate=(gate, FLOATING, "R N"), up=(up, FLOATING, "R N"))
    check_cap("limit", limit)
    return _swiglu(gate, up, limit)


@compiled
def _swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    opened, factor = gate.float(), up.float()
    if limit is not None:
        opened, factor = opened.clamp(max=limit), factor.clamp(-limit, limit)
    return (_silu(opened) * factor).to(gate.dtype)


def _silu(x: Tensor) -> Tensor:
    """x sigmoid(x), with its limit at -inf; the exponential never overflows."""
    small = torch.exp(-x.abs())
    return torch.where(x == -torch.inf, 0.0, x * (torch.where(x < 0, small, 1.0) / (1.0 + small)))
