"""Contracts "torch" and "transformers" against the installed code, which keeps them, but not with one more rounding."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.kernels.libraries import pytorch, pytorch_eager

from .examined import fails, passes
from .libraries import DTYPES, ROWS, SMALL, judged, rounding_more
from .usual import by_turns


def convolution(x: Tensor, weight: Tensor, bias: Tensor, *, activation: str = "none") -> Tensor:
    y = F.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[1])[..., : x.shape[2]]
    return F.silu(y) if activation == "silu" else y


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, *, groups: int = 2) -> Tensor:
    """torch's, which takes no single value of a channel."""
    return F.group_norm(x, groups, weight, bias)


def normalize(x: Tensor, *, clamp: str = "maximum") -> Tensor:
    return F.normalize(x, dim=-1, eps=1e-6)


def gated_by_gelu(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def module_of(path: str) -> Any:
    pytest.importorskip("transformers")
    return __import__(f"transformers.{path}", fromlist=["_"])


QWEN = "qwen3_next.modeling_qwen3_next"


def normed(kind: str, weight: Tensor, *inputs: Tensor) -> Any:
    """What a norm of a model of transformers gives."""
    module, _, name = kind.rpartition(".")
    norm = getattr(module_of(f"models.{module}"), name)(weight.shape[0], eps=1e-6)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm(*inputs)


def gemma_mlp(gate: Tensor, up: Tensor, *, approximate: str = "tanh") -> Any:
    """The middle of GemmaMLP, and with the exact GELU."""
    return module_of("activations").ACT2FN["gelu_pytorch_tanh" if approximate == "tanh" else "gelu"](gate) * up


def llama_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """apply_rotary_pos_emb; cosine and sine are cast to x's dtype, as the embedding's module does."""
    turns = [torch.cat((part, part), -1)[None].to(x.dtype) for part in (cos, sin)]
    return module_of("models.llama.modeling_llama").apply_rotary_pos_emb(x, x, *turns, unsqueeze_dim=2)[0]


def gemma_attention(q: Tensor, k: Tensor, v: Tensor, *, softcap: float | None = None) -> Any:
    """Gemma 2's eager_attention_forward, which without a softcap is Llama's."""
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False, head_dim=q.shape[-1])
    forward = module_of("models.gemma2.modeling_gemma2").eager_attention_forward
    out = forward(module, q, k, v, None, scaling=q.shape[-1] ** -0.5, softcap=softcap)[0]
    return out.transpose(1, 2).contiguous()


def mixtral_experts(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Any:
    experts, width, hidden = w_gate_up.shape
    config = module_of("models.mixtral.configuration_mixtral").MixtralConfig(
        num_local_experts=experts, hidden_size=hidden, intermediate_size=width // 2
    )
    config._experts_implementation = "eager"
    layer = module_of("models.mixtral.modeling_mixtral").MixtralExperts(config)
    layer.gate_up_proj = torch.nn.Parameter(w_gate_up, requires_grad=False)
    layer.down_proj = torch.nn.Parameter(w_down, requires_grad=False)
    return layer(x, ids.long(), weights)


KERNELS: dict[str, tuple[str, Callable[..., Tensor], dict[str, Any]]] = {
    "torch gelu": ("gelu", F.gelu, ROWS),
    "torch swiglu": ("swiglu", pytorch_eager.swiglu, ROWS),
    "torch geglu": ("geglu", gated_by_gelu, {**ROWS, "options": {"approximate": ["tanh", "none"]}}),
    "torch softmax": ("softmax", pytorch.softmax, ROWS),
    "torch log_softmax": ("log_softmax", pytorch.log_softmax, ROWS),
    "torch logsumexp": ("logsumexp", pytorch.logsumexp, ROWS),
    "torch layer_norm": ("layernorm", pytorch.layer_norm, ROWS),
    "torch group_norm": ("group_norm", group_norm, {"shapes": {"B": [2], "C": [4], "L": [2, 9]}}),
    "torch normalize": ("l2norm", normalize, {**ROWS, "options": {"clamp": ["maximum"]}}),
    "torch conv1d": (
        "causal_conv1d", convolution,
        {"shapes": {"B": [2], "D": [3], "L": [2, 9]}, "options": {"activation": ["none", "silu"]}},
    ),
    "torch attention": ("attention", attention, SMALL),
    "torch linear": ("linear", F.linear, {"shapes": {"M": [5], "N": [6], "K": [3, 16, 40]}}),
    "transformers norm": ("rmsnorm", lambda x, w: normed("llama.modeling_llama.LlamaRMSNorm", w, x), ROWS),
    "transformers gated norm": (
        "gated_rmsnorm", lambda x, w, g: normed(f"{QWEN}.Qwen3NextRMSNormGated", w, x, g), ROWS,
    ),
    "transformers l2norm": ("l2norm", lambda x: module_of(f"models.{QWEN}").l2norm(x, dim=-1, eps=1e-6), ROWS),
    "transformers swiglu": ("swiglu", lambda gate, up: module_of("activations").ACT2FN["silu"](gate) * up, ROWS),
    "transformers geglu": ("geglu", gemma_mlp, {**ROWS, "options": {"approximate": ["tanh", "none"]}}),
    "transformers rope": ("rope", llama_rope, {"shapes": {"B": [2], "S": [3, 8], "H": [2], "D": [8, 16]}}),
    "transformers attention": ("attention", gemma_attention, SMALL),
    "transformers softcap": ("attention", gemma_attention, {**SMALL, "options": {"softcap": [2.0]}}),
    "transformers experts": (
        "moe", mixtral_experts, {"shapes": {"T": [5], "D": [16], "E": [4], "F": [8], "k": [2]}},
    ),
}  # fmt: skip
LOOSE = ("torch logsumexp", "transformers experts", "transformers l2norm")
"""Those whose stages are many: one more rounding is lost among them."""


@pytest.mark.parametrize(("name", "dtype"), by_turns(KERNELS, DTYPES))
def test_the_code_keeps_its_contract(name: str, dtype: str) -> None:
    op, kernel, settings = KERNELS[name]
    passes(judged(kernel, op, name.split()[0], dtype, settings))


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in LOOSE])
def test_one_more_rounding_breaks_it(name: str) -> None:
    op, kernel, settings = KERNELS[name]
    for dtype in ("bfloat16", "float32"):
        fails(judged(rounding_more(kernel), op, name.split()[0], dtype, settings))
