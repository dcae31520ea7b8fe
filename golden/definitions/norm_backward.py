"""Gradients of the norms of groups and by length, and of running sums."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.definitions.backward import infinite
from assay.golden.definitions.running_sum import cumsum
from assay.golden.options import Option, choice, flag, number
from assay.golden.registry import Fault, Reduction, define


def _last_batch(xp: Any, x: Any, weight: Any, dy: Any, **options: Any) -> Any:
    """dweight and dbias are those of the last batch alone."""
    dx, *_ = group_norm_backward(xp, x, weight, dy, **options)
    _, dweight, dbias = group_norm_backward(xp, x[-1:], weight, dy[-1:], **options)
    return dx, dweight, dbias


def _by_channel(xp: Any, x: Any, weight: Any, dy: Any, *, groups: int, eps: float) -> Any:
    return group_norm_backward(xp, x, weight, dy, groups=x.shape[1], eps=eps)


def _constant_statistics(xp: Any, x: Any, weight: Any, dy: Any, *, groups: int, eps: float) -> Any:
    _, dweight, dbias = group_norm_backward(xp, x, weight, dy, groups=groups, eps=eps)
    shape, split = x.shape, (x.shape[0], groups, x.shape[1] // groups * x.shape[2])
    root = xp.standardize(x.reshape(*split), eps)[1]
    return ((dy * weight[:, None]).reshape(*split) * root).reshape(*shape), dweight, dbias


@define(
    "group_norm_backward",
    "x[B,C,L], weight[C], dy[B,C,L] -> dx[B,C,L], dweight[C], dbias[C]",
    options={
        "groups": Option(2, lambda value: type(value) is int and value > 0, "a positive whole number", usual=(2, 1, 4)),
        "eps": number(1e-5, positive=True),
    },
    may_be_zero=(),
    multiples={"C": "groups"},
    gradient_of="group_norm",
    reduction=Reduction("L"),
    faults=(
        Fault("group_gradient_of_last_batch", "the gradients of weight and bias are those of the last batch alone",
              _last_batch, "state", needs="more than one batch"),
        Fault("group_gradient_by_channel", "means are those of each channel, not of its group", _by_channel),
        Fault("group_gradient_constant_statistics", "mean and variance count as constants", _constant_statistics),
        Fault("group_gradient_bias_is_weight", "dbias is the weight's gradient",
              lambda xp, *tensors, **options: (
               (all_ := group_norm_backward(xp, *tensors, **options))[0], all_[1], all_[1]), "layout"),
    ),
    exempt=("tail_of_sum_dropped",),
)  # fmt: skip
def group_norm_backward(xp: Arithmetic[N], x: N, weight: N, dy: N, *, groups: int, eps: float) -> tuple[N, N, N]:
    """`layernorm_backward` of each group, g = dy weight; dweight and dbias are the sums over batches and places.

    Formulas of dx: r (g - mean g - h mean(g h)); and, as ATen's kernels have it, r g + b x + c with b = r^3 (mean x
    sum g - sum g x) / n and c = -b mean x - r sum g / n.
    """
    batch, channels, length = x.shape
    split = (batch, groups, channels // groups * length)
    centred, root = xp.standardize(x.reshape(*split), eps)
    normalized = centred * root
    grown = (dy * weight[:, None]).reshape(*split)
    count = max(split[2], 1)

    def as_written() -> N:
        return ((grown - xp.mean(grown)) - normalized * xp.mean(grown * normalized)) * root

    def from_sums() -> N:
        flat, total = x.reshape(*split), xp.sum(grown)
        mean = xp.mean(flat)
        slope = (total * mean - xp.sum(grown * flat)) * (root * root * root) / count
        return (root * grown + slope * flat) - (slope * mean + total * root / count)

    dx = xp.any_formula(as_written, from_sums).reshape(batch, channels, length)
    shares = (normalized * dy.reshape(*split)).reshape(batch, channels, length)

    def over_all(part: N) -> N:
        return xp.sum(xp.concatenate([part[place] for place in range(batch)], -1))[:, 0]

    def touched() -> Any:
        found = infinite(xp, x, weight[:, None], dy).reshape(*split).any(-1)
        return found[:, xp.integers([channel * groups // channels for channel in range(channels)])]

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
              lambda xp, x, dy, *, eps, clamp: dy * xp.rsqrt(xp.sum(x * x) + eps)),
        Fault("l2norm_gradient_of_mean", "the mean of y dy stands for its sum",
              lambda xp, x, dy, *, eps, clamp: _projected(xp, x, dy, xp.rsqrt(xp.sum(x * x) + eps), x.shape[1])),
        Fault("l2norm_gradient_sign", "y sum(y dy) is added, not subtracted",
              lambda xp, x, dy, *, eps, clamp: dy * xp.rsqrt(xp.sum(x * x) + eps) * 2.0
               - l2norm_backward(xp, x, dy, eps=eps, clamp="sum")),
        Fault("l2norm_gradient_unscaled", "dy - y sum(y dy) is not divided by the length",
              lambda xp, x, dy, *, eps, clamp: l2norm_backward(xp, x, dy, eps=eps, clamp=clamp)
               / xp.rsqrt(xp.sum(x * x) + eps)),
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
        root = 1.0 / xp.where(usable, length, 1.0)
        dx = xp.where_above(length, eps, _projected(xp, x, dy, root), dy / eps)
    return xp.unspecified(lambda: infinite(xp, x, dy).any(-1)[:, None], dx)


def _projected(xp: Arithmetic[N], x: N, dy: N, root: N, divisor: int = 1) -> N:
    """r (dy - y sum(y dy)), y = x r, the sum over a divisor."""

    def inner(product: N) -> N:
        total = xp.sum(product)
        return total / divisor if divisor > 1 else total

    return xp.any_formula(
        lambda: (dy - (x * root) * inner((x * root) * dy)) * root,
        lambda: dy * root - x * (root * root * root * inner(x * dy)),
    )


@define(
    "cumsum_backward",
    "dy[R,N] -> dx[R,N]",
    options={"reverse": flag(), "exclusive": flag()},
    rows="R",
    gradient_of="cumsum",
    reduction=Reduction("N"),
    faults=(
        Fault("cumsum_gradient_direction", "the gradient is summed in the direction of the sums",
              lambda xp, dy, *, reverse, exclusive: cumsum(xp, dy, reverse=reverse, exclusive=exclusive), "mask",
              needs="more than one column"),
        Fault("cumsum_gradient_includes_itself", "each place counts itself where it is not to, or the other way",
              lambda xp, dy, *, reverse, exclusive: cumsum(xp, dy, reverse=not reverse, exclusive=not exclusive),
              "mask"),
        Fault("cumsum_gradient_is_dy", "the gradient is handed on as it is", lambda xp, dy, **options: dy * 1.0,
              needs="more than one column"),
    ),
    exempt=("tail_of_sum_dropped", "computed_in_bfloat16", "computed_in_float16"),
)  # fmt: skip
def cumsum_backward(xp: Arithmetic[N], dy: N, *, reverse: bool, exclusive: bool) -> N:
    """The running sums of dy the other way."""
    return cumsum(xp, dy, reverse=not reverse, exclusive=exclusive)
