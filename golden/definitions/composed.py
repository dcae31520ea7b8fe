"""Gradients as a function's caller sees them: from its inputs and an upstream gradient, the forward pass included.

`assay.verify.examine_backward` asks these of ops whose backward spec starts from something else: softmax's from its own
result, which a function computes itself and may round before it saves it; cross-entropy's from an upstream gradient of
one. They are compositions of listed specs, and not listed themselves.
"""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.backward import softmax_backward
from assay.golden.definitions.loss import OPTIONS, cross_entropy_backward, labelled, loss_size
from assay.golden.registry import define


@define(
    "softmax_gradient",
    "x[R,N], dy[R,N] -> dx[R,N]",
    stages={"output": "input"},
    rows="R",
    gradient_of="softmax",
    public=False,
)
def softmax_gradient(xp: Arithmetic[N], x: N, dy: N) -> N:
    """softmax_backward of y = softmax(x) and dy. Stage "output": y, as it is saved between the passes."""
    return softmax_backward(xp, xp.round(xp.softmax(x), "output"), dy)


@define(
    "cross_entropy_gradient",
    lambda options: f"{labelled(options)}, dloss:float32[{loss_size(options)}]=weight -> dlogits[T,V]",
    options=OPTIONS,
    stages={"gradient": None},
    rows=lambda options: None if options["reduction"] == "mean" else "T",
    may_be_zero=("T",),
    gradient_of="cross_entropy",
    public=False,
)
def cross_entropy_gradient(
    xp: Arithmetic[N, Idx],
    logits: N,
    target: Idx,
    dloss: N,
    *,
    reduction: str,
    ignore_index: int,
    **options: Any,
) -> N:
    """cross_entropy_backward times dloss, of each token where nothing is reduced.

    Formulas: the product as written; dloss divided first, for the mean; and dloss multiplied into the shares before
    the label's one is subtracted, as log-softmax followed by the likelihood does (PyTorch). Stage "gradient": what a
    forward pass has saved of it, for kernels that compute it there.
    """
    upstream = dloss[:, None] if reduction == "none" else dloss.reshape(1, 1)
    counted = target != ignore_index
    count = max(int(counted.sum()), 1) if reduction == "mean" else 1

    def gradient(kind: str) -> N:
        return cross_entropy_backward(xp, logits, target, reduction=kind, ignore_index=ignore_index, **options)

    def divided() -> N:
        return upstream / count if count > 1 else upstream

    def shares_first() -> N:
        label = xp.native.where(counted, target, 0)
        is_label = (label[:, None] == xp.integers(range(logits.shape[1]))[None, :]) & counted[:, None]
        early, one = gradient("sum"), divided()
        shares = xp.where(is_label, early + 1.0, early) * one
        return xp.where(is_label, shares - one, shares)

    return xp.any_formula(
        lambda: xp.round(gradient(reduction), "gradient") * upstream,
        lambda: xp.round(gradient("sum"), "gradient") * divided(),
        shares_first,
    )
