"""Cross-entropy of a linear layer's logits, which kernels never hold as a whole."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.loss import OPTIONS, cross_entropy, loss_size
from assay.golden.registry import Fault, Reduction, define


def _logits(xp: Arithmetic[N], x: N, weight: N) -> N:
    return xp.round(xp.matmul(x, xp.swap(weight)), "logits")


def _tail_of_classes(xp: Any, x: Any, weight: Any, target: Any, **options: Any) -> Any:
    """The classes beyond the last whole block of 16 count as logits of zero."""
    whole = weight.shape[0] // 16 * 16
    logits = _logits(xp, x, weight)
    if 0 < whole < weight.shape[0]:
        logits = xp.concatenate([logits[:, :whole], logits[:, whole:] * 0.0], -1)
    return cross_entropy(xp, logits, target, **options)


def _mean_of_chunks(xp: Any, x: Any, weight: Any, target: Any, **options: Any) -> Any:
    """The mean over all tokens, ignored ones too."""
    if options["reduction"] != "mean":
        return linear_cross_entropy(xp, x, weight, target, **options)
    return linear_cross_entropy(xp, x, weight, target, **{**options, "reduction": "sum"}) / max(x.shape[0], 1)


@define(
    "linear_cross_entropy",
    lambda options: (
        f"x[T,D], weight[V,D], target:int64[T]=label(V,{options['ignore_index']}) "
        f"-> loss:float32[{loss_size(options)}]"
    ),
    options=OPTIONS,
    stages={"logits": "input"},
    rows=lambda options: loss_size(options) or None,
    empty=("T",),
    work="T*V*D",
    reduction=Reduction("D"),
    faults=(
        "inputs_in_tf32",
        Fault("classes_beyond_block_zero", "classes beyond the last whole block of 16 count as logits of zero",
              _tail_of_classes, "tail", needs="more than 16 classes, no multiple of 16"),
        Fault("linear_mean_of_all_tokens", "the mean is over all tokens, ignored ones too", _mean_of_chunks, "loss",
              needs="an ignored label"),
        Fault("linear_smoothing_dropped", "label smoothing is left out",
              lambda xp, *tensors, label_smoothing, **options: linear_cross_entropy(
               xp, *tensors, label_smoothing=0.0, **options), "loss"),
        Fault("linear_cap_dropped", "the logits' cap is left out",
              lambda xp, *tensors, softcap, **options: linear_cross_entropy(
               xp, *tensors, softcap=None, **options), "loss"),
    ),
    exempt=("flushed_subnormals",),
)  # fmt: skip
def linear_cross_entropy(xp: Arithmetic[N, Idx], x: N, weight: N, target: Idx, **options: Any) -> N:
    """`cross_entropy` of the logits x weight^T. Stage "logits": as a product stores them before the loss."""
    return cross_entropy(xp, _logits(xp, x, weight), target, **options)
