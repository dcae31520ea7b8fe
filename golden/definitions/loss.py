"""Cross-entropy of logits and labels, and its gradient."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.errors import ShapeError
from assay.golden.options import Option, choice
from assay.golden.registry import Reduction, define

OPTIONS = {
    "ignore_index": Option(-100, lambda value: type(value) is int, "a whole number"),
    "label_smoothing": Option(
        0.0,
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1,
        "a number from 0 to 1",
        usual=(0.0, 0.1),
    ),
    "reduction": choice("mean", "sum", "none"),
}


def labelled(options: Mapping[str, Any]) -> str:
    """The tensors that a loss is taken of."""
    return f"logits[T,V], target:int64[T]=label(V,{options['ignore_index']})"


def loss_size(options: Mapping[str, Any]) -> str:
    """The dimension of the loss, none where it is reduced."""
    return "T" if options["reduction"] == "none" else ""


def _labels(xp: Arithmetic[N, Idx], op: str, logits: N, target: Idx, ignore_index: int) -> tuple[N, Idx, Idx, int]:
    """The logits and labels, zero where there is no label; which tokens have one; and how many do."""
    if logits.shape[1] == 0:
        raise ShapeError(f"{op}: expected logits of one class or more, got V=0")
    counted = target != ignore_index
    return xp.where(counted[:, None], logits, 0.0), xp.native.where(counted, target, 0), counted, int(counted.sum())


@define(
    "cross_entropy",
    lambda options: f"{labelled(options)} -> loss:float32[{loss_size(options)}]",
    options=OPTIONS,
    rows=lambda options: loss_size(options) or None,
    empty=("T",),
    reduction=Reduction("V"),
    exempt=("flushed_subnormals",),
)
def cross_entropy(
    xp: Arithmetic[N, Idx], logits: N, target: Idx, *, ignore_index: int, label_smoothing: float, reduction: str
) -> N:
    """-(1 - s) log p_label - s mean log p per token, p = softmax(logits); zero where the label is ``ignore_index``.

    The mean is over the tokens that have a label: NaN where none has. Logits of ignored tokens never reach the loss.
    """
    given = logits
    logits, label, counted, count = _labels(xp, "cross_entropy", logits, target, ignore_index)
    logs = xp.log_softmax(logits)
    loss = -logs[xp.integers(range(logits.shape[0])), label]
    if label_smoothing:
        smooth = xp.any_formula(lambda: -xp.mean(logs), lambda: xp.logsumexp(logits) - xp.mean(logits))
        loss = loss * _rest(xp, label_smoothing) + smooth[:, 0] * label_smoothing
    loss = xp.spilled(lambda: ~counted & ~xp.is_finite(given).all(-1), xp.where(counted, loss, 0.0))
    if reduction == "none":
        return loss
    total = xp.sum(loss, axis=0)
    if reduction == "mean":
        total = total / count if count else xp.exact(np.full(1, math.nan))
    return total.reshape(())


def _rest(xp: Arithmetic[N], label_smoothing: float) -> N:
    """1 - label_smoothing."""
    return xp.exact(np.ones(1)) - label_smoothing


@define(
    "cross_entropy_backward",
    lambda options: f"{labelled(options)} -> dlogits[T,V]",
    options=OPTIONS,
    rows=lambda options: None if options["reduction"] == "mean" else "T",
    empty=("T",),
    gradient_of="cross_entropy",
    reduction=Reduction("V"),
)
def cross_entropy_backward(
    xp: Arithmetic[N, Idx], logits: N, target: Idx, *, ignore_index: int, label_smoothing: float, reduction: str
) -> N:
    """softmax(logits) - (1 - s) onehot(label) - s / V, over the number of labels for the mean; zero if ignored.

    A contract says nothing of rows with a logit of +inf, which exp(x - lse) makes zeros and NaN, nor of ignored ones
    with any that is not finite: kernels that multiply by zero give NaN there.
    """
    given = logits
    logits, label, counted, count = _labels(xp, "cross_entropy_backward", logits, target, ignore_index)

    def unclear() -> Idx:
        return (xp.above(given, sys.float_info.max).any(-1) | (~counted & ~xp.is_finite(given).all(-1)))[:, None]

    is_label = label[:, None] == xp.integers(range(logits.shape[1]))[None, :]
    divisor = max(count, 1) if reduction == "mean" else 1

    def difference(divide: Callable[[N], N]) -> N:
        rest = divide(_rest(xp, label_smoothing)) if label_smoothing else divide(xp.exact(np.ones(1)))
        shares = divide(xp.softmax(logits))
        away = xp.where(is_label, shares - rest, shares)
        if not label_smoothing:
            return away
        return away - divide(xp.exact(np.full(1, label_smoothing)) / logits.shape[1])

    def scaled(number: N) -> N:
        return number / divisor if divisor > 1 else number

    gradient = xp.any_formula(lambda: scaled(difference(lambda number: number)), lambda: difference(scaled))
    return xp.unspecified(unclear, xp.where(counted[:, None], gradient, 0.0))
