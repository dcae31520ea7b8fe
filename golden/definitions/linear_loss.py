"""Cross-entropy of a linear layer's logits, which kernels never hold as a whole."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.loss import OPTIONS, cross_entropy, cross_entropy_backward, loss_size
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
    may_be_zero=("T",),
    work="T*V*D",
    sequential_steps="ceil(T/16)*ceil(V/32)",
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


def _gradients(xp: Arithmetic[N, Idx], x: N, weight: N, grown: N) -> tuple[N, N]:
    """Those of x and weight, from that of the logits."""
    dx, dweight = xp.matmul(grown, weight), xp.matmul(xp.swap(grown), x)

    def touched() -> Idx:
        rows: Idx = (~xp.is_finite(x)).any(-1)[:, None]
        return rows | (~xp.is_finite(weight)).any(-1).any(0)

    return xp.unspecified(touched, dx), xp.unspecified(lambda: touched().any(0)[None], dweight)


def _not_averaged(xp: Any, *tensors: Any, reduction: str, **options: Any) -> Any:
    return linear_cross_entropy_backward(xp, *tensors, reduction="sum" if reduction == "mean" else reduction, **options)


def _first_chunk(xp: Any, x: Any, weight: Any, target: Any, **options: Any) -> Any:
    """The weight's gradient is that of the last 16 tokens alone."""
    dx, _ = linear_cross_entropy_backward(xp, x, weight, target, **options)
    kept = max(x.shape[0] - 1, 0) // 16 * 16
    grown = cross_entropy_backward(xp, _logits(xp, x, weight), target, **options)
    return dx, xp.matmul(xp.swap(grown[kept:]), x[kept:])


@define(
    "linear_cross_entropy_backward",
    lambda options: (
        f"x[T,D], weight[V,D], target:int64[T]=label(V,{options['ignore_index']}) -> dx[T,D], dweight[V,D]"
    ),
    options=OPTIONS,
    stages={"logits": "input", "logit_gradient": "input"},
    may_be_zero=("T",),
    work="3*T*V*D",
    sequential_steps="ceil(T/16)*ceil(V/32)",
    reduction=Reduction("D"),
    gradient_of="linear_cross_entropy",
    faults=(
        "inputs_in_tf32",
        Fault("linear_gradient_not_averaged", "the gradient is not divided by the number of labels", _not_averaged,
              "loss", needs="more than one label"),
        Fault("weight_gradient_of_last_chunk", "dweight is that of the last chunk of 16 tokens alone", _first_chunk,
              "state", needs="more than 16 tokens"),
        Fault("linear_gradient_cap_dropped", "the logits' cap is left out",
              lambda xp, *tensors, softcap, **options: linear_cross_entropy_backward(
               xp, *tensors, softcap=None, **options), "loss"),
        Fault("linear_gradient_without_label", "the label's share is not subtracted",
              lambda xp, x, weight, target, **options: _gradients(
               xp, x, weight, xp.softmax(_logits(xp, x, weight)) / (
                max(int((target != options["ignore_index"]).sum()), 1) if options["reduction"] == "mean" else 1)),
              "loss"),
    ),
    exempt=("flushed_subnormals",),
)  # fmt: skip
def linear_cross_entropy_backward(xp: Arithmetic[N, Idx], x: N, weight: N, target: Idx, **options: Any) -> tuple[N, N]:
    """G weight and G^T x, G being `cross_entropy_backward` of the logits x weight^T.

    Stages: "logits", as a product stores them before the loss; "logit_gradient", G as the products take it.
    """
    grown = cross_entropy_backward(xp, _logits(xp, x, weight), target, **options)
    return _gradients(xp, x, weight, xp.round(grown, "logit_gradient"))
