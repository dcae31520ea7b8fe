"""Products of matrices, windows over planes, and sequences: positions, recurrences, attention, tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .entry import Case

LAYER = "x[T,K], w[N,K], b[N] -> y[T,N]"


def linear_relu(x: Any, w: Any, b: Any) -> Any:
    return F.relu(F.linear(x, w, b))


def _split_k(x: Any, w: Any, b: Any) -> Any:
    half = x.shape[1] // 2
    return (x[:, :half] @ w[:, :half].T + x[:, half:] @ w[:, half:].T + b).clamp(min=0)


def _whole_tiles_of_k(x: Any, w: Any, b: Any) -> Any:
    whole = max(x.shape[1] // 4 * 4, 1)
    return torch.relu(x[:, :whole] @ w[:, :whole].T + b)


def _sums_in_bfloat16(x: Any, w: Any, b: Any) -> Any:
    total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.bfloat16)
    for place in range(0, x.shape[1], 8):
        total += (x[:, place : place + 8] @ w[:, place : place + 8].T).bfloat16()
    return torch.relu(total.float() + b)


def transposed_product(a: Any, b: Any) -> Any:
    return a.T @ b


def half_product(x: Any, w: Any) -> Any:
    return x @ w.T


def _half_in_float32(x: Any, w: Any) -> Any:
    return (x.float() @ w.float().T).to(x.dtype)


def _half_by_blocks(x: Any, w: Any, between: torch.dtype = torch.float32) -> Any:
    total = torch.zeros(x.shape[0], w.shape[0], dtype=between)
    for place in range(0, x.shape[1], 16):
        total = (total.float() + x[:, place : place + 16].float() @ w[:, place : place + 16].float().T).to(between)
    return total.to(x.dtype)


def scaled_batch(c: Any, a: Any, b: Any) -> Any:
    return torch.baddbmm(c, a, b, beta=0.5, alpha=2.0)


def _batch_by_batch(c: Any, a: Any, b: Any) -> Any:
    return torch.stack([2 * (one @ two) + three * 0.5 for three, one, two in zip(c, a, b, strict=True)])


def gated_layer(x: Any, w: Any, v: Any) -> Any:
    return F.silu(x @ w.T) * (x @ v.T)


def _one_product(x: Any, w: Any, v: Any) -> Any:
    gate, up = (x @ torch.cat([w, v]).T).split(w.shape[0], -1)
    return gate / (1 + torch.exp(-gate)) * up


def squared_distances(x: Any, y: Any) -> Any:
    return (x[:, None] - y[None]).square().sum(-1)


def _row_by_row(x: Any, y: Any) -> Any:
    return torch.stack([((row - y) ** 2).sum(-1) for row in x])


def low_rank(x: Any, w: Any, a: Any, b: Any) -> Any:
    return x @ w.T + (x @ a.T) @ b.T * 2.0


def _low_rank(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.addmm(F.linear(x, w), F.linear(x, a), b.T, alpha=2.0)


PRODUCTS = (
    Case(linear_relu, LAYER, _split_k, {
        "the tail of K is left out": _whole_tiles_of_k,
        "sums in bfloat16": _sums_in_bfloat16,
        "the bias comes last": lambda x, w, b: torch.relu(x @ w.T) + b,
    }, asked={"shapes": {"K": [2, 7, 33, 131]}}),  # PyTorch's product is wrong of one column whose rows lie 4 GiB apart
    Case(transposed_product, "a[K,M], b[K,N] -> c[M,N]", lambda a, b: torch.einsum("km,kn->mn", a, b), {
        "not transposed where it is square": lambda a, b: a @ b if a.shape[0] == a.shape[1] else a.T @ b,
        "the first row counts twice": lambda a, b: a.T @ b + a[:1].T @ b[:1],
        "the last column is a copy": lambda a, b: (a.T @ b)[:, [*range(max(b.shape[1] - 1, 1)), b.shape[1] - 2]]
        if b.shape[1] > 1 else a.T @ b,
    }),
    Case(half_product, "x[T,K], w[N,K] -> y[T,N]", _half_in_float32, {
        "sums kept in bfloat16": lambda x, w: _half_by_blocks(x, w, torch.bfloat16),
        "truncated": lambda x, w: ((x.float() @ w.float().T).view(torch.int32) & -65536).view(torch.float32).bfloat16(),
        "one block of K is left out beyond 64": lambda x, w: _half_in_float32(x[:, :64], w[:, :64]),
    }, dtype="bfloat16"),
    Case(scaled_batch, "c[B,M,N], a[B,M,K], b[B,K,N] -> y[B,M,N]", _batch_by_batch, {
        "c as it is": lambda c, a, b: c + 2 * (a @ b),
        "both scaled": lambda c, a, b: 2 * (0.5 * c + a @ b),
        "the first matrix for all": lambda c, a, b: 0.5 * c + 2 * (a @ b[:1]),
    }),
    Case(gated_layer, "x[T,K], w[N,K], v[N,K] -> y[T,N]", _one_product, {
        "gate and value swapped": lambda x, w, v: gated_layer(x, v, w),
        "a logistic gate": lambda x, w, v: torch.sigmoid(x @ w.T) * (x @ v.T),
        "the gate in float16": lambda x, w, v: F.silu((x @ w.T).half()).float() * (x @ v.T),
    }),
    Case(squared_distances, "x[T,D], y[S,D] -> d[T,S]", _row_by_row, {
        "expanded, which cancels": lambda x, y: (x * x).sum(-1)[:, None] - 2 * x @ y.T + (y * y).sum(-1),
        "not squared": lambda x, y: torch.cdist(x, y),
        "divided by the length": lambda x, y: squared_distances(x, y) / x.shape[1],
    }),
    Case(low_rank, "x[T,K], w[N,K], a[R,K], b[N,R] -> y[T,N]", _low_rank, {
        "unscaled": lambda x, w, a, b: x @ w.T + x @ a.T @ b.T,
        "between the factors in bfloat16": lambda x, w, a, b: x @ w.T + (x @ a.T).bfloat16().float() @ b.T * 2,
        "the first rank alone": lambda x, w, a, b: x @ w.T + x @ a[:1].T @ b[:, :1].T * 2,
    }),
)  # fmt: skip


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


WINDOWS = (
    Case(causal_conv_silu, "x[N,C,L], w[C,3], b[C] -> y[N,C,L]", _shifted_sums, {
        "the end is seen from the start": _wrapped,
        "mirrored": lambda x, w, b: _shifted_sums(x, w.flip(-1), b),
        "one place ahead": lambda x, w, b: F.silu(F.conv1d(F.pad(x, (1, 1)), w[:, None], b, groups=x.shape[1])),
    }, asked={"shapes": {"L": [3, 8, 17]}}),
    Case(plane_conv, "x[N,C,H,W], w[O,C,3,3] -> y[N,O,H,W]", _by_columns, {
        "edges are repeated": _edges_repeated,
        "rows and columns swapped": lambda x, w: F.conv2d(x, w.transpose(2, 3), padding=1),
        "the first channel alone": lambda x, w: F.conv2d(x[:, :1], w[:, :1], padding=1),
    }),
    Case(largest_around, PLANE, _separated, {
        "zeros around": lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, stride=1),
        "two by two": lambda x: F.max_pool2d(F.pad(x, (1, 0, 1, 0), value=-torch.inf), 2, stride=1),
        "NaN is left out": lambda x: F.max_pool2d(torch.where(x.isnan(), -torch.inf, x), 3, stride=1, padding=1),
    }, warned=frozenset({"NaN is left out"})),
    Case(mean_around, PLANE, _mean_by_sums, {
        "without the padding": lambda x: F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False),
        "by running sums, which cancel": _mean_by_running_sums,
        "eight neighbours": lambda x: (_mean_by_sums(x) * 9 - x) / 8,
    }),
    Case(shuffled, "x[N,4*C,H,W] -> y[N,C,2*H,2*W]", _shuffled, {
        "rows and columns swapped": lambda x: _shuffled(x, (0, 1, 4, 3, 5, 2)),
        "channels interleaved": lambda x: _shuffled(torch.cat([x[:, k::4] for k in range(4)], 1))
        if x.shape[1] > 4 else _shuffled(x).flip(-1),
        "not halved": lambda x: F.pixel_shuffle(x, 2),
    }),
    Case(enlarged_sum, "x[N,C,H,W], y[N,C,2*H,2*W] -> z[N,C,2*H,2*W]",
         lambda x, y: y + x.repeat_interleave(2, 2).repeat_interleave(2, 3), {
        "bilinear": lambda x, y: F.interpolate(x, scale_factor=2, mode="bilinear") + y,
        "tiled": lambda x, y: x.repeat(1, 1, 2, 2) + y,
        "enlarged along rows": lambda x, y: x.repeat_interleave(2, 2).repeat(1, 1, 1, 2) + y,
    }),
    Case(global_mean, "x[N,C,H,W] -> y[N,C]", lambda x: x.flatten(2).sum(-1) / x[0, 0].numel(), {
        "the last row is left out": lambda x: x[:, :, : max(x.shape[2] - 1, 1)].sum((2, 3)) / (x.shape[2] * x.shape[3]),
        "divided by the height twice": lambda x: x.sum((2, 3)) / (x.shape[2] * x.shape[2]),
        "sums in float16": lambda x: x.flatten(2).half().mean(-1).float(),
    }),
)  # fmt: skip


HEAD = "q[S,D], k[T,D], v[T,D] -> y[S,D]"
SQUARE = "q[S,D], k[S,D], v[S,D] -> y[S,D]"


def turned(x: Any, c: Any, s: Any) -> Any:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)


def _turned_by_complex(x: Any, c: Any, s: Any) -> Any:
    pairs = x.reshape(*x.shape[:-1], -1, 2).clone(memory_format=torch.contiguous_format)
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(c, s)).flatten(-2)


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
SEQUENCES = (
    Case(turned, ROPE, _turned_by_complex, {
        "halves in place of pairs": _turned_halves,
        "the other way round": lambda x, c, s: turned(x, c, -s),
        "what was overwritten is read": _overwritten,
    }),
    Case(moving_average, "x[T,D], a[D] -> y[T,D]", _averaged, {
        "the state is lost every 16 places": lambda x, a: _averaged(x, a, 16),
        "weights swapped": lambda x, a: _averaged(x, -a),
        "the state in bfloat16": lambda x, a: moving_average(x, a).bfloat16().float(),
    }, asked={"shapes": {"T": [1, 3, 16, 33, 70]}}),
    Case(causal_head, SQUARE, _causal, {
        "one place ahead is seen": lambda q, k, v: _causal(q, k, v, diagonal=1),
        "unscaled": lambda q, k, v: _causal(q, k, v, scale=q.shape[1] ** 0.5),
        "the last keys are left out": _whole_blocks,
    }, asked={"shapes": {"S": [1, 3, 7, 16, 33]}}),
    Case(sloped_head, HEAD, _sloped, {
        "the slope upward": lambda q, k, v: _sloped(q, k, v, 0.5),
        "half the slope": lambda q, k, v: _sloped(q, k, v, -0.25),
        "no slope": lambda q, k, v: _sloped(q, k, v, 0.0),
    }),
    Case(token_mix, "x[T,D], m[D] -> y[T,D]", _mixed, {
        "the last before the first": lambda x, m: x * m + x.roll(1, 0) * (1 - m),
        "the one after": lambda x, m: x * m + F.pad(x, (0, 0, 0, 1))[1:] * (1 - m),
        "weights swapped": lambda x, m: token_mix(x, 1 - m),
    }),
    Case(bag_of_tokens, "table[V,D], ids:int64[B,L]=index(V) -> y[B,D]", _bagged, {
        "summed": lambda table, ids: table[ids].sum(1),
        "the first token is left out": lambda table, ids: table[ids[:, 1:]].sum(1) / ids.shape[1],
        "the next row": lambda table, ids: _bagged(table, (ids + 1) % table.shape[0]),
    }),
    Case(summed_by_group, GROUPS, _grouped, {
        "of several rows one counts": _last_of_group,
        "what was there is lost": lambda x, ids, out: torch.zeros_like(out).index_add(0, ids, x),
        "the last row is left out": lambda x, ids, out: out.index_add(0, ids[:-1], x[:-1]),
    }),
)  # fmt: skip
