"""Faults of elementary functions, activations and rotary embeddings."""

import math
from collections.abc import Callable
from typing import Any

import torch

from assay.golden.definitions.activations import FUNCTIONS
from assay.verify.cases.case import Case
from assay.verify.explanation.fault_models.fault_model import FaultModel, Tensors
from assay.verify.explanation.fault_models.mutators import changed, every, has, operations, option, swapped

Tensor = torch.Tensor


def _as(formula: Callable[[Tensor], Tensor]) -> type:
    """Compute an elementary function by another formula, in float32."""
    return operations(function=lambda xp, right, name, x: formula(x))


def _clamped(least: float, most: float) -> Any:
    return changed("x", lambda x: torch.where(x.isnan(), x.double(), x.double().clamp(least, most)))


def _fast_sigmoid(xp: Any, x: Any, **options: Any) -> Any:
    return xp.gate_mul(x, xp.sigmoid(x * 1.702))


def _gelu(half: float = 0.5, one: float = 1.0, cubic: float = 0.044715) -> Any:
    def definition(xp: Any, x: Any, *, approximate: str) -> Any:
        if approximate == "tanh":
            inner = (x + x * x * x * cubic) * xp.constant(lambda sqrt, pi: sqrt(2 / pi))
            gate = xp.tanh(inner, absolute=True)
        else:
            gate = xp.erf(x * xp.constant(lambda sqrt, pi: 1 / sqrt(2)), absolute=True)
        return xp.gate_mul(x * half, gate + one)

    return definition


def _swiglu(kind: str) -> Any:
    def definition(xp: Any, gate: Any, up: Any, *, limit: float | None) -> Any:
        if limit is not None:
            above = xp.minimum(gate, limit)
            within = -xp.minimum(-xp.minimum(up, limit), limit)
            gate = {"up only": gate, "both sides": -xp.minimum(-above, limit)}.get(kind, above)
            up = {"gate only": up, "one side": xp.minimum(up, limit)}.get(kind, within)
        return xp.gated_product(gate, xp.sigmoid(gate), up)

    return definition


def _nan_at_limit(xp: Any, right: Any, x: Any, bound: float) -> Any:
    """Compute fmin or fmax: a NaN becomes the limit."""
    mid: Tensor = getattr(x, "mid", x)
    return xp.where(mid.isnan(), xp.exact(torch.full(mid.shape, bound, dtype=torch.float64)), right(x, bound))


def _gated(alter: Callable[[Any, Any, Any], Any]) -> type:
    """Compute the product x gate y by another formula."""
    return operations(gated_product=lambda xp, right, x, gate, y: alter(x, gate, y))


def _slope(alter: Callable[[Any], Any]) -> type:
    """Compute the slope of silu with ``alter`` of the sigmoid."""
    return operations(silu_gradient=lambda xp, right, a, b, x: a * b * alter(xp.sigmoid(x)))


def _angles(indices: Callable[[Tensor], Tensor], axis: int) -> Callable[[Tensors, Case], Tensors]:
    """Read the angles at other ``indices`` along an axis."""

    def read(x: Tensor) -> Tensor:
        return x.index_select(axis, indices(torch.arange(x.shape[axis])))

    return lambda values, case: values | {name: read(values[name]) for name in ("cos", "sin")}


def _rotated(turn: Callable[[Any, Any, Any, Any], tuple[Any, Any]]) -> Any:
    """Rotate pairs by ``turn(first, second, cos, sin)``."""

    def definition(xp: Any, x: Any, cos: Any, sin: Any, *, interleaved: bool) -> Any:
        half = x.shape[-1] // 2
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
        pair = turn(first, second, cos[:, None, :], sin[:, None, :])
        return xp.stack(pair, -1).reshape(*x.shape) if interleaved else xp.concatenate(pair, -1)

    return definition


def _inplace(first: Any, second: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    first = first * cos - second * sin
    return first, second * cos + first * sin


def _instead(wrong: str, right: str) -> FaultModel:
    return FaultModel(f"{wrong}_for_{right}", "formula", f"{wrong} is computed instead of {right}", (right,),
                arithmetic=operations(function=lambda xp, right, name, x: right(wrong, x)))  # fmt: skip


_GELU, _SWIGLU, _SWIGLU_BACK, _ROPE = (("gelu",), ("swiglu",), ("swiglu_backward",), ("rope",))

FAULT_MODELS = (
    _instead("exp2", "exp"),
    _instead("exp", "exp2"),
    _instead("exp", "expm1"),
    _instead("log2", "log"),
    _instead("log", "log2"),
    _instead("log", "log1p"),
    _instead("sigmoid", "tanh"),
    _instead("tanh", "erf"),
    _instead("tanh", "sigmoid"),
    _instead("sqrt", "rsqrt"),
    _instead("rsqrt", "sqrt"),
    _instead("rsqrt", "reciprocal"),
    _instead("cos", "sin"),
    _instead("sin", "cos"),
    FaultModel("approximate_function", "precision", "an approximation with a relative error of 2^-7", FUNCTIONS,
        results=every(lambda xp, x: x * (1 + 2.0**-7))),
    FaultModel("exp_minus_one", "precision", "expm1 is computed as exp(x) - 1, which cancels near zero", ("expm1",),
        arithmetic=_as(lambda x: torch.exp(x) - 1), emulated=True, needs="numbers near zero"),
    FaultModel("log_of_one_plus", "precision", "log1p is computed as log(1 + x), which loses small x", ("log1p",),
        arithmetic=_as(lambda x: torch.log(1 + x)), emulated=True, needs="numbers near zero"),
    FaultModel("tanh_by_exponentials", "rescale",
        "tanh is computed as (e^2x - 1) / (e^2x + 1): inf / inf above 44, and "
        "cancellation near zero", ("tanh",), emulated=True,
        arithmetic=_as(lambda x: (torch.exp(2 * x) - 1) / (torch.exp(2 * x) + 1))),
    FaultModel("sigmoid_by_growing_exponential", "rescale",
        "sigmoid is computed as e^x / (1 + e^x): inf / inf above 88",
        ("sigmoid",), emulated=True, needs="numbers beyond 88",
        arithmetic=_as(lambda x: torch.exp(x) / (1 + torch.exp(x)))),
    FaultModel("softplus_without_maximum", "rescale", "softplus is computed as log(1 + e^x): inf above 88, 0 below -17",
        ("softplus",), emulated=True, needs="numbers beyond 88", arithmetic=_as(lambda x: torch.log(1 + torch.exp(x)))),
    FaultModel("softplus_threshold", "precision", "softplus(x) is taken to be x above 2", ("softplus",), emulated=True,
        arithmetic=_as(lambda x: torch.where(x > 2, x, torch.log1p(torch.exp(x.clamp(max=2)))))),
    FaultModel("exp_clamped", "special values", "the argument is clamped to -80..80", ("exp", "exp2", "expm1"),
        inputs=_clamped(-80.0, 80.0), needs="arguments beyond 80"),
    FaultModel("log_clamped", "special values", "the argument is clamped to 1e-6 and above",
        ("log", "log2", "sqrt", "rsqrt"),
        inputs=_clamped(1e-6, math.inf), needs="arguments below 1e-6, zero among them"),
    FaultModel("reciprocal_of_zero", "special values", "1 / (x + 1e-8) stands for 1 / x", ("reciprocal", "rsqrt"),
        inputs=changed("x", lambda x: x.double() + 1e-8), needs="tiny arguments"),
    FaultModel("angle_not_reduced", "precision", "large angles are reduced by a rounded 2 pi", ("sin", "cos"),
        needs="angles of hundreds and more",
        inputs=changed("x", lambda x: torch.where(x.isfinite(), torch.remainder(x.double(), 6.2831), x.double()))),
    FaultModel("angle_in_degrees", "formula", "the argument is taken for degrees", ("sin", "cos"),
        inputs=changed("x", lambda x: x.double() * (math.pi / 180))),
    FaultModel("erf_saturates_early", "precision", "erf is taken to be one above 2", ("erf",),
        needs="numbers from 2 to 4",
        emulated=True, arithmetic=_as(lambda x: torch.where(x.abs() > 2, x.sign(), torch.erf(x)))),
    FaultModel("tanh_saturates_early", "precision", "tanh is taken to be one above 3", ("tanh",), emulated=True,
        needs="numbers from 3 to 9", arithmetic=_as(lambda x: torch.where(x.abs() > 3, x.sign(), torch.tanh(x)))),
    FaultModel("sigmoid_saturates_early", "precision", "sigmoid is taken to be zero or one beyond 6", ("sigmoid",),
        emulated=True, arithmetic=_as(lambda x: torch.where(x.abs() > 6, (x > 0).to(x.dtype), torch.sigmoid(x)))),
    FaultModel("square_root_of_magnitude", "special values", "the root of a negative number is that of its magnitude",
        ("sqrt", "rsqrt", "log", "log2"), inputs=changed("x", lambda x: x.abs()), needs="negative numbers"),
    FaultModel("sign_dropped", "special values", "the sign of the argument is dropped",
        ("reciprocal", "tanh", "erf", "sin", "expm1", "softplus", "sigmoid", "exp", "exp2"),
        inputs=changed("x", lambda x: x.abs())),
    FaultModel("gelu_tanh_for_erf", "formula", "the tanh approximation stands for erf", _GELU,
        applies=has("approximate", "none"), options=option(approximate="tanh")),
    FaultModel("gelu_erf_for_tanh", "formula", "erf stands for the tanh approximation", _GELU,
        applies=has("approximate", "tanh"), options=option(approximate="none")),
    FaultModel("gelu_by_sigmoid", "formula", "x sigmoid(1.702 x) stands for GELU", _GELU, definition=_fast_sigmoid),
    FaultModel("gelu_half_dropped", "formula", "the factor 1/2 is left out", _GELU, definition=_gelu(half=1.0)),
    FaultModel("gelu_one_dropped", "formula", "the 1 beside erf or tanh is left out", _GELU, definition=_gelu(one=0.0)),
    FaultModel("gelu_cubic_term", "formula", "the cubic term's factor is 0.0044715", _GELU,
        definition=_gelu(cubic=0.0044715), applies=has("approximate", "tanh")),
    FaultModel("gelu_of_minus_infinity", "special values", "x times a gate that has closed is NaN at minus infinity",
        _GELU, arithmetic=operations(gate_mul=lambda xp, right, x, gate: x * gate), emulated=True,
        needs="minus infinity in the input"),
    FaultModel("silu_of_minus_infinity", "special values", "x sigmoid(x) is NaN at minus infinity",
        ("silu",), arithmetic=operations(gate_mul=lambda xp, right, x, gate: x * gate), emulated=True,
        needs="minus infinity in the input"),
    FaultModel("silu_sigmoid_overflows", "rescale", "the sigmoid is e^x / (1 + e^x): inf / inf above 88",
        ("silu", "swiglu", "swiglu_backward"),
        arithmetic=operations(sigmoid=lambda xp, right, x: xp.exp(x) / (1 + xp.exp(x))), emulated=True,
        needs="numbers beyond 88"),
    FaultModel("gate_and_up_swapped", "layout", "gate and up are swapped", (*_SWIGLU, *_SWIGLU_BACK),
        inputs=swapped("gate", "up")),
    FaultModel("limit_ignored", "formula", "the limit is ignored", _SWIGLU, applies=has("limit"),
        options=option(limit=None), needs="numbers beyond the limit"),
    FaultModel("limit_on_gate_only", "formula", "the limit holds for the gate only", _SWIGLU, applies=has("limit"),
        definition=_swiglu("gate only"), needs="numbers beyond the limit"),
    FaultModel("limit_on_up_only", "formula", "the limit holds for up only", _SWIGLU, applies=has("limit"),
        definition=_swiglu("up only"), needs="numbers beyond the limit"),
    FaultModel("limit_on_one_side", "formula", "up is limited above, not below", _SWIGLU, applies=has("limit"),
        definition=_swiglu("one side"), needs="numbers below minus the limit"),
    FaultModel("gate_limited_below", "formula", "the gate is limited below too", _SWIGLU, applies=has("limit"),
        definition=_swiglu("both sides"), needs="numbers below minus the limit"),
    FaultModel("nan_becomes_limit", "special values", "NaN becomes the limit, as fmin gives it", _SWIGLU,
        origin="tilelang#3024", applies=has("limit"), arithmetic=operations(minimum=_nan_at_limit),
        needs="a NaN in the input"),
    FaultModel("swiglu_with_sigmoid", "formula", "sigmoid(gate) up: the factor gate is left out", _SWIGLU,
        arithmetic=_gated(lambda x, gate, y: gate * y)),
    FaultModel("swiglu_without_sigmoid", "formula", "gate up: the sigmoid is left out", _SWIGLU,
        arithmetic=_gated(lambda x, gate, y: x * y)),
    FaultModel("swiglu_gradients_swapped", "layout", "dgate and dup are swapped", _SWIGLU_BACK,
        results=lambda xp, outputs, case: outputs[::-1]),
    FaultModel("silu_slope_first_term", "formula", "the slope of silu is taken to be the sigmoid", _SWIGLU_BACK,
        arithmetic=_slope(lambda sigmoid: sigmoid)),
    FaultModel("silu_slope_of_sigmoid", "formula", "the slope of silu is taken to be that of the sigmoid", _SWIGLU_BACK,
        arithmetic=_slope(lambda sigmoid: sigmoid * (1 - sigmoid))),
    FaultModel("dup_of_sigmoid", "formula", "dup is sigmoid(gate) dy: the factor gate is left out", _SWIGLU_BACK,
        arithmetic=_gated(lambda x, gate, y: gate * y)),
    FaultModel("rope_pairing", "layout", "pairs (i, i + D/2) are taken for neighbours, or the other way", _ROPE,
        options=lambda options, case: options | {"interleaved": not options["interleaved"]}),
    FaultModel("rope_sign", "formula", "the rotation goes the other way", _ROPE, inputs=changed("sin", lambda x: -x)),
    FaultModel("rope_cos_and_sin_swapped", "layout", "cos and sin are swapped", _ROPE, inputs=swapped("cos", "sin")),
    FaultModel("rope_index_not_halved", "layout", "pair i takes the angle of place 2i", _ROPE,
        origin="onnxruntime#26390", needs="D of at least 4", inputs=_angles(lambda i: i * 2 % max(len(i), 1), 1)),
    FaultModel("rope_position_before", "layout", "each position takes the angle of the one before", _ROPE,
        needs="more than one position", inputs=_angles(lambda i: (i - 1).clamp(min=0), 0)),
    FaultModel("rope_position_of_first", "layout", "every position takes the angle of the first", _ROPE,
        needs="more than one position", inputs=_angles(lambda i: i * 0, 0)),
    FaultModel("rope_one_of_pair", "formula", "only the first of each pair is turned", _ROPE,
        definition=_rotated(lambda first, second, cos, sin: (first * cos - second * sin, second))),
    FaultModel("rope_in_place", "state", "the second of a pair is computed from the first after it was overwritten",
        _ROPE, definition=_rotated(_inplace)),
)  # fmt: skip
