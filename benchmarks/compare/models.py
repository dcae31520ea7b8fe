"""Small models of four layers, made on the CPU with fixed seeds, and the ways to run them on given tokens.

Two are the bundled ones, trained on text. The others are made from a seed with weights that resemble trained ones:
norms whose weights spread over a decade, a few channels of the residual stream that are much larger than the rest,
attention and routers that decide, logits with a standard deviation of two and more. All weights are numbers of
bfloat16, so a model in float32 and one in bfloat16 have the same. Tokens are drawn from the model's own distribution.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

BUNDLED = Path(__file__).resolve().parents[2] / "configs" / "models"
TOKENS = 96
CHUNK = 32  # tokens of a chunk of a prefill
PREFILL = 64  # tokens before the first step of a decode
_VOCABULARY = 512
_SEED = 20


def _bundled(name: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(BUNDLED / name, dtype=torch.float32, attn_implementation="eager")


def _made(kind: str, seed: int, **config: Any) -> nn.Module:
    """Return a causal language model of transformers by its model type, with weights from a seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    usual = {"vocab_size": _VOCABULARY, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    usual |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "tie_word_embeddings": False}
    usual |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    options = AutoConfig.for_model(kind, **(usual | config))
    options._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(options, dtype=torch.float32, attn_implementation="eager")
    _shape(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def _shape(model: Any, generator: torch.Generator) -> None:
    """Give a model weights that resemble trained ones: see the head of this file."""
    width = model.config.hidden_size
    loud = torch.randperm(width, generator=generator)[:3]  # channels of the residual stream

    def normal(shape: Sequence[int], deviation: float = 1.0) -> Tensor:
        return deviation * torch.randn(tuple(shape), generator=generator)

    for name, weight in model.named_parameters():
        last = name.rsplit(".", 2)[-2] if name.endswith((".weight", ".bias")) else name.rsplit(".", 1)[-1]
        if last == "A_log":
            weight.copy_(torch.empty(weight.shape).uniform_(0.05, 8.0, generator=generator).log())
        elif last == "dt_bias":  # time steps between 0.001 and 0.1 before the input counts, as Mamba starts with
            steps = torch.empty(weight.shape).uniform_(-6.9, -2.3, generator=generator).exp()
            weight.copy_(steps.expm1().log())
        elif "norm" in last:
            spread = normal(weight.shape, 0.3).exp()
            spread[torch.randperm(len(weight), generator=generator)[: len(weight) // 40]] *= 4.0
            weight.copy_(spread - 1.0 if type(_owner(model, name)).__name__ in _OFFSET else spread)
        elif name.endswith(".bias"):
            weight.copy_(normal(weight.shape, 0.3))
            weight[torch.randperm(len(weight), generator=generator)[:2]] *= 8.0
        elif last == "embed_tokens":
            weight.copy_(normal(weight.shape, 0.05 if model.config.model_type == "gemma2" else 0.6))
            weight[:, loud] *= 8.0
        elif last == "lm_head":
            weight.copy_(normal(weight.shape, 2.2 / width**0.5))
            weight[:, loud] *= 0.2
        elif last == "conv1d":
            weight.copy_(normal(weight.shape, 0.2))
        else:
            gain = {"q_proj": 1.6, "k_proj": 1.6, "q_b_proj": 1.6, "gate": 1.6, "in_proj_ba": 0.7}.get(last, 1.0)
            weight.copy_(normal(weight.shape, gain / weight.shape[-1] ** 0.5))
            if last in ("down_proj", "o_proj", "out_proj"):
                weight *= 0.6 if weight.dim() == 2 else 0.3  # experts are several, and their sum may be scaled
                weight[..., loud, :] *= 3.0
        weight.copy_(weight.bfloat16())
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(normal(buffer.shape, 0.1).bfloat16())


_OFFSET = ("Gemma2RMSNorm", "Qwen3NextRMSNorm")
"""Norms that multiply by one more than their weight."""


def _owner(model: nn.Module, parameter: str) -> nn.Module:
    return model.get_submodule(parameter.rpartition(".")[0])


_MOE = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "shared_expert_intermediate_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "intermediate_size": 192,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 640,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 16,
    },
}
_CAPPED = {
    "intermediate_size": 256,
    "sliding_window": 24,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 10.0,
    "tie_word_embeddings": True,
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _bundled("stdlib-llama"),
    "mixtral": lambda: _bundled("stdlib-mixtral"),
    "qwen3_moe": lambda: _made("qwen3_moe", 1, **_MOE),
    "qwen3_next": lambda: _made("qwen3_next", 2, **_MOE, **_DELTA),
    "deepseek_v3": lambda: _made("deepseek_v3", 3, **_LATENT),
    "qwen2": lambda: _made("qwen2", 4, intermediate_size=256),
    "gemma2": lambda: _made("gemma2", 5, **_CAPPED),
}
"""The five models of the acceptance, one whose projections have biases, and one with caps, a window and a tied head."""

MIDDLE = dict.fromkeys(MODELS, 2) | {"mixtral": 1, "qwen2": 1}
"""The layer that is altered; of the hybrid it has a delta rule."""
ATTENTION = MIDDLE | {"llama": 1, "qwen3_next": 1}
"""The layer whose attention is altered; in layer 2 of the bundled Llama a query looks at hardly more than one key."""


@cache
def _base(name: str) -> nn.Module:
    return MODELS[name]().eval().requires_grad_(False)


def make(name: str, dtype: torch.dtype) -> Any:
    """Return a model of one's own to alter, in ``dtype``, with eager attention and experts in a loop."""
    model: Any = copy.deepcopy(_base(name))
    rotary = {key: value.clone() for key, value in model.named_buffers() if "inv_freq" in key}
    model.to(dtype)
    for key, value in rotary.items():  # stays float32, as where a checkpoint is loaded in bfloat16
        setattr(model.get_submodule(key.rpartition(".")[0]), key.rpartition(".")[2], value)
    model.set_experts_implementation("eager")
    return model


@cache
def tokens(name: str, count: int = TOKENS, seed: int = _SEED) -> Tensor:
    """Return token ids [1, count]: the held-out text of a bundled model, or drawn from the model itself."""
    if name in ("llama", "mixtral"):
        from transformers import AutoTokenizer

        text = (BUNDLED / "held-out.txt").read_text(encoding="utf-8")[100 * seed :]
        ids = AutoTokenizer.from_pretrained(BUNDLED / f"stdlib-{name}")(text[: 8 * count], return_tensors="pt")
        return ids["input_ids"][:, :count].contiguous()
    generator = torch.Generator().manual_seed(seed)
    model, cached = make(name, torch.float32), None
    ids = torch.randint(_VOCABULARY, (1, 1), generator=generator)
    with torch.inference_mode():
        while ids.shape[1] < count:
            output = model(input_ids=ids[:, -1:], past_key_values=cached, use_cache=True)
            cached = output.past_key_values
            drawn = torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, drawn], dim=1)
    return ids.clone()


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities in float32, as trainers and engines do for a policy's gradient."""
    return torch.log_softmax(logits.float(), dim=-1)


@dataclass(frozen=True)
class Run:
    """One run of a pair: a model, its number format, the changes to it and the way in which tokens go through it.

    ``changes`` alter the run's own copy of the model, one after the other. ``way``: "whole" prefill, prefill in
    "chunks", prefill and then single "steps" with the model's cache, a "batch" in which the row is the second of three,
    or "padded" on the left. ``finish`` makes log-probabilities of logits. ``around`` is entered for the run.
    """

    model: str
    dtype: torch.dtype = torch.bfloat16
    changes: tuple[Callable[[Any], object], ...] = ()
    way: str = "whole"
    finish: Callable[[Tensor], Tensor] = log_softmax
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    cache: Callable[[Any], Any] | None = None

    def made(self) -> Any:
        """Return the model of this run, altered."""
        model = make(self.model, self.dtype)
        for change in self.changes:
            change(model)
        return model

    def log_probabilities(self, model: Any) -> Tensor:
        """Return the log-probability [TOKENS - 1] of each token but the first, given those before it."""
        ids = tokens(self.model)
        with torch.no_grad(), self.around():
            rows = [self.finish(logits) for logits in self._logits(model, ids)]
            row = torch.cat(rows, dim=1)[-1:, :-1]
            return row.gather(-1, ids[:, 1:, None])[0, :, 0]

    def _logits(self, model: Any, ids: Tensor) -> list[Tensor]:
        """Return logits [B, S, V] of consecutive parts of ``ids`` [1, S]; its row is the last of B."""
        if self.way == "whole":
            return [model(input_ids=ids, use_cache=False).logits]
        if self.way in ("batch", "padded"):
            others = [tokens(self.model, TOKENS, seed) for seed in (_SEED + 1, _SEED + 2)]
            rows = torch.cat([*others, ids])
            if self.way == "batch":
                return [model(input_ids=rows, use_cache=False).logits]
            padding = torch.zeros(3, 7, dtype=ids.dtype)
            mask = torch.cat([padding, torch.ones_like(rows)], dim=1)
            places = (mask.cumsum(-1) - 1).clamp(min=0)
            whole = torch.cat([padding, rows], dim=1)
            logits = model(input_ids=whole, attention_mask=mask, position_ids=places, use_cache=False).logits
            return [logits[:, padding.shape[1] :]]
        starts = range(0, TOKENS, CHUNK) if self.way == "chunks" else [0, *range(PREFILL, TOKENS)]
        past = None if self.cache is None else self.cache(model)
        parts = []
        for start, end in zip(starts, [*starts[1:], TOKENS], strict=True):
            output = model(input_ids=ids[:, start:end], past_key_values=past, use_cache=True)
            past = output.past_key_values
            parts.append(output.logits)
        return parts


@dataclass(frozen=True)
class Pair:
    """Two runs to compare; ``name`` is the case and the model."""

    name: str
    a: Run
    b: Run

    @property
    def case(self) -> str:
        """The name without the model."""
        return self.name.partition("@")[0]
