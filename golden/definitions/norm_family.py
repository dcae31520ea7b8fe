"""Norms beside the plain ones: of a sum, of groups of channels, by length, gated; and the tanh that takes their place.

An RMS norm whose weight is stored less one ("zero-centred", Gemma's) is `rmsnorm` with ``offset=1``.
"""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.definitions.norm import layernorm
from assay.golden.errors import ShapeError
from assay.golden.options import Option, choice, flag, number
from assay.golden.registry import Fault, Reduction, define


def _residual_dropped(xp: Any, x: Any, residual: Any, weight: Any, bias: Any, *, eps: float) -> Any:
    return layernorm(xp, x, weight, bias, eps=eps), x + residual


def _sum_not_returned(xp: Any, x: Any, residual: Any, weight: Any, bias: Any, *, eps: float) -> Any:
    return add_layernorm(xp, x, residual, weight, bias, eps=eps)[0], x


@define(
    "add_layernorm",
    "x[R,N], residual[R,N], weight[N], bias[N] -> y[R,N], total[R,N]",
    options={"eps": number(1e-5, positive=True)},
    stages={"sum": None},
    rows="R",
    reduction=Reduction("N"),
    faults=(
        "saturating_store",
        Fault("add_layernorm_of_x", "x is normalised without the residual", _residual_dropped),
        Fault("add_layernorm_sum_lost", "x is returned in place of x + residual", _sum_not_returned, "layout"),
    ),
    exempt=("tail_of_sum_dropped",),
)
def add_layernorm(xp: Arithmetic[N], x: N, residual: N, weight: N, bias: N, *, eps: float) -> tuple[N, N]:
    """Layer norm of x + residual, and x + residual itself."""
    total = x + residual
    return layernorm(xp, xp.round(total, "sum"), weight, bias, eps=eps), total


def _by_group(xp: Any, x: Any, weight: Any, bias: Any, *, groups: int, eps: float) -> Any:
    """Weight and bias of the group's place in place of the channel's."""
    share = x.shape[1] // groups
    place = xp.integers([channel // share for channel in range(x.shape[1])])
    return group_norm(xp, x, weight[place], bias[place], groups=groups, eps=eps)


def _by_channel(xp: Any, x: Any, weight: Any, bias: Any, *, groups: int, eps: float) -> Any:
    return group_norm(xp, x, weight, bias, groups=x.shape[1], eps=eps)


def _of_all(xp: Any, x: Any, weight: Any, bias: Any, *, groups: int, eps: float) -> Any:
    return group_norm(xp, x, weight, bias, groups=1, eps=eps)


def _dealt_out(xp: Any, x: Any, weight: Any, bias: Any, *, groups: int, eps: float) -> Any:
    """Group g takes the channels g, g + G, ... in place of neighbours."""
    channels = x.shape[1]
    order = [channel for group in range(groups) for channel in range(group, channels, groups)]
    back = xp.integers([order.index(channel) for channel in range(channels)])
    there = xp.integers(order)
    return group_norm(xp, x[:, there], weight[there], bias[there], groups=groups, eps=eps)[:, back]


@define(
    "group_norm",
    "x[B,C,L], weight[C], bias[C] -> y[B,C,L]",
    options={
        "groups": Option(2, lambda value: type(value) is int and value > 0, "a positive whole number", usual=(2, 1, 4)),
        "eps": number(1e-5, positive=True),
    },
    rows="B",
    may_be_zero=(),
    multiples={"C": "groups"},
    reduction=Reduction("L"),
    faults=(
        Fault("group_norm_affine_by_group", "weight and bias are those of the group, not of the channel", _by_group),
        Fault("group_norm_by_channel", "mean and variance are of each channel, not of its group", _by_channel),
        Fault("group_norm_of_all", "mean and variance are of all channels, not of the group", _of_all),
        Fault(
            "group_norm_dealt_out",
            "group g takes the channels that leave g when divided by the groups",
            _dealt_out,
            "layout",
        ),
    ),
    exempt=("tail_of_sum_dropped",),
)
def group_norm(xp: Arithmetic[N], x: N, weight: N, bias: N, *, groups: int, eps: float) -> N:
    """(x - mean) / sqrt(variance + eps) * weight + bias; a group is C / groups neighbouring channels, all of L.

    Wu & He, *Group normalization*, ECCV 2018. Images of [B, C, H, W] have L = H W.
    """
    batch, channels, length = x.shape
    if channels % groups:
        raise ShapeError(f"group_norm: expected C to be a multiple of groups={groups}, got C={channels}")
    share = channels // groups
    centred, root = xp.standardize(x.reshape(batch, groups, share * length), eps)
    root = root[:, xp.integers([channel // max(share, 1) for channel in range(channels)])]
    scaled = xp.product(centred.reshape(batch, channels, length), root, weight[:, None])
    return xp.add_bias(scaled, bias[:, None])


def _of_mean(xp: Any, x: Any, *, eps: float, clamp: str) -> Any:
    return x * xp.rsqrt(xp.mean(x * x) + eps)


def _other_eps(xp: Any, x: Any, *, eps: float, clamp: str) -> Any:
    return l2norm(xp, x, eps=eps, clamp="maximum" if clamp == "sum" else "sum")


def _without_eps(xp: Any, x: Any, *, eps: float, clamp: str) -> Any:
    return l2norm(xp, x, eps=1e-300, clamp=clamp)


@define(
    "l2norm",
    "x[R,N] -> y[R,N]",
    options={"eps": number(1e-6, positive=True), "clamp": choice("sum", "maximum")},
    stages={"squares": None, "length": None},
    rows="R",
    reduction=Reduction("N"),
    faults=(
        Fault("l2norm_of_mean", "the mean of the squares stands for their sum, as in RMS norm", _of_mean),
        Fault("l2norm_eps_elsewhere", "eps is added to the sum where the norm is held above it, or the other way",
              _other_eps, needs="rows of small numbers"),
        Fault("l2norm_eps_dropped", "eps is left out", _without_eps, needs="rows of small numbers"),
        Fault("l2norm_no_root", "divided by the sum of squares, not by its root",
              lambda xp, x, *, eps, clamp: x / (xp.sum(x * x) + eps)),
        Fault("l2norm_of_magnitudes", "divided by the sum of magnitudes",
              lambda xp, x, *, eps, clamp: x / (xp.sum(xp.abs(x)) + eps)),
    ),
)  # fmt: skip
def l2norm(xp: Arithmetic[N], x: N, *, eps: float, clamp: str) -> N:
    """x / sqrt(sum x^2 + eps); under clamp="maximum" x / max(sqrt(sum x^2), eps), as torch's `normalize`.

    Stages: "squares", each, their sum, and that with eps; "length", the root, or its reciprocal, before it meets x.
    """
    square = xp.round(xp.sum(xp.round(x * x, "squares")), "squares")
    if clamp == "sum":
        square = xp.round(square + eps, "squares")
        return xp.any_formula(
            lambda: x * xp.round(xp.rsqrt(square), "length"),
            lambda: x / xp.round(xp.apply("sqrt", square), "length"),
        )
    length = xp.round(xp.apply("sqrt", square), "length")
    least = xp.maximum(length, xp.exact(xp.native.zeros(length.shape)) + eps)
    return xp.any_formula(lambda: x / least, lambda: x * (1.0 / least))


def _gate_elsewhere(xp: Any, x: Any, weight: Any, gate: Any, *, gate_first: bool, **options: Any) -> Any:
    return gated_rmsnorm(xp, x, weight, gate, gate_first=not gate_first, **options)


def _other_gate(xp: Any, x: Any, weight: Any, gate: Any, *, activation: str, **options: Any) -> Any:
    other = "silu" if activation == "sigmoid" else "sigmoid"
    return gated_rmsnorm(xp, x, weight, gate, activation=other, **options)


def _norm_of_gate(xp: Any, x: Any, weight: Any, gate: Any, **options: Any) -> Any:
    return gated_rmsnorm(xp, gate, weight, x, **options)


@define(
    "gated_rmsnorm",
    "x[R,N], weight[N], gate[R,N] -> y[R,N]",
    options={
        "eps": number(1e-6, positive=True),
        "activation": choice("silu", "sigmoid"),
        "gate_first": flag(),
    },
    stages={"normalized": None, "weighted": None, "activated": None, "gated": None},
    rows="R",
    reduction=Reduction("N"),
    faults=(
        "saturating_store",
        Fault("gate_on_other_side", "the gate is applied before the norm where it belongs behind it, or the other way",
              _gate_elsewhere),
        Fault("gate_activation", "sigmoid stands for silu, or silu for sigmoid", _other_gate),
        Fault("norm_of_gate", "the gate is normalised, and x gates it", _norm_of_gate, "layout"),
        Fault("gated_eps_dropped", "eps is left out",
              lambda xp, x, weight, gate, *, eps, **rest: gated_rmsnorm(xp, x, weight, gate, eps=1e-300, **rest),
              needs="rows of small numbers"),
        Fault("gated_weight_plus_one", "the weight is taken as weight + 1",
              lambda xp, x, weight, gate, **rest: gated_rmsnorm(xp, x, weight + 1.0, gate, **rest)),
    ),
)  # fmt: skip
def gated_rmsnorm(xp: Arithmetic[N], x: N, weight: N, gate: N, *, eps: float, activation: str, gate_first: bool) -> N:
    """x / sqrt(mean x^2 + eps) * weight * silu(gate), or sigmoid(gate); gate_first: the RMS norm of x silu(gate).

    Mamba-2 gates first (Dao & Gu, 2024); Gated DeltaNet behind the norm. Stages: "normalized" before the weight,
    "weighted" behind it and before the gate, "activated" silu(gate), "gated" the product x silu(gate) before the norm.
    """
    opened = xp.sigmoid(gate)
    if activation == "sigmoid":
        opened = xp.round(opened, "activated")
    if gate_first:
        x = xp.gated_product(gate, opened, x) if activation == "silu" else x * opened
        x = xp.round(x, "gated")
    y = xp.product(x, xp.rsqrt(xp.mean(x * x) + eps), weight, stage="normalized")
    if gate_first:
        return y
    y = xp.round(y, "weighted")
    return xp.gated_product(gate, opened, y) if activation == "silu" else y * opened


@define(
    "dynamic_tanh",
    "x[R,N], alpha[1], weight[N], bias[N] -> y[R,N]",
    rows="R",
    columns="N",
    inputs={
        "alpha": {
            "plain": lambda draws: 0.25 + draws.uniform(),
            "half": lambda draws: 0.5 * (draws.uniform() >= 0),
            "negative": lambda draws: -0.125 - draws.uniform(),
            "steep": lambda draws: 4.0 + 4.0 * draws.uniform(),
        }
    },
    faults=(
        Fault("tanh_without_alpha", "tanh(x): alpha is left out",
              lambda xp, x, alpha, weight, bias: xp.add_bias(xp.tanh(x) * weight, bias)),
        Fault("alpha_behind_tanh", "alpha tanh(x): alpha stands behind the tanh",
              lambda xp, x, alpha, weight, bias: xp.add_bias(xp.tanh(x) * alpha * weight, bias)),
        Fault("tanh_weight_plus_one", "the weight is taken as weight + 1",
              lambda xp, x, alpha, weight, bias: xp.add_bias(xp.tanh(x * alpha) * (weight + 1.0), bias)),
        Fault("tanh_bias_dropped", "the bias is left out",
              lambda xp, x, alpha, weight, bias: xp.tanh(x * alpha) * weight),
        Fault("bias_inside_tanh", "the bias is added before the tanh",
              lambda xp, x, alpha, weight, bias: xp.tanh(x * alpha + bias) * weight),
    ),
)  # fmt: skip
def dynamic_tanh(xp: Arithmetic[N], x: N, alpha: N, weight: N, bias: N) -> N:
    """tanh(alpha x) * weight + bias (Zhu et al., *Transformers without normalization*, 2025)."""
    return xp.add_bias(xp.tanh(x * alpha) * weight, bias)
