"""Cross-entropy of a linear layer's logits, and its gradients, in chunks of tokens: logits [T,V] are never held whole.

The logits of one chunk take about as many numbers as x; the gradient computes them again. The weight's gradient is
summed over the chunks, one after another, in float32 by the products as they are stored, without atomics. That reads
and writes 8 bytes for each element of the weight, however few tokens a chunk has; so chunks have about D of them where
that gradient is computed in 16 bits, or D / 2 in float32. Logits and their gradients, V numbers for each token, then
take as much memory as the sum, which is V D numbers in float32.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, FLOATING, check, check_choice
from assay.kernels.triton.cross_entropy import (
    INT64,
    REDUCTIONS,
    LossOptions,
    empty_loss,
    logit_gradients,
    options_of,
    reduce_losses,
    token_gradients,
    token_losses,
)
from assay.kernels.triton.gemm import matmul, matmul_into
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.replay import replayed

_MIN_CHUNK = 16  # tokens


def _chunks(x: Tensor, weight: Tensor, weight_gradient: bool = False) -> list[slice]:
    """Return slices of the tokens, a power of two in each; longer ones for the weight's gradient."""
    tokens, width = x.shape
    num_chunks = triton.cdiv(len(weight), max(width, 1))
    size = max(_MIN_CHUNK, int(triton.next_power_of_2(triton.cdiv(max(tokens, 1), num_chunks))))
    if weight_gradient:
        size = max(size, int(triton.next_power_of_2(2 * width // x.element_size() + 1)) // 2)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


@custom_op("assay::linear_cross_entropy", lambda x, weight, target, *rest: empty_loss(x, target, *rest))
def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    softcap: float | None,
    z_loss: float,
) -> Tensor:
    options = LossOptions(ignore_index, label_smoothing, reduction, softcap, z_loss)
    loss = torch.empty(target.shape, dtype=torch.float32, device=x.device)
    for chunk in _chunks(x, weight):
        logits = matmul(x[chunk], weight.t(), x.dtype)
        token_losses(logits, target[chunk], loss[chunk], None, options)
    return reduce_losses(loss, target, options)


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
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    softcap: float | None,
    z_loss: float,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return dx and dweight; one that isn't needed is empty."""
    options = LossOptions(ignore_index, label_smoothing, reduction, softcap, z_loss)
    dlosses, num_valid = token_gradients(target, dloss, options)
    dx = x.new_empty(x.shape if needs_x else 0)
    chunks = _chunks(x, weight, needs_weight)
    dweight = weight.new_empty(weight.shape if needs_weight else 0, dtype=torch.float32 if chunks[1:] else weight.dtype)
    if not chunks:
        dweight.zero_()
    for chunk in chunks:
        logits = matmul(x[chunk], weight.t(), x.dtype)
        dlogits = logit_gradients(logits, target[chunk], dlosses[chunk], num_valid, None, options)
        if needs_x:
            matmul_into(dlogits, weight, dx[chunk])
        if needs_weight:
            matmul_into(dlogits.t(), x[chunk], dweight, accumulate=chunk.start > 0)
    return dx, dweight.to(weight.dtype)


differentiate(
    "assay::linear_cross_entropy",
    lambda saved, dloss: _linear_cross_entropy_backward(
        *(saved.x, saved.weight, saved.target, dloss, *options_of(saved), saved.needs.x, saved.needs.weight)
    ),
    saves="x weight target",
)


@replayed
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
    """Return `cross_entropy` of the logits x weight^T, rounded to x's dtype; x[T,D], weight[V,D], target int64[T].

    x and weight have one dtype, float32, bfloat16 or float16. Options and result are those of `cross_entropy`. Raises
    TypeError or ValueError, naming the argument, for another dtype, shape, device or option.
    """
    options = LossOptions(ignore_index, label_smoothing, reduction, softcap, z_loss)
    check(x=(x, FLOATING, "T D"), weight=(weight, ("x",), "V D"), target=(target, INT64, "T"))
    options.check("weight", len(weight))
    return _linear_cross_entropy(x, weight, target, *options)


@replayed
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
    """Return dx[T,D] and dweight[V,D] of `linear_cross_entropy`, from the gradient dloss of its result.

    dloss is float32, [T] for the reduction "none", else []; 1 where left out. The gradient of the logits is rounded to
    x's dtype. Raises as `linear_cross_entropy` does.
    """
    options = LossOptions(ignore_index, label_smoothing, reduction, softcap, z_loss)
    check_choice("reduction", reduction, REDUCTIONS)
    gradient = {} if dloss is None else {"dloss": (dloss, FLOAT32, "T" if reduction == "none" else "")}
    check(x=(x, FLOATING, "T D"), weight=(weight, ("x",), "V D"), target=(target, INT64, "T"), **gradient)
    options.check("weight", len(weight))
    return _linear_cross_entropy_backward(x, weight, target, dloss, *options, True, True)
