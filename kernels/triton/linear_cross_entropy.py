"""Cross-entropy of a linear layer's logits, and its gradients, by chunks of tokens.

The logits of one chunk are held at a time, which are about as many numbers as x has; the gradient computes them again.
Chunks follow one another, and the weight's gradient is summed over them in float32, by each product as it is stored:
there are no atomics. That reads and writes 8 bytes for each element of the weight, however few tokens a chunk has; so
chunks have about D of them where that gradient is computed in 16 bits, or D / 2 in float32. Logits and their gradients,
V numbers for each token, then take as much memory as the sum, which is V D numbers in float32.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, FLOATING, REDUCTIONS, check, check_choice, check_loss_options
from assay.kernels.triton.cross_entropy import (
    INT64,
    logit_gradients,
    loss_shape,
    reduced,
    token_losses,
    upstream_and_count,
)
from assay.kernels.triton.gemm import matmul, matmul_into
from assay.kernels.triton.operators import custom_op, differentiate

_LEAST = 16


def _chunks(x: Tensor, weight: Tensor, of_weight: bool = False) -> list[slice]:
    """Slices of the tokens, a power of two in each; longer ones for the weight's gradient."""
    tokens, width = x.shape
    parts = triton.cdiv(len(weight), max(width, 1))
    size = max(_LEAST, int(triton.next_power_of_2(triton.cdiv(max(tokens, 1), parts))))
    if of_weight:
        size = max(size, int(triton.next_power_of_2(2 * width // x.element_size() + 1)) // 2)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


@custom_op("assay::linear_cross_entropy", lambda x, weight, target, *rest: loss_shape(x, target, *rest))
def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignored: int,
    smoothing: float,
    reduction: str,
    softcap: float | None,
    z_loss: float,
) -> Tensor:
    loss = torch.empty(target.shape, dtype=torch.float32, device=x.device)
    for chunk in _chunks(x, weight):
        logits = matmul(x[chunk], weight.t(), x.dtype)
        token_losses(logits, target[chunk], loss[chunk], None, ignored, smoothing, softcap, z_loss)
    return loss if reduction == "none" else reduced(loss, target, ignored, reduction)


@custom_op(
    "assay::linear_cross_entropy_backward",
    lambda x, weight, *rest: (
        x.new_empty(x.shape if rest[-2] else 0),
        weight.new_empty(weight.shape if rest[-1] else 0),
    ),
)
def _linear_cross_entropy_backward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    dloss: Tensor | None,
    ignored: int,
    smoothing: float,
    reduction: str,
    softcap: float | None,
    z_loss: float,
    of_x: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor]:
    upstream, count = upstream_and_count(target, dloss, ignored, reduction)
    dx = x.new_empty(x.shape if of_x else 0)
    chunks = _chunks(x, weight, of_weight)
    dweight = weight.new_empty(weight.shape if of_weight else 0, dtype=torch.float32 if chunks[1:] else weight.dtype)
    if not chunks:
        dweight.zero_()
    for chunk in chunks:
        logits = matmul(x[chunk], weight.t(), x.dtype)
        grown = logit_gradients(
            logits, target[chunk], upstream[chunk], count, None, ignored, smoothing, softcap, z_loss
        )
        if of_x:
            matmul_into(grown, weight, dx[chunk])
        if of_weight:
            matmul_into(grown.t(), x[chunk], dweight, accumulate=chunk.start > 0)
    return dx, dweight.to(weight.dtype)


def _gradient(saved, dloss):
    options = (saved.ignored, saved.smoothing, saved.reduction, saved.softcap, saved.z_loss)
    needs = saved.needs.x, saved.needs.weight
    return _linear_cross_entropy_backward(saved.x, saved.weight, saved.target, dloss, *options, *needs)


differentiate("assay::linear_cross_entropy", _gradient, saves="x weight target")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """`cross_entropy` of the logits x weight^T, x[T,D], weight[V,D] and target int64[T], rounded to x's dtype.

    x and weight have one dtype, float32, bfloat16 or float16. Options and result are those of `cross_entropy`. Raises
    TypeError or ValueError, naming the argument, for another dtype, shape, device or option.
    """
    check(x=(x, FLOATING, "T D"), weight=(weight, ("x",), "V D"), target=(target, INT64, "T"))
    check_loss_options(len(weight), "weight", ignore_index, label_smoothing, reduction, softcap, z_loss)
    return _linear_cross_entropy(x, weight, target, ignore_index, label_smoothing, reduction, softcap, z_loss)


def linear_cross_entropy_backward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    dloss: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """dx[T,D] and dweight[V,D] of `linear_cross_entropy`, from the gradient dloss of its result, float32[] or
    [T]; of 1 where that is left out. The gradient of the logits is rounded to x's dtype. Raises as that does.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    upstream = {} if dloss is None else {"dloss": (dloss, FLOAT32, "T" if reduction == "none" else "")}
    check(x=(x, FLOATING, "T D"), weight=(weight, ("x",), "V D"), target=(target, INT64, "T"), **upstream)
    check_loss_options(len(weight), "weight", ignore_index, label_smoothing, reduction, softcap, z_loss)
    return _linear_cross_entropy_backward(
        *(x, weight, target, dloss, ignore_index, label_smoothing, reduction, softcap, z_loss), True, True
    )
