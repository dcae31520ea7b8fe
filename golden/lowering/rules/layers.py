"""Layers of networks: normalisation, losses, embedding bags and attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from assay.golden.lowering.dispatch import Lowering
from assay.golden.lowering.rule_table import constant, rule
from assay.golden.lowering.rules.comparisons import truth
from assay.golden.lowering.rules.products import operand
from assay.golden.lowering.rules.reductions import flattened_last
from assay.golden.lowering.tensor import permuted

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor, Tensor]

_MEAN, _SUM = 1, 2  # of ATen's ``reduction``


def _standardized(xp: Any, number: Any, eps: float) -> tuple[Any, Any, Any]:
    """Return (x - mean) / sqrt(variance + eps) along the last axis, the mean, and the reciprocal root."""

    def standardize(x: Any) -> tuple[Any, Any, Any]:
        centred, rstd = xp.standardize(x, eps)
        return centred * rstd, xp.mean(x), rstd

    results: tuple[Any, Any, Any] = xp.in_blocks(standardize, number, whole=1)
    return results


def _affine(ctx: Lowering, y: Any, weight: Any, bias: Any, shape: Any) -> Any:
    if weight is not None:
        y = y * ctx.number(weight).reshape(shape)
    return y if bias is None else ctx.xp.add_bias(y, ctx.number(bias).reshape(shape))


@rule("native_layer_norm")
def _layer_norm(ctx: Lowering, x: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Results:
    size, lead = math.prod(shape), tuple(x.shape[: x.ndim - len(shape)])
    y, mean, rstd = _standardized(ctx.xp, ctx.number(x).reshape((*lead, size)), eps)
    y = _affine(ctx, y, weight, bias, (size,)).reshape(tuple(x.shape))
    keepdim = (*lead, *(1 for _ in shape))
    return ctx.wrap(y, x.dtype), ctx.wrap(mean.reshape(keepdim), x.dtype), ctx.wrap(rstd.reshape(keepdim), x.dtype)


@rule("native_group_norm")
def _group_norm(
    ctx: Lowering, x: Tensor, weight: Any, bias: Any, batch: int, channels: int, size: int, groups: int, eps: float
) -> Results:
    number = ctx.number(x).reshape((batch, groups, channels // groups * size))
    y, mean, rstd = _standardized(ctx.xp, number, eps)
    y = _affine(ctx, y.reshape((batch, channels, size)), weight, bias, (1, channels, 1)).reshape(tuple(x.shape))
    mean, rstd = mean.reshape((batch, groups)), rstd.reshape((batch, groups))
    return ctx.wrap(y, x.dtype), ctx.wrap(mean, x.dtype), ctx.wrap(rstd, x.dtype)


@rule("_fused_rms_norm")
def _fused_rms_norm(
    ctx: Lowering, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    xp, size, lead = ctx.xp, math.prod(shape), tuple(x.shape[: x.ndim - len(shape)])
    number = ctx.number(x).reshape((*lead, size))
    square = xp.mean(number * number) + (torch.finfo(x.dtype).eps if eps is None else eps)
    rstd = xp.rsqrt(square)
    y = xp.any_formula(lambda: number * rstd, lambda: number / xp.apply("sqrt", square))
    y = _affine(ctx, y, weight, None, (size,)).reshape(tuple(x.shape))
    return ctx.wrap(y, x.dtype), ctx.wrap(rstd.reshape((*lead, *(1 for _ in shape))), x.dtype)


@rule("native_batch_norm _native_batch_norm_legit")
def _batch_norm(
    ctx: Lowering, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Results:
    """Normalise by the batch's statistics, which update the running ones in place, or by the running ones."""
    xp, channels = ctx.xp, x.shape[1]
    shape = (1, channels, *(1 for _ in x.shape[2:]))
    number = ctx.number(x)
    if not training:
        rstd, mean = xp.rsqrt(ctx.number(var) + eps), ctx.number(mean)

        def folded() -> Any:
            """x s + (b - m s), s = w r: one product and one sum."""
            scale = rstd if weight is None else rstd * ctx.number(weight)
            shift = -mean * scale if bias is None else ctx.number(bias) - mean * scale
            return number * scale.reshape(shape) + shift.reshape(shape)

        def plain() -> Any:
            return _affine(ctx, (number - mean.reshape(shape)) * rstd.reshape(shape), weight, bias, shape)

        y, empty = xp.any_formula(plain, folded), xp.exact(torch.zeros(0, dtype=torch.float64))
        return ctx.wrap(y, x.dtype), ctx.wrap(empty, x.dtype), ctx.wrap(empty, x.dtype)
    flat = flattened_last(xp, number, [0, *range(2, x.ndim)])
    y, center, rstd = _standardized(xp, flat, eps)
    y = permuted(xp, y.reshape((channels, x.shape[0], *x.shape[2:])), (1, 0, *range(2, x.ndim)))
    y, center, rstd = _affine(ctx, y, weight, bias, shape), center.reshape((channels,)), rstd.reshape((channels,))
    results = ctx.wrap(y, x.dtype), ctx.wrap(center, x.dtype), ctx.wrap(rstd, x.dtype)
    for running in (mean, var):
        if running is not None:
            statistic = center if running is mean else xp.variance(flat, 1.0).reshape((channels,))
            moved = ctx.number(running) * (1 - momentum) + statistic * momentum
            ctx.assign(running, ctx.wrap(moved, running.dtype))
    return results


@rule("_batch_norm_with_update cudnn_batch_norm")
def _batch_norm_with_update(
    ctx: Lowering, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any
) -> tuple[Tensor, ...]:
    reserve = torch.empty(0, dtype=torch.uint8)
    return (*_batch_norm(ctx, x, weight, bias, mean, var, True, *rest[-2:]), reserve)


@rule("_native_batch_norm_legit.no_stats")
def _batch_norm_without_running(ctx: Lowering, x: Tensor, weight: Any, bias: Any, *rest: Any) -> Results:
    return _batch_norm(ctx, x, weight, bias, None, None, *rest)


@rule("_native_batch_norm_legit_no_training")
def _batch_norm_inference(
    ctx: Lowering, x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, *rest: Any
) -> Results:
    return _batch_norm(ctx, x, weight, bias, mean, var, False, *rest)


@rule("native_dropout")
def _dropout(ctx: Lowering, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train and p != 0:
        raise ctx.unsupported(torch.ops.aten.native_dropout.default, "draws random numbers")
    return ctx.wrap(ctx.number(x), x.dtype), torch.ones(x.shape, dtype=torch.bool)


def _reduced_loss(ctx: Lowering, loss: Any, reduction: int, dtype: torch.dtype) -> Tensor:
    """Return the elements of a loss, their mean or their sum."""
    if reduction in (_MEAN, _SUM):
        count = max(1, math.prod(map(int, loss.shape)))
        loss = ctx.xp.sum(loss.reshape((count if loss.shape else 1,)))
        loss = (loss / float(count) if reduction == _MEAN else loss).reshape(())
    return ctx.wrap(loss, dtype)


def _loss(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate ``function(xp, x, target, ...)``, which returns the elements of a loss of two tensors."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @rule(name)
        def compute(
            ctx: Lowering, x: Tensor, target: Tensor, reduction: int = _MEAN, *args: Any, **kwargs: Any
        ) -> Tensor:
            loss = function(ctx.xp, ctx.number(x), ctx.number(target), *args, **kwargs)
            return _reduced_loss(ctx, loss, reduction, x.dtype)

        return function

    return register


def _abs(xp: Any, x: Any) -> Any:
    return xp.larger_of(x, -x)


@_loss("l1_loss")
def _l1(xp: Any, x: Any, target: Any) -> Any:
    return _abs(xp, x - target)


@_loss("mse_loss")
def _mse(xp: Any, x: Any, target: Any) -> Any:
    return (x - target) * (x - target)


@_loss("smooth_l1_loss")
def _smooth_l1(xp: Any, x: Any, target: Any, beta: float = 1.0, huber: bool = False) -> Any:
    """d^2 / (2 beta) where |d| < beta and a line beyond; Huber's loss is ``beta`` times that."""
    difference = x - target
    size = _abs(xp, difference)
    if beta == 0:
        return size
    inside, outside = difference * difference * 0.5, size - 0.5 * beta
    inside, outside = (inside, outside * beta) if huber else (inside / beta, outside)
    order = xp.compare(size, constant(xp, beta))
    return xp.select(order.less, ~(order.more | order.same), inside, outside)


@_loss("huber_loss")
def _huber(xp: Any, x: Any, target: Any, delta: float = 1.0) -> Any:
    return _smooth_l1(xp, x, target, delta, huber=True)


@rule("binary_cross_entropy")
def _bce(ctx: Lowering, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN) -> Tensor:
    """-(t log x + (1 - t) log(1 - x)), each logarithm no less than -100, as in PyTorch."""
    xp, p, t = ctx.xp, ctx.number(x), ctx.number(target)
    limit = constant(xp, -100.0)
    log = xp.larger_of(xp.function("log", p), limit)
    other = xp.any_formula(lambda: xp.function("log1p", -p), lambda: xp.function("log", 1.0 - p))
    loss = (t - 1.0) * xp.larger_of(other, limit) - t * log
    return _reduced_loss(ctx, loss if weight is None else loss * ctx.number(weight), reduction, x.dtype)


@rule("binary_cross_entropy_with_logits")
def _bce_with_logits(
    ctx: Lowering, x: Tensor, target: Tensor, weight: Any = None, pos_weight: Any = None, reduction: int = _MEAN
) -> Tensor:
    """(1 - t) x + (1 + (w - 1) t) softplus(-x), or max(x, 0) - x t + log(1 + exp(-|x|))."""
    xp, z, t = ctx.xp, ctx.number(x), ctx.number(target)
    soft = xp.function("softplus", -z)
    if pos_weight is not None:
        loss = (1.0 - t) * z + ((ctx.number(pos_weight) - 1.0) * t + 1.0) * soft
    else:
        loss = xp.any_formula(
            lambda: (1.0 - t) * z + soft,
            lambda: xp.larger_of(z, constant(xp, 0.0)) - z * t + xp.function("log1p", xp.exp(-_abs(xp, z))),
        )
    return _reduced_loss(ctx, loss if weight is None else loss * ctx.number(weight), reduction, x.dtype)


@_loss("soft_margin_loss")
def _soft_margin(xp: Any, x: Any, target: Any) -> Any:
    return xp.function("softplus", -target * x)


@_loss("kl_div")
def _kl_div(xp: Any, log_x: Any, t: Any, *, log_target: bool = False) -> Any:
    """t (log t - x), zero where t is; or exp(t) (t - x)."""
    if log_target:
        return xp.exp(t) * (t - log_x)
    zero = xp.compare(t, constant(xp, 0.0)).same
    log_t = xp.function("log", xp.chosen(zero, constant(xp, 1.0), t))
    loss = xp.any_formula(lambda: t * (log_t - log_x), lambda: t * log_t - t * log_x)
    return xp.chosen(zero, constant(xp, 0.0), loss)


@rule("_embedding_bag _embedding_bag_forward_only")
def _embedding_bag(
    ctx: Lowering,
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
    """Sums (mode 0), means (1) or maxima (2) of rows of the table over bags of indices; an empty bag is zero."""
    ids, starts = ctx.concrete(indices), ctx.concrete(offsets).tolist()
    ends = [*starts[1:], len(ids)][: len(starts)]
    if include_last_offset:
        starts, ends = starts[:-1], ends[:-1]
    bags = []
    with ctx:
        for start, end in zip(starts, ends, strict=True):
            used = torch.arange(start, end)[ids[start:end] != padding_idx]
            rows = weight[ids[used]]
            if per_sample_weights is not None:
                rows = rows * per_sample_weights[used][:, None]
            if not len(used):
                bags.append(torch.zeros(weight.shape[1], dtype=weight.dtype))
            else:
                bags.append(rows.sum(0) if mode == 0 else rows.mean(0) if mode == 1 else rows.amax(0))
        out = torch.stack(bags) if bags else weight[:0]
    empty = torch.empty(0, dtype=torch.int64)
    return out, empty, empty, empty


def _repeat_heads(xp: Any, number: Any, times: int) -> Any:
    """Repeat each head of keys or values for ``times`` heads of queries."""
    if times == 1:
        return number
    heads = torch.arange(int(number.shape[-3])).repeat_interleave(times)
    return number[..., xp.integers(heads), :, :]


def _attend(
    ctx: Lowering, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Any, Any]:
    """Return softmax(q k^T scale + bias, masked) v and its log-sum-exp; a fully masked row is zero, as in PyTorch."""
    xp = ctx.xp
    q, k, v = operand(ctx, query), operand(ctx, key), operand(ctx, value)
    times = query.shape[-3] // max(key.shape[-3], 1) if query.ndim > 2 and key.ndim > 2 else 1
    k, v = _repeat_heads(xp, k, times), _repeat_heads(xp, v, times)
    scores = xp.scores(q, k, xp.constant(lambda sqrt, pi: 1 / sqrt(query.shape[-1])) if scale is None else scale)
    shape = tuple(map(int, scores.shape))
    visible = torch.ones(shape[-2:], dtype=torch.bool)
    if causal:
        visible = visible.tril()
    if bias is not None and bias.dtype == torch.bool:
        certain, possible = truth(ctx, bias)
        if not torch.equal(certain, possible):
            raise ctx.undecided("elements of a mask")
        visible = visible & certain
    elif bias is not None:
        addend = ctx.number(bias)
        hidden = xp.enclosure(addend)[0] == -math.inf
        visible = visible & ~hidden
        scores = scores + xp.chosen(hidden, xp.exact(torch.zeros((), dtype=torch.float64)), addend)
    mask = visible if xp.native is torch else xp.integers(visible).astype(bool)
    return xp.attend(scores, xp.native.broadcast_to(mask, shape), v, None)


@rule("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable")
def _flash_attention(
    ctx: Lowering,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> tuple[Tensor, Tensor]:
    out, lse = _attend(ctx, query, key, value, attn_mask, is_causal, scale)
    return ctx.wrap(out, query.dtype), ctx.wrap(lse.reshape(tuple(query.shape[:-1])), torch.float32)


@rule("scaled_dot_product_attention")
def _attention(
    ctx: Lowering,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    if dropout_p:
        raise ctx.unsupported(torch.ops.aten.scaled_dot_product_attention.default, "draws random numbers")
    return ctx.wrap(_attend(ctx, query, key, value, attn_mask, is_causal, scale)[0], query.dtype)


@rule("_scaled_dot_product_attention_math")
def _math_attention(ctx: Lowering, *args: Any, dropout_mask: Any = None, **options: Any) -> tuple[Tensor, None]:
    return _attention(ctx, *args[:6], **options), None
