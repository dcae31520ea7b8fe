"""A model's attention: RoPE, and softmax(q k^T) v by the interface of transformers."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from assay.kernels.models.replacement import Replacement, alike, set_own

_ATTENTION = "assay_triton"
_ROWS = 3


def ropes(model: nn.Module, found: Replacement) -> str:
    """The function of its module that an attention calls, in a copy of its forward."""
    from assay.kernels.triton.rope import rope

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, heads, places, width = x.shape
        angles = (part.expand(batch, places, width)[..., : width // 2].reshape(-1, width // 2) for part in (cos, sin))
        rows = x.transpose(1, 2).reshape(1, batch * places, heads, width)
        return rope(rows, *angles).view(batch, places, heads, width).transpose(1, 2)

    why = "no attention calls apply_rotary_pos_emb"
    for module in model.modules():
        own = inspect.unwrap(type(module).forward)
        before = getattr(own, "__globals__", {}).get("apply_rotary_pos_emb")
        if before is None or "apply_rotary_pos_emb" not in getattr(own, "__code__", own).co_names:
            continue
        if not _turns_halves(before):
            why = "apply_rotary_pos_emb turns other pairs than (i, i + D/2)"
            continue

        def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, before: Any = before, **more: Any) -> Any:
            if rest or more or cos.shape[-1] != q.shape[-1] or cos.dim() != 3:  # heads in another place, or a part of D
                return before(q, k, cos, sin, *rest, **more)
            return turned(q, cos, sin), turned(k, cos, sin)

        copy = types.FunctionType(
            own.__code__, {**own.__globals__, "apply_rotary_pos_emb": both}, own.__name__, own.__defaults__,
            own.__closure__,
        )  # fmt: skip
        copy.__kwdefaults__ = own.__kwdefaults__
        set_own(found, module, "forward", types.MethodType(copy, module))
        found.done["rope"] += 1
    return why


def _turns_halves(function: Callable[..., Any]) -> bool:
    """Whether a function of q, k, cos, sin turns the pairs (i, i + D/2)."""
    x, angles = torch.randn(1, 2, _ROWS, 8), torch.randn(1, _ROWS, 4)
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    try:
        q, k = function(x, x, cos, sin)
    except Exception:  # it takes something else
        return False
    first, second = x.chunk(2, -1)
    right = x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return alike(q, right) and alike(k, right)


def attentions(model: Any, found: Replacement) -> str:
    """Attention of the whole model, by its configuration."""
    config: Any = getattr(model, "config", None)
    before = getattr(config, "_attn_implementation", None)
    if before not in ("sdpa", "eager") or not hasattr(model, "set_attn_implementation"):
        return f"its attention is {before!r}; expected a model of transformers with 'sdpa' or 'eager'"
    if getattr(config, "attn_logit_softcapping", None):
        return "its scores are capped, which transformers' own attention beside it, where there is a mask, isn't"
    _register()
    model.set_attn_implementation(_ATTENTION)
    if config._attn_implementation != _ATTENTION:
        return "its class takes no other attention"
    found.undo.append(lambda: model.set_attn_implementation(before))
    found.done["attention"] += 1
    return ""


def _register() -> None:
    """Make the kernel known to transformers, with the masks of "sdpa": none where causal is all that is asked."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [B, H, S, D], key and value [B, Hkv, T, D]; out [B, S, H, D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from assay.kernels.triton.attention import attention

    if attention_mask is not None or dropout or others.get("position_bias") is not None:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
        )
        return found
    causal = query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal:  # as transformers has it: the first keys are those of the queries, and behind them there are none yet
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    out = attention(query, key, value, causal="top_left" if causal else "none", scale=scaling)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None
