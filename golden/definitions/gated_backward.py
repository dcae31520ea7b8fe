"""Gradients of gates and of functions element by element: GELU as a gate, the log-sigmoid, the gated RMS norm, dynamic
tanh."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.definitions.activation import gate_of_gelu
from assay.golden.definitions.backward import infinite
from assay.golden.definitions.gated import OTHER
from assay.golden.options import choice, flag, number
from assay.golden.registry import Fault, Reduction, define


def _gelu_slope(xp: Arithmetic[N], x: N, approximate: str) -> N:
    """The derivative of x (1 + erf(x / sqrt 2)) / 2, or of its tanh approximation."""
    opened = gate_of_gelu(xp, x, approximate)
    if approximate == "none":
        density = xp.exp(x * x * -0.5) * xp.constant(lambda sqrt, pi: 1 / sqrt(2 * pi))
        return opened * 0.5 + x * density
    rest = 2.0 - opened  # 1 - tanh
    inner = (x * x * 0.044715 * 3.0 + 1.0) * xp.constant(lambda sqrt, pi: sqrt(2 / pi))
    return opened * 0.5 + x * (opened * rest) * inner * 0.5


def _flat_slope(xp: Any, gate: Any, up: Any, dy: Any, *, approximate: str) -> Any:
    """The slope of the gate is taken for the gate's own value over its argument."""
    dup = geglu_backward(xp, gate, up, dy, approximate=approximate)[1]
    return xp.product(dy, up, gate_of_gelu(xp, gate, approximate) * 0.5), dup


@define(
    "geglu_backward",
    "gate[R,N], up[R,N], dy[R,N] -> dgate[R,N], dup[R,N]",
    options={"approximate": choice("none", "tanh")},
    stages={"activated": None, "activated_gradient": None},
    rows="R",
    independent=("N",),
    gradient_of="geglu",
    faults=(
        Fault("geglu_gradients_swapped", "the gradients of gate and up are swapped",
              lambda xp, *tensors, approximate: geglu_backward(xp, *tensors, approximate=approximate)[::-1], "layout"),
        Fault("geglu_gradient_approximation", "the tanh approximation stands for erf, or the other way",
              lambda xp, *tensors, approximate: geglu_backward(xp, *tensors, approximate=OTHER[approximate])),
        Fault("geglu_slope_flat", "of the gate's slope only the first term is taken: Phi(gate)", _flat_slope),
        Fault("geglu_gradient_without_up", "dgate is not multiplied by up",
              lambda xp, gate, up, dy, *, approximate: (
               dy * _gelu_slope(xp, gate, approximate),
               geglu_backward(xp, gate, up, dy, approximate=approximate)[1])),
    ),
)  # fmt: skip
def geglu_backward(xp: Arithmetic[N], gate: N, up: N, dy: N, *, approximate: str) -> tuple[N, N]:
    """dy up gelu'(gate) and dy gelu(gate).

    Stages: "activated", gelu(gate) as it is multiplied with dy, and "activated_gradient", dy up. Nothing is said where
    a tensor is infinite: x exp(-x^2 / 2) is infinity times zero there.
    """
    opened = gate_of_gelu(xp, gate, approximate)
    dup = xp.any_formula(
        lambda: xp.gated_product(gate * 0.5, opened, dy), lambda: xp.gated_product(gate, opened, dy) * 0.5
    )
    dgate = xp.product(dy, up, _gelu_slope(xp, gate, approximate), "activated_gradient")
    return xp.unspecified(lambda: infinite(xp, gate, up, dy), dgate), xp.unspecified(
        lambda: infinite(xp, gate, dy), dup
    )


@define(
    "logsigmoid_backward",
    "x[R,N], dy[R,N] -> dx[R,N]",
    rows="R",
    independent=("N",),
    gradient_of="logsigmoid",
    faults=(
        Fault("logsigmoid_gradient_side", "dy sigmoid(x) is computed: the sign of x",
              lambda xp, x, dy: dy * xp.sigmoid(x)),
        Fault("logsigmoid_gradient_sign", "the gradient has the other sign", lambda xp, x, dy: -(dy * xp.sigmoid(-x))),
        Fault("logsigmoid_slope_of_sigmoid", "dy s (1 - s) is computed, the gradient of the sigmoid",
              lambda xp, x, dy: dy * (xp.sigmoid(x) * xp.sigmoid(-x))),
    ),
)  # fmt: skip
def logsigmoid_backward(xp: Arithmetic[N], x: N, dy: N) -> N:
    """dy sigmoid(-x), or dy (1 - sigmoid(x))."""
    dx = xp.any_formula(lambda: dy * xp.sigmoid(-x), lambda: dy * (1.0 - xp.sigmoid(x)))
    return xp.unspecified(lambda: infinite(xp, x, dy), dx)


def _gates(xp: Arithmetic[N], gate: N, activation: str) -> tuple[N, N]:
    """What opens, and its slope."""
    s = xp.sigmoid(gate)
    if activation == "sigmoid":
        return s, s * (1.0 - s)
    return xp.gate_mul(gate, s), xp.silu_slope(gate)


def _without_slope(xp: Any, x: Any, weight: Any, gate: Any, dy: Any, **options: Any) -> Any:
    """The gate's slope counts as one."""
    dx, dweight, _ = gated_rmsnorm_backward(xp, x, weight, gate, dy, **options)
    normalized = x * xp.rsqrt(xp.mean(x * x) + options["eps"])
    return dx, dweight, dy * normalized * weight


def _without_mean(xp: Any, x: Any, weight: Any, gate: Any, dy: Any, **options: Any) -> Any:
    """The norm's statistics count as constants."""
    _, dweight, dgate = gated_rmsnorm_backward(xp, x, weight, gate, dy, **options)
    opened = _gates(xp, gate, options["activation"])[0]
    inner = x * opened if options["gate_first"] else x
    return dy * opened * weight * xp.rsqrt(xp.mean(inner * inner) + options["eps"]), dweight, dgate


@define(
    "gated_rmsnorm_backward",
    "x[R,N], weight[N], gate[R,N], dy[R,N] -> dx[R,N], dweight[N], dgate[R,N]",
    options={"eps": number(1e-6, positive=True), "activation": choice("silu", "sigmoid"), "gate_first": flag()},
    reduced=("R",),
    may_be_zero=("R",),
    gradient_of="gated_rmsnorm",
    reduction=Reduction("N"),
    faults=(
        Fault("gated_gradient_without_slope", "the slope of the gate is left out", _without_slope),
        Fault("gated_gradient_constant_norm", "the norm counts as a constant: mean(g h) is left out", _without_mean),
        Fault("gated_gradient_other_side", "the gate is taken for one behind the norm, or the other way",
              lambda xp, *tensors, gate_first, **options: gated_rmsnorm_backward(
               xp, *tensors, gate_first=not gate_first, **options)),
        Fault("gated_gradient_eps_dropped", "eps is left out",
              lambda xp, *tensors, eps, **options: gated_rmsnorm_backward(xp, *tensors, eps=1e-300, **options),
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
    root = xp.rsqrt(xp.mean(inner * inner) + eps)
    normalized = inner * root
    grown = dy * weight if gate_first else xp.product(dy, weight, opened)
    dz = xp.any_formula(
        lambda: (grown - normalized * xp.mean(grown * normalized)) * root,
        lambda: grown * root - inner * (root * root * root * xp.mean(grown * inner)),
    )
    if gate_first:
        dx, dgate = dz * opened, xp.product(dz, x, slope)
        shares = xp.product(dy, inner, root)
    else:
        dx, dgate = dz, xp.product(dy, weight, normalized) * slope
        dgate = xp.any_formula(lambda: dgate, lambda: xp.product(dy, normalized, slope) * weight)
        shares = xp.any_formula(
            lambda: xp.product(dy, opened, normalized), lambda: xp.product(inner, root, dy) * opened
        )
    dweight = xp.sum(shares, axis=0)[0]

    def touched() -> Any:
        return infinite(xp, x, weight, gate, dy).any(-1)[:, None]

    dx, dgate = xp.unspecified(touched, dx), xp.unspecified(touched, dgate)
    return dx, xp.unspecified(lambda: touched().any(0), dweight), dgate


def _slope_left_out(xp: Any, x: Any, alpha: Any, weight: Any, dy: Any) -> Any:
    _, _, dweight, dbias = dynamic_tanh_backward(xp, x, alpha, weight, dy)
    grown = dy * weight
    return grown * alpha, _whole_sum(xp, grown * x), dweight, dbias


def _whole_sum(xp: Arithmetic[N], x: N) -> N:
    """The sum over rows and columns [1]."""
    return xp.sum(x.reshape(1, x.shape[0] * x.shape[1]))[0]


@define(
    "dynamic_tanh_backward",
    "x[R,N], alpha[1], weight[N], dy[R,N] -> dx[R,N], dalpha[1], dweight[N], dbias[N]",
    may_be_zero=("R",),
    gradient_of="dynamic_tanh",
    reduction=Reduction("N"),
    inputs={
        "alpha": {
            "plain": lambda draws: 0.25 + draws.uniform(),
            "half": lambda draws: 0.5 * (draws.uniform() >= 0),
            "negative": lambda draws: -0.125 - draws.uniform(),
        }
    },
    faults=(
        Fault("tanh_slope_left_out", "the slope 1 - tanh^2 is left out", _slope_left_out),
        Fault("tanh_gradient_without_alpha", "dx is not multiplied by alpha",
              lambda xp, x, alpha, weight, dy: (
               dynamic_tanh_backward(xp, x, alpha, weight, dy)[0] / alpha,
               *dynamic_tanh_backward(xp, x, alpha, weight, dy)[1:])),
        Fault("alpha_gradient_of_last_row", "dalpha is that of the last row alone",
              lambda xp, x, alpha, weight, dy: (
               (all_ := dynamic_tanh_backward(xp, x, alpha, weight, dy))[0],
               dynamic_tanh_backward(xp, x[-1:], alpha, weight, dy[-1:])[1], *all_[2:]), "state",
              needs="more than one row"),
        Fault("tanh_weight_gradient_of_x", "dweight is sum dy x: the tanh is left out",
              lambda xp, x, alpha, weight, dy: (
               *(all_ := dynamic_tanh_backward(xp, x, alpha, weight, dy))[:2], xp.sum(dy * x, axis=0)[0], all_[3])),
    ),
)  # fmt: skip
def dynamic_tanh_backward(xp: Arithmetic[N], x: N, alpha: N, weight: N, dy: N) -> tuple[N, N, N, N]:
    """With t = tanh(alpha x) and g = dy weight (1 - t^2): alpha g, sum g x over all, and over rows dy t and dy."""
    t = xp.tanh(x * alpha, absolute=True)
    grown = xp.product(dy, weight, 1.0 - t * t)
    shares = xp.any_formula(lambda: dy * xp.tanh(x * alpha), lambda: dy * t)
    dx = xp.unspecified(lambda: infinite(xp, x, weight, dy), grown * alpha)
    dalpha, dweight = _whole_sum(xp, grown * x), xp.sum(shares, axis=0)[0]
    dalpha = xp.unspecified(lambda: infinite(xp, x, weight, dy).any(0).any(0)[None], dalpha)
    return dx, dalpha, xp.unspecified(lambda: infinite(xp, x, dy).any(0), dweight), xp.sum(dy, axis=0)[0]
