"""Contract "torch" against the installed torch: its code keeps it, and with one more rounding it doesn't."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from assay.kernels.libraries import pytorch, pytorch_eager

from .libraries import DTYPES, ROWS, SMALL, judged, rounding_more
from .usual import by_turns


def convolution(x: Tensor, weight: Tensor, bias: Tensor, *, activation: str = "none") -> Tensor:
    """torch's convolution of each channel, and silu."""
    y = F.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[1])[..., : x.shape[2]]
    return F.silu(y) if activation == "silu" else y


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, *, groups: int = 2) -> Tensor:
    """torch's, which takes no single value of a channel."""
    return F.group_norm(x, groups, weight, bias)


def normalize(x: Tensor, *, clamp: str = "maximum") -> Tensor:
    """torch's division by the length."""
    return F.normalize(x, dim=-1, eps=1e-6)


def gated_by_gelu(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    """Two functions of torch."""
    return F.gelu(gate, approximate=approximate) * up


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's fused attention."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


KERNELS: dict[str, tuple[str, Callable[..., Tensor], dict[str, Any]]] = {
    "gelu": ("gelu", F.gelu, ROWS),
    "swiglu": ("swiglu", pytorch_eager.swiglu, ROWS),
    "geglu": ("geglu", gated_by_gelu, {**ROWS, "options": {"approximate": ["tanh", "none"]}}),
    "softmax": ("softmax", pytorch.softmax, ROWS),
    "log_softmax": ("log_softmax", pytorch.log_softmax, ROWS),
    "logsumexp": ("logsumexp", pytorch.logsumexp, ROWS),
    "layer_norm": ("layernorm", pytorch.layer_norm, ROWS),
    "group_norm": ("group_norm", group_norm, {"shapes": {"B": [2], "C": [4], "L": [2, 9]}}),
    "normalize": ("l2norm", normalize, {**ROWS, "options": {"clamp": ["maximum"]}}),
    "conv1d": ("causal_conv1d", convolution, {"shapes": {"B": [2], "D": [3], "L": [2, 9]},
                                                    "options": {"activation": ["none", "silu"]}}),
    "attention": ("attention", attention, SMALL),
    "linear": ("linear", F.linear, {"shapes": {"M": [5], "N": [6], "K": [3, 16, 40]}}),
}  # fmt: skip
LOOSE = ("logsumexp",)  # whose stages are many: one more rounding is lost among them


@pytest.mark.parametrize(("name", "dtype"), by_turns(KERNELS, DTYPES))
def test_the_code_keeps_its_contract(name: str, dtype: str) -> None:
    op, kernel, settings = KERNELS[name]
    verdict = judged(kernel, op, "torch", dtype, settings)
    assert verdict.outcome == "PASS", str(verdict)


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in LOOSE])
def test_one_more_rounding_breaks_it(name: str) -> None:
    op, kernel, settings = KERNELS[name]
    for dtype in ("bfloat16", "float32"):
        assert judged(rounding_more(kernel), op, "torch", dtype, settings).outcome == "FAIL", dtype
