"""Activations, normalisations, reductions and losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .entry import Case

ROWS = "x[T,D] -> y[T,D]"


def bias_gelu(x: Any, b: Any) -> Any:
    return F.gelu(x + b)


def _by_erf(x: Any, b: Any) -> Any:
    z = x + b
    return z.mul(0.5) * (torch.erf(z * 0.7071067811865476) + 1)


def _whole_strips_only(x: Any, b: Any) -> Any:
    z = x.clone()
    whole = x.shape[1] // 4 * 4
    z[:, :whole] += b[:whole]
    return F.gelu(z)


def clamped_swish(x: Any) -> Any:
    return torch.clamp(x * torch.sigmoid(x), -1.0, 1.0) / 2


def _exp_in_bfloat16(x: Any) -> Any:
    e = torch.exp(-x.bfloat16()).float()
    return torch.clamp(x / (1 + e), -1.0, 1.0) / 2


def _nan_as_bound(x: Any) -> Any:
    y = x * torch.sigmoid(x)
    return torch.where(y < 1.0, torch.where(y > -1.0, y, -1.0), 1.0) / 2


def mish(x: Any) -> Any:
    return x * torch.tanh(F.softplus(x))


def _mish_by_algebra(x: Any) -> Any:
    e = torch.exp(x.clamp(max=20.0))
    n = e * (e + 2)
    return torch.where(x > 20, x, x * (n / (n + 2)))


def hardswish_residual(x: Any, r: Any) -> Any:
    return x * F.relu6(x + 3) / 6 + r


def _residual_of_whole_blocks(x: Any, r: Any) -> Any:
    y = F.hardswish(x)
    rows = x.shape[0] // 2 * 2
    y[:rows] += r[:rows]
    return y


def geglu(x: Any) -> Any:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def _geglu_of(gate: Any, up: Any) -> Any:
    return gate * 0.5 * (1 + torch.erf(gate * 0.5**0.5)) * up


def soft_cap(x: Any) -> Any:
    return 30.0 * torch.tanh(x / 30.0)


def channel_prelu(x: Any, w: Any) -> Any:
    return torch.where(x > 0, x, w * x)


def _prelu_in_place(x: Any, w: Any) -> Any:
    y = x.clone()
    below = ~(x > 0)
    y[below] = (x * w)[below]
    return y


def gelu_gradient(x: Any) -> Any:
    return 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) * 0.3989422804014327


ACTIVATIONS = (
    Case(bias_gelu, "x[T,D], b[D] -> y[T,D]", _by_erf, {
        "the tail has no bias": _whole_strips_only,
        "by tanh": lambda x, b: F.gelu(x + b, approximate="tanh"),
        "by a logistic function": lambda x, b: (x + b) * torch.sigmoid(1.702 * (x + b)),
        "the bias comes last": lambda x, b: F.gelu(x) + b,
    }),
    Case(clamped_swish, ROWS, lambda x: torch.clamp(x / (1 + torch.exp(-x)), -1.0, 1.0) * 0.5, {
        "clamped first": lambda x: F.silu(x.clamp(-1, 1)) / 2,
        "exponentials in bfloat16": _exp_in_bfloat16,
        "NaN becomes a bound": _nan_as_bound,
    }, warned=frozenset({"NaN becomes a bound"})),
    Case(mish, ROWS, _mish_by_algebra, {
        "x itself from 4 on": lambda x: torch.where(x > 4, x, F.mish(x)),
        "log of 1 + exp": lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),
        "softplus without tanh": lambda x: x * F.softplus(x).clamp(max=1),
    }, warned=frozenset({"log of 1 + exp"})),
    Case(hardswish_residual, "x[T,D], r[T,D] -> y[T,D]", lambda x, r: torch.addcmul(r, x, (x + 3).clamp(0, 6) / 6), {
        "the last row has no residual": _residual_of_whole_blocks,
        "steeper": lambda x, r: x * (x + 3).clamp(0, 6) / 5.9 + r,
        "clamped a bit late": lambda x, r: x * (x + 3).clamp(0, 6.05) / 6 + r,
    }),
    Case(geglu, "x[T,2*D] -> y[T,D]", lambda x: _geglu_of(x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]), {
        "halves swapped": lambda x: _geglu_of(x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]),
        "halves interleaved": lambda x: _geglu_of(x[:, ::2], x[:, 1::2]),
        "the gate in bfloat16": lambda x: F.gelu(x.chunk(2, -1)[0].bfloat16()).float() * x.chunk(2, -1)[1],
    }),
    Case(soft_cap, ROWS, lambda x: torch.tanh(x * (1 / 30)).mul(30), {
        "by exponentials, which cancel": lambda x: 30 * (1 - 2 / (torch.exp(2 * x / 30) + 1)),
        "a hard cap": lambda x: x.clamp(-30, 30),
        "capped at 50": lambda x: 50.0 * torch.tanh(x / 50.0),
    }),
    Case(channel_prelu, "x[T,D], w[D] -> y[T,D]", _prelu_in_place, {
        "one slope for all": lambda x, w: torch.where(x > 0, x, w[:1] * x),
        "slopes are positive": lambda x, w: torch.where(x > 0, x, w.abs() * x),
        "the slope at large numbers too": lambda x, w: torch.where((x > 0) & (x < 10), x, w * x),
    }),
    Case(gelu_gradient, ROWS, lambda x: torch.special.ndtr(x) + x * torch.exp(x * x * -0.5) * 0.39894228, {
        "without the second term": lambda x: 0.5 * (1 + torch.erf(x * 0.5**0.5)),
        "the exponent not halved": lambda x: 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-x * x) * 0.39894228,
        "a coarse constant": lambda x: 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) * 0.4,
    }),
)  # fmt: skip


def unit_rows(x: Any) -> Any:
    return F.normalize(x, dim=-1)


def _without_guard(x: Any) -> Any:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True))


def gemma_norm(x: Any, w: Any) -> Any:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + w.float())).to(x.dtype)


def _gemma(x: Any, w: Any, squares: Any) -> Any:
    return (x.float() * torch.rsqrt(squares / x.shape[-1] + 1e-6) * (w.float() + 1)).to(x.dtype)


def _gemma_by_blocks(x: Any, w: Any) -> Any:
    total = torch.zeros(x.shape[0], 1)
    for first in range(0, x.shape[1], 8):
        total += x[:, first : first + 8].float().square().sum(-1, keepdim=True)
    return _gemma(x, w, total)


def _gemma_rounded_early(x: Any, w: Any) -> Any:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * (1 + w)


def plain_layer_norm(x: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:])


def _welford(x: Any) -> Any:
    mean, m2 = torch.zeros(x.shape[0]), torch.zeros(x.shape[0])
    for place in range(x.shape[1]):
        delta = x[:, place] - mean
        mean = mean + delta / (place + 1)
        m2 = m2 + delta * (x[:, place] - mean)
    return (x - mean[:, None]) * torch.rsqrt(m2[:, None] / x.shape[1] + 1e-5)


def _one_pass(x: Any) -> Any:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt((x * x).mean(-1, keepdim=True) - mean * mean + 1e-5)


def group_norm_silu(x: Any) -> Any:
    return F.silu(F.group_norm(x, 2))


def _by_groups(x: Any, groups: Any, eps: float = 1e-5) -> Any:
    y = torch.empty_like(x)
    for channels in groups:
        part = x[:, channels]
        mean = part.mean((1, 2), keepdim=True)
        square = (part - mean).square().mean((1, 2), keepdim=True)
        y[:, channels] = F.silu((part - mean) * torch.rsqrt(square + eps))
    return y


def _halves(x: Any) -> list[slice]:
    return [slice(0, x.shape[1] // 2), slice(x.shape[1] // 2, None)]


def batch_norm_inference(x: Any, m: Any, v: Any, w: Any, b: Any) -> Any:
    return F.batch_norm(x, m, v.abs(), w, b, eps=1e-3)


def _folded(x: Any, m: Any, v: Any, w: Any, b: Any) -> Any:
    scale = w * torch.rsqrt(v.abs() + 1e-3)
    return x * scale[None, :, None] + (b - m * scale)[None, :, None]


def _channelwise(x: Any, m: Any, v: Any, w: Any, b: Any, eps: float = 1e-3) -> Any:
    parts = [(x[:, c] - m[c]) / torch.sqrt(v[c].abs() + eps) * w[c] + b[c] for c in range(x.shape[1])]
    return torch.stack(parts, 1)


def min_max_scale(x: Any) -> Any:
    least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return (x - least) / (most - least + 1e-3)


NORMS = (
    Case(unit_rows, ROWS, lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True)).clamp(min=1e-12), {
        "rows of zeros give NaN": _without_guard,
        "the sum of magnitudes": lambda x: F.normalize(x, p=1.0, dim=-1),
        "columns in place of rows": lambda x: F.normalize(x, dim=0),
    }),
    Case(gemma_norm, "x[T,D], w[D] -> y[T,D]", _gemma_by_blocks, {
        "rounded before the weight": _gemma_rounded_early,
        "the weight without one": lambda x, w: F.rms_norm(x.float(), x.shape[-1:], w.float(), 1e-6).to(x.dtype),
        "squares in bfloat16": lambda x, w: _gemma(x, w, (x * x).sum(-1, keepdim=True).float()),
    }, dtype="bfloat16"),
    Case(plain_layer_norm, ROWS, _welford, {
        "one pass, which cancels": _one_pass,
        "the unbiased variance": lambda x: (x - x.mean(-1, keepdim=True))
        / torch.sqrt((x - x.mean(-1, keepdim=True)).square().sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1) + 1e-5),
        "epsilon outside of the root": lambda x: (x - x.mean(-1, keepdim=True))
        / (x.var(-1, unbiased=False, keepdim=True).sqrt() + 1e-5),
    }),
    Case(group_norm_silu, "x[N,2*C,L] -> y[N,2*C,L]", lambda x: _by_groups(x, _halves(x)), {
        "every other channel": lambda x: _by_groups(x, [slice(0, None, 2), slice(1, None, 2)]),
        "one group": lambda x: _by_groups(x, [slice(None)]),
        "a large epsilon": lambda x: _by_groups(x, _halves(x), 1e-3),
    }),
    Case(batch_norm_inference, "x[N,C,L], m[C], v[C], w[C], b[C] -> y[N,C,L]", _folded, {
        "a small epsilon": lambda *given: _channelwise(*given, eps=1e-5),
        "the variance as deviation": lambda x, m, v, w, b: (x - m[:, None]) / (v.abs()[:, None] + 1e-3) * w[:, None]
        + b[:, None],
        "statistics of the batch": lambda x, m, v, w, b: F.batch_norm(x, None, None, w, b, training=True, eps=1e-3)
        if x.shape[0] * x.shape[2] > 1 else _folded(x, m, v, w, b),
    }),
    Case(min_max_scale, ROWS, lambda x: torch.stack([(y - y.min()) / (y.max() - y.min() + 1e-3) for y in x]), {
        "no epsilon": lambda x: (x - x.amin(-1, keepdim=True)) / (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)),
        "the least of all rows": lambda x: (x - x.amin()) / (x.amax(-1, keepdim=True) - x.amin() + 1e-3),
        "the largest magnitude": lambda x: (x - x.amin(-1, keepdim=True))
        / (x.abs().amax(-1, keepdim=True) - x.amin(-1, keepdim=True) + 1e-3),
    }),
)  # fmt: skip


ROW = "x[T,D] -> y[T]"


def mean_magnitude(x: Any) -> Any:
    return x.abs().mean(-1)


def _pairwise(x: Any) -> Any:
    part, count = x.abs(), x.shape[-1]
    while part.shape[-1] > 1:
        if part.shape[-1] % 2:
            part = torch.cat([part, torch.zeros_like(part[..., :1])], -1)
        part = part[..., ::2] + part[..., 1::2]
    return part[..., 0] / count


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


REDUCTIONS = (
    Case(mean_magnitude, ROW, _pairwise, {
        "the tail is left out": lambda x: x[:, : max(x.shape[1] // 4 * 4, 1)].abs().sum(-1) / x.shape[1],
        "partial sums in bfloat16": _partial_sums_in_bfloat16,
        "divided by the padded length": lambda x: x.abs().sum(-1) / (-(-x.shape[1] // 4) * 4),
    }),
    Case(first_largest, "x[T,D] -> y:int64[T]", _largest_by_blocks, {
        "the place within a block": _place_within_the_block,
        "of the magnitudes": lambda x: x.abs().argmax(-1),
        "of numbers rounded to float16": lambda x: x.half().argmax(-1),
    }),
    Case(sum_of_the_largest, "x[T,3*D] -> y[T]", _by_sorting, {
        "of the first 32 columns": lambda x: x[:, :32].topk(3, -1).values.sum(-1),
        "of the magnitudes": lambda x: x.gather(-1, x.abs().topk(3, -1).indices).sum(-1),
        "two of them": lambda x: x.topk(2, -1).values.sum(-1),
    }),
    Case(sample_variance, "x[T,2*D] -> y[T]", _chan, {
        "divided by n": lambda x: x.var(-1, unbiased=False),
        "one pass, which cancels": lambda x: ((x * x).sum(-1) - x.sum(-1).square() / x.shape[-1]) / (x.shape[-1] - 1),
        "about zero": lambda x: x.square().sum(-1) / (x.shape[-1] - 1),
    }),
    Case(log_sum_exp, ROW, _online, {
        "without a shift": lambda x: x.exp().sum(-1).log(),
        "blocks are never rescaled": _never_rescaled,
        "the largest alone beyond 20": lambda x: torch.where(x.amax(-1) > 20, x.amax(-1), torch.logsumexp(x, -1)),
    }),
    Case(sums_from_the_end, ROWS, _carried_backward, {
        "by subtraction, which cancels": lambda x: x.sum(-1, keepdim=True) - x.cumsum(-1) + x,
        "its own element left out": lambda x: sums_from_the_end(x) - x,
        "no carry beyond 64": _carry_lost,
    }),
    Case(masked_mean, "x[T,D], mask:bool[T,D] -> y[T]", _mean_of_chosen, {
        "divided by all": lambda x, mask: torch.where(mask, x, 0.0).mean(-1),
        "rows without any give NaN": lambda x, mask: torch.where(mask, x, 0.0).sum(-1) / mask.sum(-1),
        "masked by a product": lambda x, mask: (x * mask).sum(-1) / mask.sum(-1).clamp(min=1),
    }, warned=frozenset({"masked by a product"})),
)  # fmt: skip


PAIR = "x[T,D], y[T,D] -> l[]"


def token_loss(x: Any, t: Any) -> Any:
    return F.cross_entropy(x, t)


def _loss_by_blocks(x: Any, t: Any) -> Any:
    most = x.amax(-1)
    total = torch.zeros_like(most)
    for part in x.split(8, -1):
        total += torch.exp(part - most[:, None]).sum(-1)
    return (torch.log(total) + most - x.gather(-1, t[:, None])[:, 0]).mean()


def _loss_of(x: Any, t: Any) -> Any:
    return torch.logsumexp(x, -1) - x[torch.arange(len(t)), t]


def binary_loss(x: Any, t: Any) -> Any:
    return F.binary_cross_entropy_with_logits(x, torch.sigmoid(t), reduction="none")


def _stable_binary(x: Any, t: Any) -> Any:
    return x.clamp(min=0) - x * torch.sigmoid(t) + torch.log1p(torch.exp(-x.abs()))


def _naive_binary(x: Any, t: Any) -> Any:
    p, y = torch.sigmoid(x), torch.sigmoid(t)
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p))


def batch_divergence(x: Any, y: Any) -> Any:
    return F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="batchmean")


def _divergence_by_hand(x: Any, y: Any) -> Any:
    p = torch.softmax(y, -1)
    return (torch.xlogy(p, p) - p * torch.log_softmax(x, -1)).sum() / x.shape[0]


def hinge(x: Any, y: Any) -> Any:
    return torch.relu(1 - x * y).mean()


def focal(x: Any, t: Any) -> Any:
    log_p = F.log_softmax(x, -1).gather(-1, t[:, None])[:, 0]
    return -((1 - log_p.exp()) ** 2) * log_p


def _focal(x: Any, t: Any, power: int = 2) -> Any:
    log_p = x[torch.arange(len(t)), t] - torch.logsumexp(x, -1)
    return (1 - log_p.exp()).pow(power) * -log_p


def contrastive(a: Any, b: Any) -> Any:
    scores = a @ b.T / 0.5
    return F.cross_entropy(scores, torch.arange(a.shape[0]))


def _contrastive(a: Any, b: Any) -> Any:
    scores = (a @ b.T) * 2.0
    return (torch.logsumexp(scores, -1) - scores.diagonal()).sum() / a.shape[0]


LOSSES = (
    Case(token_loss, "x[T,V], t:int64[T]=index(V) -> l[]", _loss_by_blocks, {
        "the label after": lambda x, t: _loss_of(x, (t + 1) % x.shape[1]).mean(),
        "no shift": lambda x, t: (x.exp().sum(-1).log() - x.gather(-1, t[:, None])[:, 0]).mean(),
        "the last row is left out": lambda x, t: _loss_of(x, t)[:-1].sum() / len(t),
    }),
    Case(binary_loss, "x[T,D], t[T,D] -> l[T,D]", _stable_binary, {
        "logarithms of what vanishes": _naive_binary,
        "targets as they are": lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="none"),
        "half of it": lambda x, t: 0.5 * _stable_binary(x, t),
    }),
    Case(batch_divergence, PAIR, _divergence_by_hand, {
        "the mean of all": lambda x, y: F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="none").mean(),
        "the other way round": lambda x, y: batch_divergence(y, x),
        "cross-entropy": lambda x, y: -(torch.softmax(y, -1) * torch.log_softmax(x, -1)).sum() / x.shape[0],
    }),
    Case(hinge, PAIR, lambda x, y: torch.clamp(1 - x * y, min=0).sum() / x.numel(), {
        "squared": lambda x, y: torch.relu(1 - x * y).square().mean(),
        "a narrower margin": lambda x, y: torch.relu(0.9 - x * y).mean(),
        "means of rows, the last one twice": lambda x, y: torch.cat(
            [torch.relu(1 - x * y), torch.relu(1 - x * y)[-1:]]).mean(),
    }),
    Case(focal, "x[T,V], t:int64[T]=index(V) -> l[T]", _focal, {
        "not squared": lambda x, t: _focal(x, t, 1),
        "unweighted": lambda x, t: _focal(x, t, 0),
        "of probabilities in bfloat16": lambda x, t: F.cross_entropy(x, t, reduction="none")
        * (1 - F.softmax(x, -1).bfloat16().float().gather(-1, t[:, None])[:, 0]) ** 2,
    }),
    Case(contrastive, "a[T,D], b[T,D] -> l[]", _contrastive, {
        "columns in place of rows": lambda a, b: F.cross_entropy(b @ a.T / 0.5, torch.arange(a.shape[0])),
        "another temperature": lambda a, b: F.cross_entropy(a @ b.T, torch.arange(a.shape[0])),
        "scores in bfloat16": lambda a, b: F.cross_entropy((a @ b.T).bfloat16().float() * 2, torch.arange(len(a))),
    }, asked={"shapes": {"T": [1, 2, 7, 16, 33], "D": [2, 7, 33]}}),
)  # fmt: skip
