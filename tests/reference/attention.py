"""Attention in all its forms: whole, paged, ragged, its gradient, and two parts of it merged."""

import math
from typing import Any

import torch
from torch import Tensor

from .gradients import by_autograd

Outputs = tuple[Tensor, ...]


def attention(
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
    sinks: Tensor | bool | None = None,
    return_lse: bool = False,
) -> Outputs:
    """Query by query, over the keys that it sees; the sink is one more key, whose value is zero."""
    queries, keys = q.shape[2], k.shape[2]
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scale = max(q.shape[3], 1) ** -0.5 if scale is None else scale
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    for i in range(queries):
        own = i + (0 if causal == "top_left" else keys - queries)
        low, high = (0, keys - 1) if window is None else (max(0, own - window[0]), min(keys - 1, own + window[1]))
        high = high if causal == "none" else min(high, own)
        seen = slice(low, max(low, high + 1))
        scores = (k[:, :, seen] @ q[:, :, i, :, None].double())[..., 0] * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi and slopes is not None:
            scores = scores - slopes.double()[:, None] * (torch.arange(keys)[seen] - (i + keys - queries)).abs()
        width = scores.shape[2]
        if isinstance(sinks, Tensor):
            scores = torch.cat([scores, sinks.double()[:, None].expand(*scores.shape[:2], 1)], -1)
        lse[:, :, i] = torch.logsumexp(scores, -1)
        out[:, :, i] = (torch.softmax(scores, -1)[..., None, :width] @ v[:, :, seen])[..., 0, :]
    return (out, lse) if return_lse else (out,)


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Outputs:
    """Each sequence's keys and values put together slot by slot."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    page = k_cache.shape[1]
    for b, length in enumerate(seq_lens.tolist()):
        if length:
            places = torch.arange(length)
            slots = block_table[b, places // page].long(), places % page
            k, v = (cache.double()[slots].transpose(0, 1)[None] for cache in (k_cache, v_cache))
            out[b] = attention(q[b, None, :, None], k * k_scale, v * v_scale, scale=scale)[0][0, :, 0]
    return (out,)


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options: Any
) -> Outputs:
    """Each sequence as if it were alone."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_seqlens_q, cu_seqlens_k))
        alone = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        out[rows] = attention(*alone, **options)[0][0].transpose(0, 1)
    return (out,)


def merge_states(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> Outputs:
    out, lse = torch.zeros(o_a.shape, dtype=torch.float64), torch.full(lse_a.shape, -math.inf, dtype=torch.float64)
    for t in range(o_a.shape[0]):
        for h in range(o_a.shape[1]):
            states = [
                (float(s[t, h]), o[t, h].double()) for s, o in ((lse_a, o_a), (lse_b, o_b)) if s[t, h] > -math.inf
            ]
            if states:
                largest = max(level for level, _ in states)
                total = sum(math.exp(level - largest) for level, _ in states)
                lse[t, h] = largest + math.log(total)
                out[t, h] = sum((math.exp(level - largest) / total * o for level, o in states), out[t, h])
    return out, lse


def mla_decode(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    return_lse: bool = False,
) -> Outputs:
    """As attention of each sequence to one key of both parts and one value for all heads."""
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    queries = torch.cat([q.double(), q_rope.double()], -1)
    for b, length in enumerate(seq_lens.tolist()):
        places = torch.arange(length)
        if length:
            slots = block_table[b, places // cache.shape[1]].long(), places % cache.shape[1]
            latent, rope = cache.double()[slots], rope_cache.double()[slots]
            keys = torch.cat([latent, rope], -1)
            found = attention(
                queries[b, None, :, None], keys[None, None], latent[None, None], scale=scale, return_lse=True
            )
            out[b], lse[b] = found[0][0, :, 0], found[1][0, :, 0]
    return (out, lse) if return_lse else (out,)


def merge_cascade(o: Tensor, lse: Tensor) -> Outputs:
    merged = o[:, 0].double(), lse[:, 0].double()
    merged = torch.where((merged[1] == -math.inf)[..., None], 0.0, merged[0]), merged[1]
    for state in range(1, o.shape[1]):
        first, second = merge_states(*merged, o[:, state], lse[:, state])
        merged = first, second
    return merged


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: Tensor,
    block: int = 16,
    causal: str = "none",
    scale: float | None = None,
) -> Outputs:
    """Query by query, over the keys of the blocks that it sees."""
    shared = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    places = torch.arange(k.shape[2])
    for b, h, i in [(b, h, i) for b in range(q.shape[0]) for h in range(q.shape[1]) for i in range(q.shape[2])]:
        seen = block_mask[h, i // block][places // block] == 1
        if causal != "none":
            seen &= places <= i + k.shape[2] - q.shape[2]
        if bool(seen.any()):
            keys, values = k[b, h // shared, seen].double(), v[b, h // shared, seen].double()
            factor = max(q.shape[3], 1) ** -0.5 if scale is None else scale
            out[b, h, i] = torch.softmax(keys @ q[b, h, i].double() * factor, 0) @ values
    return (out,)


def selective_scan(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, softplus: bool = False
) -> Outputs:
    u, delta, a, b, c = (x.double() for x in (u, delta, a, b, c))
    delta = torch.nn.functional.softplus(delta, threshold=1000.0) if softplus else delta
    state, parts = torch.zeros(*u.shape[:2], a.shape[1], dtype=torch.float64), []
    for t in range(u.shape[2]):
        step = delta[:, :, t, None]
        state = torch.exp(step * a) * state + step * b[:, None, :, t] * u[:, :, t, None]
        parts.append((state * c[:, None, :, t]).sum(-1) + skip.double() * u[:, :, t])
    return (torch.stack(parts, 2),)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *gate: Tensor, scale: float | None = None, gated: bool = False
) -> Outputs:
    q, k, v = (x.double() for x in (q, k, v))
    factor = max(q.shape[3], 1) ** -0.5 if scale is None else scale
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=torch.float64)
    out = torch.zeros(v.shape, dtype=torch.float64)
    for t in range(q.shape[1]):
        decay = torch.exp(gate[0][:, t].double())[..., None, None] if gated else 1.0
        state = decay * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        out[:, t] = factor * (q[:, t, :, None] @ state)[:, :, 0]
    return (out,)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    scale: float | None = None,
    normalized: bool = False,
) -> Outputs:
    """Step by step, the state as a matrix that each place multiplies and adds to."""
    q, k, v, gate, beta = (x.double() for x in (q, k, v, gate, beta))
    if normalized:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    factor = max(q.shape[3], 1) ** -0.5 if scale is None else scale
    one = torch.eye(q.shape[3], dtype=torch.float64)
    out = torch.zeros(v.shape, dtype=torch.float64)
    for batch, head in [(b, h) for b in range(q.shape[0]) for h in range(q.shape[2])]:
        state = torch.zeros(v.shape[3], q.shape[3], dtype=torch.float64)
        for t in range(q.shape[1]):
            key, step = k[batch, t, head], beta[batch, t, head]
            state = state * torch.exp(gate[batch, t, head]) @ (one - step * torch.outer(key, key))
            state = state + step * torch.outer(v[batch, t, head], key)
            out[batch, t, head] = factor * (state @ q[batch, t, head])
    return (out,)


attention_backward = by_autograd(attention, 3)
attention_varlen_backward = by_autograd(attention_varlen, 3)
selective_scan_backward = by_autograd(selective_scan, 6)
