"""Honest float32 attention kernels: full, online in blocks, split over keys, with the scale and log2 e put anywhere."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tests.golden.float32 import LN2, LOG2E, Functions, fma, forward

Tensor = torch.Tensor
Round = Callable[[Tensor], Tensor]
Scores = Callable[[Tensor, Tensor, float], Tensor]


def _dot(q: Tensor, k: Tensor) -> Tensor:
    total = q.new_zeros(*q.shape[:-1], k.shape[-2])
    for d in range(q.shape[-1]):
        total = fma(q[..., d : d + 1], k[..., d].unsqueeze(-2), total)
    return total


SCORES: dict[str, Scores] = {
    "scale on scores": lambda q, k, scale: _dot(q, k) * scale,
    "scale in q": lambda q, k, scale: _dot(q * scale, k),
    "root of the scale in both": lambda q, k, scale: _dot(q * math.sqrt(scale), k * math.sqrt(scale)),
    "torch's product": lambda q, k, scale: (q @ k.transpose(-1, -2)) * scale,
    "backwards": lambda q, k, scale: forward((q[..., None, :] * k[..., None, :, :]).flip(-1)) * scale,
}


@dataclass(frozen=True)
class Problem:
    """Prepared operands [H, S, D] (grouped heads repeated) and everything that the scores go through."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None

    def scores(self, f: Functions, method: Scores) -> Tensor:
        """Scaled, capped, biased; -inf where hidden."""
        scores = method(self.q, self.k, self.scale)
        if self.softcap is not None:
            scores = self.softcap * f.tanh(f.divide(scores, torch.tensor(self.softcap, dtype=torch.float32)))
        if self.bias is not None:
            scores = scores + self.bias
        return torch.where(self.visible, scores, -math.inf)


def _shift(m: Tensor) -> Tensor:
    return torch.where(m == -math.inf, 0.0, m)


def _keep(p: Tensor) -> Tensor:
    return p


def full(f: Functions, p: Problem, scores: Tensor, stage: Round = _keep, late: bool = True) -> tuple[Tensor, Tensor]:
    """All scores at once; normalised after the product with the values, or before."""
    m = scores.amax(-1, keepdim=True)
    if p.sinks is not None:
        m = torch.maximum(m, p.sinks)
    weights = f.exp(scores - _shift(m))
    total = forward(weights).unsqueeze(-1)
    if p.sinks is not None:
        total = total + f.exp(p.sinks - _shift(m))
    lse = (_shift(m) + f.log(total))[..., 0]
    safe = torch.where(total == 0, 1.0, total)
    if late:
        return f.divide(_product(stage(weights), p.v), safe), lse
    return _product(stage(f.divide(weights, safe)), p.v), lse


def _product(weights: Tensor, v: Tensor) -> Tensor:
    return _dot(weights, v.transpose(-1, -2))


def online(
    f: Functions, p: Problem, scores: Tensor, block: int, base: str, stage: Round = _keep, rounded_sum: bool = False
) -> tuple[Tensor, Tensor]:
    """Blocks of keys with running maximum, sum and accumulator; exponentials in one of four ways."""
    m = torch.full_like(scores[..., :1], -math.inf)
    total, out = torch.zeros_like(m), torch.zeros_like(p.q[..., :1]).expand(*p.q.shape[:-1], p.v.shape[-1])
    if p.sinks is not None:
        m, total = p.sinks.expand_as(m), torch.ones_like(m)
    for start in range(0, scores.shape[-1], block):
        part, values = scores[..., start : start + block], p.v[..., start : start + block, :]
        new = torch.maximum(m, part.amax(-1, keepdim=True))
        weights, decay = _exponentials(f, base, part, m, _shift(new))
        rounded = stage(weights)
        total = total * decay + forward(rounded if rounded_sum else weights).unsqueeze(-1)
        out, m = out * decay + _product(rounded, values), new
    if base == "log2 throughout":
        lse = (_shift(m) * LOG2E + f.log2(total)) * LN2
    else:
        lse = _shift(m) + f.log(total)
    return f.divide(out, torch.where(total == 0, 1.0, total)), lse[..., 0]


BASES = ("e", "2, after", "2, before", "2, fused", "log2 throughout")


def _exponentials(f: Functions, base: str, part: Tensor, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    if base == "e":
        return f.exp(part - new), f.exp(old - new)
    if base == "2, after":
        return f.exp2((part - new) * LOG2E), f.exp2((old - new) * LOG2E)
    if base == "2, fused":  # the decay of an unchanged maximum must be one
        return f.exp2(fma(part, LOG2E, -(new * LOG2E))), f.exp2((old - new) * LOG2E)
    return f.exp2(part * LOG2E - new * LOG2E), f.exp2(old * LOG2E - new * LOG2E)


def rescaled_each_step(f: Functions, p: Problem, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The first flash attention: the output is normalised after every key."""
    m = torch.full_like(scores[..., :1], -math.inf)
    total, out = torch.zeros_like(m), p.q.new_zeros(*p.q.shape[:-1], p.v.shape[-1])
    if p.sinks is not None:
        m, total = p.sinks.expand_as(m), torch.ones_like(m)
    for j in range(scores.shape[-1]):
        new = torch.maximum(m, scores[..., j : j + 1])
        weight, decay = f.exp(scores[..., j : j + 1] - _shift(new)), f.exp(m - _shift(new)) * total
        total, m = decay + weight, new
        safe = torch.where(total == 0, 1.0, total)
        out = f.divide(out * decay + weight * p.v[..., j : j + 1, :], safe)
    return out, (_shift(m) + f.log(total))[..., 0]


def split(f: Functions, p: Problem, scores: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Flash decoding: parts of the keys apart, each with its lse, then merged by exp(lse_i - lse)."""
    size = -(-scores.shape[-1] // parts)
    states = []
    for start in range(0, scores.shape[-1], size):
        piece = Problem(p.q, p.k, p.v[..., start : start + size, :], p.visible, p.scale)
        states.append(online(f, piece, scores[..., start : start + size], 16, "e"))
    most = torch.stack([lse for _, lse in states]).amax(0)
    if p.sinks is not None:
        most = torch.maximum(most, p.sinks[..., 0].expand_as(most))
    shares = [f.exp(lse - _shift(most)) for _, lse in states]
    total = sum(shares[1:], shares[0])
    if p.sinks is not None:
        total = total + f.exp(p.sinks[..., 0] - _shift(most))
    safe = torch.where(total == 0, 1.0, total)
    weighted = [(share / safe).unsqueeze(-1) * out for share, (out, _) in zip(shares, states, strict=True)]
    return sum(weighted[1:], weighted[0]), _shift(most) + f.log(total)


def attentions(f: Functions, p: Problem, stage: Round | None = None) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Every kernel; with ``stage`` those that round their probabilities so."""
    for name, method in SCORES.items():
        scores = p.scores(f, method)
        if stage is not None:
            yield f"{name}, full, rounded weights", full(f, p, scores, stage)
            yield f"{name}, full, rounded probabilities", full(f, p, scores, stage, late=False)
            for block in (1, 16):
                out, lse = online(f, p, scores, block, "2, fused", stage)
                yield f"{name}, blocks of {block}, rounded weights", (out, lse)
                out, _ = online(f, p, scores, block, "2, fused", stage, rounded_sum=True)
                yield f"{name}, blocks of {block}, rounded weights in the sum too", (out, lse)
            continue
        yield f"{name}, full", full(f, p, scores)
        yield f"{name}, full, normalised first", full(f, p, scores, late=False)
        yield f"{name}, normalised at each key", rescaled_each_step(f, p, scores)
        for block in (1, 16, 64):
            for base in BASES:
                yield f"{name}, blocks of {block}, base {base}", online(f, p, scores, block, base)
        for parts in (2, 5):
            yield f"{name}, {parts} parts", split(f, p, scores, parts)
