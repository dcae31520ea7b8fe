"""Each field of a contract changes a verdict: a kernel that keeps only the weaker promise fails under the default."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.verify import Contract, Verdict, examine

from .zoo.honest_attention import attention_rows
from .zoo.honest_elementwise import silu
from .zoo.honest_gemm import gemm
from .zoo.honest_moe import moe_by_expert, moe_by_expert_rounded
from .zoo.honest_softmax import softmax_shifted
from .zoo.faulty_conduct import gemm_random_order
from .zoo.faulty_softmax import nan_to_zero, softmax_unshifted
from .zoo.numerics import load, round_via, store_flushed, store_saturated, store_truncated

Kernel = Callable[..., Any]
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


def gemm_accumulating_in(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """One product after another is rounded and added to a running sum, in ``dtype``."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=dtype)
    for k in range(a.shape[1]):
        total = total + (load(a[:, k : k + 1]) * load(b[k : k + 1])).to(dtype)
    return total.to(a.dtype)


def rope_in_bfloat16(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every product and sum is rounded to bfloat16."""
    first, second = x.chunk(2, dim=-1)
    c, s = cos[None, :, None], sin[None, :, None]
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)


def ulps_off(y: Tensor, ulps: int) -> Tensor:
    """Positive float32 numbers that many places too large."""
    return torch.where(y.isfinite() & (y > 0), (y.view(torch.int32) + ulps).view(torch.float32), y)


def rmsnorm_off(x: Tensor, weight: Tensor, *, ulps: int) -> Tensor:
    """An rsqrt that is ``ulps`` too large."""
    values = load(x)
    root = ulps_off(torch.rsqrt(values.square().mean(1, keepdim=True) + 1e-6), ulps)
    return (values * root * load(weight)).to(x.dtype)


def softmax_off(x: Tensor, *, ulps: int) -> Tensor:
    """An exponential that is ``ulps`` too large for all but the largest."""
    if x.numel() == 0:
        return torch.empty_like(x)
    shifted = load(x) - load(x).amax(1, keepdim=True)
    weights = torch.where(shifted == 0, torch.exp(shifted), ulps_off(torch.exp(shifted), ulps))
    return (weights / weights.sum(1, keepdim=True)).to(x.dtype)


def store_stochastic(y: Tensor, dtype: torch.dtype) -> Tensor:
    """To either neighbour in bfloat16, by chance: 16 random bits are added to what is cut off."""
    bits = y.view(torch.int32) + torch.randint(0, 1 << 16, y.shape, dtype=torch.int32)
    return torch.where(y.isfinite(), (bits & -(1 << 16)).view(torch.float32), y).to(dtype)


def gemm_overflowing_to_nan(a: Tensor, b: Tensor) -> Tensor:
    """What float16 can't hold is NaN."""
    y = gemm(load(a), load(b))
    stored = y.to(a.dtype)
    return torch.where(stored.isinf() & y.isfinite(), math.nan, stored)


def moe_rounding_everything(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The first product is rounded too, as kernels do that write it to memory between two launches."""
    return moe_by_expert(x, w_gate_up, w_down, weights, ids, hidden=hidden_of_rounded)


def hidden_of_rounded(projected: Tensor, dtype: torch.dtype, stage: Any) -> Tensor:
    gate, up = projected.to(dtype).to(torch.float32).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(dtype).to(torch.float32)


def attention_with_empty_rows(value: float, q: Tensor, k: Tensor, v: Tensor, *, causal: str) -> Tensor:
    """Rows that see nothing hold ``value``."""
    out = attention_rows(q, k, v, causal=causal)
    empty = max(q.shape[2] - k.shape[2], 0)
    out[:, :, :empty] = value
    return out


def probabilities(stage: str | None) -> dict[str, str]:
    return {} if stage is None else {"probabilities": stage}


GEMM_SHORT = {"dtype": "float16", "shapes": {"M": range(1, 40), "N": range(1, 40), "K": range(1, 33)}}
GEMM_SHORTER = {"dtype": "bfloat16", "shapes": {"M": range(1, 40), "N": range(1, 40), "K": range(1, 17)}}
SMALL_MOE = {"dtype": "bfloat16", "shapes": {"T": range(1, 20), "D": range(1, 40), "F": range(1, 40)}}
SMALL_ATTENTION = {"dtype": "bfloat16", "shapes": {"Sq": range(1, 40), "Sk": range(1, 40), "D": [16], "Dv": [16]}}
MASKED = {"dtype": "float32", "options": {"causal": ["bottom_right"]}, "shapes": SMALL_ATTENTION["shapes"]}

# name, op, kernel, settings, the contract that it breaks, the one that it keeps
WEAKER: list[tuple[str, str, Kernel, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("accumulate-float16", "gemm", partial(gemm_accumulating_in, FLOAT16), GEMM_SHORT, {}, {"accumulate": "float16"}),
    ("accumulate-bfloat16", "gemm", partial(gemm_accumulating_in, BFLOAT16), GEMM_SHORTER, {}, {"accumulate": "bfloat16"}),
    ("accumulate-bfloat16-in-float16", "gemm", partial(gemm_accumulating_in, BFLOAT16), GEMM_SHORTER, {"accumulate": "float16"}, {"accumulate": "bfloat16"}),
    ("compute", "rope", rope_in_bfloat16, {"dtype": "bfloat16"}, {}, {"compute": "bfloat16"}),
    ("ulps-rsqrt", "rmsnorm", partial(rmsnorm_off, ulps=8), {"dtype": "float32"}, {}, {"ulps": {"rsqrt": 8}}),
    ("ulps-exp", "softmax", partial(softmax_off, ulps=8), {"dtype": "float32"}, {}, {"ulps": {"exp": 8}}),
    ("ulps-exp-64", "softmax", partial(softmax_off, ulps=64), {"dtype": "float32"}, {"ulps": {"exp": 8}}, {"ulps": {"exp": 64}}),
    ("stages-gate_up", "moe", moe_rounding_everything, SMALL_MOE, {}, {"stages": {"gate_up": "input", "hidden": "input"}}),
    ("stages-hidden", "moe", moe_by_expert_rounded, SMALL_MOE, {"stages": {}}, {"stages": {"hidden": "bfloat16"}}),
    ("stages-hidden-default", "moe", moe_by_expert_rounded, SMALL_MOE, {"stages": {"hidden": "float16"}}, {}),
    ("stages-probabilities", "attention", partial(attention_rows, round_probabilities=True), SMALL_ATTENTION, {"stages": {}}, {}),
    ("rounding-toward_zero", "gemm", partial(gemm, store=store_truncated), {"dtype": "bfloat16"}, {}, {"rounding": "toward_zero"}),
    ("rounding-nearest", "gemm", gemm, {"dtype": "bfloat16"}, {"rounding": "toward_zero"}, {}),
    ("rounding-stochastic", "softmax", partial(softmax_shifted, store=store_stochastic), {"dtype": "bfloat16"}, {"deterministic": False}, {"rounding": "stochastic", "deterministic": False}),
    ("overflow-saturate", "gemm", partial(gemm, store=store_saturated), {"dtype": "float16"}, {}, {"overflow": "saturate"}),
    ("overflow-inf", "gemm", gemm, {"dtype": "float16"}, {"overflow": "saturate"}, {}),
    ("overflow-nan", "gemm", gemm_overflowing_to_nan, {"dtype": "float16"}, {}, {"overflow": "nan"}),
    ("overflow-nan-not-inf", "gemm", gemm, {"dtype": "float16"}, {"overflow": "nan"}, {"overflow": "inf"}),
    ("subnormals", "silu", partial(silu, store=store_flushed), {"dtype": "float32"}, {}, {"subnormals": "flush"}),
    ("nonfinite", "softmax", partial(softmax_shifted, prepare=nan_to_zero), {"dtype": "float32"}, {}, {"nonfinite": "unspecified"}),
    ("masked_rows-nan", "attention", partial(attention_with_empty_rows, math.nan), MASKED, {}, {"masked_rows": "nan"}),
    ("masked_rows-zero", "attention", partial(attention_with_empty_rows, 0.0), MASKED, {"masked_rows": "nan"}, {}),
    ("masked_rows-any", "attention", partial(attention_with_empty_rows, 7.0), MASKED, {}, {"masked_rows": "any"}),
    ("deterministic", "gemm", gemm_random_order, {"dtype": "float32"}, {}, {"deterministic": False}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "kernel", "settings", "broken", "kept"), [row[1:] for row in WEAKER], ids=[row[0] for row in WEAKER])
def test_x(op, kernel, settings, broken, kept, record_property):
    import time
    t=time.time()
    a=examine(kernel, op, contract=Contract(**broken), examples=30, **settings)
    t1=time.time()
    b=examine(kernel, op, contract=Contract(**kept), examples=30, **settings)
    t2=time.time()
    print(a.outcome,b.outcome,a.failure and a.failure.kind, a.failure and a.failure.ratio, b.worst, b.note, 'times',t1-t,t2-t1)
    if b.outcome!='PASS': print(b)
    if a.outcome!='FAIL': print(a)
