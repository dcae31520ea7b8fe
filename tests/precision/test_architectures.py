"""Small random models of many architectures: what of each is audited, what isn't, and whether predictions hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from assay.precision import audit
from assay.precision.choice.roofline import Shape
from tests.precision.recurrent_models import Recurrent

FORMATS = ("bf16", "fp8", "w8a16", "w4a16-g32", "kv-fp8", "a-fp8")
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
HEADS: dict[str, Any] = {**SIZES, "num_key_value_heads": 1, "head_dim": 32}
LATENT: dict[str, Any] = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


class Block(torch.nn.Module):
    """Two convolutions with batch norms, and a way past them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = torch.nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = torch.nn.BatchNorm2d(outputs), torch.nn.BatchNorm2d(outputs)
        self.past = torch.nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + self.past(x))


class ResNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3, 1, 1)
        self.blocks = torch.nn.Sequential(Block(16, 16, 1), Block(16, 32, 2))
        self.fc = torch.nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class UNet(torch.nn.Module):
    """Down, through, up beside what went down, and no linear anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(4, 16, 3, padding=1)
        self.down = torch.nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm = torch.nn.GroupNorm(4, 32)
        self.middle = torch.nn.Conv2d(32, 32, 3, padding=1)
        self.up = torch.nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1)
        self.last = torch.nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.nn.functional.silu(self.first(x))
        below = torch.nn.functional.silu(self.norm(self.down(before)))
        return self.last(torch.cat([before, self.up(below + self.middle(below))], 1))


def tokens(length: int = 12) -> Tensor:
    return torch.randint(0, 256, (8, length), generator=torch.Generator().manual_seed(length))


def pixels(*shape: int) -> Tensor:
    return torch.randn(8, *shape, generator=torch.Generator().manual_seed(3))


def causal(name: str, sizes: dict[str, Any] = HEADS, **more: Any) -> Callable[[], torch.nn.Module]:
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    return lambda: getattr(transformers, f"{name}ForCausalLM")(config(**{**sizes, **more}))


TEXT = {"input_ids": tokens()}
BOTH = {"input_ids": tokens(), "decoder_input_ids": tokens(9)}
CASES: dict[str, tuple[Callable[[], torch.nn.Module], Any, str]] = {
    "GPT-2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=2, n_positions=64)
        ),
        TEXT,
        "kl",
    ),
    "Gemma 2": (causal("Gemma2"), TEXT, "kl"),
    "Gemma 3": (causal("Gemma3"), TEXT, "kl"),
    "Qwen3 MoE": (causal("Qwen3Moe", num_experts=4, **ROUTED), TEXT, "kl"),
    "Mixtral": (causal("Mixtral", num_local_experts=4), TEXT, "kl"),
    "DeepSeek V3": (
        causal(
            "DeepseekV3",
            SIZES,
            **LATENT,
            **ROUTED,
            v_head_dim=32,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            n_shared_experts=1,
            num_key_value_heads=2,
        ),
        TEXT,
        "kl",
    ),
    "gpt-oss": (causal("GptOss", num_local_experts=4, num_experts_per_tok=2), TEXT, "kl"),
    "Llama 4": (causal("Llama4", intermediate_size_mlp=96, num_local_experts=4), TEXT, "kl"),
    "BERT": (lambda: transformers.BertModel(transformers.BertConfig(**SIZES)), TEXT, "relative"),
    "T5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=256, d_model=64, d_ff=96, d_kv=32, num_layers=2, num_heads=2)
        ),
        BOTH,
        "kl",
    ),
    "ViT": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**{**SIZES, "image_size": 32, "patch_size": 8, "num_labels": 10})
        ),
        {"pixel_values": pixels(3, 32, 32)},
        "kl",
    ),
    "Mamba": (
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=256, hidden_size=64, state_size=8, num_hidden_layers=2)
        ),
        TEXT,
        "kl",
    ),
    "ResNet": (ResNet, (pixels(3, 16, 16),), "kl"),
    "U-Net": (UNet, (pixels(4, 16, 16),), "relative"),
    "LSTM": (lambda: Recurrent(torch.nn.LSTM), (tokens() % 64,), "kl"),
}
SHUT = {"Mamba": "MambaMixer", "ViT": "ViTEmbeddings"}
"""Whose matrices are not all sites, and a word of why."""
CACHES = {"GPT-2": 2, "Gemma 3": 2, "Qwen3 MoE": 2, "Mixtral": 2, "DeepSeek V3": 2, "Llama 4": 2, "T5": 4}
"""How many KV caches there are: T5's decoder keeps its own and those of the encoder."""


@pytest.mark.parametrize("name", CASES)
def test_every_matrix_is_a_site_or_is_told_and_predicted_as_measured(name: str) -> None:
    torch.manual_seed(0)
    build, batch, metric = CASES[name]
    found = audit(build().eval(), [batch], metric, FORMATS)
    told = found.observed.unaudited
    assert (SHUT[name] in str(told)) if name in SHUT else str(told) == ""
    held = sum(site.parameters for site in found.all_sites if not site.tied)
    matrices = sum(
        values.numel()
        for each, values in found.model.named_parameters()
        if values.dim() > 1 and not each.endswith("_bias")
    )
    assert held + told.parameters == matrices
    assert found.sites_without_gradient == ()
    caches = [site for site in found.all_sites if site.type == "kv_cache"]
    assert len(caches) == CACHES.get(name, 0)
    if name in ("BERT", "ViT"):
        assert not Shape.of(found.model).decodes
        assert found.cost({}).kv_bytes == 0
        assert found.cost({}).decode != found.cost({}).decode
    weights = [site for site in found.sites if site.type in ("linear", "embedding") and not site.tied]
    assignment = {str(site): "w8a16" for site in weights}
    assert 1 / 3 < found.predictor.uncalibrated(assignment)[0] / found.trial(assignment) < 3
