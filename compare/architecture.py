"""What a run's configuration says of its regions: numbers of heads, scales, windows, frequencies, routing, epsilons.

The configuration is the authority: a run whose code computes with another number than its configuration says is wrong.
Fields are those of transformers' configurations; plain models have them under the names of Llama's own code.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from assay.compare.runs.run import Run
from assay.configs import table


class Architecture:
    """The facts of one run's model."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.setting: Callable[..., Any] = run.setting
        self.kind = str(run.setting("model_type", default=""))
        rules = table("compare")["norms"]
        self._one_plus_weight = self.kind in rules["one_plus_weight"]
        self._own_epsilon: dict[str, float] = rules["epsilon"]

    @property
    def heads(self) -> int:
        return int(self.setting("num_attention_heads", "n_heads", "n_head", default=0))

    @property
    def groups(self) -> int:
        return int(self.setting("num_key_value_heads", "n_kv_heads", default=self.heads))

    @property
    def head_width(self) -> int:
        width = self.setting("hidden_size", "dim", "n_embd", default=0)
        return int(self.setting("head_dim", default=width // max(self.heads, 1)))

    def epsilon(self, module: str) -> float:
        """Return the epsilon of a norm."""
        own = self._own_epsilon.get(module.rpartition(".")[2])
        if own is not None:
            return own
        stated = self.setting("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
        return float(self._run.attribute(module, "variance_epsilon", "eps", "epsilon") if stated is None else stated)

    def norm_offset(self, module_class: str) -> float:
        """Return what an RMS norm of this class adds to its weight."""
        return 1.0 if self._one_plus_weight and "Gated" not in module_class else 0.0

    @property
    def embedding_scale(self) -> float:
        """The factor of embeddings: sqrt(width) in Gemma."""
        if self.kind.startswith("gemma"):
            return float(torch.tensor(self.setting("hidden_size") ** 0.5, dtype=self._run.main_dtype))
        return float(self.setting("embedding_multiplier", default=1.0))

    def attention(self, layer: int, width: int) -> dict[str, Any]:
        """Return the options of a layer's attention with heads of ``width`` features."""
        stated = self.setting("query_pre_attn_scalar")
        scale = self.setting("attention_multiplier", default=(width if stated is None else stated) ** -0.5)
        window = self.setting("sliding_window", default=0) or 0
        kinds = self.setting("layer_types")
        if kinds is not None and layer < len(kinds):
            window = window if kinds[layer] == "sliding_attention" else 0
        elif self.setting("use_sliding_window", default=True) is False:
            window = 0
        softcap = self.setting("attn_logit_softcapping", default=0.0)
        return {"scale": float(scale), "window": int(window), "softcap": float(softcap)}

    @property
    def latent_scale(self) -> float:
        """The scale of multi-head latent attention, with YaRN's factor (DeepSeek)."""
        scale = (self.setting("qk_nope_head_dim") + self.setting("qk_rope_head_dim")) ** -0.5
        rope = self.setting("rope_parameters", "rope_scaling", default={}) or {}
        all_widths, factor = rope.get("mscale_all_dim", 0), rope.get("factor", 1.0)
        if rope.get("rope_type", "default") != "default" and all_widths and factor > 1:
            scale *= (0.1 * all_widths * math.log(factor) + 1.0) ** 2
        return float(scale)

    def rotary_frequencies(self) -> tuple[Tensor, float] | None:
        """Return the frequencies [R / 2] and the factor of cosines and sines; None if the configuration has none, or
        one for each kind of layer."""
        rope = self.setting("rope_parameters", "rope_scaling", default={}) or {}
        if any(isinstance(each, dict) for each in rope.values()):
            return None
        theta = rope.get("rope_theta", self.setting("rope_theta"))
        if theta is None:
            return None
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            share = rope.get("partial_rotary_factor", self.setting("partial_rotary_factor", default=1.0))
            width = int((self.setting("qk_rope_head_dim") or self.head_width) * share)
            return 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)), 1.0
        with contextlib.suppress(Exception):  # a kind that this version of transformers doesn't know
            from transformers import AutoConfig
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            fields = {name: value for name, value in self._run.config.items() if name != "model_type"}
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](AutoConfig.for_model(self.kind, **fields))
            return frequencies, float(factor)
        return None

    @property
    def interleaved(self) -> bool:
        """Whether neighbouring features are rotated together."""
        return bool(self.setting("rope_interleave", "rope_interleaved", default=self.kind == "deepseek_v2"))

    @property
    def activation(self) -> str:
        return str(self.setting("hidden_activation", "hidden_act", "activation", default="silu"))

    @property
    def routing(self) -> dict[str, Any]:
        """The options of `routing_weights`."""
        scoring = self.setting("scoring_func", default="sigmoid" if self.kind == "deepseek_v3" else "softmax")
        return {
            "scoring": scoring,
            "renormalize": bool(self.setting("norm_topk_prob", default=True)),
            "factor": float(self.setting("routed_scaling_factor", default=1.0)),
        }

    @property
    def routes_in_float32(self) -> bool:
        """Whether the logits of experts are computed in float32 by definition (DeepSeek)."""
        return self.kind.startswith("deepseek")
