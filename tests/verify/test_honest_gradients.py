"""Honest gradients, by autograd in float32, pass in every dtype; with a term left out or a constant wrong they fail."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.verify import Contract, examine

from .usual import by_turns

Function = Callable[..., Tensor]
ROWS: dict[str, Any] = {"shapes": {"R": [1, 5], "N": [3, 16, 33]}}
LOGITS: dict[str, Any] = {"shapes": {"T": [1, 5], "V": [3, 16, 33]}}


def gradient_of(forward: Function, taken: int, bare: int = 0, *, scale: float = 1.0) -> Function:
    """The gradient of a function of ``taken`` tensors and of zeros for so many ``bare`` ones behind, like the last."""

    def kernel(*tensors: Tensor, **options: Any) -> Any:
        given, upstream = tensors[:taken], tensors[taken:]
        with torch.enable_grad():
            leaves = [tensor.detach().float().requires_grad_() for tensor in given]
            leaves += [torch.zeros_like(leaves[-1]).requires_grad_() for _ in range(bare)]
            out = forward(*leaves, *upstream[:-1], **options)
            found = torch.autograd.grad(out, leaves, upstream[-1].float().reshape(out.shape))
        results = tuple((scale * part).to(given[0].dtype).contiguous() for part in found)
        return results if len(results) > 1 else results[0]

    return kernel


def geglu(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def gated(x: Tensor, weight: Tensor, gate: Tensor, *, gate_first: bool = False, eps: float = 1e-6) -> Tensor:
    opened = F.silu(gate)
    inner = x * opened if gate_first else x
    y = inner * torch.rsqrt(inner.square().mean(-1, keepdim=True) + eps) * weight
    return y if gate_first else y * opened


def dynamic_tanh(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(alpha * x) * weight + bias


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    flat = x.reshape(x.shape[0], 2, -1)
    centred = flat - flat.mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    return normal.reshape(x.shape) * weight[:, None] + bias[:, None]


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def distilled(logits: Tensor, target: Tensor) -> Tensor:
    target = torch.log_softmax(target.float(), -1)
    each = target.exp() * (target - torch.log_softmax(logits, -1))
    return each.sum() / len(logits)


def mixed(logits: Tensor, target: Tensor) -> Tensor:
    q, p = torch.log_softmax(logits, -1), torch.log_softmax(target.float(), -1)
    m = torch.logaddexp(p, q) - 0.6931471805599453
    return (0.5 * p.exp() * (p - m) + 0.5 * q.exp() * (q - m)).sum() / len(logits)


def convolved(x: Tensor, weight: Tensor, bias: Tensor, *, activation: str = "none") -> Tensor:
    padded = F.pad(x, (weight.shape[1] - 1, 0))
    y = sum(padded[:, :, w : w + x.shape[2]] * weight[:, w, None] for w in range(weight.shape[1])) + bias[:, None]
    return F.silu(y) if activation == "silu" else y


def linear_loss(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and their gradient, stored in the tensors' dtype; what has no label adds nothing."""
    logits = (x.float() @ weight.float().T).to(x.dtype).float()
    counted = target != -100
    shares = torch.softmax(logits, -1) - F.one_hot(torch.where(counted, target, 0), weight.shape[0])
    grown = torch.where(counted[:, None], shares / counted.sum().clamp(min=1), 0.0).to(x.dtype).float()
    return (grown @ weight.float()).to(x.dtype), (grown.T @ x.float()).to(x.dtype)


def summed_back(dy: Tensor) -> Tensor:
    return dy.float().flip(-1).cumsum(-1).flip(-1).to(dy.dtype)


def wrong_way(dy: Tensor) -> Tensor:
    return dy.float().cumsum(-1).to(dy.dtype)


def unlabelled(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return linear_loss(x, weight, torch.where(target == 0, 1, target))


def ignoring_none(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return linear_loss(x, weight, torch.where(target == -100, 0, target))


KERNELS: dict[str, tuple[Function, list[Function], dict[str, Any]]] = {
    "geglu": (gradient_of(geglu, 2), [gradient_of(lambda g, u, **o: F.silu(g) * u, 2)],
              {**ROWS, "options": {"approximate": ["none", "tanh"]}}),
    "logsigmoid": (gradient_of(F.logsigmoid, 1), [gradient_of(torch.sigmoid, 1)], ROWS),
    "gated_rmsnorm": (gradient_of(gated, 3), [gradient_of(lambda *t, gate_first: gated(*t, gate_first=True), 3)],
                      {**ROWS, "options": {"gate_first": [False, True]}}),
    "dynamic_tanh": (gradient_of(dynamic_tanh, 3, 1),
                     [gradient_of(lambda x, a, w, b: torch.sin(a * x) * w + b, 3, 1)], ROWS),
    "group_norm": (gradient_of(group_norm, 2, 1),
                   [gradient_of(lambda x, w, b: F.layer_norm(x, x.shape[1:]) * w[:, None] + b[:, None], 2, 1)],
                   {"shapes": {"B": [1, 3], "C": [4], "L": [2, 9]}}),
    "l2norm": (gradient_of(l2norm, 1), [gradient_of(lambda x: x * torch.rsqrt(x.square().mean(-1, True) + 1e-6), 1)],
               ROWS),
    "kl_div": (gradient_of(distilled, 1), [gradient_of(lambda x, t: distilled(x, t) * len(x), 1)], LOGITS),
    "jsd": (gradient_of(mixed, 1), [gradient_of(distilled, 1)], LOGITS),
    "causal_conv1d": (gradient_of(convolved, 3), [gradient_of(lambda x, w, b, **o: convolved(x, w.flip(1), b, **o), 3)],
                      {"shapes": {"B": [1, 2], "D": [3], "L": [2, 9]}, "options": {"activation": ["none", "silu"]}}),
    "cumsum": (summed_back, [wrong_way], ROWS),
    "linear_cross_entropy": (linear_loss, [unlabelled, ignoring_none],
                             {"shapes": {"T": [1, 6], "V": [3, 19], "D": [8]}}),
}  # fmt: skip


def outcome(kernel: Function, op: str, dtype: str) -> tuple[str, str]:
    """That of a short examination, and what it prints; what meets an infinity is left alone."""
    settings = {"effort": "quick", "examples": 1, "every_aspect": False, "shrinking": False, **KERNELS[op][2]}
    verdict = examine(
        kernel,
        f"{op}_backward",
        dtype=dtype,
        contract=Contract(nonfinite="unspecified", subnormals="flush"),
        **settings,
    )
    return verdict.outcome, str(verdict)


@pytest.mark.parametrize(("op", "dtype"), by_turns(KERNELS, ["bfloat16", "float16", "float32"]))
def test_an_honest_gradient_passes(op: str, dtype: str) -> None:
    """In each dtype."""
    assert (found := outcome(KERNELS[op][0], op, dtype))[0] == "PASS", found[1]


@pytest.mark.parametrize("op", KERNELS)
def test_a_wrong_gradient_fails(op: str) -> None:
    """That of another function, and one that is 2 % too large."""
    for kernel in KERNELS[op][1]:
        assert outcome(kernel, op, "bfloat16")[0] == "FAIL"

    def larger(*tensors: Tensor, **options: Any) -> Any:
        found = KERNELS[op][0](*tensors, **options)
        return tuple(part * 1.02 for part in found) if isinstance(found, tuple) else found * 1.02

    assert outcome(larger, op, "bfloat16")[0] == "FAIL"
