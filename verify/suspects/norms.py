"""Faults of norms and of their gradients."""

from __future__ import annotations

from typing import Any

import torch

from assay.precision.rounding import round_to
from assay.verify.suspects.mechanisms import (
    changed,
    cut,
    is_narrow,
    option,
    whole,
)
from assay.verify.suspects.suspect import Suspect

Tensor = torch.Tensor

_LAYER, _RMS, _ADD = ("layernorm",), ("rmsnorm",), ("add_rmsnorm",)
_LAYER_BACK, _RMS_BACK = ("layernorm_backward",), ("rmsnorm_backward",)
_MEANS = (*_LAYER, *_LAYER_BACK)
_ROOTS = (*_RMS, *_ADD, *_RMS_BACK)


def _standardised(root: Any) -> type:
    """Standardisation with another root: ``root(xp, mean square deviation, eps, columns)``."""

    class Standardised:
        def standardize(self: Any, x: Any, eps: float) -> tuple[Any, Any]:
            centred, _ = super().standardize(x, eps)  # type: ignore[misc]
            return centred, root(self, self.mean(centred * centred), eps, x.shape[-1])

    return Standardised


def _eps_outside(xp: Any, square: Any, eps: float, columns: int) -> Any:
    unit = xp.exact(torch.ones(square.shape))
    return unit / (unit / xp.rsqrt(square) + eps)


def _unbiased(xp: Any, square: Any, eps: float, columns: int) -> Any:
    return xp.rsqrt(square * columns / max(columns - 1, 1) + eps) if columns > 1 else xp.rsqrt(square + eps)


def _no_root(xp: Any, square: Any, eps: float, columns: int) -> Any:
    return xp.exact(torch.ones(square.shape)) / (square + eps)


class _MeanKept:
    """Only the scale is normalised: the mean is not subtracted."""

    def standardize(self: Any, x: Any, eps: float) -> tuple[Any, Any]:
        return x, super().standardize(x, eps)[1]  # type: ignore[misc]


class _MeanTwice:
    """The deviations from the mean are centred by the mean again."""

    def standardize(self: Any, x: Any, eps: float) -> tuple[Any, Any]:
        centred, root = super().standardize(x, eps)  # type: ignore[misc]
        return centred - self.mean(x), root


class _TailOfMean:
    """Mean and variance are those of the columns in whole blocks of 16."""

    def standardize(self: Any, x: Any, eps: float) -> tuple[Any, Any]:
        kept = cut(x, -1, whole(x.shape[-1], 16))
        mean = self.mean(kept)
        inner = kept - mean
        return x - mean, self.rsqrt(self.mean(inner * inner) + eps)


class _PaddedMean:
    """Sums over the columns are divided by their number rounded up to a multiple of 16."""

    def mean(self: Any, x: Any) -> Any:
        return self.sum(x) / (-(-x.shape[-1] // 16) * 16)

    def standardize(self: Any, x: Any, eps: float) -> tuple[Any, Any]:
        centred = x - self.mean(x)
        return centred, self.rsqrt(self.mean(centred * centred) + eps)


class _SquareOfSum:
    """The variance as E[x^2] - E[x]^2: for float32 evaluations."""

    def standardize(self: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        mean = self.mean(x)
        variance = (self.mean(x * x) - mean * mean).clamp(min=0)
        return x - mean, self.rsqrt(variance + eps)


def _squares_in(format: str) -> type:
    """Squares, and what is centred before them, rounded to a narrow format."""

    class Squares:
        def mean(self: Any, x: Tensor) -> Tensor:
            return self.sum(round_to(x.double(), format).to(x.dtype)) / x.shape[-1]

        def standardize(self: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            centred = x - self.sum(x) / x.shape[-1]
            return centred, self.rsqrt(self.mean(centred * centred) + eps)

    return Squares


class _MeanInInputDtype:
    """Mean and deviations rounded to the dtype of the inputs: for float32 evaluations."""

    def standardize(self: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        dtype = next(iter(self.case.dtypes.values()))
        mean = round_to(self.mean(x).double(), dtype).to(x.dtype)
        centred = round_to((x - mean).double(), dtype).to(x.dtype)
        return centred, self.rsqrt(self.mean(centred * centred) + eps)


class _NormalisedFirst:
    """x r is rounded to the dtype of the inputs before the weight is applied."""

    def product(self: Any, a: Tensor, b: Tensor, c: Tensor, stage: str = "") -> Tensor:
        dtype = next(iter(self.case.dtypes.values()))
        return round_to((a * b).double(), dtype).to(a.dtype) * c


class _SumFirst:
    """x + residual is rounded to the dtype of the inputs before it is normalised."""

    def round(self: Any, x: Tensor, stage: str) -> Tensor:
        return round_to(x.double(), next(iter(self.case.dtypes.values()))).to(x.dtype) if stage == "sum" else x


def _rms(root: Any, weigh: Any = None) -> Any:
    """RMS norm with another root, or another use of the weight."""

    def definition(xp: Any, x: Any, weight: Any, *, eps: float, offset: float) -> Any:
        scale = root(xp, xp.mean(x * x), eps, x.shape[-1]) if root else xp.rsqrt(xp.mean(x * x) + eps)
        return xp.product(x, scale, weigh(xp, weight, offset) if weigh else weight + offset)

    return definition


def _centred_rms(xp: Any, x: Any, weight: Any, *, eps: float, offset: float) -> Any:
    inner = x - xp.mean(x)
    return xp.product(inner, xp.rsqrt(xp.mean(inner * inner) + eps), weight + offset)


def _first_of(place: int, of: str) -> Any:
    def definition(xp: Any, x: Any, residual: Any, weight: Any, *, eps: float) -> tuple[Any, Any]:
        total = x + residual
        normed = {"x": x, "residual": residual}.get(of, total)
        y = xp.product(normed, xp.rsqrt(xp.mean(normed * normed) + eps), weight)
        return (y, total) if place == 0 else (xp.product(total, xp.rsqrt(xp.mean(total * total) + eps), weight), x)

    return definition


def _backward(without: str) -> Any:
    def definition(xp: Any, x: Any, weight: Any, dy: Any, *, eps: float) -> tuple[Any, Any, Any]:
        centred, root = xp.standardize(x, eps)
        normalized, grown = centred * root, dy * weight if without != "weight" else dy
        dx = grown if without == "mean" else grown - xp.mean(grown)
        dx = dx if without == "spread" else dx - normalized * xp.mean(grown * normalized)
        dweight = xp.sum(dy * x if without == "normalised" else dy * normalized, axis=0)[0]
        return dx * root, dweight, xp.sum(dy, axis=0)[0]

    return definition


def _rms_backward(without: str) -> Any:
    def definition(xp: Any, x: Any, weight: Any, dy: Any, *, eps: float) -> tuple[Any, Any]:
        root = xp.rsqrt(xp.mean(x * x) + eps)
        normalized, grown = x * root, dy * weight if without != "weight" else dy
        dx = grown if without == "spread" else grown - normalized * xp.mean(grown * normalized)
        dweight = xp.sum(dy * x if without == "normalised" else dy * normalized, axis=0)[0]
        return dx * root, dweight

    return definition


class _RowsInBlocks:
    """Sums over rows leave out those beyond the last whole block of 16."""

    def sum(self: Any, x: Any, axis: int = -1, **settings: Any) -> Any:
        kept = cut(x, 0, whole(x.shape[0], 16)) if axis == 0 else x
        return super().sum(kept, axis, **settings)  # type: ignore[misc]


_drop_bias = changed("bias", lambda x: x * 0)
_drop_weight = changed("weight", lambda x: torch.ones_like(x))

SUSPECTS = (
    Suspect("eps_dropped", "formula", "eps is left out", (*_MEANS, *_ROOTS), options=option(eps=1e-300),
            needs="rows of small numbers"),
    Suspect("eps_of_other_norm", "formula", "eps is ten times another: 1e-5 for 1e-6, or 1e-6 for 1e-5",
            (*_MEANS, *_ROOTS), needs="rows of small numbers", options=lambda options, case: options
            | {"eps": 1e-6 if options["eps"] > 3e-6 else 1e-5}),
    Suspect("eps_outside_root", "formula", "eps is added to the root, not under it", _MEANS,
            needs="rows of small numbers", arithmetic=_standardised(_eps_outside)),
    Suspect("rms_eps_outside_root", "formula", "eps is added to the root, not under it", _RMS,
            needs="rows of small numbers", definition=_rms(_eps_outside)),
    Suspect("unbiased_variance", "formula", "the variance is divided by N - 1", _MEANS,
            arithmetic=_standardised(_unbiased)),
    Suspect("root_dropped", "formula", "divided by the variance, not by its root", _LAYER,
            arithmetic=_standardised(_no_root)),
    Suspect("rms_root_dropped", "formula", "divided by the mean square, not by its root", _RMS,
            definition=_rms(_no_root)),
    Suspect("mean_kept", "formula", "the mean is not subtracted", _LAYER, arithmetic=_MeanKept),
    Suspect("mean_subtracted_twice", "formula", "the mean is subtracted twice", _MEANS, origin="tt-metal#53215",
            arithmetic=_MeanTwice),
    Suspect("mean_subtracted", "formula", "the mean is subtracted, as in LayerNorm", _RMS, definition=_centred_rms),
    Suspect("tail_of_mean_dropped", "tail", "mean and variance leave out what is beyond the last whole block of 16",
            _LAYER, needs="more than 16 columns, no multiple of 16", arithmetic=_TailOfMean),
    Suspect("mean_over_padding", "tail", "sums are divided by the number of columns rounded up to a multiple of 16",
            (*_LAYER, *_ROOTS), needs="a number of columns that is no multiple of 16", arithmetic=_PaddedMean),
    Suspect("variance_from_squares", "precision", "the variance is E[x^2] - E[x]^2, which cancels", _LAYER,
            origin="pytorch#51102", needs="a mean that is large beside the spread", arithmetic=_SquareOfSum,
            emulated=True),
    Suspect("squares_in_bfloat16", "precision", "squares are rounded to bfloat16 before they are summed",
            (*_LAYER, *_RMS, *_ADD), origin="mlir-air#1679", arithmetic=_squares_in("bfloat16"), emulated=True),
    Suspect("squares_in_float16", "precision", "squares are kept in float16, which overflows at 65504",
            (*_LAYER, *_RMS, *_ADD), origin="onnxruntime#29034", needs="numbers beyond 256",
            arithmetic=_squares_in("float16"), emulated=True),
    Suspect("mean_in_input_dtype", "precision", "mean and deviations are rounded to the input dtype", _LAYER,
            arithmetic=_MeanInInputDtype, emulated=True, applies=is_narrow),
    Suspect("rounded_before_weight", "precision", "the normalised row is rounded to the input dtype before the weight",
            (*_RMS, *_ADD), arithmetic=_NormalisedFirst, contract={"stages": {"normalized": "input"}},
            applies=is_narrow),
    Suspect("rounded_before_norm", "precision", "x + residual is rounded to the input dtype before it is normalised",
            _ADD, arithmetic=_SumFirst, contract={"stages": {"sum": "input"}}, applies=is_narrow),
    Suspect("bias_dropped", "formula", "the bias is left out", (*_LAYER, "linear"), inputs=_drop_bias),
    Suspect("weight_dropped", "formula", "the weight is left out", (*_LAYER, *_RMS, *_ADD), inputs=_drop_weight),
    Suspect("weight_offset_dropped", "formula", "the offset of the weight is left out", _RMS,
            options=option(offset=0.0), applies=lambda case: case.options["offset"] != 0),
    Suspect("weight_plus_one", "formula", "the weight is taken as weight + 1", (*_LAYER, *_RMS, *_ADD),
            inputs=changed("weight", lambda x: x.double() + 1)),
    Suspect("residual_not_normalised", "formula", "x is normalised without the residual", _ADD,
            definition=_first_of(0, "x")),
    Suspect("sum_not_returned", "layout", "x is returned in place of x + residual", _ADD, definition=_first_of(1, "")),
    Suspect("residual_dropped", "formula", "the residual is left out", _ADD,
            inputs=changed("residual", lambda x: x * 0)),
    Suspect("layernorm_mean_term_dropped", "formula", "dx leaves out the mean of the gradient", _LAYER_BACK,
            definition=_backward("mean")),
    Suspect("layernorm_spread_term_dropped", "formula", "dx leaves out the gradient of the variance", _LAYER_BACK,
            definition=_backward("spread")),
    Suspect("layernorm_weight_not_in_dx", "formula", "dx leaves out the weight", _LAYER_BACK,
            definition=_backward("weight")),
    Suspect("layernorm_dweight_of_x", "formula", "dweight sums dy x, not dy times the normalised x", _LAYER_BACK,
            definition=_backward("normalised")),
    Suspect("rmsnorm_spread_term_dropped", "formula", "dx leaves out the gradient of the mean square", _RMS_BACK,
            definition=_rms_backward("spread")),
    Suspect("rmsnorm_weight_not_in_dx", "formula", "dx leaves out the weight", _RMS_BACK,
            definition=_rms_backward("weight")),
    Suspect("rmsnorm_dweight_of_x", "formula", "dweight sums dy x, not dy times the normalised x", _RMS_BACK,
            definition=_rms_backward("normalised")),
    Suspect("rows_beyond_block_dropped", "tail", "the sums over rows leave out those beyond the last whole block of 16",
            (*_LAYER_BACK, *_RMS_BACK), needs="more than 16 rows, no multiple of 16", arithmetic=_RowsInBlocks),
)  # fmt: skip
