"""Layer, RMS, group and L2 norms along the last axis, dynamic tanh, and their gradients.

An RMS norm whose weight is stored less one ("zero-centred", Gemma's) is `rmsnorm` with ``offset=1``.
"""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.definitions.softmax import _row_is_finite, infinite
from assay.golden.errors import ShapeError
from assay.golden.options import choice, count, flag, number
from assay.golden.registry import Fault, Reduction, altered, define
from assay.golden.signature import Inputs


@define(
    "layernorm",
    "x[R,N], weight[N], bias[N] -> y[R,N]",
    options={"eps": number(1e-5, positive=True)},
    rows="R",
    reduction=Reduction("N"),
    exempt=("tail_of_sum_dropped",),
)
def layernorm(xp: Arithmetic[N], x: N, weight: N, bias: N, *, eps: float) -> N:
    """(x - mean) / sqrt(variance + eps) * weight + bias, with the biased variance."""
    centred, rstd = xp.standardize(x, eps)
    return xp.add_bias(xp.product(centred, rstd, weight), bias)


_RMS = {"eps": number(1e-6, positive=True), "offset": number(0.0, usual=(0.0, 1.0))}


@define(
    "rmsnorm",
    "x[R,N], weight[N] -> y[R,N]",
    options=_RMS,
    stages={"normalized": None},
    rows="R",
    reduction=Reduction("N"),
)
def rmsnorm(xp: Arithmetic[N], x: N, weight: N, *, eps: float, offset: float) -> N:
    """x / sqrt(mean x^2 + eps) * (weight + offset)."""
    return xp.product(x, xp.rsqrt(xp.mean(x * x) + eps), weight + offset, stage="normalized")


@define(
    "add_rmsnorm",
    "x[R,N], residual[R,N], weight[N] -> y[R,N], total[R,N]",
    options={"eps": number(1e-6, positive=True)},
    stages={"sum": None, "normalized": None},
    rows="R",
    reduction=Reduction("N"),
    faults=("saturating_store",),
)
def add_rmsnorm(xp: Arithmetic[N], x: N, residual: N, weight: N, *, eps: float) -> tuple[N, N]:
    """RMS norm of x + residual, and x + residual itself."""
    total = x + residual
    return rmsnorm(xp, xp.round(total, "sum"), weight, eps=eps, offset=0.0), total


@define(
    "add_layernorm",
    "x[R,N], residual[R,N], weight[N], bias[N] -> y[R,N], total[R,N]",
    options={"eps": number(1e-5, positive=True)},
    stages={"sum": None},
    rows="R",
    reduction=Reduction("N"),
    faults=(
        "saturating_store",
        Fault(
            "add_layernorm_of_x",
            "x is normalised without the residual",
            altered("add_layernorm", y=lambda xp, x, weight, bias, eps: layernorm(xp, x, weight, bias, eps=eps)),
        ),
        Fault(
            "add_layernorm_sum_lost",
            "x is returned instead of x + residual",
            altered("add_layernorm", total=lambda x: x),
            "layout",
        ),
    ),
    exempt=("tail_of_sum_dropped",),
)
def add_layernorm(xp: Arithmetic[N], x: N, residual: N, weight: N, bias: N, *, eps: float) -> tuple[N, N]:
    """Layer norm of x + residual, and x + residual itself."""
    total = x + residual
    return layernorm(xp, xp.round(total, "sum"), weight, bias, eps=eps), total


def _by_group(xp: Any, value: Any, groups: int) -> Any:
    """Use each group's index instead of the channel's."""
    share = value.shape[0] // groups
    return value[xp.integers([channel // share for channel in range(value.shape[0])])]


def _interleaved(xp: Any, x: Any, weight: Any, bias: Any, *, groups: int, eps: float) -> Any:
    """Group g takes the channels g, g + G, ... instead of neighbours."""
    channels = x.shape[1]
    order = [channel for group in range(groups) for channel in range(group, channels, groups)]
    back = xp.integers([order.index(channel) for channel in range(channels)])
    there = xp.integers(order)
    return group_norm(xp, x[:, there], weight[there], bias[there], groups=groups, eps=eps)[:, back]


@define(
    "group_norm",
    "x[B,C,L], weight[C], bias[C] -> y[B,C,L]",
    options={"groups": count(2, usual=(2, 1, 4)), "eps": number(1e-5, positive=True)},
    rows="B",
    may_be_zero=(),
    multiples={"C": "groups"},
    reduction=Reduction("L"),
    faults=(
        Fault(
            "group_norm_affine_by_group",
            "weight and bias are those of the group, not of the channel",
            altered("group_norm", weight=_by_group, bias=_by_group),
        ),
        Fault(
            "group_norm_by_channel",
            "mean and variance are of each channel, not of its group",
            altered("group_norm", groups=lambda x: x.shape[1]),
        ),
        Fault(
            "group_norm_of_all",
            "mean and variance are of all channels, not of the group",
            altered("group_norm", groups=1),
        ),
        Fault(
            "group_norm_dealt_out",
            "group g takes the channels that leave g when divided by the groups",
            _interleaved,
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
    centred, rstd = xp.standardize(x.reshape(batch, groups, share * length), eps)
    rstd = rstd[:, xp.integers([channel // max(share, 1) for channel in range(channels)])]
    scaled = xp.product(centred.reshape(batch, channels, length), rstd, weight[:, None])
    return xp.add_bias(scaled, bias[:, None])


@define(
    "l2norm",
    "x[R,N] -> y[R,N]",
    options={"eps": number(1e-6, positive=True), "clamp": choice("sum", "maximum")},
    stages={"squares": None, "length": None},
    rows="R",
    reduction=Reduction("N"),
    faults=(
        Fault("l2norm_of_mean", "the mean of the squares replaces their sum, as in RMS norm",
              lambda xp, x, *, eps, **_: x * xp.rsqrt(xp.mean(x * x) + eps)),
        Fault("l2norm_eps_elsewhere", "eps is added to the sum instead of bounding the norm, or vice versa",
              altered("l2norm", clamp=lambda clamp: "maximum" if clamp == "sum" else "sum"),
              needs="rows of small numbers"),
        Fault("l2norm_eps_dropped", "eps is missing", altered("l2norm", eps=1e-300), needs="rows of small numbers"),
        Fault("l2norm_no_root", "divided by the sum of squares, not by its root",
              lambda xp, x, *, eps, **_: x / (xp.sum(x * x) + eps)),
        Fault("l2norm_of_magnitudes", "divided by the sum of magnitudes",
              lambda xp, x, *, eps, **_: x / (xp.sum(xp.abs(x)) + eps)),
    ),
)  # fmt: skip
def l2norm(xp: Arithmetic[N], x: N, *, eps: float, clamp: str) -> N:
    """x / sqrt(sum x^2 + eps); under clamp="maximum" x / max(sqrt(sum x^2), eps), as torch's `normalize`.

    Stages: "squares", each, their sum, and that with eps; "length", the root or its reciprocal, before it multiplies x.
    """
    square = xp.round(xp.sum(xp.round(x * x, "squares")), "squares")
    if clamp == "sum":
        square = xp.round(square + eps, "squares")
        return xp.any_formula(
            lambda: x * xp.round(xp.rsqrt(square), "length"), lambda: x / xp.round(xp.apply("sqrt", square), "length")
        )
    length = xp.round(xp.apply("sqrt", square), "length")
    least = xp.maximum(length, xp.exact(xp.native.zeros(length.shape)) + eps)
    return xp.any_formula(lambda: x / least, lambda: x * (1.0 / least))


_GATED = {"eps": number(1e-6, positive=True), "activation": choice("silu", "sigmoid"), "gate_first": flag()}


@define(
    "gated_rmsnorm",
    "x[R,N], weight[N], gate[R,N] -> y[R,N]",
    options=_GATED,
    stages={"normalized": None, "weighted": None, "activated": None, "gated": None},
    rows="R",
    reduction=Reduction("N"),
    faults=(
        "saturating_store",
        Fault("gate_on_other_side", "the gate is applied before the norm where it belongs behind it, or vice versa",
              altered("gated_rmsnorm", gate_first=lambda value: not value)),
        Fault("gate_activation", "sigmoid replaces silu, or vice versa",
              altered("gated_rmsnorm", activation=lambda value: "silu" if value == "sigmoid" else "sigmoid")),
        Fault("norm_of_gate", "the gate is normalised, and x gates it",
              altered("gated_rmsnorm", x=lambda gate: gate, gate=lambda x: x), "layout"),
        Fault("gated_eps_dropped", "eps is missing", altered("gated_rmsnorm", eps=1e-300),
              needs="rows of small numbers"),
        Fault("gated_weight_plus_one", "the weight is taken as weight + 1",
              altered("gated_rmsnorm", weight=lambda weight: weight + 1.0)),
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


_ALPHA: Inputs = {
    "plain": lambda draws: 0.25 + draws.uniform(),
    "half": lambda draws: 0.5 * (draws.uniform() >= 0),
    "negative": lambda draws: -0.125 - draws.uniform(),
    "zeros": lambda draws: 0.0 * draws.uniform(),
    "small": lambda draws: 2.0**-10 * draws.normal(),
}


@define(
    "dynamic_tanh",
    "x[R,N], alpha[1], weight[N], bias[N] -> y[R,N]",
    rows="R",
    columns="N",
    inputs={"alpha": {**_ALPHA, "steep": lambda draws: 4.0 + 4.0 * draws.uniform()}},
    faults=(
        Fault("tanh_without_alpha", "tanh(x): alpha is missing",
              lambda xp, x, alpha, weight, bias: xp.add_bias(xp.tanh(x) * weight, bias)),
        Fault("alpha_behind_tanh", "alpha tanh(x): alpha is applied after the tanh",
              lambda xp, x, alpha, weight, bias: xp.add_bias(xp.tanh(x) * alpha * weight, bias)),
        Fault("tanh_weight_plus_one", "the weight is taken as weight + 1",
              altered("dynamic_tanh", weight=lambda weight: weight + 1.0)),
        Fault("tanh_bias_dropped", "the bias is missing",
              lambda xp, x, alpha, weight, bias: xp.tanh(x * alpha) * weight),
        Fault("bias_inside_tanh", "the bias is added before the tanh",
              lambda xp, x, alpha, weight, bias: xp.tanh(x * alpha + bias) * weight),
    ),
)  # fmt: skip
def dynamic_tanh(xp: Arithmetic[N], x: N, alpha: N, weight: N, bias: N) -> N:
    """tanh(alpha x) * weight + bias (Zhu et al., *Transformers without normalization*, 2025)."""
    return xp.add_bias(xp.tanh(x * alpha) * weight, bias)


def _column_is_finite(xp: Arithmetic[N], dweight: N, dy: N) -> N:
    """``dweight``, but where an infinite gradient meets an x whose sign or zero depends on rounding."""
    return xp.unspecified(lambda: infinite(xp, dy).any(0), dweight)


@define(
    "layernorm_backward",
    "x[R,N], weight[N], dy[R,N] -> dx[R,N], dweight[N], dbias[N]",
    options={"eps": number(1e-5, positive=True)},
    reduced=("R",),
    may_be_zero=("R",),
    gradient_of="layernorm",
    reduction=Reduction("N"),
    exempt=("tail_of_sum_dropped",),
)
def layernorm_backward(xp: Arithmetic[N], x: N, weight: N, dy: N, *, eps: float) -> tuple[N, N, N]:
    """With h = (x - mean) r, r = 1 / sqrt(variance + eps) and g = dy weight: dx = r (g - mean g - h mean(g h)).

    dweight and dbias are the sums over rows of dy h and dy. The formulas of dx: as written; times N inside and r / N
    outside (Apex); and r g + b (x - mean) - r mean g with b = r^3 (mean x sum g - sum g x) / N, in which PyTorch's CPU
    kernel multiplies x and the mean separately, with an error that `standardize` allows the deviations.
    """
    columns = max(x.shape[-1], 1)
    centred, rstd = xp.standardize(x, eps)
    normalized, wdy = centred * rstd, dy * weight

    def as_written() -> N:
        return ((wdy - xp.mean(wdy)) - normalized * xp.mean(wdy * normalized)) * rstd

    def times_columns() -> N:
        inner = (wdy * columns - xp.sum(wdy)) - normalized * xp.sum(wdy * normalized)
        return inner * (rstd / columns)

    def from_sums() -> N:
        total = xp.sum(wdy)
        slope = (total * xp.mean(x) - xp.sum(wdy * x)) * (rstd * rstd * rstd) / columns
        return (rstd * wdy + slope * centred) - total * rstd / columns

    dx = xp.any_formula(as_written, times_columns, from_sums)
    dweight = xp.sum(xp.product(dy, centred, rstd), axis=0)[0]
    return _row_is_finite(xp, dx, x, weight, dy), _column_is_finite(xp, dweight, dy), xp.sum(dy, axis=0)[0]


@define(
    "rmsnorm_backward",
    "x[R,N], weight[N], dy[R,N] -> dx[R,N], dweight[N]",
    options={"eps": number(1e-6, positive=True)},
    reduced=("R",),
    may_be_zero=("R",),
    gradient_of="rmsnorm",
    reduction=Reduction("N"),
)
def rmsnorm_backward(xp: Arithmetic[N], x: N, weight: N, dy: N, *, eps: float) -> tuple[N, N]:
    """With r = 1 / sqrt(mean x^2 + eps), h = x r and g = dy weight: dx = r (g - h mean(g h)), dweight = sum dy h."""
    rstd = xp.rsqrt(xp.mean(x * x) + eps)
    normalized, wdy = x * rstd, dy * weight
    dx = xp.any_formula(
        lambda: (wdy - normalized * xp.mean(wdy * normalized)) * rstd,
        lambda: wdy * rstd - x * (rstd * rstd * rstd * xp.mean(wdy * x)),
        lambda: (wdy - x * (rstd * rstd * xp.mean(wdy * x))) * rstd,
    )
    dweight = xp.sum(xp.product(dy, x, rstd), axis=0)[0]
    return _row_is_finite(xp, dx, x, weight, dy), _column_is_finite(xp, dweight, dy)


def _of_last(again: Any, x: Any, dy: Any) -> Any:
    """Return the gradient of the last batch or row alone."""
    return again(x=x[-1:], dy=dy[-1:])


def _constant_statistics(xp: Any, x: Any, weight: Any, dy: Any, groups: int, eps: float) -> Any:
    split = x.shape[0], groups, x.shape[1] // groups * x.shape[2]
    rstd = xp.standardize(x.reshape(*split), eps)[1]
    return ((dy * weight[:, None]).reshape(*split) * rstd).reshape(*x.shape)


@define(
    "group_norm_backward",
    "x[B,C,L], weight[C], dy[B,C,L] -> dx[B,C,L], dweight[C], dbias[C]",
    options={"groups": count(2, usual=(2, 1, 4)), "eps": number(1e-5, positive=True)},
    may_be_zero=(),
    multiples={"C": "groups"},
    gradient_of="group_norm",
    reduction=Reduction("L"),
    faults=(
        Fault("group_gradient_of_last_batch", "the gradients of weight and bias are those of the last batch alone",
              altered("group_norm_backward", dweight=_of_last, dbias=_of_last), "state", needs="more than one batch"),
        Fault("group_gradient_by_channel", "means are those of each channel, not of its group",
              altered("group_norm_backward", groups=lambda x: x.shape[1])),
        Fault("group_gradient_constant_statistics", "mean and variance count as constants",
              altered("group_norm_backward", dx=_constant_statistics)),
        Fault("group_gradient_bias_is_weight", "dbias is the weight's gradient",
              altered("group_norm_backward", dbias=lambda dweight: dweight), "layout"),
    ),
    exempt=("tail_of_sum_dropped",),
)  # fmt: skip
def group_norm_backward(xp: Arithmetic[N], x: N, weight: N, dy: N, *, groups: int, eps: float) -> tuple[N, N, N]:
    """`layernorm_backward` of each group, g = dy weight; dweight and dbias are the sums over batches and positions.

    Formulas of dx: r (g - mean g - h mean(g h)); and, as ATen's kernels have it, r g + b x + c with b = r^3 (mean x
    sum g - sum g x) / n and c = -b mean x - r sum g / n.
    """
    batch, channels, length = x.shape
    split = (batch, groups, channels // groups * length)
    centred, rstd = xp.standardize(x.reshape(*split), eps)
    normalized = centred * rstd
    wdy = (dy * weight[:, None]).reshape(*split)
    count = max(split[2], 1)

    def as_written() -> N:
        return ((wdy - xp.mean(wdy)) - normalized * xp.mean(wdy * normalized)) * rstd

    def from_sums() -> N:
        flat, total = x.reshape(*split), xp.sum(wdy)
        mean = xp.mean(flat)
        slope = (total * mean - xp.sum(wdy * flat)) * (rstd * rstd * rstd) / count
        return (rstd * wdy + slope * flat) - (slope * mean + total * rstd / count)

    dx = xp.any_formula(as_written, from_sums).reshape(batch, channels, length)
    shares = (normalized * dy.reshape(*split)).reshape(batch, channels, length)

    def over_all(part: N) -> N:
        return xp.sum(xp.concatenate([part[b] for b in range(batch)], -1))[:, 0]

    def touched() -> Any:
        mask = infinite(xp, x, weight[:, None], dy).reshape(*split).any(-1)
        return mask[:, xp.integers([channel * groups // channels for channel in range(channels)])]

    dx = xp.unspecified(lambda: touched()[:, :, None], dx)
    dweight = xp.unspecified(lambda: touched().any(0), over_all(shares))
    return dx, dweight, over_all(dy)


@define(
    "l2norm_backward",
    "x[R,N], dy[R,N] -> dx[R,N]",
    options={"eps": number(1e-6, positive=True), "clamp": choice("sum", "maximum")},
    rows="R",
    gradient_of="l2norm",
    reduction=Reduction("N"),
    faults=(
        Fault("l2norm_gradient_constant_length", "the length counts as a constant: dy over it",
              lambda xp, x, dy, *, eps, **_: dy * xp.rsqrt(xp.sum(x * x) + eps)),
        Fault("l2norm_gradient_of_mean", "the mean of y dy replaces its sum",
              lambda xp, x, dy, *, eps, **_: (
               _projected(xp, x, dy, xp.rsqrt(xp.sum(x * x) + eps), x.shape[1]))),
        Fault("l2norm_gradient_sign", "y sum(y dy) is added, not subtracted",
              altered("l2norm_backward", dx=lambda xp, again, x, dy, eps: (
               dy * xp.rsqrt(xp.sum(x * x) + eps) * 2.0 - again(clamp="sum")))),
        Fault("l2norm_gradient_unscaled", "dy - y sum(y dy) is not divided by the length",
              altered("l2norm_backward", dx=lambda xp, x, dx, eps: dx / xp.rsqrt(xp.sum(x * x) + eps))),
    ),
)  # fmt: skip
def l2norm_backward(xp: Arithmetic[N], x: N, dy: N, *, eps: float, clamp: str) -> N:
    """With r = 1 / sqrt(sum x^2 + eps) and y = x r: r (dy - y sum(y dy)).

    Under clamp="maximum" r is 1 / sqrt(sum x^2), and dx = dy / eps where that length is not above eps.
    """
    square = xp.sum(x * x)
    if clamp == "sum":
        dx = _projected(xp, x, dy, xp.rsqrt(square + eps))
    else:
        length = xp.apply("sqrt", square)
        usable = xp.above(length, 0.0)
        rstd = 1.0 / xp.where(usable, length, 1.0)
        dx = xp.where_above(length, eps, _projected(xp, x, dy, rstd), dy / eps)
    return xp.unspecified(lambda: infinite(xp, x, dy).any(-1)[:, None], dx)


def _projected(xp: Arithmetic[N], x: N, dy: N, rstd: N, divisor: int = 1) -> N:
    """r (dy - y sum(y dy)), y = x r, the sum over a divisor."""

    def inner(product: N) -> N:
        total = xp.sum(product)
        return total / divisor if divisor > 1 else total

    return xp.any_formula(
        lambda: (dy - (x * rstd) * inner((x * rstd) * dy)) * rstd,
        lambda: dy * rstd - x * (rstd * rstd * rstd * inner(x * dy)),
    )


def _gates(xp: Arithmetic[N], gate: N, activation: str) -> tuple[N, N]:
    """What opens, and its slope."""
    s = xp.sigmoid(gate)
    if activation == "sigmoid":
        return s, s * (1.0 - s)
    return xp.gate_mul(gate, s), xp.silu_slope(gate)


def _constant_norm(
    xp: Any, x: Any, weight: Any, gate: Any, dy: Any, eps: float, activation: str, gate_first: bool
) -> Any:
    opened = _gates(xp, gate, activation)[0]
    inner = x * opened if gate_first else x
    return dy * opened * weight * xp.rsqrt(xp.mean(inner * inner) + eps)


@define(
    "gated_rmsnorm_backward",
    "x[R,N], weight[N], gate[R,N], dy[R,N] -> dx[R,N], dweight[N], dgate[R,N]",
    options=_GATED,
    reduced=("R",),
    may_be_zero=("R",),
    gradient_of="gated_rmsnorm",
    reduction=Reduction("N"),
    faults=(
        Fault("gated_gradient_without_slope", "the slope of the gate is missing",
              altered("gated_rmsnorm_backward", dgate=lambda xp, x, weight, dy, eps: (
               dy * (x * xp.rsqrt(xp.mean(x * x) + eps)) * weight))),
        Fault("gated_gradient_constant_norm", "the norm counts as a constant: mean(g h) is missing",
              altered("gated_rmsnorm_backward", dx=_constant_norm)),
        Fault("gated_gradient_other_side", "the gate is taken for one behind the norm, or vice versa",
              altered("gated_rmsnorm_backward", gate_first=lambda value: not value)),
        Fault("gated_gradient_eps_dropped", "eps is missing", altered("gated_rmsnorm_backward", eps=1e-300),
              needs="rows of small numbers"),
    ),
)  # fmt: skip
def gated_rmsnorm_backward(
    xp: Arithmetic[N], x: N, weight: N, gate: N, dy: N, *, eps: float, activation: str, gate_first: bool
) -> tuple[N, N, N]:
    """With z = x, or x a(gate) where ``gate_first``, r = 1 / sqrt(mean z^2 + eps), h = z r and g the gradient of h.

    g = dy weight a(gate), or dy weight; dz = r (g - h mean(g h)); dweight = sum dy a h, or sum dy h; dgate = dy h
    weight a'(gate), or dz x a'(gate). Of rows with an infinity nothing is said.
    """
    opened, slope = _gates(xp, gate, activation)
    inner = x * opened if gate_first else x
    rstd = xp.rsqrt(xp.mean(inner * inner) + eps)
    normalized = inner * rstd
    wdy = dy * weight if gate_first else xp.product(dy, weight, opened)
    dz = xp.any_formula(
        lambda: (wdy - normalized * xp.mean(wdy * normalized)) * rstd,
        lambda: wdy * rstd - inner * (rstd * rstd * rstd * xp.mean(wdy * inner)),
    )
    if gate_first:
        dx, dgate = dz * opened, xp.product(dz, x, slope)
        shares = xp.product(dy, inner, rstd)
    else:
        dx, dgate = dz, xp.product(dy, weight, normalized) * slope
        dgate = xp.any_formula(lambda: dgate, lambda: xp.product(dy, normalized, slope) * weight)
        shares = xp.any_formula(
            lambda: xp.product(dy, opened, normalized), lambda: xp.product(inner, rstd, dy) * opened
        )
    dweight = xp.sum(shares, axis=0)[0]

    def touched() -> Any:
        return infinite(xp, x, weight, gate, dy).any(-1)[:, None]

    dx, dgate = xp.unspecified(touched, dx), xp.unspecified(touched, dgate)
    return dx, xp.unspecified(lambda: touched().any(0), dweight), dgate


def _whole_sum(xp: Arithmetic[N], x: N) -> N:
    """The sum over rows and columns [1]."""
    return xp.sum(x.reshape(1, x.shape[0] * x.shape[1]))[0]


@define(
    "dynamic_tanh_backward",
    "x[R,N], alpha[1], weight[N], dy[R,N] -> dx[R,N], dalpha[1], dweight[N], dbias[N]",
    may_be_zero=("R",),
    gradient_of="dynamic_tanh",
    reduction=Reduction("N"),
    inputs={"alpha": _ALPHA},
    faults=(
        Fault("tanh_slope_left_out", "the slope 1 - tanh^2 is missing",
              altered("dynamic_tanh_backward", dx=lambda alpha, weight, dy: dy * weight * alpha,
               dalpha=lambda xp, x, weight, dy: _whole_sum(xp, dy * weight * x))),
        Fault("tanh_gradient_without_alpha", "dx is not multiplied by alpha",
              altered("dynamic_tanh_backward", dx=lambda dx, alpha: dx / alpha)),
        Fault("alpha_gradient_of_last_row", "dalpha is that of the last row alone",
              altered("dynamic_tanh_backward", dalpha=_of_last), "state", needs="more than one row"),
        Fault("tanh_weight_gradient_of_x", "dweight is sum dy x: the tanh is missing",
              altered("dynamic_tanh_backward", dweight=lambda xp, x, dy: xp.sum(dy * x, axis=0)[0])),
    ),
)  # fmt: skip
def dynamic_tanh_backward(xp: Arithmetic[N], x: N, alpha: N, weight: N, dy: N) -> tuple[N, N, N, N]:
    """With t = tanh(alpha x) and g = dy weight (1 - t^2): alpha g, sum g x over all, and over rows dy t and dy."""
    t = xp.tanh(x * alpha, absolute=True)
    wdy = xp.product(dy, weight, 1.0 - t * t)
    shares = xp.any_formula(lambda: dy * xp.tanh(x * alpha), lambda: dy * t)
    dx = xp.unspecified(lambda: infinite(xp, x, weight, dy), wdy * alpha)
    dalpha, dweight = _whole_sum(xp, wdy * x), xp.sum(shares, axis=0)[0]
    dalpha = xp.unspecified(lambda: infinite(xp, x, weight, dy).any(0).any(0)[None], dalpha)
    return dx, dalpha, xp.unspecified(lambda: infinite(xp, x, dy).any(0), dweight), xp.sum(dy, axis=0)[0]
