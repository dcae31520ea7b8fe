"""Cross-entropy of logits and labels, and its gradient."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.errors import ShapeError
from assay.golden.options import Option, choice, number
from assay.golden.registry import Fault, Reduction, define

OPTIONS = {
    "ignore_index": Option(-100, lambda value: type(value) is int, "a whole number"),
    "label_smoothing": Option(
        0.0,
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1,
        "a number from 0 to 1",
        usual=(0.0, 0.1),
    ),
    "reduction": choice("mean", "sum", "none"),
    "softcap": number(None, positive=True, usual=(None, 4.0)),
    "z_loss": number(0.0, usual=(0.0, 0.01)),
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


def _faults(op: Callable[..., Any], kind: str) -> tuple[Fault, ...]:
    """What kernels of the loss, and of its gradient, do wrong with caps and with the squared log-sum-exp."""

    def hard(xp: Any, logits: Any, target: Any, *, softcap: float | None, **options: Any) -> Any:
        if softcap is not None:
            logits = -xp.minimum(-xp.minimum(logits, softcap), softcap)
        return op(xp, logits, target, softcap=None, **options)

    def outside(xp: Any, logits: Any, target: Any, *, softcap: float | None, **options: Any) -> Any:
        return op(xp, logits if softcap is None else logits * softcap, target, softcap=softcap, **options)

    return (
        Fault(f"logits_not_capped{kind}", "the logits' cap is left out",
              lambda xp, *tensors, softcap, **options: op(xp, *tensors, softcap=None, **options), "loss"),
        Fault(f"logits_clamped{kind}", "logits are clamped to the cap, not bent by a tanh", hard, "loss"),
        Fault(f"cap_not_divided{kind}", "the tanh takes the logits undivided by the cap", outside, "loss"),
        Fault(f"z_loss_dropped{kind}", "z times the squared log-sum-exp is left out",
              lambda xp, *tensors, z_loss, **options: op(xp, *tensors, z_loss=0.0, **options), "loss"),
        Fault(f"z_loss_halved{kind}", "z is taken half",
              lambda xp, *tensors, z_loss, **options: op(xp, *tensors, z_loss=z_loss / 2, **options), "loss"),
    )  # fmt: skip


@define(
    "cross_entropy",
    lambda options: f"{labelled(options)} -> loss:float32[{loss_size(options)}]",
    options=OPTIONS,
    rows=lambda options: loss_size(options) or None,
    may_be_zero=("T",),
    reduction=Reduction("V"),
    faults=_faults(lambda xp, *tensors, **options: cross_entropy(xp, *tensors, **options), ""),
    exempt=("flushed_subnormals",),
)
def cross_entropy(
    xp: Arithmetic[N, Idx],
    logits: N,
    target: Idx,
    *,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> N:
    """-(1 - s) log p_label - s mean log p + z lse^2 per token, p = softmax(logits); zero if it is ``ignore_index``.

    With ``softcap`` c the logits are c tanh(logits / c); z is ``z_loss`` (Chowdhery et al., *PaLM*, 2022), lse the
    log-sum-exp. The mean is over the tokens that have a label: NaN where none has. Logits of ignored tokens never reach
    the loss.
    """
    given = logits
    logits, label, counted, count = _labels(xp, "cross_entropy", logits, target, ignore_index)
    if softcap is not None:
        logits = xp.softcap(logits, softcap)
    logs = xp.log_softmax(logits)
    loss = -logs[xp.integers(range(logits.shape[0])), label]
    if label_smoothing:
        smooth = xp.any_formula(lambda: -xp.mean(logs), lambda: xp.logsumexp(logits) - xp.mean(logits))
        loss = loss * _rest(xp, label_smoothing) + smooth[:, 0] * label_smoothing
    if z_loss:
        level = xp.logsumexp(logits)[:, 0]
        loss = loss + level * level * z_loss
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


def _without_slope(xp: Any, logits: Any, target: Any, *, softcap: float | None, **options: Any) -> Any:
    capped = logits if softcap is None else xp.softcap(logits, softcap)
    return cross_entropy_backward(xp, capped, target, softcap=None, **options)


@define(
    "cross_entropy_backward",
    lambda options: f"{labelled(options)} -> dlogits[T,V]",
    options=OPTIONS,
    rows=lambda options: None if options["reduction"] == "mean" else "T",
    may_be_zero=("T",),
    gradient_of="cross_entropy",
    reduction=Reduction("V"),
    faults=(
        *_faults(lambda xp, *tensors, **options: cross_entropy_backward(xp, *tensors, **options), "_gradient"),
        Fault("softcap_slope_dropped", "the slope of the cap, 1 - tanh^2, is left out", _without_slope, "loss",
              needs="logits beyond the cap"),
    ),
)  # fmt: skip
def cross_entropy_backward(
    xp: Arithmetic[N, Idx],
    logits: N,
    target: Idx,
    *,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> N:
    """p (1 + 2 z lse) - (1 - s) onehot(label) - s / V, over the number of labels for the mean; zero if ignored.

    p = softmax(logits); of capped logits, times 1 - tanh(logits / softcap)^2. A contract says nothing of rows with a
    logit of +inf, which exp(x - lse) makes zeros and NaN, nor of ignored ones with any that is not finite: kernels that
    multiply by zero give NaN there.
    """
    given = logits
    logits, label, counted, count = _labels(xp, "cross_entropy_backward", logits, target, ignore_index)
    raw = logits
    if softcap is not None:
        logits = xp.softcap(logits, softcap)

    def unclear() -> Idx:
        return (xp.above(given, sys.float_info.max).any(-1) | (~counted & ~xp.is_finite(given).all(-1)))[:, None]

    is_label = label[:, None] == xp.integers(range(logits.shape[1]))[None, :]
    divisor = max(count, 1) if reduction == "mean" else 1

    def difference(divide: Callable[[N], N]) -> N:
        rest = divide(_rest(xp, label_smoothing)) if label_smoothing else divide(xp.exact(np.ones(1)))
        shares = divide(xp.softmax(logits))
        if z_loss:
            shares = shares + shares * (xp.logsumexp(logits) * (2 * z_loss))
        away = xp.where(is_label, shares - rest, shares)
        if not label_smoothing:
            return away
        return away - divide(xp.exact(np.full(1, label_smoothing)) / logits.shape[1])

    def scaled(number: N) -> N:
        return number / divisor if divisor > 1 else number

    gradient = xp.any_formula(lambda: scaled(difference(lambda number: number)), lambda: difference(scaled))
    if softcap is not None:
        bent = xp.tanh(raw / softcap, absolute=True)
        gradient = gradient * (1.0 - bent * bent)
    return xp.unspecified(unclear, xp.where(counted[:, None], gradient, 0.0))
