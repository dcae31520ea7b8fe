"""Faults of norms and of their gradients."""

from typing import Any

import torch

from assay.golden.arithmetic import Arithmetic
from assay.golden.definitions.norms import add_rmsnorm, rmsnorm
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.explanation.fault_models.mutators import (
    changed,
    cut,
    in_input_dtype,
    is_narrow,
    narrowed,
    operations,
    option,
    whole,
)

Tensor = torch.Tensor

_LAYER, _RMS, _ADD = ("layernorm", "add_layernorm", "group_norm"), ("rmsnorm",), ("add_rmsnorm",)
_LAYER_BACK, _RMS_BACK = ("layernorm_backward",), ("rmsnorm_backward",)
_MEANS = (*_LAYER, *_LAYER_BACK)
_ROOTS = (*_RMS, *_ADD, *_RMS_BACK)


def _standardised(root: Any) -> type:
    """Standardise with another root: ``root(xp, mean square deviation, eps, columns)``."""

    def standardize(xp: Any, right: Any, x: Any, eps: float) -> tuple[Any, Any]:
        centred, _ = right(x, eps)
        return centred, root(xp, xp.mean(centred * centred), eps, x.shape[-1])

    return operations(standardize=standardize)


def _eps_outside(xp: Any, square: Any, eps: float, columns: int) -> Any:
    unit = xp.exact(torch.ones(square.shape))
    return unit / (unit / xp.rsqrt(square) + eps)


def _unbiased(xp: Any, square: Any, eps: float, columns: int) -> Any:
    return xp.rsqrt(square * columns / max(columns - 1, 1) + eps) if columns > 1 else xp.rsqrt(square + eps)


def _no_root(xp: Any, square: Any, eps: float, columns: int) -> Any:
    return xp.exact(torch.ones(square.shape)) / (square + eps)


def _mean_in_input_dtype(xp: Any, right: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    centred = in_input_dtype(xp, x - in_input_dtype(xp, xp.mean(x)))
    return centred, xp.rsqrt(xp.mean(centred * centred) + eps)


def _tail_of_mean(xp: Any, right: Any, x: Any, eps: float) -> tuple[Any, Any]:
    kept = cut(x, -1, whole(x.shape[-1], 16))
    mean = xp.mean(kept)
    inner = kept - mean
    return x - mean, xp.rsqrt(xp.mean(inner * inner) + eps)


def _squares_in(format: str) -> type:
    """Round squares, and the deviations before them, to a narrow format."""

    def standardize(xp: Any, right: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        centred = x - xp.sum(x) / x.shape[-1]
        return centred, xp.rsqrt(xp.mean(centred * centred) + eps)

    return operations(mean=lambda xp, right, x: xp.sum(narrowed(x, format)) / x.shape[-1], standardize=standardize)


def _rms(root: Any, *, centred: bool = False) -> Any:
    """Compute an RMS norm with another root, or of deviations from the mean."""

    def definition(xp: Any, x: Any, weight: Any, *, eps: float, offset: float) -> Any:
        x = x - xp.mean(x) if centred else x
        return xp.product(x, root(xp, xp.mean(x * x), eps, x.shape[-1]), weight + offset)

    return definition


def _backward(without: str, *, rms: bool = False) -> Any:
    """Compute the gradient of LayerNorm or RMS norm without one of its terms."""

    def definition(xp: Any, x: Any, weight: Any, dy: Any, *, eps: float) -> tuple[Any, ...]:
        centred, root = (x, xp.rsqrt(xp.mean(x * x) + eps)) if rms else xp.standardize(x, eps)
        normalized, scaled = centred * root, dy * weight
        dx = scaled if rms or without == "mean" else scaled - xp.mean(scaled)
        dx = dx if without == "spread" else dx - normalized * xp.mean(scaled * normalized)
        dweight = xp.sum(dy * x if without == "normalised" else dy * normalized, axis=0)[0]
        return (dx * root, dweight) if rms else (dx * root, dweight, xp.sum(dy, axis=0)[0])

    return definition


_drop_bias = changed("bias", lambda x: x * 0)
_drop_weight = changed("weight", lambda x: torch.ones_like(x))

FAULT_MODELS = (
    FaultModel("eps_dropped", "formula", "eps is left out", (*_MEANS, *_ROOTS), options=option(eps=1e-300),
        needs="rows of small numbers"),
    FaultModel("eps_of_other_norm", "formula", "eps is ten times another: 1e-5 for 1e-6, or 1e-6 for 1e-5",
        (*_MEANS, *_ROOTS), needs="rows of small numbers", options=lambda options, case: options
        | {"eps": 1e-6 if options["eps"] > 3e-6 else 1e-5}),
    FaultModel("eps_outside_root", "formula", "eps is added to the root, not under it", _MEANS,
        needs="rows of small numbers", arithmetic=_standardised(_eps_outside)),
    FaultModel("rms_eps_outside_root", "formula", "eps is added to the root, not under it", _RMS,
        needs="rows of small numbers", definition=_rms(_eps_outside)),
    FaultModel("unbiased_variance", "formula", "the variance is divided by N - 1", _MEANS,
        arithmetic=_standardised(_unbiased)),
    FaultModel("root_dropped", "formula", "divided by the variance, not by its root", _LAYER,
        arithmetic=_standardised(_no_root)),
    FaultModel("rms_root_dropped", "formula", "divided by the mean square, not by its root", _RMS,
        definition=_rms(_no_root)),
    FaultModel("mean_kept", "formula", "the mean is not subtracted", _LAYER,
        arithmetic=operations(standardize=lambda xp, right, x, eps: (x, right(x, eps)[1]))),
    FaultModel("mean_subtracted_twice", "formula", "the mean is subtracted twice", _MEANS, origin="tt-metal#53215",
        arithmetic=operations(standardize=lambda xp, right, x, eps: (
         right(x, eps)[0] - xp.mean(x), right(x, eps)[1]))),
    FaultModel("mean_subtracted", "formula", "the mean is subtracted, as in LayerNorm", _RMS, definition=_rms(
         lambda xp, square, eps, columns: xp.rsqrt(square + eps), centred=True)),
    FaultModel("tail_of_mean_dropped", "tail", "mean and variance leave out what is beyond the last whole block of 16",
        _LAYER, needs="more than 16 columns, no multiple of 16", arithmetic=operations(standardize=_tail_of_mean)),
    FaultModel("mean_over_padding", "tail", "sums are divided by the number of columns rounded up to a multiple of 16",
        (*_LAYER, *_ROOTS), needs="a number of columns that is no multiple of 16", arithmetic=operations(
         mean=lambda xp, right, x: xp.sum(x) / (-(-x.shape[-1] // 16) * 16),
         standardize=lambda xp, right, x, eps: Arithmetic.standardize(xp, x, eps))),
    FaultModel("squares_in_bfloat16", "precision", "squares are rounded to bfloat16 before they are summed",
        (*_LAYER, *_RMS, *_ADD), origin="mlir-air#1679", arithmetic=_squares_in("bfloat16"), emulated=True),
    FaultModel("squares_in_float16", "precision", "squares are kept in float16, which overflows at 65504",
        (*_LAYER, *_RMS, *_ADD), origin="onnxruntime#29034", needs="numbers beyond 256",
        arithmetic=_squares_in("float16"), emulated=True),
    FaultModel("mean_in_input_dtype", "precision", "mean and deviations are rounded to the input dtype", _LAYER,
        arithmetic=operations(standardize=_mean_in_input_dtype), emulated=True, applies=is_narrow),
    FaultModel("rounded_before_weight", "precision",
        "the normalised row is rounded to the input dtype before the weight",
        (*_RMS, *_ADD),
        arithmetic=operations(product=lambda xp, right, a, b, c, stage="": in_input_dtype(xp, a * b) * c),
        contract={"stages": {"normalized": "input"}},
        applies=is_narrow),
    FaultModel("rounded_before_norm", "precision", "x + residual is rounded to the input dtype before it is normalised",
        _ADD, arithmetic=operations(round=lambda xp, right, x, stage: in_input_dtype(xp, x) if stage == "sum" else x),
        contract={"stages": {"sum": "input"}}, applies=is_narrow),
    FaultModel("bias_dropped", "formula", "the bias is left out", (*_LAYER, "linear"), inputs=_drop_bias),
    FaultModel("weight_dropped", "formula", "the weight is left out", (*_LAYER, *_RMS, *_ADD), inputs=_drop_weight),
    FaultModel("weight_offset_dropped", "formula", "the offset of the weight is left out", _RMS,
        options=option(offset=0.0), applies=lambda case: case.options["offset"] != 0),
    FaultModel("weight_plus_one", "formula", "the weight is taken as weight + 1", (*_LAYER, *_RMS, *_ADD),
        inputs=changed("weight", lambda x: x.double() + 1)),
    FaultModel("residual_not_normalised", "formula", "x is normalised without the residual", _ADD,
        definition=lambda xp, x, residual, weight, *, eps: (
         rmsnorm(xp, x, weight, eps=eps, offset=0.0), x + residual)),
    FaultModel("sum_not_returned", "layout", "x is returned in place of x + residual", _ADD,
        definition=lambda xp, x, residual, weight, *, eps: (add_rmsnorm(xp, x, residual, weight, eps=eps)[0], x)),
    FaultModel("residual_dropped", "formula", "the residual is left out", _ADD,
        inputs=changed("residual", lambda x: x * 0)),
    FaultModel("layernorm_mean_term_dropped", "formula", "dx leaves out the mean of the gradient", _LAYER_BACK,
        definition=_backward("mean")),
    FaultModel("layernorm_spread_term_dropped", "formula", "dx leaves out the gradient of the variance", _LAYER_BACK,
        definition=_backward("spread")),
    FaultModel("layernorm_weight_not_in_dx", "formula", "dx leaves out the weight", _LAYER_BACK,
        inputs=_drop_weight),
    FaultModel("layernorm_dweight_of_x", "formula", "dweight sums dy x, not dy times the normalised x", _LAYER_BACK,
        definition=_backward("normalised")),
    FaultModel("rmsnorm_spread_term_dropped", "formula", "dx leaves out the gradient of the mean square", _RMS_BACK,
        definition=_backward("spread", rms=True)),
    FaultModel("rmsnorm_weight_not_in_dx", "formula", "dx leaves out the weight", _RMS_BACK,
        inputs=_drop_weight),
    FaultModel("rmsnorm_dweight_of_x", "formula", "dweight sums dy x, not dy times the normalised x", _RMS_BACK,
        definition=_backward("normalised", rms=True)),
    FaultModel("rows_beyond_block_dropped", "tail",
        "the sums over rows leave out those beyond the last whole block of 16",
        (*_LAYER_BACK, *_RMS_BACK), needs="more than 16 rows, no multiple of 16",
        arithmetic=operations(sum=lambda xp, right, x, axis=-1, **settings: right(
         cut(x, 0, whole(x.shape[0], 16)) if axis == 0 else x, axis, **settings))),
)  # fmt: skip
