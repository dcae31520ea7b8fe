"""Honest attention: whole rows, blocks of keys with an online maximum, and keys split among workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .honest_softmax import LOG2_E, shift_of
from .numerics import keep, load

Result = Tensor | tuple[Tensor, Tensor]


def visible_keys(queries: int, keys: int, causal: str, window: tuple[int, int] | None) -> Tensor:
    """Which key each query may see, bool [Sq,Sk]."""
    offset = 0 if causal == "top_left" else keys - queries
    distance = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - offset
    see = torch.ones(queries, keys, dtype=torch.bool)
    if causal != "none":
        see &= distance <= 0
    if window is not None:
        see &= (distance >= -window[0]) & (distance <= window[1])
    return see


def kv_head_of(heads: int, kv_heads: int) -> Tensor:
    """The key/value head of each query head: neighbours share one."""
    return torch.arange(heads) // max(1, heads // max(1, kv_heads))


def alibi_bias(slopes: Tensor, queries: int, keys: int) -> Tensor:
    """-slope * distance, [H,Sq,Sk]."""
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)[None, :]
    return -load(slopes)[:, None, None] * distance.abs()


def masked_scores(
    q: Tensor, k: Tensor, scale: float, softcap: float | None, bias: Tensor | None, see: Tensor
) -> Tensor:
    """Scale, softcap, bias, mask: in this order."""
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(~see, -math.inf)


def decay_base_two(old: Tensor, new: Tensor) -> Tensor:
    """What a sum relative to the old maximum is worth relative to the new."""
    return torch.exp2((old - new) * LOG2_E)


@dataclass(frozen=True)
class Parts:
    """The pieces that all three kernels are made of; a fault replaces one."""

    visible: Callable[[int, int, str, tuple[int, int] | None], Tensor] = visible_keys
    kv_head: Callable[[int, int], Tensor] = kv_head_of
    bias: Callable[[Tensor, int, int], Tensor] = alibi_bias
    scores: Callable[[Tensor, Tensor, float, float | None, Tensor | None, Tensor], Tensor] = masked_scores
    shift: Callable[[Tensor], Tensor] = shift_of
    decay_of_sum: Callable[[Tensor, Tensor], Tensor] = decay_base_two
    decay_of_output: Callable[[Tensor, Tensor], Tensor] = decay_base_two
    running_output: Callable[[Tensor], Tensor] = keep
    partial_lse: Callable[[Tensor], Tensor] = keep
    returned_lse: Callable[[Tensor], Tensor] = keep


HONEST_PARTS = Parts()


class Problem:
    """What the kernels hold after their loads: float32 operands, one key head per query head, mask and bias."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: str,
        scale: float | None,
        window: tuple[int, int] | None,
        softcap: float | None,
        slopes: Tensor | None,
        round_probabilities: bool,
        parts: Parts,
    ) -> None:
        heads = parts.kv_head(q.shape[1], k.shape[1])
        self.dtype = q.dtype
        self.q, self.k, self.v = load(q), load(k)[:, heads], load(v)[:, heads]
        self.queries, self.keys = q.shape[2], k.shape[2]
        self.scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
        self.softcap = softcap
        self.see = parts.visible(self.queries, self.keys, causal, window)
        self.bias = None if slopes is None else parts.bias(slopes, self.queries, self.keys)
        self.round_probabilities = round_probabilities
        self.parts = parts

    def scores(self, start: int, stop: int) -> Tensor:
        """Masked scores of the keys from `start` to `stop`, [B,H,Sq,stop-start]."""
        bias = None if self.bias is None else self.bias[:, :, start:stop]
        k = self.k[:, :, start:stop]
        return self.parts.scores(self.q, k, self.scale, self.softcap, bias, self.see[:, start:stop])

    def weighted_values(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """weights @ v, to which a key behind the mask adds nothing even where its value is NaN: 0 * NaN is NaN."""
        if self.round_probabilities:
            weights = weights.to(self.dtype).to(torch.float32)
        v, see = self.v[:, :, start:stop], self.see[:, start:stop]
        finite = v.isfinite().all(dim=-1, keepdim=True)
        out = weights @ torch.where(finite, v, torch.zeros_like(v))
        for key in torch.nonzero(~finite.flatten(0, 1).all(dim=0)[:, 0])[:, 0].tolist():
            term = weights[..., key, None] * v[:, :, key, None, :]
            out = out + torch.where(see[:, key, None] & ~finite[:, :, key, None], term, torch.zeros_like(term))
        return out

    def finish(self, out: Tensor, lse: Tensor, return_lse: bool) -> Result:
        """The stores: a row that sees no key is zero."""
        sees_any = self.see.any(dim=1, keepdim=True)
        stored = torch.where(sees_any, out, torch.zeros_like(out)).to(self.dtype)
        return (stored, self.parts.returned_lse(lse.squeeze(-1))) if return_lse else stored


def sink_column(sinks: Tensor | None, like: Tensor) -> Tensor:
    """One more logit per head, -inf where there are no sinks."""
    return torch.full_like(like, -math.inf) if sinks is None else load(sinks).view(1, -1, 1, 1).expand_as(like)


def attention_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    round_probabilities: bool = False,
    parts: Parts = HONEST_PARTS,
) -> Result:
    """Whole rows of scores, normalised before the product with the values."""
    problem = Problem(q, k, v, causal, scale, window, softcap, slopes if alibi else None, round_probabilities, parts)
    keys = problem.keys
    scores = problem.scores(0, keys)
    sink = sink_column(sinks, problem.q.new_empty(*q.shape[:3], 1))
    shift = parts.shift(torch.cat([scores, sink], dim=-1).amax(dim=-1, keepdim=True))
    weights = torch.exp(scores - shift)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(sink - shift)
    return problem.finish(problem.weighted_values(weights / total, 0, keys), shift + torch.log(total), return_lse)


def attention_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    round_probabilities: bool = False,
    block: int = 64,
    parts: Parts = HONEST_PARTS,
) -> Result:
    """Blocks of keys: running maximum, running sum, unnormalised output rescaled whenever the maximum grows."""
    problem = Problem(q, k, v, causal, scale, window, softcap, slopes if alibi else None, round_probabilities, parts)
    maximum = torch.full((*q.shape[:3], 1), -math.inf)
    total = torch.zeros(*q.shape[:3], 1)
    out = torch.zeros(*q.shape[:3], v.shape[3])
    for start in range(0, problem.keys, block):
        stop = min(start + block, problem.keys)
        scores = problem.scores(start, stop)
        new = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        shift = parts.shift(new)
        weights = torch.exp2((scores - shift) * LOG2_E)
        total = total * parts.decay_of_sum(maximum, shift) + weights.sum(dim=-1, keepdim=True)
        added = problem.weighted_values(weights, start, stop)
        out = parts.running_output(out * parts.decay_of_output(maximum, shift) + added)
        maximum = new
    sink = sink_column(sinks, maximum)
    shift = parts.shift(torch.maximum(maximum, sink))
    last = decay_base_two(maximum, shift)
    total = total * last + decay_base_two(sink, shift)
    return problem.finish(out * last / total, shift + torch.log(total), return_lse)


def attention_split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    round_probabilities: bool = False,
    splits: int = 3,
    parts: Parts = HONEST_PARTS,
) -> Result:
    """Keys split among workers; their normalised outputs are merged by lse, a sink counting as one more worker."""
    problem = Problem(q, k, v, causal, scale, window, softcap, slopes if alibi else None, round_probabilities, parts)
    outputs = [torch.zeros(*q.shape[:3], v.shape[3])]
    lses = [sink_column(sinks, torch.empty(*q.shape[:3], 1))]
    width = max(1, -(-problem.keys // splits))
    for start in range(0, problem.keys, width):
        stop = min(start + width, problem.keys)
        scores = problem.scores(start, stop)
        shift = parts.shift(scores.amax(dim=-1, keepdim=True))
        weights = torch.exp(scores - shift)
        total = weights.sum(dim=-1, keepdim=True)
        out = problem.weighted_values(weights, start, stop)
        outputs.append(torch.where(total == 0, torch.zeros_like(out), out / total))
        lses.append(parts.partial_lse(shift + torch.log(total)))
    lse = torch.stack(lses)
    shift = shift_of(lse.amax(dim=0))
    weights = torch.exp(lse - shift)
    total = weights.sum(dim=0)
    merged = (weights * torch.stack(outputs)).sum(dim=0) / total
    return problem.finish(merged, shift + torch.log(total), return_lse)
