"""Depthwise causal convolution along a sequence, as Mamba and gated linear attention have it before their scans."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.options import choice
from assay.golden.registry import Fault, Reduction, define


def _shifted(xp: Arithmetic[N], x: N, taps: N, back: int) -> N:
    """The products of each place ``back`` before, zero where there is none."""
    length = x.shape[2]
    products = x[:, :, : max(length - back, 0)] * taps
    nothing = xp.exact(xp.native.zeros((*x.shape[:2], min(back, length))))
    return xp.concatenate([nothing, products], -1)


def _convolved(xp: Arithmetic[N], x: N, weight: N, bias: N) -> N:
    width = weight.shape[1]
    terms = [_shifted(xp, x, weight[:, tap, None], width - 1 - tap) for tap in range(width)]
    constant = xp.exact(xp.native.zeros(x.shape)) + bias[:, None]
    return xp.sum(xp.stack([*terms, constant], -1))[..., 0]


def _flipped(xp: Any, x: Any, weight: Any, bias: Any, *, activation: str) -> Any:
    back = xp.integers(range(weight.shape[1] - 1, -1, -1))
    return causal_conv1d(xp, x, weight[:, back], bias, activation=activation)


def _ahead(xp: Any, x: Any, weight: Any, bias: Any, *, activation: str) -> Any:
    """The window ends a place later."""
    length = x.shape[2]
    later = xp.concatenate([x[:, :, 1:], x[:, :, :1] * 0.0], -1) if length else x
    return causal_conv1d(xp, later, weight, bias, activation=activation)


def _other(xp: Any, x: Any, weight: Any, bias: Any, *, activation: str) -> Any:
    return causal_conv1d(xp, x, weight, bias, activation="silu" if activation == "none" else "none")


@define(
    "causal_conv1d",
    "x[B,D,L], weight[D,W], bias[D] -> y[B,D,L]",
    options={"activation": choice("none", "silu")},
    stages={"convolved": None},
    rows="B",
    separable=("D",),
    sizes={"W": (4, 2, 3)},
    work="B*D*L*W",
    reduction=Reduction("W"),
    grid=("B", "D"),
    faults=(
        Fault("taps_flipped", "the taps are read from the last to the first, as a convolution has them", _flipped),
        Fault("window_a_place_later", "the window ends at the next place: the future is seen", _ahead, "mask",
              needs="more than one place"),
        Fault("convolution_bias_dropped", "the bias is left out",
              lambda xp, x, weight, bias, *, activation: causal_conv1d(
               xp, x, weight, bias * 0.0, activation=activation)),
        Fault("convolution_activation", "silu is left out, or applied where there is none", _other),
        Fault("first_tap_dropped", "the tap of the earliest place is left out",
              lambda xp, x, weight, bias, *, activation: causal_conv1d(
               xp, x, weight[:, 1:], bias, activation=activation), "tail"),
    ),
    exempt=("tail_of_sum_dropped",),
)  # fmt: skip
def causal_conv1d(xp: Arithmetic[N], x: N, weight: N, bias: N, *, activation: str) -> N:
    """y[b,d,l] = bias[d] + sum_w weight[d,w] x[b,d,l-W+1+w], x zero before its beginning; silu of it where asked.

    Stage "convolved": the sum, before the activation.
    """
    y = _convolved(xp, x, weight, bias)
    if activation == "none":
        return y
    y = xp.round(y, "convolved")
    return xp.gate_mul(y, xp.sigmoid(y))
