"""Modules of a model: RMS norms, gated projections, and experts in one parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from assay.kernels.models.replacement import Replacement, alike, given, noise, set_own


def norms(model: nn.Module, found: Replacement) -> str:
    """RMS norms, with an offset of the weight or without."""
    from assay.kernels.triton.rmsnorm import rmsnorm

    seen = 0
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if not isinstance(eps, float) or not isinstance(weight, Tensor) or weight.dim() != 1:
            continue
        seen += 1
        offset = _offset(module, weight, eps)
        if offset is None:
            continue

        def forward(x: Tensor, *, module: Any = module, eps: float = eps, offset: float = offset) -> Tensor:
            return rmsnorm(x.reshape(-1, x.shape[-1]), module.weight, eps=eps, offset=offset).view(x.shape)

        set_own(found, module, "forward", forward)
        found.done["norm"] += 1
    return f"none of {seen} modules with an eps computes an RMS norm" if seen else "there is no module with an eps"


def _offset(module: nn.Module, weight: Tensor, eps: float) -> float | None:
    """What an RMS norm adds to its weight, 0 or 1; None for a module that computes something else.

    It is given rows with a mean, which others subtract, rows as small as the root of eps, and large ones.
    """
    small, plain, large = noise(weight, weight.shape[0])
    x = torch.stack([small * eps**0.5, plain + 3.0, large * 100.0])
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    got = given(module, x)
    return next((offset for offset in (0.0, 1.0) if alike(got, normed * (weight.double() + offset))), None)


def mlps(model: nn.Module, found: Replacement) -> str:
    """Gated projections with SiLU."""
    from assay.kernels.triton.swiglu import swiglu

    seen = 0
    for module in model.modules():
        projections = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        if not all(isinstance(each, nn.Linear) for each in projections):
            continue
        seen += 1
        gate, up, down = projections
        assert isinstance(gate, nn.Linear)
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)
        with torch.no_grad():
            x = _spread(noise(gate.weight, gate.in_features), gate)
            right = down(nn.functional.silu(gate(x)) * up(x))
        if not alike(given(module, x), right):
            continue

        def forward(x: Tensor, *, module: Any = module) -> Tensor:
            gated, upper = module.gate_proj(x), module.up_proj(x)
            rows = (gated.reshape(-1, gated.shape[-1]), upper.reshape(-1, upper.shape[-1]))
            return module.down_proj(swiglu(*rows).view(gated.shape))

        set_own(found, module, "forward", forward)
        found.done["mlp"] += 1
    return f"none of {seen} gated projections has SiLU" if seen else "there are no gate_proj, up_proj and down_proj"


def _spread(x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    """Three rows whose largest gates are 1, 5 and 30: other functions than SiLU, and clamps, differ there."""
    return x * (torch.tensor([1.0, 5.0, 30.0], device=x.device)[:, None] / gate(x).abs().amax(-1, keepdim=True)).to(x)


def experts(model: nn.Module, found: Replacement) -> str:
    """Experts with SiLU whose weights are two parameters."""
    from assay.kernels.triton.moe import moe

    seen = 0
    for module in model.modules():
        gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
        if not all(isinstance(each, nn.Parameter) and each.dim() == 3 for each in (gate_up, down)):
            continue
        seen += 1
        if not _are_gated(module):
            continue

        def forward(x: Tensor, ids: Tensor, weights: Tensor, *, module: Any = module) -> Tensor:
            return moe(x, module.gate_up_proj, module.down_proj, weights.float(), ids.int())

        set_own(found, module, "forward", forward)
        found.done["experts"] += 1
    return (
        f"none of {seen} modules of experts has SiLU" if seen else "there are no gate_up_proj [E, 2F, D] and down_proj"
    )


def _are_gated(module: Any) -> bool:
    """Whether each token's result is the sum over its experts of weight * down(silu(gate x) * (up x))."""
    count, width, _ = module.down_proj.shape
    if module.gate_up_proj.shape[-1] != width:
        return False
    with torch.no_grad():
        x = _spread(noise(module.down_proj, width), lambda x: x @ module.gate_up_proj[0].t())
    ids = torch.arange(2 * len(x), device=x.device).view(-1, 2) % count
    weights = torch.linspace(0.2, 0.8, 2 * len(x), device=x.device).view(-1, 2).to(x.dtype)
    with torch.no_grad():
        right = torch.zeros_like(x)
        for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights, strict=True)):
            for expert, share in zip(chosen, shares, strict=True):
                gate, up = (module.gate_up_proj[expert] @ x[token]).chunk(2)
                right[token] += share * (module.down_proj[expert] @ (nn.functional.silu(gate) * up))
        try:
            got = module(x, ids, weights)
        except Exception:  # it takes something else
            return False
    return alike(got, right)
