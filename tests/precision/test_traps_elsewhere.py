"""Traps planted in a GPT-2 and in experts that are multiplied as one parameter: each is found where it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from assay.precision import Audit
from assay.precision.advice import Finding
from tests.precision import traps

FORMATS = ("bf16", "fp16", "fp8", "w8a8")
SIZES: dict[str, Any] = {"vocab_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 256, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))


def llama4() -> Any:
    """Its experts are two parameters [E, K, N], which torch.bmm multiplies all tokens with."""
    more = {"hidden_size": 128, "intermediate_size": 128, "intermediate_size_mlp": 128, "head_dim": 32}
    config = transformers.Llama4TextConfig(**SIZES, **more, num_key_value_heads=4, num_local_experts=4)
    return transformers.Llama4ForCausalLM(config)


def normed_channel(model: Any, channel: int, factor: float = 2.0**8) -> None:
    """A channel of the second layer's first norm is larger, and the weight [K, N] that reads it makes up for that."""
    block = model.transformer.h[1]
    block.ln_1.weight[channel] *= factor
    block.ln_1.bias[channel] *= factor
    block.attn.c_attn.weight[channel] /= factor


def value_channel(model: Any, channel: int, factor: float = 2.0**22) -> None:
    """A channel of the values is huge, and what reads attention's output makes up for that."""
    attention, width = model.transformer.h[0].attn, model.config.n_embd
    attention.c_attn.weight[:, 2 * width + channel] *= factor
    attention.c_attn.bias[2 * width + channel] *= factor
    attention.c_proj.weight[channel] /= factor


def experts_channel(model: Any, channel: int, factor: float = 2.0**8) -> None:
    """A channel of the norm before the experts is larger, and all that reads it makes up for that."""
    layer = model.model.layers[1]
    layer.post_attention_layernorm.weight[channel] *= factor
    feed = layer.feed_forward
    feed.experts.gate_up_proj[:, channel] /= factor
    for weight in (feed.router.weight, feed.shared_expert.gate_proj.weight, feed.shared_expert.up_proj.weight):
        weight[:, channel] /= factor


def expert_unit(model: Any, unit: int, factor: float = 2.0**26) -> None:
    """A hidden unit of every expert is huge, and the second parameter makes up for that."""
    experts = model.model.layers[0].feed_forward.experts
    hidden = experts.down_proj.shape[1]
    experts.gate_up_proj[:, :, hidden + unit] *= factor
    experts.down_proj[:, unit] /= factor


def found_with(build: Callable[[], Any], trap: Callable[..., None], **options: Any) -> tuple[Audit, list[Finding]]:
    """The audit of a model with a trap that keeps its function, and what is found in it but not without."""
    torch.manual_seed(0)
    model = build().eval()
    batches = [{"input_ids": torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(1))}]
    changed = traps.planted(model, trap, **options)
    assert traps.same_function(model, changed, batches)
    return traps.new_findings(model, changed, batches, "kl", FORMATS)[1:]


CHANNELS = {
    "GPT-2": (gpt2, normed_channel, "transformer.h.1.attn.c_attn"),
    "experts": (llama4, experts_channel, "model.layers.1.feed_forward.experts.gate_up_proj"),
}
UNITS = {
    "GPT-2": (gpt2, value_channel, {"channel": 9}, "transformer.h.0.attn.c_proj"),
    "experts": (llama4, expert_unit, {"unit": 9}, "model.layers.0.feed_forward.experts.down_proj"),
}


@pytest.mark.parametrize("case", CHANNELS)
def test_an_outlier_channel_is_found(case: str) -> None:
    build, trap, site = CHANNELS[case]
    found, findings = found_with(build, trap, channel=17)
    told = [finding for finding in findings if finding.kind == "outlier_channel"]
    assert told
    assert all(finding.numbers["channels"] == [17] and finding.numbers["ratio"] > 50 for finding in told)
    assert {finding.site.split(".")[2] for finding in told} == {"1"}
    assert found.contribution(site, "w8a8") > 3 * found.contribution(site, "fp8")


@pytest.mark.parametrize("case", UNITS)
def test_a_site_that_breaks_at_a_format_is_found(case: str) -> None:
    build, trap, options, site = UNITS[case]
    found, findings = found_with(build, trap, **options)
    told = [finding for finding in findings if finding.kind == "overflow" and finding.site == site]
    assert [finding.numbers["scheme"] for finding in told] == ["fp16"]
    assert not torch.tensor(float(found.measure({site: "fp16"}))).isfinite()
    assert torch.tensor(float(found.measure({site: "bf16"}))).isfinite()
