"""Honest attention: whole rows, blocks of keys with an online maximum, and keys split among workers."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .honest_softmax import LOG2_E, shift_of
from .numerics import keep, load, round_via

Result = Tensor | tuple[Tensor, Tensor]
Stage = Callable[[Tensor], Tensor]


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


def weighted_sum(weights: Tensor, values: Tensor, see: Tensor) -> Tensor:
    """weights [..,S,L] @ values [..,L,D], to which what is not seen adds nothing, NaN included."""
    finite = values.isfinite()
    total = weights @ torch.where(finite, values, 0.0)
    for place in torch.nonzero(~finite.all(dim=-1).flatten(0, -2).all(dim=0))[:, 0].tolist():
        row = values[..., place, None, :]
        term = torch.where(row.isfinite(), 0.0, weights[..., place, None] * row)
        total = total + torch.where(see[:, place, None], term, 0.0)
    return total


Block = tuple[Tensor, Tensor, Tensor]


def online(blocks: Iterable[Block], out: Tensor, stage: Stage = keep, running: Stage = keep) -> tuple[Tensor, ...]:
    """Blocks of masked scores, values and mask: unnormalised output, sum and maximum, rescaled as the maximum grows.

    ``out`` are the zeros to begin with, ``stage`` is what weights pass through on their way to the values, ``running``
    what the output does after each block.
    """
    maximum = torch.full((*out.shape[:-1], 1), -math.inf)
    total = torch.zeros_like(maximum)
    for scores, values, see in blocks:
        new = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        weights, decay = (torch.exp2((x - shift_of(new)) * LOG2_E) for x in (scores, maximum))
        total = total * decay + weights.sum(dim=-1, keepdim=True)
        out = running(out * decay + weighted_sum(stage(weights), values, see))
        maximum = new
    return out, total, maximum


@dataclass(frozen=True)
class Parts:
    """The pieces that all three kernels are made of; a fault replaces one."""

    visible: Callable[[int, int, str, tuple[int, int] | None], Tensor] = visible_keys
    bias: Callable[[Tensor, int, int], Tensor] = alibi_bias
    running_output: Stage = keep
    partial_lse: Stage = keep
    returned_lse: Stage = keep


class Problem:
    """What the kernels hold after their loads: float32 operands, one key head per query head, mask and bias."""

    def __init__(
        self,
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
        parts: Parts = Parts(),
    ) -> None:
        heads = kv_head_of(q.shape[1], k.shape[1])
        self.dtype, self.parts, self.softcap, self.return_lse = q.dtype, parts, softcap, return_lse
        self.q, self.k, self.v = load(q), load(k)[:, heads], load(v)[:, heads]
        self.keys = k.shape[2]
        self.scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
        self.see = parts.visible(q.shape[2], self.keys, causal, window)
        self.bias = parts.bias(slopes, q.shape[2], self.keys) if alibi and slopes is not None else None
        # One more logit per head, -inf where there are no sinks.
        one = torch.full((*q.shape[:3], 1), -math.inf)
        self.sink = one if sinks is None else load(sinks).view(1, -1, 1, 1).expand_as(one)
        self.stage = round_via(q.dtype) if round_probabilities else keep

    def block(self, start: int, stop: int) -> Block:
        """Masked scores [B,H,Sq,stop-start] of the keys from `start` to `stop`, their values and their mask."""
        keys = slice(start, stop)
        bias = None if self.bias is None else self.bias[:, :, keys]
        see = self.see[:, keys]
        scores = masked_scores(self.q, self.k[:, :, keys], self.scale, self.softcap, bias, see)
        return scores, self.v[:, :, keys], see

    def weighted_values(self, weights: Tensor, values: Tensor, see: Tensor) -> Tensor:
        """weights @ v."""
        return weighted_sum(self.stage(weights), values, see)

    def finish(self, out: Tensor, lse: Tensor) -> Result:
        """The stores: a row that sees no key is zero."""
        stored = torch.where(self.see.any(dim=1, keepdim=True), out, 0.0).to(self.dtype)
        return (stored, self.parts.returned_lse(lse.squeeze(-1))) if self.return_lse else stored


def attention_rows(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    """Whole rows of scores, normalised before the product with the values."""
    problem = Problem(q, k, v, **options)
    scores, values, see = problem.block(0, problem.keys)
    shift = shift_of(torch.cat([scores, problem.sink], dim=-1).amax(dim=-1, keepdim=True))
    weights = torch.exp(scores - shift)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(problem.sink - shift)
    return problem.finish(problem.weighted_values(weights / total, values, see), shift + torch.log(total))


def attention_flash(q: Tensor, k: Tensor, v: Tensor, *, block: int = 64, **options: Any) -> Result:
    """Blocks of keys: running maximum, running sum, unnormalised output rescaled whenever the maximum grows."""
    problem = Problem(q, k, v, **options)
    blocks = (problem.block(start, start + block) for start in range(0, problem.keys, block))
    zeros = torch.zeros(*q.shape[:3], v.shape[3])
    out, total, maximum = online(blocks, zeros, problem.stage, problem.parts.running_output)
    shift = shift_of(torch.maximum(maximum, problem.sink))
    last, sink = (torch.exp2((x - shift) * LOG2_E) for x in (maximum, problem.sink))
    total = total * last + sink
    return problem.finish(out * last / total, shift + torch.log(total))


def attention_split(q: Tensor, k: Tensor, v: Tensor, *, splits: int = 3, **options: Any) -> Result:
    """Keys split among workers; their normalised outputs are merged by lse, a sink counting as one more worker."""
    problem = Problem(q, k, v, **options)
    outputs, lses = [torch.zeros(*q.shape[:3], v.shape[3])], [problem.sink]
    width = max(1, -(-problem.keys // splits))
    for start in range(0, problem.keys, width):
        scores, values, see = problem.block(start, start + width)
        shift = shift_of(scores.amax(dim=-1, keepdim=True))
        weights = torch.exp(scores - shift)
        total = weights.sum(dim=-1, keepdim=True)
        out = problem.weighted_values(weights, values, see)
        outputs.append(torch.where(total == 0, 0.0, out / total))
        lses.append(problem.parts.partial_lse(shift + torch.log(total)))
    lse = torch.stack(lses)
    shift = shift_of(lse.amax(dim=0))
    weights = torch.exp(lse - shift)
    total = weights.sum(dim=0)
    merged = (weights * torch.stack(outputs)).sum(dim=0) / total
    return problem.finish(merged, shift + torch.log(total))
