"""Honest float32 kernels of divergences, capped losses, convolutions, scans and merged states, in many orders."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from tests.golden.float32 import SUMS, Functions, fma
from tests.golden.honest_rows import log_softmaxes, logsumexps

Tensor = torch.Tensor
Results = Iterator[tuple[str, Any]]
FEW = ("forward", "pairwise", "32 lanes")


def _logs(f: Functions, x: Tensor) -> list[tuple[str, Tensor]]:
    found = dict(log_softmaxes(f, x))
    return [(name, found[name]) for name in sorted(found)[:: max(len(found) // 4, 1)]]


def kl_divs(f: Functions, x: Tensor, target: Tensor, *, temperature: float, reduction: str) -> Results:
    q_logs, p_logs = _logs(f, x / temperature), _logs(f, target / temperature)
    for (name, q), (_, p) in zip(q_logs, p_logs, strict=True):
        share = f.exp(p)
        for order in FEW:
            add = SUMS[order]
            yield f"share (log - log), {name}, {order}", add(share * (p - q))
            yield f"apart, {name}, {order}", add(share * p) - add(share * q)


def jsds(f: Functions, x: Tensor, target: Tensor, *, beta: float, reduction: str) -> Results:
    for (name, q), (_, p) in zip(_logs(f, x), _logs(f, target), strict=True):
        one, other = p + math.log(beta), q + math.log(1 - beta)
        mixed = torch.maximum(one, other) + torch.log1p(f.exp(-(one - other).abs()))
        for order in FEW:
            add = SUMS[order]
            yield f"{name}, {order}", add(f.exp(p) * (p - mixed)) * beta + add(f.exp(q) * (q - mixed)) * (1 - beta)
            yield f"one sum, {name}, {order}", add(beta * f.exp(p) * (p - mixed) + (1 - beta) * f.exp(q) * (q - mixed))


def capped_entropies(f: Functions, x: Tensor, target: Tensor, *, softcap: float, z_loss: float, **rest: Any) -> Results:
    for name, capped in (("tanh", softcap * f.tanh(x / softcap)), ("1/c", softcap * f.tanh(x * (1 / softcap)))):
        own = capped.gather(1, target[:, None])[:, 0]
        for how, lse in logsumexps(f, capped):
            yield f"{name}, {how}", (lse - own) + z_loss * lse * lse


def convolutions(f: Functions, x: Tensor, w: Tensor, b: Tensor, *, activation: str) -> Results:
    width, length = w.shape[1], x.shape[2]
    padded = torch.nn.functional.pad(x, (width - 1, 0))
    taps = [(padded[:, :, tap : tap + length], w[:, tap, None]) for tap in range(width)]
    bias = b[:, None].expand(x.shape)
    forward, fused, behind = bias, bias, torch.zeros_like(x)
    for part, weight in taps:
        forward, fused = forward + part * weight, fma(weight.expand(part.shape), part, fused)
    for part, weight in reversed(taps):
        behind = behind + part * weight
    ways = {"bias first": forward, "fused": fused, "bias last": behind + bias}
    for name, y in ways.items():
        yield name, y * f.sigmoid(y) if activation == "silu" else y


def cascades(f: Functions, o: Tensor, lse: Tensor) -> Results:
    largest = lse.amax(1, keepdim=True)
    shift = torch.where(largest == -math.inf, 0.0, largest)
    weights = f.exp(lse - shift)
    total = weights.sum(1)
    some = torch.where(total > 0, total, 1.0)
    seen = torch.where((lse > -math.inf)[..., None], o, 0.0)
    level = shift[:, 0] + f.log(total)
    yield "at once", ((seen * weights[..., None]).sum(1) / some[..., None], level)
    out, running = seen[:, 0], lse[:, 0]
    for state in range(1, o.shape[1]):
        top = torch.maximum(running, lse[:, state])
        top = torch.where(top == -math.inf, 0.0, top)
        a, b = f.exp(running - top), f.exp(lse[:, state] - top)
        whole = torch.where(a + b > 0, a + b, 1.0)
        out = out * (a / whole)[..., None] + seen[:, state] * (b / whole)[..., None]
        running = top + f.log(a + b)
    yield "pair by pair", (out, running)


def scans(f: Functions, u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, **_: Any) -> Results:
    decay, term = f.exp(delta[:, :, None] * a[:, :, None]), (delta * u)[:, :, None] * b[:, None]
    state, parts = torch.zeros(term.shape[:3]), []
    for t in range(u.shape[2]):
        state = decay[..., t] * state + term[..., t]
        parts.append(state)
    doubled, product, reach = term, decay, 1
    while reach < u.shape[2]:
        doubled = torch.cat(
            [doubled[..., :reach], product[..., reach:] * doubled[..., :-reach] + doubled[..., reach:]], -1
        )
        product = torch.cat([product[..., :reach], product[..., reach:] * product[..., :-reach]], -1)
        reach *= 2
    for name, states in (("in sequence", torch.stack(parts, -1)), ("by doubling", doubled)):
        yield name, (states * c[:, None]).sum(2) + u * skip[:, None]


def linear_attentions(
    f: Functions, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, *, gated: bool, scale: float
) -> Results:
    q, k, v, gate = (x.transpose(1, 2) for x in (q, k, v, gate[..., None]))
    length = q.shape[2]
    level = gate[..., 0].cumsum(-1)
    seen = torch.ones(length, length).tril().bool()
    weights = f.exp(torch.where(seen, level[..., :, None] - level[..., None, :], 0.0))
    scores = torch.where(seen, (q @ k.transpose(-1, -2)) * weights * scale, 0.0)
    yield "by scores", (scores @ v).transpose(1, 2)
    state, parts = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3]), []
    for t in range(length):
        state = f.exp(gate[:, :, t])[..., None] * state + k[:, :, t, :, None] * v[:, :, t, None, :]
        parts.append(((q[:, :, t] * scale)[..., None] * state).sum(-2))
    yield "by states", torch.stack(parts, 1)
