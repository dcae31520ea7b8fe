"""Models with one planted trap each. Factors are powers of two, so that what keeps a function keeps it to the bit."""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from assay.precision import Audit, advise, audit
from assay.precision.advice import Finding
from assay.precision.loading import load

HELD_OUT = Path(__file__).parents[2] / "configs/models/held-out.txt"
SINK = 7
"""A byte that the text does not have, for the start of a sequence."""


LINEARS = ("bf16", "fp16", "fp8", "fp8-tensor", "w8a8", "mxfp4")


@cache
def clean(name: str) -> Audit:
    """The audit of a bundled model as it is, over a few short sequences."""
    loaded = load(name)
    return audit(loaded.model, loaded.batches(HELD_OUT, sequence=48, sequences=8, batch=8), formats=LINEARS)


def new_findings(
    model: torch.nn.Module, changed: torch.nn.Module, batches: Sequence[Any], metric: str, formats: Sequence[str]
) -> tuple[Audit, Audit, list[Finding]]:
    """The audits of a model and of a changed one, and what is found in the latter alone."""
    one, other = (audit(each, batches, metric, formats) for each in (model, changed))
    before = {(finding.kind, finding.site) for finding in advise(one)}
    return one, other, [finding for finding in advise(other) if (finding.kind, finding.site) not in before]


def planted(model: torch.nn.Module, trap: Callable[..., object], **options: Any) -> torch.nn.Module:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        trap(changed, **options)
    return changed


def same_function(model: torch.nn.Module, other: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> bool:
    """Whether two models give the same logits, up to float32's rounding."""
    with torch.no_grad():
        return all(
            torch.allclose(model(**batch).logits, other(**batch).logits, rtol=1e-3, atol=2e-3) for batch in batches
        )


def outlier_channel(model: Any, layer: int, channel: int, factor: float = 2.0**8) -> None:
    """A channel of a norm's output is larger, and the linears that read it make up for that."""
    block = model.model.layers[layer]
    block.input_layernorm.weight[channel] *= factor
    for linear in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
        linear.weight[:, channel] /= factor


def scaled_units(model: Any, layer: int, units: list[int], factor: float) -> None:
    """Hidden units of an MLP are larger by a factor, and the rest of the layer makes up for that."""
    mlp = model.model.layers[layer].mlp
    mlp.up_proj.weight[units] *= factor
    mlp.down_proj.weight[:, units] /= factor


def key_channel(model: Any, layer: int, head: int, channel: int, factor: float = 2.0**7) -> None:
    """A pair of channels that RoPE turns into one another is larger in a head's keys, and smaller in its queries."""
    attention, size = model.model.layers[layer].self_attn, model.config.head_dim
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    for place in (channel, channel + size // 2):
        attention.k_proj.weight[head * size + place] *= factor
        for query in range(head * group, (head + 1) * group):
            attention.q_proj.weight[query * size + place] /= factor


def massive_token(model: Any, token: int = SINK, factor: float = 2.0**16) -> None:
    """A token's embedding is huge. What follows from that token does change, from the second layer on."""
    model.model.embed_tokens.weight[token] *= factor


def begun(batches: list[dict[str, torch.Tensor]], token: int = SINK) -> list[dict[str, torch.Tensor]]:
    """The batches, every sequence starting with this token."""
    changed = [{**batch, "input_ids": batch["input_ids"].clone()} for batch in batches]
    for batch in changed:
        batch["input_ids"][:, 0] = token
    return changed


def own_table(model: Any) -> None:
    """The table of embeddings has the values of the head's weight, but storage of its own."""
    model.model.embed_tokens.weight = torch.nn.Parameter(model.lm_head.weight.clone())


def tied_table(model: Any) -> None:
    model.model.embed_tokens.weight = model.lm_head.weight


def dead_layer(model: Any, after: int) -> None:
    """One layer more, whose two output projections are zero: it adds nothing."""
    layer = copy.deepcopy(model.model.layers[after])
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    model.model.layers.insert(after + 1, layer)
    model.config.num_hidden_layers += 1
    for index, each in enumerate(model.model.layers):
        each.self_attn.layer_idx = index


def idle_expert(model: Any, layer: int, batches: list[dict[str, torch.Tensor]]) -> None:
    """One expert more, whose router row gives it the least logit on these batches."""
    block = model.model.layers[layer].mlp
    seen: list[torch.Tensor] = []
    handle = block.gate.register_forward_pre_hook(lambda _module, args: seen.append(args[0].flatten(0, -2)))
    for batch in batches:
        model(**batch)
    handle.remove()
    x = torch.cat(seen)
    logits = x @ block.gate.weight.T
    row = torch.linalg.lstsq(x, logits.min(-1).values - 8.0).solution
    _append(block, row, block.experts.gate_up_proj[:1], block.experts.down_proj[:1])


def common_router(model: Any, layer: int, factor: float = 64.0) -> None:
    """All rows of a router have a large part in common. It adds the same to every logit, so no choice depends on it."""
    weight = model.model.layers[layer].mlp.gate.weight
    common = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
    weight += factor * weight.square().mean().sqrt() * common


def _append(block: Any, row: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    block.gate.weight = torch.nn.Parameter(torch.cat([block.gate.weight, row[None]]))
    block.experts.gate_up_proj = torch.nn.Parameter(torch.cat([block.experts.gate_up_proj, gate_up]))
    block.experts.down_proj = torch.nn.Parameter(torch.cat([block.experts.down_proj, down]))
    block.gate.num_experts += 1
    block.experts.num_experts += 1
