"""Cross-entropy of the rows of a matrix of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.kernels.cpu.compiling import compiled, composed
from assay.kernels.triton.arguments import FLOATING, check, check_loss_options


@composed
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """-(1 - s) log p_label - s mean log p + z lse^2 of each token, p = softmax(logits[T,V]); zero if it is ignored.

    logits are float32, bfloat16 or float16, target[T] is int64: 0 to V - 1 or ``ignore_index``. s: ``label_smoothing``,
    from 0 to 1. ``softcap`` c: the logits are c tanh(logits / c). z: ``z_loss``; lse is the log-sum-exp. ``reduction``:
    "none" gives float32[T], "sum" float32[], and "mean" that over the tokens that aren't ignored, NaN where all are.
    Raises TypeError or ValueError, naming the argument, for another dtype, shape or option.
    """
    check(logits=(logits, FLOATING, "T V"), target=(target, (torch.int64,), "T"))
    check_loss_options(logits.shape[1], "logits", ignore_index, label_smoothing, reduction, softcap, z_loss)
    losses = _losses(logits, target, ignore_index, label_smoothing, softcap, z_loss)
    if reduction == "none":
        return losses
    return losses.sum() / (target != ignore_index).sum() if reduction == "mean" else losses.sum()


@compiled
def _losses(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, softcap: float | None, z_loss: float
) -> Tensor:
    wide = logits.float()
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    largest = wide.amax(-1, keepdim=True)
    shifted = wide - largest
    log_sum = torch.log(torch.exp(shifted).sum(-1, keepdim=True))
    kept = target != ignore_index
    label = torch.where(kept, target, 0)[:, None]
    loss = (log_sum - shifted.gather(-1, label))[:, 0]
    if label_smoothing:
        others = (log_sum - shifted).mean(-1)
        loss = others if label_smoothing == 1 else (1 - label_smoothing) * loss + label_smoothing * others
    if z_loss:
        loss = loss + z_loss * (largest + log_sum)[:, 0].square()
    return torch.where(kept, loss, 0.0)
