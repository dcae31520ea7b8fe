"""The bundled Triton kernels in a model of transformers: norms, SwiGLU, experts, RoPE, attention and the loss.

In: a model. Out: the same model, in which modules compute by the kernels, and a `Replacement` that can undo it. A part
is taken for what it computes, not for its class's name: a module is replaced where, on a few random numbers, it gives
what the kernel's formula gives. Replaced are attributes of this model's modules: nothing that other models share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from assay.kernels.models.attention import attentions, ropes
from assay.kernels.models.loss import losses
from assay.kernels.models.modules import experts, mlps, norms
from assay.kernels.models.replacement import Replacement

_REPLACERS: Mapping[str, Callable[[nn.Module, Replacement], str]] = {
    "norm": norms,
    "mlp": mlps,
    "experts": experts,
    "rope": ropes,
    "attention": attentions,
    "loss": losses,
}
PARTS = tuple(_REPLACERS)


def replace(model: nn.Module, parts: Sequence[str] = PARTS) -> Replacement:
    """Put the bundled Triton kernels into a causal language model of transformers, such as Llama, Qwen, Mixtral, Gemma.

    ``parts``: "norm" (RMS norms, with an offset of the weight or without), "mlp" (gate, up and down projections with
    SiLU between them), "experts" (the same for a mixture), "rope", "attention" (without
    a mask other than causal), "loss" (the cross-entropy of the next token). Where a
    condition doesn't hold a call is what it was. On a CPU the kernels run only inside
    ``assay.interpreter.faithful()``. Raises ValueError for a part that there isn't, TypeError for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"parts: expected some of {', '.join(PARTS)}, got {part!r}")
    found = Replacement()
    try:
        for part in parts:
            why = _REPLACERS[part](model, found)
            if not found.done[part]:
                del found.done[part]
                found.left[part] = why
    except BaseException:
        found.restore()
        raise
    return found


__all__ = ["PARTS", "Replacement", "replace"]
