"""Sums, extremes, choices and running sums."""

from __future__ import annotations

from typing import Any

import torch

from .entry import Case

ROWS, ROW = "x[T,D] -> y[T,D]", "x[T,D] -> y[T]"


def mean_magnitude(x: Any) -> Any:
    return x.abs().mean(-1)


def _pairwise(x: Any) -> Any:
    part, count = x.abs(), x.shape[-1]
    while part.shape[-1] > 1:
        if part.shape[-1] % 2:
            part = torch.cat([part, torch.zeros_like(part[..., :1])], -1)
        part = part[..., ::2] + part[..., 1::2]
    return part[..., 0] / count


def _kahan(x: Any) -> Any:
    total, lost = torch.zeros(x.shape[0]), torch.zeros(x.shape[0])
    for place in range(x.shape[1]):
        term = x[:, place].abs() - lost
        moved = total + term
        lost = torch.where(moved.isfinite(), (moved - total) - term, 0.0)
        total = moved
    return total / x.shape[1]


def _partial_sums_in_bfloat16(x: Any) -> Any:
    parts = [part.sum(-1).bfloat16().float() for part in x.abs().split(32, -1)]
    return torch.stack(parts).sum(0) / x.shape[-1]


def first_largest(x: Any) -> Any:
    return x.argmax(-1)


def _largest_by_blocks(x: Any) -> Any:
    best, place = torch.full((x.shape[0],), -torch.inf), torch.zeros(x.shape[0], dtype=torch.int64)
    for first in range(0, x.shape[1], 8):
        value, inside = x[:, first : first + 8].max(-1)
        better = (value > best) | (value.isnan() & ~best.isnan()) | ((value == best) & (place == 0) & (first == 0))
        best, place = torch.where(better, value, best), torch.where(better, inside + first, place)
    return place


def _place_within_the_block(x: Any) -> Any:
    return x.argmax(-1) % 8


def sum_of_the_largest(x: Any) -> Any:
    return x.topk(3, dim=-1).values.sum(-1)


def _by_sorting(x: Any) -> Any:
    return x.sort(-1, descending=True).values[:, :3].sum(-1)


def sample_variance(x: Any) -> Any:
    return x.var(-1)


def _chan(x: Any) -> Any:
    count, mean, m2 = 0, torch.zeros(x.shape[0]), torch.zeros(x.shape[0])
    for part in x.split(16, -1):
        n = part.shape[-1]
        own = part.mean(-1)
        apart = own - mean
        m2 = m2 + (part - own[:, None]).square().sum(-1) + apart * apart * (count * n / (count + n))
        mean = mean + apart * (n / (count + n))
        count += n
    return m2 / (count - 1)


def log_sum_exp(x: Any) -> Any:
    return torch.logsumexp(x, -1)


def _online(x: Any) -> Any:
    most, total = torch.full((x.shape[0],), -torch.inf), torch.zeros(x.shape[0])
    for part in x.split(4, -1):
        now = torch.maximum(most, part.amax(-1))
        shift = torch.where(now.isinf(), 0.0, now)
        total = total * torch.exp(most - shift) + torch.exp(part - shift[:, None]).sum(-1)
        most = now
    return torch.where(most.isinf(), most, most + torch.log(total))


def _never_rescaled(x: Any) -> Any:
    most, total = x[:, 0], torch.zeros(x.shape[0])
    for part in x.split(4, -1):
        most = torch.maximum(most, part.amax(-1))
        total = total + torch.exp(part - most[:, None]).sum(-1)
    return most + torch.log(total)


def sums_from_the_end(x: Any) -> Any:
    return x.flip(-1).cumsum(-1).flip(-1)


def _carried_backward(x: Any) -> Any:
    out, carry = torch.empty_like(x), torch.zeros(x.shape[0])
    for last in range(x.shape[1], 0, -8):
        first = max(last - 8, 0)
        part = x[:, first:last].flip(-1).cumsum(-1).flip(-1) + carry[:, None]
        out[:, first:last], carry = part, part[:, 0]
    return out


def _carry_lost(x: Any) -> Any:
    parts = [part.flip(-1).cumsum(-1).flip(-1) for part in x.split(64, -1)]
    return torch.cat(parts, -1)


def masked_mean(x: Any, mask: Any) -> Any:
    kept = torch.where(mask, x, 0.0)
    return kept.sum(-1) / mask.sum(-1).clamp(min=1)


def _mean_of_chosen(x: Any, mask: Any) -> Any:
    rows = [row[keep].sum() / max(int(keep.sum()), 1) for row, keep in zip(x, mask, strict=True)]
    return torch.stack(rows) if rows else x.new_zeros(0)


CASES = (
    Case(mean_magnitude, ROW, (_pairwise, _kahan), {
        "the tail is left out": lambda x: x[:, : max(x.shape[1] // 4 * 4, 1)].abs().sum(-1) / x.shape[1],
        "partial sums in bfloat16": _partial_sums_in_bfloat16,
        "divided by the padded length": lambda x: x.abs().sum(-1) / (-(-x.shape[1] // 4) * 4),
    }),
    Case(first_largest, "x[T,D] -> y:int64[T]", (
        _largest_by_blocks, lambda x: x.sort(-1, descending=True).indices[:, 0],
    ), {
        "the place within a block": _place_within_the_block,
        "of the magnitudes": lambda x: x.abs().argmax(-1),
        "of numbers rounded to float16": lambda x: x.half().argmax(-1),
    }),
    Case(sum_of_the_largest, "x[T,3*D] -> y[T]", (_by_sorting, lambda x: x.kthvalue(x.shape[1], -1).values
         + x.kthvalue(x.shape[1] - 1, -1).values + x.kthvalue(x.shape[1] - 2, -1).values), {
        "of the first 32 columns": lambda x: x[:, :32].topk(3, -1).values.sum(-1),
        "of the magnitudes": lambda x: x.gather(-1, x.abs().topk(3, -1).indices).sum(-1),
        "two of them": lambda x: x.topk(2, -1).values.sum(-1),
    }),
    Case(sample_variance, "x[T,2*D] -> y[T]", (_chan, lambda x: (x - x.mean(-1, keepdim=True)).square().sum(-1)
         / (x.shape[-1] - 1)), {
        "divided by n": lambda x: x.var(-1, unbiased=False),
        "one pass, which cancels": lambda x: ((x * x).sum(-1) - x.sum(-1).square() / x.shape[-1]) / (x.shape[-1] - 1),
        "about zero": lambda x: x.square().sum(-1) / (x.shape[-1] - 1),
    }),
    Case(log_sum_exp, ROW, (_online, lambda x: x.amax(-1) + (x - x.amax(-1, keepdim=True)).exp().sum(-1).log()), {
        "without a shift": lambda x: x.exp().sum(-1).log(),
        "blocks are never rescaled": _never_rescaled,
        "the largest alone beyond 20": lambda x: torch.where(x.amax(-1) > 20, x.amax(-1), torch.logsumexp(x, -1)),
    }),
    Case(sums_from_the_end, ROWS, (
        _carried_backward, lambda x: torch.stack([x[:, i:].sum(-1) for i in range(x.shape[1])], -1),
    ), {
        "by subtraction, which cancels": lambda x: x.sum(-1, keepdim=True) - x.cumsum(-1) + x,
        "its own element left out": lambda x: sums_from_the_end(x) - x,
        "no carry beyond 64": _carry_lost,
    }),
    Case(masked_mean, "x[T,D], mask:bool[T,D] -> y[T]", (
        _mean_of_chosen, lambda x, mask: x.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1).float(),
    ), {
        "divided by all": lambda x, mask: torch.where(mask, x, 0.0).mean(-1),
        "rows without any give NaN": lambda x, mask: torch.where(mask, x, 0.0).sum(-1) / mask.sum(-1),
        "masked by a product": lambda x, mask: (x * mask).sum(-1) / mask.sum(-1).clamp(min=1),
    }, warned=frozenset({"masked by a product"})),
)  # fmt: skip
