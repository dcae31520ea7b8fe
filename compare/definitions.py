"""What each kind of region computes: PyTorch functions of [tokens, features], one for every region of a model.

They are references (docs/references.md): evaluated in ball arithmetic they give the golden and the tolerance of a
region on the inputs that a run had; differentiated in float64 they carry a local error to the log-probabilities. Casts
to float32 are those of transformers' own text: what is computed there in float32 is promised to be.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Return a tensor in float32, where it isn't wider."""
    return x if x.dtype == torch.float64 else x.float()


def embedding(table: Tensor, ids: Tensor, *, scale: float = 1.0) -> Tensor:
    """Return the rows of ``table`` [V, D] at ``ids`` [T, 1], times ``scale``."""
    rows = F.embedding(ids[:, 0], table)
    return rows if scale == 1.0 else rows * scale


def rmsnorm(x: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0) -> Tensor:
    """Return x / sqrt(mean x^2 + eps) * (weight + offset) of each ``weight.shape[0]`` features of x [T, N]."""
    rows = wide(x.reshape(-1, weight.shape[0]))
    normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        out = normed * (wide(weight) + offset)
        return out.to(x.dtype).reshape(x.shape)
    return (weight * normed.to(x.dtype)).reshape(x.shape)


def added_rmsnorm(weight: Tensor, *terms: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return `rmsnorm` of a sum, which may be stored first or not."""
    return rmsnorm(total(*terms), weight, eps=eps, offset=offset)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias along the last axis of x [T, N]."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] weight^T [K, N] + bias [N]; a weight in another dtype, of codes times scales, in float32."""
    if weight.dtype != x.dtype:
        return F.linear(wide(x), wide(weight), None if bias is None else wide(bias)).to(x.dtype)
    return F.linear(x, weight, bias)


def capped(logits: Tensor, *, softcap: float) -> Tensor:
    """Return softcap * tanh(logits / softcap)."""
    return torch.tanh(logits / softcap) * softcap


def rotary_table(positions: Tensor, frequencies: Tensor, *, scale: float = 1.0, dtype: str = "float32") -> Any:
    """Return cosines and sines [T, 2 F] of positions [T, 1] times frequencies [F], each frequency twice, times
    scale."""
    angles = wide(positions) * wide(frequencies)[None, :]
    angles = torch.cat([angles, angles], -1)
    return (angles.cos() * scale).to(getattr(torch, dtype)), (angles.sin() * scale).to(getattr(torch, dtype))


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, heads: int, interleaved: bool = False) -> Tensor:
    """Rotate the first R features of each head of x [T, heads * D] by cos, sin [T, R]: pairs (i, i + R/2), or, where
    interleaved, (2i, 2i + 1), which come out as halves."""
    x = x.reshape(len(x), heads, -1)
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    if interleaved:
        turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], -1)
    first, second = turned[..., : width // 2], turned[..., width // 2 :]
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, rest], -1).reshape(len(x), -1)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, heads: int, groups: int, interleaved: bool) -> Any:
    """Rotate queries [T, heads * D] and keys [T, groups * D] (`rotated`)."""
    return (
        rotated(q, cos, sin, heads=heads, interleaved=interleaved),
        rotated(k, cos, sin, heads=groups, interleaved=interleaved),
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    groups: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Return causal attention of q [T, heads * D] to k [T, groups * D] and v [T, groups * Dv], [T, heads * Dv].

    ``window``: how many keys a query sees, its own included; 0: all before it.
    """
    if softcap:
        counts = {"heads": heads, "groups": groups}
        return stepwise_attention(q, k, v, **counts, scale=scale, window=window, softcap=softcap)
    length = len(q)
    q, k, v = (x.reshape(length, count, -1).transpose(0, 1) for x, count in ((q, heads), (k, groups), (v, groups)))
    k, v = (x.repeat_interleave(heads // groups, 0) for x in (k, v))
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    if window:
        mask = mask & torch.ones(length, length, dtype=torch.bool).triu(1 - window)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(0, 1).reshape(length, -1)


def stepwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    groups: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    ahead: int = 0,
) -> Tensor:
    """Return `attention` operation by operation, each stored in the tensors' dtype, as transformers' eager attention.

    A query sees ``ahead`` keys behind its own.
    """
    length = len(q)
    q, k, v = (x.reshape(length, count, -1).transpose(0, 1) for x, count in ((q, heads), (k, groups), (v, groups)))
    k, v = (x.repeat_interleave(heads // groups, 0) for x in (k, v))
    mask = torch.ones(length, length, dtype=torch.bool).tril(min(ahead, length))
    if window:
        mask = mask & torch.ones(length, length, dtype=torch.bool).triu(1 - window)
    scores = q @ k.mT * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = wide(scores.masked_fill(~mask, torch.finfo(scores.dtype).min)).softmax(-1).to(q.dtype)
    return (weights @ v).transpose(0, 1).reshape(length, -1)


def attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *, heads: int, groups: int, scale: float, window: int = 0
) -> Tensor:
    """Return `attention` in which each head has one more score, ``sinks`` [heads], without a value."""
    length = len(q)
    q, k, v = (x.reshape(length, count, -1).transpose(0, 1) for x, count in ((q, heads), (k, groups), (v, groups)))
    k, v = (x.repeat_interleave(heads // groups, 0) for x in (k, v))
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    if window:
        mask = mask & torch.ones(length, length, dtype=torch.bool).triu(1 - window)
    scores = (q @ k.mT * scale).masked_fill(~mask, -math.inf)
    column = sinks.reshape(heads, 1, 1).expand(heads, length, 1).to(scores.dtype)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1].to(q.dtype)
    return (weights @ v).transpose(0, 1).reshape(length, -1)


def rotary_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    groups: int,
    scale: float,
    interleaved: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Return `attention` of rotated queries and keys, where what lies between isn't recorded."""
    q, k = rotary(q, k, cos, sin, heads=heads, groups=groups, interleaved=interleaved)
    return attention(q, k, v, heads=heads, groups=groups, scale=scale, window=window, softcap=softcap)


def output_gate(x: Tensor, q_and_gate: Tensor, *, heads: int) -> Tensor:
    """Return x [T, heads * D] times the logistic function of the second half of each head of [T, heads * 2 D]."""
    gate = q_and_gate.reshape(len(x), heads, 2, -1)[:, :, 1]
    return x * torch.sigmoid(gate.reshape(x.shape))


def latent_rotary(
    q: Tensor, k_rotary: Tensor, cos: Tensor, sin: Tensor, *, heads: int, plain: int, interleaved: bool
) -> Any:
    """Rotate the features from ``plain`` on of each head of q [T, heads * D], and the one rotary key [T, R]."""
    x = q.reshape(len(q), heads, -1)
    turned = rotated(x[..., plain:].reshape(len(q), -1), cos, sin, heads=heads, interleaved=interleaved)
    q = torch.cat([x[..., :plain], turned.reshape(len(q), heads, -1)], -1).reshape(len(q), -1)
    return q, rotated(k_rotary, cos, sin, heads=1, interleaved=interleaved)


def latent_attention(
    q: Tensor,
    k_rotary: Tensor,
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    plain: int,
    scale: float,
    interleaved: bool,
    rotates: str = "qk",
) -> Tensor:
    """Return multi-head latent attention, of queries [T, heads * D] and the key [T, R] that all heads share, both
    before they are rotated, and of keys and values [T, heads * (plain + Dv)] made of the latent.

    ``rotates``: which of queries and key are rotated; the other is put in the same order of features.
    """
    length, still = len(q), (torch.ones_like(cos), torch.zeros_like(sin))
    turned = [
        latent_rotary(q, k_rotary, *((cos, sin) if name in rotates else still), heads=heads, plain=plain,
                      interleaved=interleaved)[order]
        for order, name in enumerate("qk")
    ]  # fmt: skip
    q, k_rotary = turned
    each = kv.reshape(length, heads, -1)
    shared = k_rotary[:, None, :].expand(length, heads, k_rotary.shape[-1])
    k = torch.cat([each[..., :plain], shared], -1).reshape(length, -1)
    v = each[..., plain:].reshape(length, -1)
    return attention(q, k, v, heads=heads, groups=heads, scale=scale)


def gated_delta_rule(
    qkvz: Tensor,
    ba: Tensor,
    convolution: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    key_heads: int,
    value_heads: int,
    key_width: int,
    value_width: int,
) -> Tensor:
    """Return Qwen3-Next's linear attention before its gated norm, [T, value_heads * value_width].

    A causal convolution with SiLU, then o_t = q_t S_t / sqrt(D), S_t = e^g S_(t-1) + beta k (v - e^g k S_(t-1)), of
    keys and queries of length one, with g = -exp(A_log) softplus(a + dt_bias) (Yang, Kautz & Hatamizadeh, 2024).
    """
    parts = delta_parts(
        *(qkvz, ba, convolution, a_log, dt_bias),
        key_heads=key_heads,
        value_heads=value_heads,
        key_width=key_width,
        value_width=value_width,
    )
    return delta_steps(*parts).to(qkvz.dtype)


def delta_parts(
    qkvz: Tensor,
    ba: Tensor,
    convolution: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    key_heads: int,
    value_heads: int,
    key_width: int,
    value_width: int,
    activated: bool = True,
    normalised: str = "qk",
) -> tuple[Tensor, ...]:
    """Return queries, keys, values [T, value_heads, D], beta and e^g [T, value_heads] of `gated_delta_rule`."""
    length, shared = len(qkvz), value_heads // key_heads
    groups, ba = qkvz.reshape(length, key_heads, -1), ba.reshape(length, key_heads, 2 * shared)
    parts = torch.split(groups, [key_width, key_width, shared * value_width, shared * value_width], -1)
    mixed = torch.cat([x.reshape(length, -1) for x in parts[:3]], -1)
    taps = convolution.reshape(mixed.shape[1], -1)
    before = torch.cat([mixed.new_zeros(taps.shape[1] - 1, mixed.shape[1]), mixed])
    mixed = total(*(before[tap : tap + length] * taps[:, tap] for tap in range(taps.shape[1])))
    mixed = F.silu(mixed) if activated else mixed
    q, k, v = torch.split(mixed, [key_heads * key_width, key_heads * key_width, value_heads * value_width], -1)
    q, k = (x.reshape(length, key_heads, key_width) for x in (q, k))
    q, k = (
        x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) if name in normalised else x
        for name, x in (("q", q), ("k", k))
    )
    q, k = (wide(x.repeat_interleave(shared, 1)) for x in (q, k))
    beta = wide(ba[..., :shared].reshape(length, value_heads).sigmoid())
    step = F.softplus(wide(ba[..., shared:].reshape(length, value_heads)) + dt_bias)
    return q, k, wide(v.reshape(length, value_heads, value_width)), beta, (-wide(a_log).exp() * step).exp()


def delta_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    subtracts: bool = True,
    restart: int = 0,
    undecayed: int = 0,
) -> Tensor:
    """Return the recurrence's outputs [T, heads * Dv]; ``restart``: the state is zero again every so many steps.

    ``undecayed``: in what a query reads of the state at the beginning of its chunk of so many steps, the decay since
    then is missing.
    """
    length, heads, width = q.shape
    state, outputs = q.new_zeros(heads, width, v.shape[-1]), []
    begin, since = state, torch.ones_like(decay[0])
    for step in range(length):
        if undecayed and step % undecayed == 0:
            begin, since = state, torch.ones_like(decay[0])
        if restart and step % restart == 0:
            state = torch.zeros_like(state)
        state = state * decay[step][:, None, None]
        missing = v[step] - (k[step][:, None] @ state)[:, 0] if subtracts else v[step]
        state = state + k[step][:, :, None] * (missing * beta[step][:, None])[:, None, :]
        read = state
        if undecayed:
            since = since * decay[step]
            read = state + (1 - since)[:, None, None] * begin
        outputs.append((q[step][:, None] @ read)[:, 0] * width**-0.5)
    return torch.stack(outputs).reshape(length, -1)


def first_halves(q_and_gate: Tensor, *, heads: int) -> Tensor:
    """Return the queries [T, heads * D] of [T, heads * 2 D], whose heads hold a query and its gate."""
    return q_and_gate.reshape(len(q_and_gate), heads, 2, -1)[:, :, 0].reshape(len(q_and_gate), -1)


def last_parts(qkvz: Tensor, *, groups: int, width: int) -> Tensor:
    """Return the last ``width`` features of each of ``groups`` parts of [T, N], as Qwen3-Next's gate z."""
    return qkvz.reshape(len(qkvz), groups, -1)[..., -width:].reshape(len(qkvz), -1)


def gated_rmsnorm(x: Tensor, weight: Tensor, gate: Tensor, *, eps: float) -> Tensor:
    """Return `rmsnorm` times SiLU of ``gate`` [T, N], head by head of ``weight.shape[0]`` features."""
    normed = rmsnorm(x, weight, eps=eps)
    return (normed * F.silu(wide(gate.reshape(x.shape)))).to(x.dtype)


def gated_product(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """Return activation(gate) * up."""
    return _ACTIVATIONS[activation](gate) * up


def gated_block(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, activation: str) -> Tensor:
    """Return down (activation(gate x) * up x) of x [T, D], with weights gate and up [F, D] and down [D, F]."""
    return linear(_ACTIVATIONS[activation](linear(x, gate)) * linear(x, up), down)


def router_logits(x: Tensor, weight: Tensor, *, in_float32: bool = False) -> Tensor:
    """Return the logits [T, E] of experts, x weight^T, computed in float32 where ``in_float32``."""
    return F.linear(wide(x), wide(weight)) if in_float32 else F.linear(x, weight)


def routing_weights(
    logits: Tensor, ids: Tensor, *, scoring: str = "softmax", renormalize: bool = True, factor: float = 1.0
) -> Tensor:
    """Return the weights [T, k] of the chosen experts ``ids`` [T, k]: their scores, divided by their sum where
    renormalised, times ``factor``."""
    scores = wide(logits).sigmoid() if scoring == "sigmoid" else wide(logits).softmax(-1)
    weights = scores.gather(1, ids.long())
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * factor if factor != 1.0 else weights


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *, activation: str = "silu"
) -> Tensor:
    """Return sum_k weights[t, k] down_e(activation(gate_e x_t) * up_e x_t) with e = ids[t, k].

    x [T, D], ids and weights [T, k], gate_up [E, 2 F, D], down [E, D, F].
    """
    out = torch.zeros_like(x)
    for expert in sorted(set(ids.flatten().tolist())):
        token, choice = torch.where(ids == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
        each = F.linear(_ACTIVATIONS[activation](gate) * up, down[expert])
        out = out.index_add(0, token, (each * weights[token, choice][:, None]).to(x.dtype))
    return out


def total(*terms: Tensor) -> Tensor:
    """Return the sum of a residual stream and what is added to it."""
    result = terms[0]
    for term in terms[1:]:
        result = result + term
    return result


def gated_total(stream: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    """Return stream + sigmoid(gate) * branch, as Qwen's shared expert is added."""
    return stream + torch.sigmoid(gate) * branch


def tempered(logits: Tensor, *, temperature: float) -> Tensor:
    """Return the logits divided by a temperature."""
    return logits / temperature


def log_softmax(logits: Tensor) -> Tensor:
    """Return the logarithms of the probabilities [T, V], in float32."""
    return wide(logits).log_softmax(-1)


_ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
ACTIVATIONS = tuple(_ACTIVATIONS)
