"""Convolutions, pooling and rearranged planes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .entry import Case

PLANE = "x[N,C,H,W] -> y[N,C,H,W]"


def causal_conv_silu(x: Any, w: Any, b: Any) -> Any:
    return F.silu(F.conv1d(F.pad(x, (2, 0)), w[:, None], b, groups=x.shape[1]))


def _shifted_sums(x: Any, w: Any, b: Any) -> Any:
    total = b[:, None] + w[:, 2:3] * x
    total[..., 1:] += w[:, 1:2] * x[..., :-1]
    total[..., 2:] += w[:, :1] * x[..., :-2]
    return total * torch.sigmoid(total)


def _wrapped(x: Any, w: Any, b: Any) -> Any:
    total = b[:, None] + sum(w[:, 2 - k, None] * x.roll(k, -1) for k in range(3))
    return F.silu(total)


def plane_conv(x: Any, w: Any) -> Any:
    return F.conv2d(x, w, padding=1)


def _by_columns(x: Any, w: Any) -> Any:
    columns = F.unfold(x, 3, padding=1)
    return (w.flatten(1) @ columns).reshape(x.shape[0], w.shape[0], *x.shape[2:])


def _by_shifts(x: Any, w: Any) -> Any:
    height, width = x.shape[2:]
    padded, total = F.pad(x, (1, 1, 1, 1)), torch.zeros(x.shape[0], w.shape[0], height, width)
    for i in range(3):
        for j in range(3):
            total += torch.einsum("nchw,oc->nohw", padded[:, :, i : i + height, j : j + width], w[:, :, i, j])
    return total


def _edges_repeated(x: Any, w: Any) -> Any:
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), w)


def largest_around(x: Any) -> Any:
    return F.max_pool2d(x, 3, stride=1, padding=1)


def _separated(x: Any) -> Any:
    row = F.max_pool2d(x, (1, 3), stride=1, padding=(0, 1))
    return F.max_pool2d(row, (3, 1), stride=1, padding=(1, 0))


def mean_around(x: Any) -> Any:
    return F.avg_pool2d(x, 3, stride=1, padding=1)


def _mean_by_sums(x: Any) -> Any:
    padded, (height, width) = F.pad(x, (1, 1, 1, 1)), x.shape[2:]
    return sum(padded[..., i : i + height, j : j + width] for i in range(3) for j in range(3)) / 9


def _mean_by_running_sums(x: Any) -> Any:
    total = F.pad(x, (2, 1, 2, 1)).cumsum(-1).cumsum(-2)
    return (total[..., 3:, 3:] - total[..., :-3, 3:] - total[..., 3:, :-3] + total[..., :-3, :-3]) / 9


def shuffled(x: Any) -> Any:
    return F.pixel_shuffle(x, 2) * 0.5


def _shuffled(x: Any, order: tuple[int, ...] = (0, 1, 4, 2, 5, 3)) -> Any:
    n, c, h, w = x.shape
    return x.reshape(n, c // 4, 2, 2, h, w).permute(*order).reshape(n, c // 4, 2 * h, 2 * w) / 2


def enlarged_sum(x: Any, y: Any) -> Any:
    return F.interpolate(x, scale_factor=2, mode="nearest") + y


def global_mean(x: Any) -> Any:
    return x.mean((2, 3))


CASES = (
    Case(causal_conv_silu, "x[N,C,L], w[C,3], b[C] -> y[N,C,L]", (
        _shifted_sums, lambda x, w, b: F.silu(torch.einsum("nclk,ck->ncl", F.pad(x, (2, 0)).unfold(-1, 3, 1), w)
                                              + b[:, None]),
    ), {
        "the end is seen from the start": _wrapped,
        "mirrored": lambda x, w, b: _shifted_sums(x, w.flip(-1), b),
        "one place ahead": lambda x, w, b: F.silu(F.conv1d(F.pad(x, (1, 1)), w[:, None], b, groups=x.shape[1])),
    }, asked={"shapes": {"L": [3, 8, 17]}}),
    Case(plane_conv, "x[N,C,H,W], w[O,C,3,3] -> y[N,O,H,W]", (_by_columns, _by_shifts), {
        "edges are repeated": _edges_repeated,
        "rows and columns swapped": lambda x, w: F.conv2d(x, w.transpose(2, 3), padding=1),
        "the first channel alone": lambda x, w: F.conv2d(x[:, :1], w[:, :1], padding=1),
    }),
    Case(largest_around, PLANE, (_separated,), {
        "zeros around": lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, stride=1),
        "two by two": lambda x: F.max_pool2d(F.pad(x, (1, 0, 1, 0), value=-torch.inf), 2, stride=1),
        "NaN is left out": lambda x: F.max_pool2d(torch.where(x.isnan(), -torch.inf, x), 3, stride=1, padding=1),
    }, warned=frozenset({"NaN is left out"})),
    Case(mean_around, PLANE, (_mean_by_sums, lambda x: F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 3, stride=1)), {
        "without the padding": lambda x: F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False),
        "by running sums, which cancel": _mean_by_running_sums,
        "eight neighbours": lambda x: (_mean_by_sums(x) * 9 - x) / 8,
    }),
    Case(shuffled, "x[N,4*C,H,W] -> y[N,C,2*H,2*W]", (_shuffled,), {
        "rows and columns swapped": lambda x: _shuffled(x, (0, 1, 4, 3, 5, 2)),
        "channels interleaved": lambda x: _shuffled(torch.cat([x[:, k::4] for k in range(4)], 1))
        if x.shape[1] > 4 else _shuffled(x).flip(-1),
        "not halved": lambda x: F.pixel_shuffle(x, 2),
    }),
    Case(enlarged_sum, "x[N,C,H,W], y[N,C,2*H,2*W] -> z[N,C,2*H,2*W]", (
        lambda x, y: x.repeat_interleave(2, 2).repeat_interleave(2, 3) + y,
        lambda x, y: x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2).reshape(y.shape) + y,
    ), {
        "bilinear": lambda x, y: F.interpolate(x, scale_factor=2, mode="bilinear") + y,
        "tiled": lambda x, y: x.repeat(1, 1, 2, 2) + y,
        "enlarged along rows": lambda x, y: x.repeat_interleave(2, 2).repeat(1, 1, 1, 2) + y,
    }),
    Case(global_mean, "x[N,C,H,W] -> y[N,C]", (
        lambda x: x.flatten(2).sum(-1) / x[0, 0].numel(), lambda x: x.sum(3).sum(2) / (x.shape[2] * x.shape[3]),
    ), {
        "the last row is left out": lambda x: x[:, :, : max(x.shape[2] - 1, 1)].sum((2, 3)) / (x.shape[2] * x.shape[3]),
        "divided by the height twice": lambda x: x.sum((2, 3)) / (x.shape[2] * x.shape[2]),
        "sums in float16": lambda x: x.flatten(2).half().mean(-1).float(),
    }),
)  # fmt: skip
