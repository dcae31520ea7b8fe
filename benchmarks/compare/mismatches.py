"""Planted mismatches: each alters one region of one run, as trainers and inference engines really come to differ.

A mismatch names its models, what a right report must call the first region beyond its bound (``layer`` and one of
``regions``, within the region's name or kind), and words of which its cause must have one. Where it makes sense the
altered layer stands in the middle. Both runs have the same tokens, weights and number format; run A is right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.compare.forms import (
    BlockFP8Linear,
    Call,
    FusedAttention,
    FusedMLP,
    Overlay,
    attend,
    block_fp8,
    both,
    delta_rule,
    eager,
    function,
    functions,
    layers,
    method,
    over_ranks,
    turn_halves,
    turn_pairs,
    wrap,
)
from benchmarks.compare.models import ATTENTION, MIDDLE, PREFILL, Pair, Run, log_softmax

Change = Callable[[Any], object]
LLAMA, MIXTRAL, MOE, NEXT, MLA = "llama", "mixtral", "qwen3_moe", "qwen3_next", "deepseek_v3"
FULL = torch.float32
COLD = 0.7  # the temperature of the runs that have one


@dataclass(frozen=True)
class Mismatch:
    """One fault: how it is planted in a model, in what kind of run, and what names it rightly.

    ``plant(layer)`` changes a layer of its model, where ``at`` gives its index by model; without ``at``, ``plant``
    changes the model, and ``used`` is the first layer that uses what it changes. ``first`` changes the models of both
    runs beforehand. ``finishes`` make log-probabilities of logits in run A and in run B.
    """

    name: str
    models: tuple[str, ...]
    plant: Change
    regions: tuple[str, ...]
    causes: tuple[str, ...]
    at: dict[str, int] | None = None
    dtype: torch.dtype = torch.bfloat16
    way: str = "whole"
    first: tuple[Change, ...] = ()
    finishes: tuple[Callable[[Tensor], Tensor], ...] = (log_softmax, log_softmax)
    used: int | None = None

    def layer(self, model: str) -> int | None:
        """Return the index of the layer that is altered, None where what is altered stands outside of layers."""
        return None if self.at is None else self.at[model]

    def pair(self, model: str) -> Pair:
        """Return the two runs of a model."""
        layer = self.layer(model)
        plant = self.plant if layer is None else lambda whole: self.plant(layers(whole, layer)[0])
        a = Run(model, self.dtype, self.first, self.way, self.finishes[0])
        b = replace(a, changes=(*self.first, plant), finish=self.finishes[1])
        return Pair(f"{self.name}@{model}", a, b)


# Rotary embeddings.


def other_pairing(layer: Any) -> None:
    """Turn neighbours for halves, or halves for neighbours."""
    if hasattr(layer.self_attn, "kv_b_proj"):
        functions(layer.self_attn, apply_rotary_pos_emb_interleave=both(turn_halves))
    else:
        functions(layer.self_attn, apply_rotary_pos_emb=both(turn_pairs))


def last_quarter_turned(layer: Any) -> None:
    """Turn the last dimensions of a head that has rotary dimensions only in its first quarter."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        kept = q.shape[-1] - cos.shape[-1]
        return tuple(torch.cat([x[..., :kept], turn_halves(x[..., kept:], cos, sin)], -1) for x in (q, k))

    functions(layer.self_attn, apply_rotary_pos_emb=rotate)


def keys_not_turned(layer: Any) -> None:
    right = function(layer.self_attn, "apply_rotary_pos_emb_interleave")

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return right(q, k, cos, sin)[0], torch.cat([k[..., 0::2], k[..., 1::2]], -1)

    functions(layer.self_attn, apply_rotary_pos_emb_interleave=rotate)


def default_theta(model: Any) -> None:
    """Take the usual base of 10,000, or the newer one where a model has that."""
    rotary = model.model.rotary_emb
    theta = model.config.rope_parameters["rope_theta"]
    rotary.inv_freq = rotary.inv_freq ** (torch.tensor(1e6 if theta == 1e4 else 1e4).log() / torch.tensor(theta).log())


def default_factor(model: Any) -> None:
    """Take another factor of YaRN for the frequencies; what multiplies cos and sin stays."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = copy.deepcopy(model.config)
    config.rope_parameters["factor"] = 4.0
    config.rope_parameters["attention_factor"] = float(model.model.rotary_emb.attention_scaling)
    model.model.rotary_emb.inv_freq = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[0]


def late_positions(model: Any) -> None:
    """Give each decoded token the position of the one before it."""
    rotary = model.model.rotary_emb
    wrap(rotary, lambda original, x, position_ids: original(x, position_ids - int(position_ids.shape[-1] == 1)))


# Attention and its cache.


def attention(change: Callable[[Call], object], decode: bool = False) -> Change:
    """Return a fault that changes what a layer's attention is called with, in ``decode`` only for single tokens."""

    def form(call: Call) -> Tensor:
        if not decode or call.q.shape[2] == 1:
            change(call)
        return eager(call)

    return lambda layer: attend(layer.self_attn, form)


def padded_scale(call: Call) -> None:
    """Scale by the head size that a kernel pads to: the next multiple of 48."""
    call.scale = (-(-call.q.shape[-1] // 48) * 48) ** -0.5


def plain_scale(call: Call) -> None:
    call.scale = call.q.shape[-1] ** -0.5


def wrong_groups(call: Call) -> None:
    """Give query head h the key head h % Hkv."""
    groups = call.q.shape[1] // call.k.shape[1]
    call.k, call.v = (x.repeat(1, groups, 1, 1)[:, ::groups] for x in (call.k, call.v))


def one_key_too_far(call: Call) -> None:
    """Let each query see the key after its own."""
    assert call.mask is not None
    call.mask = torch.cat([call.mask[..., :1], call.mask[..., :-1]], -1).maximum(call.mask)


def shorter_window(call: Call) -> None:
    """Hide the earliest key that each query still sees, where the window cuts off earlier ones."""
    assert call.mask is not None
    seen = call.mask == 0
    first = seen & (seen.cumsum(-1) == 1) & ~seen[..., :1]
    call.mask = call.mask.masked_fill(first, float(call.mask.min()))


def uncapped(call: Call) -> None:
    call.softcap = None


def last_value_missing(call: Call) -> None:
    """Read the value slot of the newest token before it is written."""
    call.v = torch.cat([call.v[..., :-1, :], torch.zeros_like(call.v[..., -1:, :])], -2)


PAGE = 16


def stale_page(call: Call) -> None:
    """Read the keys and values of the third page where those of the fourth are meant."""
    call.k, call.v = (_page_over(x.clone()) for x in (call.k, call.v))


def _page_over(x: Tensor) -> Tensor:
    x[..., 3 * PAGE : 4 * PAGE, :] = x[..., 2 * PAGE : 3 * PAGE, :]
    return x


def overwritten_page(layer: Any) -> None:
    """Let another request write the fourth page of this layer's cache before the first step."""

    def around(original: Any, *arguments: Any, past_key_values: Any, **options: Any) -> Any:
        cache = past_key_values.layers[layer.self_attn.layer_idx]
        if cache.is_initialized and cache.keys.shape[-2] == PREFILL:
            for x in (cache.keys, cache.values):
                x[..., 3 * PAGE : 4 * PAGE, :] = x[..., :PAGE, :].flip(-2)
        return original(*arguments, past_key_values=past_key_values, **options)

    wrap(layer.self_attn, around)


def eight_bit_keys(call: Call) -> None:
    call.k = call.k.to(torch.float8_e4m3fn).to(call.q.dtype)


def half_attention(layer: Any) -> None:
    """Round q, k, v and the weights to bfloat16 in a model of float32."""

    def form(call: Call) -> Tensor:
        q, dtype = call.q, torch.bfloat16
        call.q, call.k, call.v = (x.to(dtype) for x in (call.q, call.k, call.v))
        return eager(call).to(q.dtype)

    attend(layer.self_attn, form)


def ungated(layer: Any) -> None:
    functions(layer.self_attn, torch=Overlay(torch, sigmoid=torch.ones_like))


# Projections.


def no_bias(layer: Any) -> None:
    layer.self_attn = FusedAttention(layer.self_attn, lost=("k", "v"))


def exchanged(layer: Any) -> None:
    layer.mlp = FusedMLP(layer.mlp, exchanged=True)


def other_activation(activation: Callable[[Tensor], Tensor]) -> Change:
    def plant(layer: Any) -> None:
        block = getattr(layer.mlp, "experts", layer.mlp)
        del block.act_fn
        block.act_fn = activation

    return plant


def ranks_in_disorder(layer: Any) -> None:
    """Gather the output of the value projection of two ranks in the wrong order."""
    wrap(layer.self_attn.v_proj, lambda original, x: original(x).roll(layer.self_attn.v_proj.out_features // 2, -1))


def transposed(layer: Any) -> None:
    weight = layer.self_attn.o_proj.weight
    weight.copy_(weight.T.clone())


def stale_weight(layer: Any) -> None:
    """Keep the weight of the step before: another by a thousandth of its size."""
    weight = (layer.mlp.down_proj if hasattr(layer.mlp, "down_proj") else layer.self_attn.o_proj).weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(7))
    weight.add_((0.02 * noise * weight.float().std()).to(weight.dtype))


def neighbour_scale(layer: Any) -> None:
    down: BlockFP8Linear = layer.mlp.down_proj
    down.shift = 1


def half_sums(layer: Any) -> None:
    """Add the products of float16 numbers in float16, sixteen at a time."""

    def forward(self: Any, x: Tensor) -> Tensor:
        total = torch.zeros(*x.shape[:-1], self.out_features, dtype=torch.float16)
        for part, weight in zip(x.half().split(16, -1), self.weight.half().split(16, -1), strict=True):
            total = total + F.linear(part.float(), weight.float()).half()
        return total.to(x.dtype)

    method(layer.self_attn.o_proj, forward)


# Norms and the residual stream.


def rms(eps: float, outside: bool = False) -> Change:
    """Return a norm's fault: eps beside the root instead of beneath it, or another eps."""

    def forward(self: Any, x: Tensor) -> Tensor:
        square = x.float().square().mean(-1, keepdim=True)
        root = 1.0 / (square.sqrt() + eps) if outside else (square + eps).rsqrt()
        return self.weight * (x.float() * root).to(x.dtype)

    return lambda layer: method(layer.input_layernorm, forward)


def final_norm_in_half(model: Any) -> None:
    """Compute all of the final norm in the model's 16 bits."""

    def forward(self: Any, x: Tensor) -> Tensor:
        eps = getattr(self, "variance_epsilon", None) or self.eps
        weight = self.weight + 1.0 if hasattr(self, "eps") else self.weight
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight

    method(model.model.norm, forward)


def plain_weight(layer: Any) -> None:
    """Multiply by the weight where the norm multiplies by one more."""
    wrap(layer.input_layernorm, lambda original, x: (original(x).float() - _normed(layer, x)).to(x.dtype))


def _normed(layer: Any, x: Tensor) -> Tensor:
    return x.float() * (x.float().square().mean(-1, keepdim=True) + layer.input_layernorm.eps).rsqrt()


def same(name: str) -> Change:
    """Return a fault that leaves a part of attention, or of the layer, out."""

    def plant(layer: Any) -> None:
        wrap(layer.get_submodule(name), lambda original, x: x)

    return plant


def residual_after_norm(layer: Any) -> None:
    """Take the normed stream for the residual of attention."""

    def forward(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(hidden_states=hidden_states, **options)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    method(layer, forward)


def residual_twice(layer: Any) -> None:
    """Add the residual after the MLP once more."""

    def forward(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
        x = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)[0]
        return x + (x + self.mlp(self.post_attention_layernorm(x)))

    method(layer, forward)


# Mixtures of experts.


def route(change: Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Change:
    """Return a fault of a router: ``change(router, logits, weights, ids)`` gives other weights and ids."""

    def plant(layer: Any) -> None:
        gate = layer.mlp.gate

        def around(original: Any, x: Tensor) -> tuple[Tensor, ...]:
            logits, weights, ids = original(x)
            return logits, *change(gate, logits, weights, ids)

        wrap(gate, around)

    return plant


def half_router(layer: Any) -> None:
    """Compute logits and probabilities of the router in bfloat16."""
    gate, dtype = layer.mlp.gate, torch.bfloat16

    def narrow(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x.to(dtype)

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(x.to(dtype), weight.to(dtype))

    def softmax(x: Tensor, **_: Any) -> Tensor:
        return x.to(dtype).softmax(-1).float()

    below = Overlay(torch.nn.functional, linear=linear, softmax=softmax)
    functions(gate, F=below, torch=Overlay(torch, nn=Overlay(torch.nn, functional=below)))
    wrap(gate, lambda original, x: tuple(part.float() if part.is_floating_point() else part for part in original(x)))


def not_renormalised(gate: Any, logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return logits.float().softmax(-1).gather(-1, ids).to(weights.dtype), ids


def biased_weights(gate: Any, logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Take the scores with the bias that only chooses experts for their weights too."""
    scores = (logits.sigmoid() + gate.e_score_correction_bias).gather(-1, ids)
    return scores / scores.sum(-1, keepdim=True) * gate.routed_scaling_factor, ids


def unscaled(gate: Any, logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return weights / gate.routed_scaling_factor, ids


def experts(change: Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> Change:
    """Return a fault of the experts: ``change(experts, x, ids, weights)`` gives what they are called with."""

    def plant(layer: Any) -> None:
        module = layer.mlp.experts
        wrap(module, lambda original, x, ids, weights: original(*change(module, x, ids, weights)))

    return plant


def beyond_capacity(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Drop what an expert gets beyond a fixed number of rows."""
    chosen = F.one_hot(ids, module.num_experts).flatten(0, 1)
    rank = (chosen.cumsum(0) * chosen).sum(-1).view_as(ids)
    return x, ids, weights * (rank <= 1.25 * ids.numel() / module.num_experts)


def interleaved_halves(layer: Any) -> None:
    """Take rows of gate and up by turns from a weight that has all of gate first."""

    def turns(self: Any, x: Tensor) -> Tensor:
        return self.act_fn(x[..., 0::2]) * x[..., 1::2]

    method(layer.mlp.experts, turns, "_apply_gate")
    layer.mlp.experts.config = Overlay(layer.mlp.experts.config, _experts_implementation="batched_mm")


def no_shared_expert(layer: Any) -> None:
    shared = getattr(layer.mlp, "shared_expert", None) or layer.mlp.shared_experts
    wrap(shared, lambda original, x: torch.zeros_like(x))


def shared_expert_ungated(layer: Any) -> None:
    functions(layer.mlp, F=Overlay(F, sigmoid=torch.ones_like))


# The gated delta rule.


def rule(**options: Any) -> Change:
    """Return a fault of a layer's delta rule, in whichever form it runs."""
    wrong = partial(delta_rule, chunk=64, **options)

    def plant(layer: Any) -> None:
        functions(layer.linear_attn, torch_chunk_gated_delta_rule=wrong, torch_recurrent_gated_delta_rule=wrong)

    return plant


def state_not_carried(layer: Any) -> None:
    """Start each chunk of a prefill with a state of zeros."""
    right = function(layer.linear_attn, "torch_chunk_gated_delta_rule")

    def chunked(*arguments: Any, initial_state: Any = None, **options: Any) -> Any:
        return right(*arguments, initial_state=None, **options)

    functions(layer.linear_attn, torch_chunk_gated_delta_rule=chunked)


def convolution_not_carried(layer: Any) -> None:
    """Let the convolution of each chunk of a prefill begin with zeros."""

    def around(original: Any, *arguments: Any, cache_params: Any, **options: Any) -> Any:
        if cache_params.has_previous_state(layer.linear_attn.layer_idx):
            cache_params.get_conv_state(layer.linear_attn.layer_idx, state_idx=0).zero_()
        return original(*arguments, cache_params=cache_params, **options)

    wrap(layer.linear_attn, around)


def no_step_bias(layer: Any) -> None:
    module = layer.linear_attn
    functions(module, F=Overlay(F, softplus=lambda x: F.softplus(x - module.dt_bias)))


def gate_before_norm(layer: Any) -> None:
    """Multiply by silu(gate) before the norm instead of after it."""

    def forward(self: Any, x: Tensor, gate: Tensor) -> Tensor:
        gated = x.float() * F.silu(gate.float())
        normed = gated * (gated.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return (self.weight.float() * normed).to(x.dtype)

    method(layer.linear_attn.norm, forward)


# Embedding, head and the policy's log-probability.


def plain_embedding(model: Any) -> None:
    model.model.embed_tokens.embed_scale = torch.ones_like(model.model.embed_tokens.embed_scale)


def uncapped_logits(model: Any) -> None:
    model.config = Overlay(model.config, final_logit_softcapping=None)


def half_head(model: Any) -> None:
    wrap(model.lm_head, lambda _, x: F.linear(x.bfloat16(), model.lm_head.weight.bfloat16()).to(x.dtype))


def untied_head(model: Any) -> None:
    """Give the head a matrix of its own, which the last training step hasn't reached."""
    weight = model.lm_head.weight.clone()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(8))
    model.lm_head.weight = torch.nn.Parameter((weight + 0.05 * weight.std() * noise).to(weight.dtype), False)


def at_temperature(logits: Tensor) -> Tensor:
    """Return log-probabilities at a temperature, which divides the logits."""
    return torch.log_softmax(logits.float() / COLD, dim=-1)


def at_temperature_twice(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float() / COLD / COLD, dim=-1)


def half_log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.bfloat16(), dim=-1).float()


FIRST = dict.fromkeys(MIDDLE, 0)  # where the stream is small, and eps counts
ROTARY, ATTEND = ("rotary", "rope", "attention", "attn"), ("attention", "attn", "cache")
NORM = ("norm",)
INPUT_NORM = ("input_layernorm", "input_norm", "attention_norm", "attn_norm")
GATED = ("mlp", "act", "gate", "up_proj", "swiglu", "experts")
ROUTER = ("gate", "router", "routing", "moe_route", "top")
EXPERTS = ("expert", "moe", "mlp")
DELTA = ("linear_attn", "delta", "attention")

MISMATCHES: tuple[Mismatch, ...] = (
    Mismatch("rotary-pairing", (LLAMA, MOE, MLA), other_pairing, ROTARY, ("interleav", "pair", "rotary"), ATTENTION),
    Mismatch("rotary-dimensions", (NEXT,), last_quarter_turned, ROTARY, ("partial", "dimension", "rotary"), ATTENTION),
    Mismatch("rotary-keys", (MLA,), keys_not_turned, ROTARY, ("rotary", "rope", "key"), ATTENTION),
    Mismatch("rope-theta", (LLAMA, MIXTRAL), default_theta, ROTARY, ("theta", "base", "frequenc"), used=0),
    Mismatch("yarn-factor", (MLA,), default_factor, ROTARY, ("yarn", "factor", "frequenc", "scaling"), used=0),
    Mismatch(
        "positions",
        (LLAMA, MOE),
        late_positions,
        (*ROTARY, "position"),
        ("position", "off by one"),
        way="steps",
        used=0,
    ),
    Mismatch("softmax-scale", (MIXTRAL, LLAMA), attention(padded_scale), ATTEND, ("scale", "temperature"), ATTENTION),
    Mismatch("mscale", (MLA,), attention(plain_scale), ATTEND, ("scale",), ATTENTION),
    Mismatch("head-group", (LLAMA, MIXTRAL, MOE), attention(wrong_groups), ATTEND, ("head", "group", "gqa"), ATTENTION),
    Mismatch("mask", (LLAMA, NEXT), attention(one_key_too_far), ATTEND, ("mask", "causal", "key"), ATTENTION),
    Mismatch("window", ("gemma2",), attention(shorter_window), ATTEND, ("window", "mask"), ATTENTION),
    Mismatch("attention-cap", ("gemma2",), attention(uncapped), ATTEND, ("cap",), ATTENTION),
    Mismatch(
        "last-value",
        (MOE, MIXTRAL),
        attention(last_value_missing, decode=True),
        ATTEND,
        ("last", "missing", "value", "off by one", "length"),
        ATTENTION,
        way="steps",
    ),
    Mismatch(
        "stale-page",
        (LLAMA, MIXTRAL),
        attention(stale_page, decode=True),
        ATTEND,
        ("stale", "page", "cache", "slot"),
        ATTENTION,
        way="steps",
    ),
    Mismatch(
        "overwritten-page", (MOE, LLAMA), overwritten_page, ATTEND, ("stale", "page", "cache"), ATTENTION, way="steps"
    ),
    Mismatch(
        "fp8-keys",
        (MOE, MIXTRAL, LLAMA),
        attention(eight_bit_keys, decode=True),
        ATTEND,
        ("fp8", "float8", "e4m3", "cache"),
        ATTENTION,
        way="steps",
    ),
    Mismatch(
        "half-attention", (LLAMA, NEXT), half_attention, ATTEND, ("bfloat16", "bf16", "precision"), ATTENTION, FULL
    ),
    Mismatch("output-gate", (NEXT,), ungated, ("attn", "o_proj", "gate", "attention"), ("gate", "sigmoid"), ATTENTION),
    Mismatch("lost-bias", ("qwen2",), no_bias, ("qkv", "k_proj", "v_proj"), ("bias",), MIDDLE),
    Mismatch("gate-up", (LLAMA,), exchanged, GATED, ("exchang", "swap", "order", "gate"), MIDDLE),
    Mismatch("gelu", (LLAMA, MIXTRAL), other_activation(F.gelu), GATED, ("gelu", "activation", "silu"), MIDDLE),
    Mismatch("gelu-erf", ("gemma2",), other_activation(F.gelu), GATED, ("gelu", "tanh", "activation"), MIDDLE, FULL),
    Mismatch(
        "rank-order", (LLAMA,), ranks_in_disorder, ("v_proj", "qkv"), ("rank", "order", "permut", "shift"), MIDDLE
    ),
    Mismatch("transposed", (LLAMA,), transposed, ("o_proj",), ("transpos", "weight"), MIDDLE),
    Mismatch("stale-weight", (LLAMA, MIXTRAL), stale_weight, ("down_proj", "o_proj"), ("weight",), MIDDLE),
    Mismatch("block-scale", (LLAMA,), neighbour_scale, ("down_proj",), ("scale", "block"), MIDDLE, first=(block_fp8,)),
    Mismatch(
        "tensor-parallel",
        (LLAMA, MIXTRAL),
        lambda layer: over_ranks(layer.self_attn.o_proj, 4, torch.bfloat16),
        ("o_proj", "reduce"),
        ("bfloat16", "bf16", "partial", "parallel", "accumul", "split"),
        MIDDLE,
    ),
    Mismatch(
        "lost-rank",
        (LLAMA,),
        lambda layer: over_ranks(layer.mlp.down_proj, 4, lost=3),
        ("down_proj", "reduce"),
        ("rank", "missing", "part", "split", "shard"),
        MIDDLE,
    ),
    Mismatch("half-sums", (LLAMA, MLA), half_sums, ("o_proj",), ("accumul", "float16", "fp16", "sum"), MIDDLE, FULL),
    Mismatch("eps-place", (MIXTRAL,), rms(1e-5, outside=True), INPUT_NORM, ("eps",), FIRST, FULL),
    Mismatch("eps", (LLAMA,), rms(1e-5), INPUT_NORM, ("eps",), FIRST, FULL),
    Mismatch(
        "final-norm", (LLAMA, NEXT), final_norm_in_half, NORM, ("bfloat16", "bf16", "precision", "half", "compute")
    ),
    Mismatch("norm-offset", ("gemma2", NEXT), plain_weight, INPUT_NORM, ("offset", "weight", "one"), MIDDLE),
    Mismatch(
        "q-norm",
        (MOE, NEXT),
        same("self_attn.q_norm"),
        ("q_norm", "query_norm"),
        ("missing", "norm", "identity"),
        ATTENTION,
    ),
    Mismatch(
        "post-norm",
        ("gemma2",),
        same("post_attention_layernorm"),
        ("post_attention",),
        ("missing", "norm", "identity"),
        MIDDLE,
    ),
    Mismatch(
        "latent-norm",
        (MLA,),
        same("self_attn.kv_a_layernorm"),
        ("kv_a", "latent"),
        ("missing", "norm", "identity"),
        ATTENTION,
    ),
    Mismatch(
        "residual-norm", (LLAMA, MIXTRAL), residual_after_norm, ("residual", "add", "norm"), ("residual",), MIDDLE
    ),
    Mismatch("residual-twice", (LLAMA,), residual_twice, ("residual", "add"), ("residual", "twice"), MIDDLE),
    Mismatch("half-router", (MIXTRAL, MOE, MLA), half_router, ROUTER, ("bfloat16", "bf16", "precision"), MIDDLE, FULL),
    Mismatch(
        "weights-twice",
        (MIXTRAL, MOE),
        experts(lambda _, x, ids, weights: (x, ids, weights * weights)),
        EXPERTS,
        ("twice", "weight", "square"),
        MIDDLE,
    ),
    Mismatch("renormalise", (MIXTRAL, MOE), route(not_renormalised), ROUTER, ("renormal", "normali"), MIDDLE),
    Mismatch("biased-weights", (MLA,), route(biased_weights), ROUTER, ("bias",), MIDDLE),
    Mismatch("routed-scale", (MLA,), route(unscaled), (*ROUTER, *EXPERTS), ("scal", "factor"), MIDDLE),
    Mismatch(
        "expert-ids",
        (MIXTRAL, MOE, NEXT),
        experts(lambda own, x, ids, weights: (x, (ids + 1) % own.num_experts, weights)),
        EXPERTS,
        ("expert", "ids", "shift"),
        MIDDLE,
    ),
    Mismatch("capacity", (MIXTRAL, MOE), experts(beyond_capacity), EXPERTS, ("capacity", "drop", "missing"), MIDDLE),
    Mismatch("expert-layout", (MOE,), interleaved_halves, EXPERTS, ("interleav", "layout", "gate", "order"), MIDDLE),
    Mismatch("shared-expert", (NEXT, MLA), no_shared_expert, ("shared", *EXPERTS), ("shared", "missing"), MIDDLE),
    Mismatch("shared-gate", (NEXT,), shared_expert_ungated, ("shared", *EXPERTS), ("gate", "sigmoid"), MIDDLE),
    Mismatch("chunk-decay", (NEXT,), rule(decayed=False), DELTA, ("decay", "chunk"), MIDDLE),
    Mismatch("key-norm", (NEXT,), rule(keys_normed=False), DELTA, ("norm", "l2"), MIDDLE),
    Mismatch("delta-groups", (NEXT,), rule(interleaved=False), DELTA, ("head", "group"), MIDDLE),
    Mismatch("step-bias", (NEXT,), no_step_bias, DELTA, ("bias", "dt", "decay"), MIDDLE),
    Mismatch(
        "gate-before-norm",
        (NEXT,),
        gate_before_norm,
        ("linear_attn", "gated", "delta"),
        ("gate", "order", "before"),
        MIDDLE,
    ),
    Mismatch("lost-state", (NEXT,), state_not_carried, DELTA, ("state", "chunk", "carried"), MIDDLE, way="chunks"),
    Mismatch(
        "lost-convolution",
        (NEXT,),
        convolution_not_carried,
        ("conv", *DELTA),
        ("conv", "state", "chunk"),
        MIDDLE,
        way="chunks",
    ),
    Mismatch("embedding-scale", ("gemma2",), plain_embedding, ("embed",), ("scale", "embed")),
    Mismatch("logit-cap", ("gemma2",), uncapped_logits, ("cap", "head", "logit", "softmax"), ("cap",)),
    Mismatch("half-head", (LLAMA, MLA), half_head, ("head", "logit"), ("bfloat16", "bf16", "precision"), dtype=FULL),
    Mismatch("untied-head", ("gemma2",), untied_head, ("head", "logit"), ("tied", "weight")),
    Mismatch(
        "temperature-twice",
        (LLAMA, MOE),
        lambda model: None,
        ("temperature", "sampl", "softmax", "logit", "log_prob", "logprob"),
        ("temperature", "scale"),
        finishes=(at_temperature, at_temperature_twice),
    ),
    Mismatch(
        "half-log-softmax",
        (LLAMA, MIXTRAL),
        lambda model: None,
        ("softmax", "log_prob", "logprob", "sampl"),
        ("bfloat16", "bf16", "precision"),
        finishes=(log_softmax, half_log_softmax),
    ),
)


def planted() -> Iterator[tuple[Mismatch, Pair]]:
    """Yield each mismatch with the pair of each of its models."""
    for mismatch in MISMATCHES:
        for model in mismatch.models:
            yield mismatch, mismatch.pair(model)
