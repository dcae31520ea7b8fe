"""Depthwise causal convolution along a sequence, as in Mamba and gated linear attention, and its gradient."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.options import choice
from assay.golden.registry import Fault, Reduction, altered, define

_OTHER = {"none": "silu", "silu": "none"}
_HUGE = 2.0**126  # half the largest float32: beyond it a sum may overflow


def _shifted(xp: Arithmetic[N], x: N, taps: N, back: int) -> N:
    """Return the products with the position ``back`` before, zero if there is none."""
    length = x.shape[2]
    products = x[:, :, : max(length - back, 0)] * taps
    nothing = xp.exact(xp.native.zeros((*x.shape[:2], min(back, length))))
    return xp.concatenate([nothing, products], -1)


def _convolved(xp: Arithmetic[N], x: N, weight: N, bias: N) -> N:
    width = weight.shape[1]
    terms = [_shifted(xp, x, weight[:, tap, None], width - 1 - tap) for tap in range(width)]
    constant = xp.exact(xp.native.zeros(x.shape)) + bias[:, None]
    return xp.sum(xp.stack([*terms, constant], -1))[..., 0]


_CONVOLUTION: dict[str, Any] = {
    "options": {"activation": choice("none", "silu")},
    "stages": {"convolved": None},
    "independent": ("D",),
    "sizes": {"W": (4, 2, 3, 7)},
    "sequential_steps": "ceil(B*D/16)*ceil(L/64)",
    "grid": ("B", "D"),
    "exempt": ("tail_of_sum_dropped",),
}


@define(
    "causal_conv1d",
    "x[B,D,L], weight[D,W], bias[D] -> y[B,D,L]",
    rows="B",
    work="B*D*L*W",
    reduction=Reduction("W"),
    **_CONVOLUTION,
    faults=(
        Fault("taps_flipped", "the taps are read from the last to the first, as a convolution has them",
              altered("causal_conv1d", weight=lambda xp, weight: (
               weight[:, xp.integers(range(weight.shape[1] - 1, -1, -1))]))),
        Fault("window_a_place_later", "the window ends at the next position: the future is seen",
              altered("causal_conv1d", x=lambda xp, x: xp.concatenate([x[:, :, 1:], x[:, :, :1] * 0.0], -1)), "mask",
              needs="more than one position"),
        Fault("convolution_bias_dropped", "the bias is missing",
              altered("causal_conv1d", bias=lambda bias: bias * 0.0)),
        Fault("convolution_activation", "silu is missing, or applied where there is none",
              altered("causal_conv1d", activation=lambda activation: _OTHER[activation])),
        Fault("first_tap_dropped", "the tap of the earliest position is missing",
              altered("causal_conv1d", weight=lambda weight: weight[:, 1:]), "tail"),
    ),
)  # fmt: skip
def causal_conv1d(xp: Arithmetic[N], x: N, weight: N, bias: N, *, activation: str) -> N:
    """y[b,d,l] = bias[d] + sum_w weight[d,w] x[b,d,l-W+1+w], x zero before its beginning; silu of it if asked for.

    Stage "convolved": the sum, before the activation.
    """
    y = _convolved(xp, x, weight, bias)
    if activation == "none":
        return y
    y = xp.round(y, "convolved")
    return xp.gate_mul(y, xp.sigmoid(y))


def _of_last_batch(again: Any, x: Any, dy: Any) -> Any:
    return again(x=x[-1:], dy=dy[-1:])


def _before_activation(xp: Arithmetic[N], x: N, weight: N, bias: N, dy: N, activation: str) -> N:
    if activation == "none":
        return dy
    return dy * xp.silu_slope(xp.round(_convolved(xp, x, weight, bias), "convolved"))


@define(
    "causal_conv1d_backward",
    "x[B,D,L], weight[D,W], bias[D], dy[B,D,L] -> dx[B,D,L], dweight[D,W], dbias[D]",
    may_be_zero=(),
    work="3*B*D*L*W",
    reduction=Reduction("L"),
    **_CONVOLUTION,
    gradient_of="causal_conv1d",
    faults=(
        Fault("convolution_gradient_of_last_batch", "the gradients of weight and bias are the last batch's alone",
              altered("causal_conv1d_backward", dweight=_of_last_batch, dbias=_of_last_batch), "state",
              needs="more than one batch"),
        Fault("convolution_gradient_unflipped", "dx is convolved as the forward pass is, not the other way",
              altered("causal_conv1d_backward", dx=lambda xp, x, weight, bias, dy, activation: (
               _convolved(xp, _before_activation(xp, x, weight, bias, dy, activation), weight, bias * 0.0))),
              needs="more than one position"),
        Fault("convolution_gradient_slope", "the slope of silu is missing, or taken where there is none",
              altered("causal_conv1d_backward", activation=lambda activation: _OTHER[activation])),
        Fault("convolution_gradient_bias_mean", "dbias is a mean over the positions, not their sum",
              altered("causal_conv1d_backward", dbias=lambda x, dbias: dbias / max(x.shape[2], 1))),
    ),
)  # fmt: skip
def causal_conv1d_backward(xp: Arithmetic[N], x: N, weight: N, bias: N, dy: N, *, activation: str) -> tuple[N, N, N]:
    """With g the gradient before the activation: dx[b,d,l] = sum_w weight[d,w] g[b,d,l+W-1-w], zero behind the end;
    dweight[d,w] = sum g[b,d,l] x[b,d,l-W+1+w] and dbias[d] = sum g[b,d,l] over batches and positions.

    Stage "convolved": the sum that the slope of silu is taken of. Of channels with an infinity nothing is said.
    """
    batch, width = x.shape[0], weight.shape[1]
    g = _before_activation(xp, x, weight, bias, dy, activation)
    backward = xp.integers(range(x.shape[2] - 1, -1, -1))
    reversed_g = g[:, :, backward]
    terms = [_shifted(xp, reversed_g, weight[:, tap, None], width - 1 - tap) for tap in range(width)]
    dx = xp.sum(xp.stack(terms, -1))[..., 0][:, :, backward]

    def over_all(part: N) -> N:
        return xp.sum(xp.concatenate([part[b] for b in range(batch)], -1))[:, 0]

    dweight = xp.stack([over_all(_shifted(xp, x, g[:, :, back:], back)) for back in range(width - 1, -1, -1)], -1)

    def touched() -> Any:
        mask = (~xp.is_finite(x)).any(-1) | (~xp.is_finite(dy)).any(-1)
        if activation == "silu":  # of a sum that overflows, whose slope meets the zeros before the beginning
            size = xp.sum(xp.abs(x)) * xp.sum(xp.abs(weight)) + xp.abs(bias)[:, None]
            mask = mask | xp.above(size, _HUGE)[..., 0]
        return mask | (~xp.is_finite(weight)).any(-1) | ~xp.is_finite(bias)

    dx = xp.unspecified(lambda: touched()[:, :, None], dx)
    dweight = xp.unspecified(lambda: touched().any(0)[:, None], dweight)
    return dx, dweight, xp.unspecified(lambda: touched().any(0), over_all(g))
