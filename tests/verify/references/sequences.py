"""What runs along a sequence: positions, recurrences, attention, tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .entry import Case

HEAD = "q[S,D], k[T,D], v[T,D] -> y[S,D]"
SQUARE = "q[S,D], k[S,D], v[S,D] -> y[S,D]"


def turned(x: Any, c: Any, s: Any) -> Any:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)


def _turned_by_complex(x: Any, c: Any, s: Any) -> Any:
    pairs = x.reshape(*x.shape[:-1], -1, 2).clone(memory_format=torch.contiguous_format)
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(c, s)).flatten(-2)


def _turned_in_place(x: Any, c: Any, s: Any) -> Any:
    y = torch.empty_like(x)
    y[..., ::2] = x[..., ::2] * c - x[..., 1::2] * s
    y[..., 1::2] = x[..., 1::2] * c + x[..., ::2] * s
    return y


def _turned_halves(x: Any, c: Any, s: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def _overwritten(x: Any, c: Any, s: Any) -> Any:
    y = x.clone()
    y[..., ::2] = y[..., ::2] * c - y[..., 1::2] * s
    y[..., 1::2] = y[..., 1::2] * c + y[..., ::2] * s
    return y


def moving_average(x: Any, a: Any) -> Any:
    keep, h, out = torch.sigmoid(a), torch.zeros_like(x[0]), []
    for row in x:
        h = keep * h + (1 - keep) * row
        out.append(h)
    return torch.stack(out)


def _averaged(x: Any, a: Any, restart: int = 0) -> Any:
    keep, out = torch.sigmoid(a), torch.empty_like(x)
    h = torch.zeros_like(x[0])
    for place in range(x.shape[0]):
        h = torch.zeros_like(h) if restart and place % restart == 0 else h
        h = h * keep + x[place] * (1 - keep)
        out[place] = h
    return out


def causal_head(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.T / q.shape[1] ** 0.5
    ahead = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(ahead, -torch.inf), -1) @ v


def _causal(q: Any, k: Any, v: Any, scale: float = 1.0, diagonal: int = 0, block: int = 4) -> Any:
    most, total = torch.full((q.shape[0], 1), -torch.inf), torch.zeros(q.shape[0], 1)
    out = torch.zeros(q.shape[0], v.shape[1])
    rows = torch.arange(q.shape[0])[:, None]
    for first in range(0, k.shape[0], block):
        keys = torch.arange(first, min(first + block, k.shape[0]))
        scores = (q @ k[keys].T * (scale / q.shape[1] ** 0.5)).masked_fill(keys > rows + diagonal, -torch.inf)
        now = torch.maximum(most, scores.amax(-1, keepdim=True))
        shift = torch.where(now.isinf(), 0.0, now)
        weights, old = torch.exp(scores - shift), torch.exp(most - shift)
        total, out, most = total * old + weights.sum(-1, keepdim=True), out * old + weights @ v[keys], now
    return out / total


def _whole_blocks(q: Any, k: Any, v: Any) -> Any:
    keys = max(k.shape[0] // 4 * 4, 1)
    return _causal(q, k[:keys], v[:keys])


def sloped_head(q: Any, k: Any, v: Any) -> Any:
    apart = torch.arange(k.shape[0])[None, :] - torch.arange(q.shape[0])[:, None]
    return torch.softmax(q @ k.T / q.shape[1] ** 0.5 - 0.5 * apart.abs(), -1) @ v


def _sloped(q: Any, k: Any, v: Any, slope: float = -0.5) -> Any:
    apart = (torch.arange(k.shape[0])[None, :] - torch.arange(q.shape[0])[:, None]).abs()
    scores = torch.einsum("sd,td->st", q, k) / q.shape[1] ** 0.5 + slope * apart
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights @ v) / weights.sum(-1, keepdim=True)


def token_mix(x: Any, m: Any) -> Any:
    before = F.pad(x, (0, 0, 1, 0))[:-1]
    return x * m + before * (1 - m)


def _mixed(x: Any, m: Any) -> Any:
    y = x * m
    y[1:] += x[:-1] * (1 - m)
    return y


def bag_of_tokens(table: Any, ids: Any) -> Any:
    return table[ids].mean(1)


def _bagged(table: Any, ids: Any) -> Any:
    total = torch.zeros(ids.shape[0], table.shape[1])
    for place in range(ids.shape[1]):
        total += table[ids[:, place]]
    return total / ids.shape[1]


def summed_by_group(x: Any, ids: Any, out: Any) -> Any:
    return out.index_add(0, ids, x)


def _grouped(x: Any, ids: Any, out: Any) -> Any:
    found = out.clone()
    for row, group in zip(x, ids.tolist(), strict=True):
        found[group] += row
    return found


def _last_of_group(x: Any, ids: Any, out: Any) -> Any:
    found = out.clone()
    found[ids] = out[ids] + x
    return found


ROPE, GROUPS = "x[T,2*D], c[T,D], s[T,D] -> y[T,2*D]", "x[T,D], ids:int64[T]=index(G), out[G,D] -> y[G,D]"
CASES = (
    Case(turned, ROPE, (_turned_by_complex, _turned_in_place), {
        "halves in place of pairs": _turned_halves,
        "the other way round": lambda x, c, s: turned(x, c, -s),
        "what was overwritten is read": _overwritten,
    }),
    Case(moving_average, "x[T,D], a[D] -> y[T,D]", (_averaged,), {
        "the state is lost every 16 places": lambda x, a: _averaged(x, a, 16),
        "weights swapped": lambda x, a: _averaged(x, -a),
        "the state in bfloat16": lambda x, a: moving_average(x, a).bfloat16().float(),
    }, asked={"shapes": {"T": [1, 3, 16, 33, 70]}}),
    Case(causal_head, SQUARE, (_causal, lambda q, k, v: _causal(q, k, v, block=1)), {
        "one place ahead is seen": lambda q, k, v: _causal(q, k, v, diagonal=1),
        "unscaled": lambda q, k, v: _causal(q, k, v, scale=q.shape[1] ** 0.5),
        "the last keys are left out": _whole_blocks,
    }, asked={"shapes": {"S": [1, 3, 7, 16, 33]}}),
    Case(sloped_head, HEAD, (_sloped,), {
        "the slope upward": lambda q, k, v: _sloped(q, k, v, 0.5),
        "half the slope": lambda q, k, v: _sloped(q, k, v, -0.25),
        "no slope": lambda q, k, v: _sloped(q, k, v, 0.0),
    }),
    Case(token_mix, "x[T,D], m[D] -> y[T,D]", (_mixed, lambda x, m: torch.stack(
        [row * m + (x[i - 1] if i else torch.zeros_like(row)) * (1 - m) for i, row in enumerate(x)])), {
        "the last before the first": lambda x, m: x * m + x.roll(1, 0) * (1 - m),
        "the one after": lambda x, m: x * m + F.pad(x, (0, 0, 0, 1))[1:] * (1 - m),
        "weights swapped": lambda x, m: token_mix(x, 1 - m),
    }),
    Case(bag_of_tokens, "table[V,D], ids:int64[B,L]=index(V) -> y[B,D]", (
        _bagged, lambda table, ids: F.embedding_bag(ids, table, mode="mean"),
    ), {
        "summed": lambda table, ids: table[ids].sum(1),
        "the first token is left out": lambda table, ids: table[ids[:, 1:]].sum(1) / ids.shape[1],
        "the next row": lambda table, ids: _bagged(table, (ids + 1) % table.shape[0]),
    }),
    Case(summed_by_group, GROUPS, (_grouped,), {
        "of several rows one counts": _last_of_group,
        "what was there is lost": lambda x, ids, out: torch.zeros_like(out).index_add(0, ids, x),
        "the last row is left out": lambda x, ids, out: out.index_add(0, ids[:-1], x[:-1]),
    }),
)  # fmt: skip
