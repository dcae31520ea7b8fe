"""Normalisations over layers, groups and batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from assay.golden.lowering.evaluation import Evaluation
from assay.golden.lowering.rules.reductions import last, transposed
from assay.golden.lowering.table import rule

Tensor = torch.Tensor


def standardized(xp: Any, number: Any, eps: float) -> tuple[Any, Any, Any]:
    """(x - mean) / sqrt(variance + eps) along the last axis, the mean, and the reciprocal root."""

    def rows(x: Any) -> tuple[Any, Any, Any]:
        centred, root = xp.standardize(x, eps)
        return centred * root, xp.mean(x), root

    found: tuple[Any, Any, Any] = xp.in_blocks(rows, number, whole=1)
    return found


def _affine(evaluation: Evaluation, y: Any, weight: Tensor | None, bias: Tensor | None, shape: Any) -> Any:
    if weight is not None:
        y = y * evaluation.number(weight).reshape(shape)
    return y if bias is None else evaluation.xp.add_bias(y, evaluation.number(bias).reshape(shape))


@rule("native_layer_norm")
def _layer_norm(
    evaluation: Evaluation, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    size, kept = math.prod(shape), tuple(x.shape[: x.ndim - len(shape)])
    number = evaluation.number(x).reshape((*kept, size))
    y, mean, root = standardized(evaluation.xp, number, eps)
    out = _affine(evaluation, y, weight, bias, (size,)).reshape(tuple(x.shape))
    ones = (*kept, *(1 for _ in shape))
    return (
        evaluation.made(out, x.dtype),
        evaluation.made(mean.reshape(ones), x.dtype),
        evaluation.made(root.reshape(ones), x.dtype),
    )


@rule("native_group_norm")
def _group_norm(
    evaluation: Evaluation,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    count: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    number = evaluation.number(x).reshape((count, groups, channels // groups * size))
    y, mean, root = standardized(evaluation.xp, number, eps)
    out = _affine(evaluation, y.reshape((count, channels, size)), weight, bias, (1, channels, 1))
    return (
        evaluation.made(out.reshape(tuple(x.shape)), x.dtype),
        evaluation.made(mean.reshape((count, groups)), x.dtype),
        evaluation.made(root.reshape((count, groups)), x.dtype),
    )


@rule("_fused_rms_norm")
def _fused_rms_norm(
    evaluation: Evaluation, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    xp = evaluation.xp
    size, kept = math.prod(shape), tuple(x.shape[: x.ndim - len(shape)])
    number = evaluation.number(x).reshape((*kept, size))
    square = xp.mean(number * number) + (torch.finfo(x.dtype).eps if eps is None else eps)
    root = xp.rsqrt(square)
    y = xp.any_formula(lambda: number * root, lambda: number / xp.apply("sqrt", square))
    out = _affine(evaluation, y, weight, None, (size,)).reshape(tuple(x.shape))
    ones = (*kept, *(1 for _ in shape))
    return evaluation.made(out, x.dtype), evaluation.made(root.reshape(ones), x.dtype)


def _batch_norm(
    evaluation: Evaluation,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """By statistics of the batch, with which running ones are updated in place, or by those."""
    xp, channels = evaluation.xp, x.shape[1]
    shape = (1, channels, *(1 for _ in x.shape[2:]))
    number = evaluation.number(x)
    if not training:
        assert running_mean is not None
        assert running_var is not None
        root = xp.rsqrt(evaluation.number(running_var) + eps)
        mean = evaluation.number(running_mean)

        def folded() -> Any:
            """x s + (b - m s), s = w r: as one product and one sum."""
            scale = root if weight is None else root * evaluation.number(weight)
            shift = -mean * scale if bias is None else evaluation.number(bias) - mean * scale
            return number * scale.reshape(shape) + shift.reshape(shape)

        def plain() -> Any:
            y = (number - mean.reshape(shape)) * root.reshape(shape)
            return _affine(evaluation, y, weight, bias, shape)

        out = xp.any_formula(plain, folded)
        none = xp.exact(torch.zeros(0, dtype=torch.float64))
        return evaluation.made(out, x.dtype), evaluation.made(none, x.dtype), evaluation.made(none, x.dtype)
    axes = [0, *range(2, x.ndim)]
    flat = last(xp, number, axes)
    y, mean, root = standardized(xp, flat, eps)
    y = y.reshape((channels, x.shape[0], *x.shape[2:]))
    y = xp.rearranged(lambda a: transposed(a[0], (1, 0, *range(2, x.ndim))), [y])
    out = _affine(evaluation, y, weight, bias, shape)
    made = [evaluation.made(n.reshape((channels,)), x.dtype) for n in (mean, root)]
    if running_mean is not None:
        moved = evaluation.number(running_mean) * (1 - momentum) + mean.reshape((channels,)) * momentum
        evaluation.assign(running_mean, evaluation.made(moved, running_mean.dtype))
    if running_var is not None:
        spread = xp.variance(flat, 1.0).reshape((channels,))
        moved = evaluation.number(running_var) * (1 - momentum) + spread * momentum
        evaluation.assign(running_var, evaluation.made(moved, running_var.dtype))
    return evaluation.made(out, x.dtype), made[0], made[1]


@rule("native_batch_norm _native_batch_norm_legit")
def _native_batch_norm(evaluation: Evaluation, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _batch_norm(evaluation, *args)


@rule("_batch_norm_with_update cudnn_batch_norm")
def _with_update(
    evaluation: Evaluation,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    momentum, eps = rest[-2:]
    found = _batch_norm(evaluation, x, weight, bias, mean, var, True, momentum, eps)
    return (*found, torch.empty(0, dtype=torch.uint8))


@rule("_native_batch_norm_legit.no_stats")
def _without_running(
    evaluation: Evaluation,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _batch_norm(evaluation, x, weight, bias, None, None, training, momentum, eps)


@rule("_native_batch_norm_legit_no_training")
def _in_evaluation(
    evaluation: Evaluation,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _batch_norm(evaluation, x, weight, bias, mean, var, False, momentum, eps)


@rule("native_dropout")
def _dropout(evaluation: Evaluation, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Nothing in evaluation mode, or where nothing is dropped."""
    if train and p != 0:
        raise evaluation.refusal(torch.ops.aten.native_dropout.default, "draws random numbers")
    return evaluation.made(evaluation.number(x), x.dtype), torch.ones(x.shape, dtype=torch.bool)
