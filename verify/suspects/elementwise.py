"""Faults of elementary functions, activations and rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from assay.golden.definitions.unary import FUNCTIONS
from assay.verify.inputs.cases import Case
from assay.verify.suspects.mechanisms import asked, changed, every, option, swapped
from assay.verify.suspects.suspect import Suspect, Tensors

Tensor = torch.Tensor


def _as(formula: Callable[[Tensor], Tensor]) -> type:
    """An elementary function by another formula, in float32."""

    class Formula:
        def function(self: Any, name: str, x: Tensor) -> Tensor:
            return formula(x)

    return Formula


def _other(name: str) -> type:
    """Another elementary function."""

    class Other:
        def function(self: Any, asked_for: str, x: Any) -> Any:
            return super().function(name, x)  # type: ignore[misc]

    return Other


def _clamped(least: float, most: float) -> Any:
    return changed("x", lambda x: torch.where(x.isnan(), x.double(), x.double().clamp(least, most)))


class _NaiveTail:
    """x times a sigmoid that is zero: minus infinity gives NaN."""

    def gated(self: Any, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate


class _SigmoidOverflows:
    """exp(x) / (1 + exp(x)), which is inf / inf above 88."""

    def sigmoid(self: Any, x: Tensor) -> Tensor:
        grown = self.exp(x)
        return grown / (1 + grown)


def _fast_sigmoid(xp: Any, x: Any, **options: Any) -> Any:
    return xp.gated(x, xp.sigmoid(x * 1.702))


def _gelu(half: float = 0.5, one: float = 1.0, cubic: float = 0.044715) -> Any:
    def definition(xp: Any, x: Any, *, approximate: str) -> Any:
        if approximate == "tanh":
            inner = (x + x * x * x * cubic) * xp.constant(lambda sqrt, pi: sqrt(2 / pi))
            gate = xp.tanh(inner, absolute=True)
        else:
            gate = xp.erf(x * xp.constant(lambda sqrt, pi: 1 / sqrt(2)), absolute=True)
        return xp.gated(x * half, gate + one)

    return definition


def _swiglu(kind: str) -> Any:
    def definition(xp: Any, gate: Any, up: Any, *, limit: float | None) -> Any:
        if limit is not None:
            above = xp.minimum(gate, limit)
            within = -xp.minimum(-xp.minimum(up, limit), limit)
            gate = {"up only": gate, "both sides": -xp.minimum(-above, limit)}.get(kind, above)
            up = {"gate only": up, "one side": xp.minimum(up, limit)}.get(kind, within)
        if kind == "sigmoid":
            return xp.sigmoid(gate) * up
        if kind == "no gate":
            return gate * up
        return xp.gated_product(gate, xp.sigmoid(gate), up)

    return definition


class _NanAtLimit:
    """fmin and fmax: a NaN becomes the limit."""

    def minimum(self: Any, x: Any, bound: float) -> Any:
        mid: Tensor = getattr(x, "mid", x)
        low = super().minimum(x, bound)  # type: ignore[misc]
        return self.where(mid.isnan(), self.exact(torch.full(mid.shape, bound, dtype=torch.float64)), low)


def _swiglu_backward(kind: str) -> Any:
    def definition(xp: Any, gate: Any, up: Any, dy: Any) -> tuple[Any, Any]:
        s = xp.sigmoid(gate)
        slope = {"no x": s, "sigmoid": s * (1 - s)}.get(kind)
        dgate = dy * up * slope if slope is not None else xp.silu_gradient(dy, up, gate)
        return dgate, s * dy if kind == "dup" else xp.gated_product(gate, s, dy)

    return definition


def _rope(alter: Any) -> Callable[[Tensors, Case], Tensors]:
    return lambda values, case: values | {name: alter(values[name], case) for name in ("cos", "sin")}


def _index_not_halved(x: Tensor, case: Case) -> Tensor:
    """The angle of pair i taken from place 2i."""
    return x[:, torch.arange(x.shape[1]) * 2 % max(x.shape[1], 1)]


def _position_before(x: Tensor, case: Case) -> Tensor:
    return x[(torch.arange(x.shape[0]) - 1).clamp(min=0)]


def _position_of_first(x: Tensor, case: Case) -> Tensor:
    return x[:1].expand(x.shape)


def _one_half(xp: Any, x: Any, cos: Any, sin: Any, *, interleaved: bool) -> Any:
    """Only the first of each pair is turned."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = first * cos - second * sin, second
    return xp.stack(turned, -1).reshape(*x.shape) if interleaved else xp.concatenate(turned, -1)


def _updated_in_place(xp: Any, x: Any, cos: Any, sin: Any, *, interleaved: bool) -> Any:
    """The second of each pair is computed from the first after that was overwritten."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    first = first * cos - second * sin
    turned = first, second * cos + first * sin
    return xp.stack(turned, -1).reshape(*x.shape) if interleaved else xp.concatenate(turned, -1)


def _instead(wrong: str, right: str) -> Suspect:
    return Suspect(f"{wrong}_for_{right}", "formula", f"{wrong} is computed instead of {right}", (right,),
                arithmetic=_other(wrong))  # fmt: skip


_GELU, _SILU, _SWIGLU, _SWIGLU_BACK, _ROPE = (
    ("gelu",), ("silu",), ("swiglu",), ("swiglu_backward",), ("rope",),
)  # fmt: skip

SUSPECTS = (
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
    Suspect("approximate_function", "precision", "an approximation with a relative error of 2^-7", FUNCTIONS,
            results=every(lambda xp, x: x * (1 + 2.0**-7))),
    Suspect("exp_minus_one", "precision", "expm1 is computed as exp(x) - 1, which cancels near zero", ("expm1",),
            arithmetic=_as(lambda x: torch.exp(x) - 1), emulated=True, needs="numbers near zero"),
    Suspect("log_of_one_plus", "precision", "log1p is computed as log(1 + x), which loses small x", ("log1p",),
            arithmetic=_as(lambda x: torch.log(1 + x)), emulated=True, needs="numbers near zero"),
    Suspect("tanh_by_exponentials", "rescale", "tanh is computed as (e^2x - 1) / (e^2x + 1): inf / inf above 44, and "
            "cancellation near zero", ("tanh",), emulated=True,
            arithmetic=_as(lambda x: (torch.exp(2 * x) - 1) / (torch.exp(2 * x) + 1))),
    Suspect("sigmoid_by_growing_exponential", "rescale", "sigmoid is computed as e^x / (1 + e^x): inf / inf above 88",
            ("sigmoid",), emulated=True, needs="numbers beyond 88",
            arithmetic=_as(lambda x: torch.exp(x) / (1 + torch.exp(x)))),
    Suspect("softplus_without_maximum", "rescale", "softplus is computed as log(1 + e^x), which overflows",
            ("softplus",),
            emulated=True, needs="numbers beyond 88", arithmetic=_as(lambda x: torch.log(1 + torch.exp(x)))),
    Suspect("softplus_threshold", "precision", "softplus(x) is taken to be x above 2", ("softplus",), emulated=True,
            arithmetic=_as(lambda x: torch.where(x > 2, x, torch.log1p(torch.exp(x.clamp(max=2)))))),
    Suspect("exp_clamped", "special values", "the argument is clamped to -80..80", ("exp", "exp2", "expm1"),
            inputs=_clamped(-80.0, 80.0), needs="arguments beyond 80"),
    Suspect("log_clamped", "special values", "the argument is clamped to 1e-6 and above",
            ("log", "log2", "sqrt", "rsqrt"),
            inputs=_clamped(1e-6, math.inf), needs="arguments below 1e-6, zero among them"),
    Suspect("reciprocal_of_zero", "special values", "1 / (x + 1e-8) stands for 1 / x", ("reciprocal", "rsqrt"),
            inputs=changed("x", lambda x: x.double() + 1e-8), needs="tiny arguments"),
    Suspect("angle_not_reduced", "precision", "large angles are reduced by a rounded 2 pi", ("sin", "cos"),
            needs="angles of hundreds and more",
            inputs=changed("x", lambda x: torch.where(x.isfinite(), torch.remainder(x.double(), 6.2831), x.double()))),
    Suspect("angle_in_degrees", "formula", "the argument is taken for degrees", ("sin", "cos"),
            inputs=changed("x", lambda x: x.double() * (math.pi / 180))),
    Suspect("erf_saturates_early", "precision", "erf is taken to be one above 2", ("erf",), needs="numbers from 2 to 4",
            emulated=True, arithmetic=_as(lambda x: torch.where(x.abs() > 2, x.sign(), torch.erf(x)))),
    Suspect("tanh_saturates_early", "precision", "tanh is taken to be one above 3", ("tanh",), emulated=True,
            needs="numbers from 3 to 9", arithmetic=_as(lambda x: torch.where(x.abs() > 3, x.sign(), torch.tanh(x)))),
    Suspect("sigmoid_saturates_early", "precision", "sigmoid is taken to be zero or one beyond 6", ("sigmoid",),
            emulated=True, arithmetic=_as(lambda x: torch.where(x.abs() > 6, (x > 0).to(x.dtype), torch.sigmoid(x)))),
    Suspect("square_root_of_magnitude", "special values", "the root of a negative number is that of its magnitude",
            ("sqrt", "rsqrt", "log", "log2"), inputs=changed("x", lambda x: x.abs()), needs="negative numbers"),
    Suspect("sign_dropped", "special values", "the sign of the argument is dropped",
            ("reciprocal", "tanh", "erf", "sin", "expm1", "softplus", "sigmoid", "exp", "exp2"),
            inputs=changed("x", lambda x: x.abs())),
    Suspect("gelu_tanh_for_erf", "formula", "the tanh approximation stands for erf", _GELU,
            applies=asked("approximate", "none"), options=option(approximate="tanh")),
    Suspect("gelu_erf_for_tanh", "formula", "erf stands for the tanh approximation", _GELU,
            applies=asked("approximate", "tanh"), options=option(approximate="none")),
    Suspect("gelu_by_sigmoid", "formula", "x sigmoid(1.702 x) stands for GELU", _GELU, definition=_fast_sigmoid),
    Suspect("gelu_half_dropped", "formula", "the factor 1/2 is left out", _GELU, definition=_gelu(half=1.0)),
    Suspect("gelu_one_dropped", "formula", "the 1 beside erf or tanh is left out", _GELU, definition=_gelu(one=0.0)),
    Suspect("gelu_cubic_term", "formula", "the cubic term's factor is 0.0044715", _GELU,
            definition=_gelu(cubic=0.0044715), applies=asked("approximate", "tanh")),
    Suspect("silu_of_minus_infinity", "special values", "x sigmoid(x) is NaN at minus infinity",
            ("silu", "gelu"), arithmetic=_NaiveTail, emulated=True, needs="minus infinity in the input"),
    Suspect("silu_sigmoid_overflows", "rescale", "the sigmoid is e^x / (1 + e^x): inf / inf above 88",
            ("silu", "swiglu", "swiglu_backward"), arithmetic=_SigmoidOverflows, emulated=True,
            needs="numbers beyond 88"),
    Suspect("silu_with_beta", "formula", "x sigmoid(1.702 x) is computed", _SILU, definition=_fast_sigmoid),
    Suspect("silu_factor_dropped", "formula", "sigmoid is computed: the factor x is left out", _SILU,
            definition=lambda xp, x: xp.sigmoid(x)),
    Suspect("relu_for_silu", "formula", "max(x, 0) is computed", _SILU,
            definition=lambda xp, x: xp.maximum(x, x * 0.0)),
    Suspect("gate_and_up_swapped", "layout", "gate and up are swapped", (*_SWIGLU, *_SWIGLU_BACK),
            inputs=swapped("gate", "up")),
    Suspect("limit_ignored", "formula", "the limit is ignored", _SWIGLU, applies=asked("limit"),
            options=option(limit=None),
            needs="numbers beyond the limit"),
    Suspect("limit_on_gate_only", "formula", "the limit holds for the gate only", _SWIGLU, applies=asked("limit"),
            definition=_swiglu("gate only"), needs="numbers beyond the limit"),
    Suspect("limit_on_up_only", "formula", "the limit holds for up only", _SWIGLU, applies=asked("limit"),
            definition=_swiglu("up only"), needs="numbers beyond the limit"),
    Suspect("limit_on_one_side", "formula", "up is limited above, not below", _SWIGLU, applies=asked("limit"),
            definition=_swiglu("one side"), needs="numbers below minus the limit"),
    Suspect("gate_limited_below", "formula", "the gate is limited below too", _SWIGLU, applies=asked("limit"),
            definition=_swiglu("both sides"), needs="numbers below minus the limit"),
    Suspect("nan_becomes_limit", "special values", "NaN becomes the limit, as fmin gives it", _SWIGLU,
            origin="tilelang#3024", applies=asked("limit"), arithmetic=_NanAtLimit, needs="a NaN in the input"),
    Suspect("swiglu_with_sigmoid", "formula", "sigmoid(gate) up: the factor gate is left out", _SWIGLU,
            definition=_swiglu("sigmoid")),
    Suspect("swiglu_without_sigmoid", "formula", "gate up: the sigmoid is left out", _SWIGLU,
            definition=_swiglu("no gate")),
    Suspect("swiglu_gradients_swapped", "layout", "dgate and dup are swapped", _SWIGLU_BACK,
            results=lambda xp, found, case: found[::-1]),
    Suspect("silu_slope_first_term", "formula", "the slope of silu is taken to be the sigmoid", _SWIGLU_BACK,
            definition=_swiglu_backward("no x")),
    Suspect("silu_slope_of_sigmoid", "formula", "the slope of silu is taken to be that of the sigmoid", _SWIGLU_BACK,
            definition=_swiglu_backward("sigmoid")),
    Suspect("dup_of_sigmoid", "formula", "dup is sigmoid(gate) dy: the factor gate is left out", _SWIGLU_BACK,
            definition=_swiglu_backward("dup")),
    Suspect("rope_pairing", "layout", "pairs (i, i + D/2) are taken for neighbours, or the other way", _ROPE,
            options=lambda options, case: options | {"interleaved": not options["interleaved"]}),
    Suspect("rope_sign", "formula", "the rotation goes the other way", _ROPE, inputs=changed("sin", lambda x: -x)),
    Suspect("rope_cos_and_sin_swapped", "layout", "cos and sin are swapped", _ROPE, inputs=swapped("cos", "sin")),
    Suspect("rope_index_not_halved", "layout", "pair i takes the angle of place 2i", _ROPE, origin="onnxruntime#26390",
            needs="D of at least 4", inputs=_rope(_index_not_halved)),
    Suspect("rope_position_before", "layout", "each position takes the angle of the one before", _ROPE,
            needs="more than one position", inputs=_rope(_position_before)),
    Suspect("rope_position_of_first", "layout", "every position takes the angle of the first", _ROPE,
            needs="more than one position", inputs=_rope(_position_of_first)),
    Suspect("rope_one_of_pair", "formula", "only the first of each pair is turned", _ROPE, definition=_one_half),
    Suspect("rope_in_place", "state", "the second of a pair is computed from the first after it was overwritten", _ROPE,
            definition=_updated_in_place),
)  # fmt: skip
