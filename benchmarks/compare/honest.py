"""Honest pairs: two right ways to run one model, whose difference is rounding and nothing else.

Nothing may be named beyond its bound. A format that differs by contract, such as a head in float32 or a run in bfloat16
of weights that float32 has too, is no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.compare.forms import (
    Call,
    absorbed,
    attend,
    attentions,
    blockwise,
    both,
    carried_norms,
    delta_rule,
    experts_by_token,
    functions,
    fuse,
    layers,
    method,
    mixtures,
    over_ranks,
    turn_pairs,
    wrap,
)
from benchmarks.compare.mismatches import (
    COLD,
    FULL,
    LLAMA,
    MIXTRAL,
    MLA,
    MOE,
    NEXT,
    Change,
    at_temperature,
)
from benchmarks.compare.models import TOKENS, Pair, Run

HALF = torch.bfloat16


def sdpa(model: Any) -> None:
    model.set_attn_implementation("sdpa")


def attention(form: Callable[[Call], Tensor]) -> Change:
    """Return a change of all softmax attention to another algorithm."""

    def change(model: Any) -> None:
        for module in attentions(model):
            attend(module, form)

    return change


def scaled_queries(call: Call) -> Tensor:
    """Scale q before the product with k, in float32."""
    return blockwise(replace(call, q=call.q.float() * call.scale, scale=1.0), block=64).to(call.v.dtype)


def by_head_ranks(call: Call) -> Tensor:
    """Compute the heads of two ranks apart, as tensor parallelism does."""
    ranks = zip(*(x.chunk(2, 1) for x in (call.q, call.k, call.v)), strict=True)
    return torch.cat([blockwise(replace(call, q=q, k=k, v=v), block=32) for q, k, v in ranks], dim=2)


def experts(implementation: str) -> Change:
    return lambda model: model.set_experts_implementation(implementation)


def experts_reordered(model: Any) -> None:
    for block in mixtures(model):
        experts_by_token(block.experts)


def parallel(ranks: int) -> Change:
    """Return a change that splits K of the output and down projections over ranks and adds in float32."""

    def change(model: Any) -> None:
        for layer in layers(model):
            over_ranks(layer.self_attn.o_proj, ranks)
            if hasattr(layer.mlp, "down_proj"):
                over_ranks(layer.mlp.down_proj, ranks)

    return change


def delta(**options: Any) -> Change:
    """Return a change of the delta rule's form in all layers."""

    def change(model: Any) -> None:
        for layer in layers(model):
            if hasattr(layer, "linear_attn"):
                rule = partial(delta_rule, **options)
                functions(layer.linear_attn, torch_chunk_gated_delta_rule=rule)

    return change


def recurrent(model: Any) -> None:
    """Run a prefill with the form of the delta rule that goes token by token."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    for layer in layers(model):
        if hasattr(layer, "linear_attn"):
            functions(layer.linear_attn, torch_chunk_gated_delta_rule=torch_recurrent_gated_delta_rule)


def latent(model: Any) -> None:
    for module in attentions(model):
        absorbed(module)


def norms_in_float32(model: Any) -> None:
    """Multiply by a norm's weight before the rounding to 16 bits, as Gemma and most kernels do."""

    def forward(self: Any, x: Tensor) -> Tensor:
        normed = x.float() * (x.float().square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return (normed * self.weight.float()).to(x.dtype)

    for module in model.modules():
        if hasattr(module, "variance_epsilon") and "Gated" not in type(module).__name__:
            method(module, forward)


def float32_residual(model: Any) -> None:
    """Keep the residual stream in float32; what blocks take and give stays bfloat16."""

    def narrow(original: Any, x: Tensor) -> Tensor:
        return original(x).to(HALF)

    wrap(model.model.embed_tokens, lambda original, ids: original(ids).float())
    wrap(model.model.norm, narrow)
    for layer in layers(model):
        wrap(layer.input_layernorm, narrow)
        wrap(layer.post_attention_layernorm, narrow)
    tables = model.model.rotary_emb
    wrap(tables, lambda original, x, position_ids: original(x.to(HALF), position_ids))


def neighbours_turned(model: Any) -> None:
    """Store the rows of q and k so that rotary pairs are neighbours, and turn those: the layout of Meta and GGUF."""
    for module in attentions(model):
        for linear in (module.q_proj, module.k_proj):
            halves = linear.weight.unflatten(0, (-1, 2, module.head_dim // 2))
            linear.weight = nn.Parameter(halves.transpose(1, 2).flatten(0, 2).contiguous(), requires_grad=False)
        functions(module, apply_rotary_pos_emb=both(turn_pairs))


def doubled_norms(model: Any) -> None:
    """Double the weights of norms and halve the weights that take their output, exactly."""
    for layer in layers(model):
        layer.input_layernorm.weight *= 2.0
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).weight *= 0.5


def folded_norms(model: Any) -> None:
    """Put the weights of the norms before attention into the projections, as quantisers do."""
    for layer in layers(model):
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).weight *= layer.input_layernorm.weight
        layer.input_layernorm.weight.fill_(1.0)


def of_float16(model: Any) -> None:
    """Round the few weights that float16 would make subnormal, so that every format has the same weights."""
    for weight in model.parameters():
        weight.copy_(weight.half())


def float32_head(model: Any) -> None:
    """Compute logits in float32 of the same hidden states and weights."""
    wrap(model.lm_head, lambda _, x: F.linear(x.float(), model.lm_head.weight.float()))


def compiled(part: str) -> Change:
    """Return a change that compiles each layer's part with inductor, or the model where ``part`` is empty."""

    def change(model: Any) -> None:
        torch._dynamo.reset()
        for module in [getattr(layer, part) for layer in layers(model)] if part else [model]:
            module.compile()

    return change


def bundled(*parts: str) -> Change:
    """Return a change that puts kernels of `assay.kernels` into the model."""

    def change(model: Any) -> None:
        from assay.kernels import replace as put

        assert put(model, parts).done, parts

    return change


def faithful() -> Any:
    from assay.interpreter import faithful as interpreter

    return interpreter()


def static_cache(model: Any) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=TOKENS + 32)


def by_sums(logits: Tensor) -> Tensor:
    """Log-probabilities as fused losses have them: logits less the log-sum-exp of blocks of the vocabulary."""
    parts = [block.float().logsumexp(-1) for block in logits.split(96, -1)]
    return logits.float() - torch.stack(parts, -1).logsumexp(-1, keepdim=True)


def by_reciprocal(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float() * (1.0 / COLD), dim=-1)


def _pairs_of(
    name: str,
    models: tuple[str, ...],
    dtypes: tuple[torch.dtype, ...],
    first: tuple[Change, ...] = (),
    **b: Any,
) -> Iterator[Pair]:
    """Yield pairs of a run of models changed by ``first`` and one that also differs in the fields ``b``."""
    for model in models:
        for dtype in dtypes:
            a = Run(model, dtype, first)
            yield Pair(f"{name}@{model}-{'float32' if dtype is FULL else 'bfloat16'}", a, replace(a, **b))


def honest() -> Iterator[Pair]:
    """Yield the honest pairs."""
    same, two = (HALF,), (FULL, HALF)
    yield from _pairs_of("again", (LLAMA,), same)
    yield from _pairs_of("sdpa", (LLAMA, MIXTRAL, MOE, NEXT, MLA), same, changes=(sdpa,))
    yield from _pairs_of("sdpa", (LLAMA, NEXT), (FULL,), changes=(sdpa,))
    yield from _pairs_of("blockwise", (LLAMA, "gemma2"), two, changes=(attention(blockwise),))
    yield from _pairs_of("scaled-queries", (LLAMA, MOE), same, changes=(attention(scaled_queries),))
    yield from _pairs_of("head-ranks", (LLAMA,), same, changes=(attention(by_head_ranks),))
    yield from _pairs_of("fused", (LLAMA, "qwen2", MOE), two, changes=(fuse,))
    yield from _pairs_of("carried-norms", (LLAMA,), two, changes=(carried_norms,))
    yield from _pairs_of("batch", (LLAMA, MIXTRAL, NEXT), same, way="batch")
    yield from _pairs_of("batch", (MIXTRAL,), (FULL,), way="batch")
    yield from _pairs_of("padded", (LLAMA,), two, way="padded")
    yield from _pairs_of("chunks", (LLAMA, MIXTRAL, NEXT, MLA), same, way="chunks")
    yield from _pairs_of("chunks", (MIXTRAL, NEXT, MLA), (FULL,), way="chunks")
    yield from _pairs_of("steps", (LLAMA, MOE, NEXT, MLA, "gemma2"), same, way="steps")
    yield from _pairs_of("steps", (LLAMA, MOE, NEXT, MLA, "gemma2"), (FULL,), way="steps")
    yield from _pairs_of("static-cache", (LLAMA,), same, way="steps", cache=static_cache)
    splits = attention(partial(blockwise, splits=4))
    yield from _pairs_of("split-decode", (LLAMA, MIXTRAL), same, way="steps", changes=(splits,))
    yield from _pairs_of("float32-residual", (LLAMA, MIXTRAL), same, changes=(float32_residual,))
    yield from _pairs_of("bfloat16", (LLAMA, MIXTRAL, NEXT, MLA), (FULL,), dtype=HALF)
    yield from _pairs_of("float16", (LLAMA,), two, (of_float16,), dtype=torch.float16)
    yield from _pairs_of("norm-order", (LLAMA, MLA), same, changes=(norms_in_float32,))
    yield from _pairs_of("grouped-experts", (MIXTRAL, MOE, MLA), same, changes=(experts("grouped_mm"),))
    yield from _pairs_of("batched-experts", (MIXTRAL,), two, changes=(experts("batched_mm"),))
    yield from _pairs_of("expert-order", (MIXTRAL, NEXT), same, changes=(experts_reordered,))
    yield from _pairs_of("float32-ranks", (LLAMA, MIXTRAL), same, changes=(parallel(4),))
    yield from _pairs_of("delta-chunks", (NEXT,), two, changes=(delta(chunk=16),))
    yield from _pairs_of("recurrent", (NEXT,), two, changes=(recurrent,))
    yield from _pairs_of("absorbed", (MLA,), two, changes=(latent,))
    yield from _pairs_of("absorbed-decode", (MLA,), same, changes=(latent,), way="steps")
    yield from _pairs_of("neighbours", (LLAMA,), two, changes=(neighbours_turned,))
    yield from _pairs_of("doubled-norms", (LLAMA,), same, changes=(doubled_norms,))
    yield from _pairs_of("folded-norms", (LLAMA,), (FULL,), changes=(folded_norms,))
    yield from _pairs_of("float32-head", (LLAMA, MOE), same, changes=(float32_head,))
    yield from _pairs_of("compiled-mlp", (LLAMA,), same, changes=(compiled("mlp"),))
    yield from _pairs_of("compiled", (LLAMA,), two, changes=(compiled(""),))
    yield from _pairs_of("log-sum-exp", (LLAMA, MOE), same, finish=by_sums)
    for parts in (("norm",), ("mlp",), ("rope",)):
        yield from _pairs_of(f"kernel-{parts[0]}", (LLAMA,), same, changes=(bundled(*parts),), around=faithful)
    yield from _pairs_of("kernel-attention", (LLAMA,), same, changes=(bundled("attention"),), around=faithful)
    warm = Run(LLAMA, finish=at_temperature)
    yield Pair("temperature@llama-bfloat16", warm, replace(warm, finish=by_reciprocal))
