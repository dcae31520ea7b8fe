"""Contract "transformers" against the installed transformers: its code keeps it, and rounding once more it doesn't."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from .libraries import DTYPES, ROWS, SMALL, judged, rounding_more
from .usual import by_turns


def module_of(path: str) -> Any:
    pytest.importorskip("transformers")
    return __import__(f"transformers.{path}", fromlist=["_"])


def normed(kind: Any, weight: Tensor, *inputs: Tensor, **options: Any) -> Tensor:
    norm = kind(weight.shape[0], **options)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    found: Tensor = norm(*inputs)
    return found


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    return normed(module_of("models.llama.modeling_llama").LlamaRMSNorm, weight, x, eps=1e-6)


def qwen_gated_norm(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    return normed(module_of("models.qwen3_next.modeling_qwen3_next").Qwen3NextRMSNormGated, weight, x, gate, eps=1e-6)


def qwen_l2norm(x: Tensor) -> Tensor:
    """The length of queries and keys before a delta rule."""
    found: Tensor = module_of("models.qwen3_next.modeling_qwen3_next").l2norm(x, dim=-1, eps=1e-6)
    return found


def llama_mlp(gate: Tensor, up: Tensor) -> Tensor:
    """The middle of LlamaMLP."""
    found: Tensor = module_of("activations").ACT2FN["silu"](gate) * up
    return found


def gemma_mlp(gate: Tensor, up: Tensor, *, approximate: str = "tanh") -> Tensor:
    """The middle of GemmaMLP, and with the exact GELU."""
    activation = module_of("activations").ACT2FN["gelu_pytorch_tanh" if approximate == "tanh" else "gelu"]
    found: Tensor = activation(gate) * up
    return found


def llama_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """apply_rotary_pos_emb; cosine and sine are cast to x's dtype, as the embedding's module does."""
    turns = [torch.cat((part, part), -1)[None].to(x.dtype) for part in (cos, sin)]
    found: Tensor = module_of("models.llama.modeling_llama").apply_rotary_pos_emb(x, x, *turns, unsqueeze_dim=2)[0]
    return found


def gemma_attention(q: Tensor, k: Tensor, v: Tensor, *, softcap: float | None = None) -> Tensor:
    """Gemma 2's eager_attention_forward, which without a softcap is Llama's."""
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False, head_dim=q.shape[-1])
    forward = module_of("models.gemma2.modeling_gemma2").eager_attention_forward
    out: Tensor = forward(module, q, k, v, None, scaling=q.shape[-1] ** -0.5, softcap=softcap)[0]
    return out.transpose(1, 2).contiguous()


def mixtral_experts(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    experts, width, hidden = w_gate_up.shape
    config = module_of("models.mixtral.configuration_mixtral").MixtralConfig(
        num_local_experts=experts, hidden_size=hidden, intermediate_size=width // 2
    )
    config._experts_implementation = "eager"
    layer = module_of("models.mixtral.modeling_mixtral").MixtralExperts(config)
    layer.gate_up_proj = torch.nn.Parameter(w_gate_up, requires_grad=False)
    layer.down_proj = torch.nn.Parameter(w_down, requires_grad=False)
    out: Tensor = layer(x, ids.long(), weights)
    return out


KERNELS: dict[str, tuple[str, Callable[..., Tensor], dict[str, Any]]] = {
    "norm": ("rmsnorm", llama_norm, ROWS),
    "gated norm": ("gated_rmsnorm", qwen_gated_norm, ROWS),
    "l2norm": ("l2norm", qwen_l2norm, ROWS),
    "swiglu": ("swiglu", llama_mlp, ROWS),
    "geglu": ("geglu", gemma_mlp, {**ROWS, "options": {"approximate": ["tanh", "none"]}}),
    "rope": ("rope", llama_rope, {"shapes": {"B": [2], "S": [3, 8], "H": [2], "D": [8, 16]}}),
    "attention": ("attention", gemma_attention, SMALL),
    "softcap": ("attention", gemma_attention, {**SMALL, "options": {"softcap": [2.0]}}),
    "experts": ("moe", mixtral_experts, {"shapes": {"T": [5], "D": [16], "E": [4], "F": [8], "k": [2]}}),
}  # fmt: skip
LOOSE = ("experts", "l2norm")  # whose stages are many: one more rounding is lost among them


@pytest.mark.parametrize(("name", "dtype"), by_turns(KERNELS, DTYPES))
def test_the_code_keeps_its_contract(name: str, dtype: str) -> None:
    op, kernel, settings = KERNELS[name]
    verdict = judged(kernel, op, "transformers", dtype, settings)
    assert verdict.outcome == "PASS", str(verdict)


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in LOOSE])
def test_one_more_rounding_breaks_it(name: str) -> None:
    op, kernel, settings = KERNELS[name]
    for dtype in ("bfloat16", "float32"):
        assert judged(rounding_more(kernel), op, "transformers", dtype, settings).outcome == "FAIL", dtype
