"""Honest float32 kernels of divergences, capped losses, convolutions, scans and merged states, in many orders."""

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch

from tests.golden.float32 import LN2, LOG2E, SUMS, Functions, fma
from tests.golden.honest_rows import log_softmaxes, logsumexps

Tensor = torch.Tensor
Results = Iterator[tuple[str, Any]]
FEW = ("forward", "pairwise", "32 lanes")


def _logs(f: Functions, x: Tensor) -> list[tuple[str, Tensor]]:
    found = dict(log_softmaxes(f, x))
    return [(name, found[name]) for name in sorted(found)[:: max(len(found) // 4, 1)]]


def softmax(f: Functions, x: Tensor) -> Tensor:
    """Shares that don't come from their logarithms."""
    weights = f.exp(x - x.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def kl_divs(f: Functions, x: Tensor, target: Tensor, *, temperature: float, reduction: str) -> Results:
    q_logs, p_logs = _logs(f, x / temperature), _logs(f, target / temperature)
    for (name, q), (_, p) in zip(q_logs, p_logs, strict=True):
        share = f.exp(p)
        for order in FEW:
            add = SUMS[order]
            yield f"share (log - log), {name}, {order}", add(share * (p - q))
            yield f"apart, {name}, {order}", add(share * p) - add(share * q)
            yield f"own shares, {name}, {order}", add(softmax(f, target / temperature) * (p - q))


def jsds(f: Functions, x: Tensor, target: Tensor, *, beta: float, reduction: str) -> Results:
    for (name, q), (_, p) in zip(_logs(f, x), _logs(f, target), strict=True):
        one, other = p + math.log(beta), q + math.log(1 - beta)
        mixed = torch.maximum(one, other) + torch.log1p(f.exp(-(one - other).abs()))
        for order in FEW:
            add = SUMS[order]
            yield f"{name}, {order}", add(f.exp(p) * (p - mixed)) * beta + add(f.exp(q) * (q - mixed)) * (1 - beta)
            apart = add(f.exp(p) * p) - add(f.exp(p) * mixed), add(f.exp(q) * q) - add(f.exp(q) * mixed)
            yield f"sums apart, {name}, {order}", apart[0] * beta + apart[1] * (1 - beta)
            shares = softmax(f, target), softmax(f, x)
            for how, level in (
                ("own shares", mixed),
                ("their mixture", f.log(beta * shares[0] + (1 - beta) * shares[1])),
            ):
                terms = beta * shares[0] * (p - level) + (1 - beta) * shares[1] * (q - level)
                yield f"{how}, {name}, {order}", add(torch.where(shares[0] + shares[1] > 1e-30, terms, 0.0))
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


def merges(f: Functions, oa: Tensor, la: Tensor, ob: Tensor, lb: Tensor) -> Results:
    """In base e and base 2, by the sum of weights or by the new log-sum-exp, and by a logistic function."""
    m = torch.maximum(la, lb)
    wide = [part[..., None] for part in (la, lb, m)]
    for name, wa, wb in (
        ("base e", f.exp(la - m), f.exp(lb - m)),
        ("base 2", f.exp2((la - m) * LOG2E), f.exp2((lb - m) * LOG2E)),
        ("folded", f.exp2(fma(la, LOG2E, -(m * LOG2E))), f.exp2(fma(lb, LOG2E, -(m * LOG2E)))),
    ):
        total = wa + wb
        lse = m + f.log(total)
        a, b, s = wa[..., None], wb[..., None], total[..., None]
        yield f"{name}, divided last", (f.divide(a * oa + b * ob, s), lse)
        yield f"{name}, shares", (f.divide(a, s) * oa + f.divide(b, s) * ob, (m * LOG2E + f.log2(total)) * LN2)
    lse = m + f.log(f.exp(la - m) + f.exp(lb - m))
    yield "by the new lse", (f.exp(wide[0] - lse[..., None]) * oa + f.exp(wide[1] - lse[..., None]) * ob, lse)
    share = f.sigmoid(wide[0] - wide[1])
    softplus = torch.clamp(lb - la, min=0) + f.log(1 + f.exp(-(lb - la).abs()))
    yield "logistic", (fma(share, oa - ob, ob), la + softplus)
    yield "logistic, unfused", (ob - share * (ob - oa), la + softplus)


def cascades(f: Functions, o: Tensor, lse: Tensor) -> Results:
    largest = lse.amax(1, keepdim=True)
    shift = torch.where(largest == -math.inf, 0.0, largest)
    weights = f.exp(lse - shift)
    total = weights.sum(1)
    some = torch.where(total > 0, total, 1.0)
    seen = torch.where((lse > -math.inf)[..., None], o, 0.0)
    yield "at once", ((seen * weights[..., None]).sum(1) / some[..., None], shift[:, 0] + f.log(total))
    states = [(seen[:, state], lse[:, state]) for state in range(o.shape[1])]
    for place, (name, _) in enumerate(merges(f, *states[0], *states[0])):

        def merged(one: Any, other: Any, place: int = place) -> Any:
            """By one of the forms, where both states hold something."""
            (oa, la), (ob, lb) = one, other
            out, level = list(merges(f, oa, la, ob, lb))[place][1]
            for (kept, known), empty in ((one, lb == -math.inf), (other, la == -math.inf)):
                out, level = torch.where(empty[..., None], kept, out), torch.where(empty, known, level)
            return out, level

        yield f"one after the other, {name}", reduce(merged, states)
        yield f"from the last on, {name}", reduce(lambda one, other: merged(other, one), reversed(states))
        rest = states
        while len(rest) > 1:
            rest = [merged(*rest[i : i + 2]) if i + 1 < len(rest) else rest[i] for i in range(0, len(rest), 2)]
        yield f"as a tree, {name}", rest[0]


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
