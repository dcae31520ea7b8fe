"""A function of the forward pass with another one in its backward pass."""

from typing import Any

import torch


class Passed(torch.autograd.Function):
    """``run(x)`` in the forward pass; in the backward pass ``back(x, g)``, which gives x's cotangent, or None.

    ``back`` must not hold a streamed weight, only how it is read again. ``copied``: x is kept, and the result given, as
    a copy that the model can't write over.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Any, x: Any, run: Any, back: Any, copied: Any) -> Any:
        ctx.save_for_backward(x.clone() if copied else x)
        ctx.back = back
        result = run(x)
        return result.clone() if copied else result

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return None, ctx.back(x, g), None, None, None
