"""Puts the bundled Triton kernels into a model of transformers: norms, SwiGLU, experts, RoPE, attention and the loss.

A module is recognised by what it computes, not by the name of its class: it is replaced if on a few random numbers it
returns what the kernel's formula gives. Only attributes of this model's modules are set, nothing that models share.
"""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PARTS", "Replacement", "replace"]

_MAX_ULPS = 4.0  # of a row's largest number: the most by which a module may differ from the formula
_TF32_ERROR = 1e-3  # the same as a relative error, where float32 products may be rounded to ten bits
_ATTENTION = "assay_triton"


@dataclass
class Replacement:
    """What `replace` did: how often each part was replaced, and why the others weren't; ``restore()`` undoes it."""

    done: Counter[str] = field(default_factory=Counter)
    left: dict[str, str] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def restore(self) -> None:
        """Restore the model, in the reverse order; a second call does nothing."""
        while self.undo:
            self.undo.pop()()

    def __str__(self) -> str:
        done = ", ".join(f"{count} {name}" for name, count in self.done.items()) or "nothing"
        left = "".join(f"; {name} not: {why}" for name, why in self.left.items())
        return f"{done} replaced{left}"

    def set(self, part: str, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of a module, count it as ``part``, and remember how to undo it."""
        previous = vars(module).get(name)
        setattr(module, name, value)
        self.undo.append(lambda: delattr(module, name) if previous is None else setattr(module, name, previous))
        self.done[part] += 1


def _replace_norms(model: nn.Module, replacement: Replacement) -> str:
    from assay.kernels.triton.rmsnorm import rmsnorm

    candidates = 0
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if not isinstance(eps, float) or not isinstance(weight, Tensor) or weight.dim() != 1:
            continue
        candidates += 1
        offset = _weight_offset(module, weight, eps)
        if offset is None:
            continue

        def forward(x: Tensor, *, module: Any = module, eps: float = eps, offset: float = offset) -> Tensor:
            return rmsnorm(x.reshape(-1, x.shape[-1]), module.weight, eps=eps, offset=offset).view(x.shape)

        replacement.set("norm", module, "forward", forward)
    if not candidates:
        return "there is no module with an eps"
    return f"none of {candidates} modules with an eps computes an RMS norm"


def _weight_offset(module: nn.Module, weight: Tensor, eps: float) -> float | None:
    """Return what an RMS norm adds to its weight, 0 or 1; None for a module that computes something else."""
    small, plain, large = _random_rows(weight, weight.shape[0])
    # A mean of 3, which a layer norm subtracts; numbers as small as sqrt(eps), where it counts; and large ones.
    x = torch.stack([small * eps**0.5, plain + 3.0, large * 100.0])
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    result = _call(module, x)
    return next((offset for offset in (0.0, 1.0) if _is_close(result, normed * (weight.double() + offset))), None)


def _replace_mlps(model: nn.Module, replacement: Replacement) -> str:
    from assay.kernels.triton.swiglu import swiglu

    candidates = 0
    for module in model.modules():
        projections = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        if not all(isinstance(projection, nn.Linear) for projection in projections):
            continue
        candidates += 1
        gate, up, down = projections
        assert isinstance(gate, nn.Linear)
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)
        with torch.no_grad():
            x = _scale_gates(_random_rows(gate.weight, gate.in_features), gate)
            expected = down(nn.functional.silu(gate(x)) * up(x))
        if not _is_close(_call(module, x), expected):
            continue

        def forward(x: Tensor, *, module: Any = module) -> Tensor:
            gate, up = module.gate_proj(x), module.up_proj(x)
            rows = (gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1]))
            return module.down_proj(swiglu(*rows).view(gate.shape))

        replacement.set("mlp", module, "forward", forward)
    if not candidates:
        return "there are no gate_proj, up_proj and down_proj"
    return f"none of {candidates} gated projections has SiLU"


def _replace_experts(model: nn.Module, replacement: Replacement) -> str:
    from assay.kernels.triton.moe import moe

    candidates = 0
    for module in model.modules():
        weights = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
        if not all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights):
            continue
        candidates += 1
        if not _are_swiglu_experts(module):
            continue

        def forward(x: Tensor, ids: Tensor, weights: Tensor, *, module: Any = module) -> Tensor:
            return moe(x, module.gate_up_proj, module.down_proj, weights.float(), ids.int())

        replacement.set("experts", module, "forward", forward)
    if not candidates:
        return "there are no gate_up_proj [E, 2F, D] and down_proj"
    return f"none of {candidates} modules of experts has SiLU"


def _are_swiglu_experts(module: Any) -> bool:
    """Return whether each token's result is the sum over its experts of weight * down(silu(gate x) * (up x))."""
    num_experts, width, _ = module.down_proj.shape
    if module.gate_up_proj.shape[-1] != width:
        return False
    with torch.no_grad():
        x = _scale_gates(_random_rows(module.down_proj, width), lambda x: x @ module.gate_up_proj[0].t())
    ids = torch.arange(2 * len(x), device=x.device).view(-1, 2) % num_experts
    weights = torch.linspace(0.2, 0.8, 2 * len(x), device=x.device).view(-1, 2).to(x.dtype)
    with torch.no_grad():
        expected = torch.zeros_like(x)
        for token, experts in enumerate(ids.tolist()):
            for expert, weight in zip(experts, weights[token], strict=True):
                gate, up = (module.gate_up_proj[expert] @ x[token]).chunk(2)
                expected[token] += weight * (module.down_proj[expert] @ (nn.functional.silu(gate) * up))
        try:
            result = module(x, ids, weights)
        except Exception:  # the module takes other arguments
            return False
    return _is_close(result, expected)


def _replace_rope(model: nn.Module, replacement: Replacement) -> str:
    """Replace apply_rotary_pos_emb, a global of the attention's module, in a copy of the attention's forward."""
    from assay.kernels.triton.rope import rope

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, heads, length, width = x.shape
        angles = (half.expand(batch, length, width)[..., : width // 2].reshape(-1, width // 2) for half in (cos, sin))
        rows = x.transpose(1, 2).reshape(1, batch * length, heads, width)
        return rope(rows, *angles).view(batch, length, heads, width).transpose(1, 2)

    why = "no attention calls apply_rotary_pos_emb"
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        original = getattr(forward, "__globals__", {}).get("apply_rotary_pos_emb")
        if original is None or "apply_rotary_pos_emb" not in getattr(forward, "__code__", forward).co_names:
            continue
        if not _rotates_halves(original):
            why = "apply_rotary_pos_emb turns other pairs than (i, i + D/2)"
            continue

        def apply(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, original: Any = original, **options: Any
        ) -> Any:
            if rest or options or cos.shape[-1] != q.shape[-1] or cos.dim() != 3:  # another layout, or a part of D
                return original(q, k, cos, sin, *rest, **options)
            return rotate(q, cos, sin), rotate(k, cos, sin)

        copy = types.FunctionType(
            forward.__code__,
            {**forward.__globals__, "apply_rotary_pos_emb": apply},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        copy.__kwdefaults__ = forward.__kwdefaults__
        replacement.set("rope", module, "forward", types.MethodType(copy, module))
    return why


def _rotates_halves(function: Callable[..., Any]) -> bool:
    """Return whether a function of q, k, cos, sin rotates the pairs (i, i + D/2)."""
    x, angles = torch.randn(1, 2, 3, 8), torch.randn(1, 3, 4)
    cos, sin = (torch.cat([half, half], -1) for half in (angles.cos(), angles.sin()))
    try:
        q, k = function(x, x, cos, sin)
    except Exception:  # the function takes other arguments
        return False
    first, second = x.chunk(2, -1)
    expected = x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return _is_close(q, expected) and _is_close(k, expected)


def _replace_attention(model: Any, replacement: Replacement) -> str:
    """Replace the attention of the whole model, by its configuration."""
    config: Any = getattr(model, "config", None)
    previous = getattr(config, "_attn_implementation", None)
    if previous not in ("sdpa", "eager") or not hasattr(model, "set_attn_implementation"):
        return f"its attention is {previous!r}; expected a model of transformers with 'sdpa' or 'eager'"
    if getattr(config, "attn_logit_softcapping", None):
        return "its scores are capped, which transformers' own attention, used where there is a mask, doesn't do"
    _register_attention()
    model.set_attn_implementation(_ATTENTION)
    if config._attn_implementation != _ATTENTION:
        return "its class takes no other attention"
    replacement.undo.append(lambda: model.set_attn_implementation(previous))
    replacement.done["attention"] += 1
    return ""


def _register_attention() -> None:
    """Register the kernel with transformers, with the masks of "sdpa": None where the mask is causal only."""
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
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [B, H, S, D], key and value [B, Hkv, T, D]; out [B, S, H, D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from assay.kernels.triton.attention import attention

    if attention_mask is not None or dropout or options.get("position_bias") is not None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
        )
        return result
    causal = query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal:  # as in transformers the first keys are those of the queries; a static cache is empty after them
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    out = attention(query, key, value, causal="top_left" if causal else "none", scale=scaling)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def _replace_loss(model: nn.Module, replacement: Replacement) -> str:
    from assay.kernels.triton.cross_entropy import cross_entropy

    if getattr(getattr(model, "loss_function", None), "__name__", "") != "ForCausalLMLoss":
        return "its loss is not that of a causal language model"

    def loss(
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1).to(logits.device)
        reduction = "mean" if num_items_in_batch is None else "sum"
        total = cross_entropy(logits.reshape(-1, vocab_size), target, ignore_index=ignore_index, reduction=reduction)
        return total if num_items_in_batch is None else total / num_items_in_batch

    # loss_function is a property of transformers' models, which stores in _loss_function.
    replacement.set("loss", model, "_loss_function", loss)
    return ""


def _random_rows(weight: Tensor, width: int) -> Tensor:
    """Return three rows [3, width] like a module's input, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, width, generator=generator).to(weight.device, weight.dtype)


def _scale_gates(x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    """Scale three rows to largest gates of 1, 5 and 30, where other functions than SiLU, and clamps, differ."""
    return x * (torch.tensor([1.0, 5.0, 30.0], device=x.device)[:, None] / gate(x).abs().amax(-1, keepdim=True)).to(x)


def _call(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return a module's result for a batch of one; None if it takes or returns something else."""
    try:
        with torch.no_grad():
            result = module(x[None])
    except Exception:
        return None
    return result[0] if isinstance(result, Tensor) and result.shape == (1, *x.shape) else None


def _is_close(result: Tensor | None, expected: Tensor) -> bool:
    """Return whether each row of a module's result is the formula's, up to roundings."""
    if result is None or result.shape != expected.shape:
        return False
    error, size = (x.double().abs().amax(-1) for x in (result.double() - expected.double(), expected))
    return bool((error <= max(_MAX_ULPS * torch.finfo(result.dtype).eps, _TF32_ERROR) * size).all())


_REPLACERS: Mapping[str, Callable[[nn.Module, Replacement], str]] = {
    "norm": _replace_norms,
    "mlp": _replace_mlps,
    "experts": _replace_experts,
    "rope": _replace_rope,
    "attention": _replace_attention,
    "loss": _replace_loss,
}
"""Each returns why it replaced nothing, if so."""
PARTS = tuple(_REPLACERS)


def replace(model: nn.Module, parts: Sequence[str] = PARTS) -> Replacement:
    """Put the bundled Triton kernels into a causal language model of transformers, such as Llama, Qwen, Mixtral, Gemma.

    ``parts``: "norm" (RMS norms, with an offset of the weight or without), "mlp" (gate, up and down projections with
    SiLU between them), "experts" (the same for a mixture), "rope", "attention" (without a mask other than causal),
    "loss" (the cross-entropy of the next token). A call for which a condition doesn't hold runs as before. On a CPU the
    kernels run only inside ``assay.interpreter.faithful()``. Raises ValueError for an unknown part, TypeError if
    ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"parts: expected some of {', '.join(PARTS)}, got {part!r}")
    replacement = Replacement()
    try:
        for part in parts:
            why = _REPLACERS[part](model, replacement)
            if not replacement.done[part]:
                del replacement.done[part]
                replacement.left[part] = why
    except BaseException:
        replacement.restore()
        raise
    return replacement
