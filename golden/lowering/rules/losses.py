"""Losses, where PyTorch computes them by operations of their own."""

from __future__ import annotations

from typing import Any

import torch

from assay.golden.lowering.evaluation import Evaluation
from assay.golden.lowering.table import constant, rule

Tensor = torch.Tensor

_MEAN, _SUM = 1, 2


def _shrunk(evaluation: Evaluation, number: Any, reduction: int, dtype: torch.dtype) -> Tensor:
    """The losses themselves, their mean or their sum."""
    xp = evaluation.xp
    if reduction in (_MEAN, _SUM):
        count = max(1, int(torch.tensor(number.shape).prod()))
        number = xp.sum(number.reshape((count,)) if number.shape else number.reshape((1,)))
        number = (number / float(count) if reduction == _MEAN else number).reshape(())
    return evaluation.made(number, dtype)


@rule("mse_loss")
def _mse(evaluation: Evaluation, x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    apart = evaluation.number(x) - evaluation.number(target)
    return _shrunk(evaluation, apart * apart, reduction, x.dtype)


@rule("l1_loss")
def _l1(evaluation: Evaluation, x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    apart = evaluation.number(x) - evaluation.number(target)
    return _shrunk(evaluation, evaluation.xp.larger_of(apart, -apart), reduction, x.dtype)


def _quadratic(evaluation: Evaluation, x: Tensor, target: Tensor, edge: float, huber: bool) -> Any:
    xp = evaluation.xp
    apart = evaluation.number(x) - evaluation.number(target)
    size = xp.larger_of(apart, -apart)
    if edge == 0:
        return size
    if huber:
        inside, outside = apart * apart * 0.5, (size - 0.5 * edge) * edge
    else:
        inside, outside = apart * apart * 0.5 / edge, size - 0.5 * edge
    order = xp.compare(size, constant(xp, edge))
    return xp.select(order.less, ~(order.more | order.same), inside, outside)


@rule("smooth_l1_loss")
def _smooth_l1(evaluation: Evaluation, x: Tensor, target: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Tensor:
    return _shrunk(evaluation, _quadratic(evaluation, x, target, beta, False), reduction, x.dtype)


@rule("huber_loss")
def _huber(evaluation: Evaluation, x: Tensor, target: Tensor, reduction: int = _MEAN, delta: float = 1.0) -> Tensor:
    return _shrunk(evaluation, _quadratic(evaluation, x, target, delta, True), reduction, x.dtype)


@rule("binary_cross_entropy")
def _bce(
    evaluation: Evaluation, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """-(t log x + (1 - t) log(1 - x)), each logarithm no less than -100, as PyTorch has it."""
    xp = evaluation.xp
    p, t = evaluation.number(x), evaluation.number(target)
    least = constant(xp, -100.0)
    log = xp.larger_of(xp.function("log", p), least)
    other = xp.any_formula(lambda: xp.function("log1p", -p), lambda: xp.function("log", 1.0 - p))
    other = xp.larger_of(other, least)
    loss = (t - 1.0) * other - t * log
    if weight is not None:
        loss = loss * evaluation.number(weight)
    return _shrunk(evaluation, loss, reduction, x.dtype)


@rule("soft_margin_loss")
def _soft_margin(evaluation: Evaluation, x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    xp = evaluation.xp
    loss = xp.function("softplus", -evaluation.number(target) * evaluation.number(x))
    return _shrunk(evaluation, loss, reduction, x.dtype)


@rule("nll_loss_forward nll_loss2d_forward")
def _nll(
    evaluation: Evaluation, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """-w[t] x[t] of each target t, zero of those to be ignored; the mean is over the weights of the others."""
    xp, number = evaluation.xp, evaluation.number(x)
    if x.ndim == 1:
        number = number.reshape((1, *x.shape))
        target = target.reshape((1,))
    classes, shape = int(number.shape[1]), tuple(target.shape)
    used = target != ignore_index
    safe = torch.where(used, target, 0)
    rest = [int(n) for n in number.shape[2:]]
    places = torch.meshgrid(*(torch.arange(n) for n in (shape[0], *rest)), indexing="ij")
    picked = number[tuple(xp.integers(p) for p in (places[0], safe, *places[1:]))]
    weights = xp.exact(used.double())
    if weight is not None:
        weights = evaluation.number(weight)[xp.integers(safe)] * weights
    zero = constant(xp, 0.0)
    terms = xp.chosen(used, -(picked * weights) if weight is not None else -picked, zero)
    total = xp.sum(weights.reshape((-1,))).reshape(())
    assert classes
    if reduction not in (_MEAN, _SUM):
        result = terms.reshape(()) if x.ndim == 1 else terms
    else:
        result = xp.sum(terms.reshape((-1,))).reshape(())
        result = result / total if reduction == _MEAN else result
    return evaluation.made(result, x.dtype), evaluation.made(total, x.dtype)


@rule("kl_div")
def _kl_div(
    evaluation: Evaluation, x: Tensor, target: Tensor, reduction: int = _MEAN, *, log_target: bool = False
) -> Tensor:
    """t (log t - x), zero where t is; or exp(t) (t - x)."""
    xp = evaluation.xp
    log, t = evaluation.number(x), evaluation.number(target)
    if log_target:
        return _shrunk(evaluation, xp.exp(t) * (t - log), reduction, x.dtype)
    zero = xp.compare(t, constant(xp, 0.0)).same
    safe = xp.chosen(zero, constant(xp, 1.0), t)
    own = xp.function("log", safe)
    term = xp.any_formula(lambda: t * (own - log), lambda: t * own - t * log)
    return _shrunk(evaluation, xp.chosen(zero, constant(xp, 0.0), term), reduction, x.dtype)


@rule("binary_cross_entropy_with_logits")
def _bce_with_logits(
    evaluation: Evaluation,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """(1 - t) x + (1 + (w - 1) t) softplus(-x), or max(x, 0) - x t + log(1 + exp(-|x|))."""
    xp = evaluation.xp
    z, t = evaluation.number(x), evaluation.number(target)
    soft = xp.function("softplus", -z)
    if pos_weight is not None:
        loss = (1.0 - t) * z + ((evaluation.number(pos_weight) - 1.0) * t + 1.0) * soft
    else:
        loss = xp.any_formula(
            lambda: (1.0 - t) * z + soft, lambda: xp.larger_of(z, constant(xp, 0.0)) - z * t + _of_size(xp, z)
        )
    if weight is not None:
        loss = loss * evaluation.number(weight)
    return _shrunk(evaluation, loss, reduction, x.dtype)


def _of_size(xp: Any, z: Any) -> Any:
    return xp.function("log1p", xp.exp(-xp.larger_of(z, -z)))


@rule("_embedding_bag _embedding_bag_forward_only")
def _embedding_bag(
    evaluation: Evaluation,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums, means or largest rows of the table over bags of indices; an empty bag is zero."""
    ids, starts = evaluation.known(indices), evaluation.known(offsets).tolist()
    ends = [*starts[1:], len(ids)][: len(starts)]
    if include_last_offset:
        starts, ends = starts[:-1], ends[:-1]
    rows = []
    with evaluation:
        for start, end in zip(starts, ends, strict=True):
            used = torch.arange(start, end)[ids[start:end] != padding_idx]
            taken = weight[ids[used]]
            if per_sample_weights is not None:
                taken = taken * per_sample_weights[used][:, None]
            if not len(used):
                rows.append(torch.zeros(weight.shape[1], dtype=weight.dtype))
            else:
                rows.append(taken.sum(0) if mode == 0 else taken.mean(0) if mode == 1 else taken.amax(0))
        out = torch.stack(rows) if rows else weight[:0]
    none = torch.empty(0, dtype=torch.int64)
    return out, none, none, none
