"""Each field of a contract changes a verdict: a kernel that keeps only the weaker promise fails under the stronger."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.libraries.pytorch_eager import rms_norm_cast_before_weight
from assay.verify import Contract, Verdict, examine
from assay.verify.cases.case import Case
from assay.verify.contract import contract_from_table
from assay.verify.errors import ContractError
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness
from tests.zoo import rounding
from tests.zoo.attention import attention_rows
from tests.zoo.conduct import gemm_random_order
from tests.zoo.functions import silu, silu_values
from tests.zoo.numerics import load, nan_to_zero, store_flushed, store_saturated, store_truncated
from tests.zoo.products import gemm, moe_by_expert, moe_by_expert_rounded
from tests.zoo.softmax import softmax_shifted, softmax_unshifted

Kernel = Callable[..., Any]
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


def gemm_accumulating_in(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """One product after another is rounded and added to a running sum, in ``dtype``."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=dtype)
    for k in range(a.shape[1]):
        total = total + (load(a[:, k : k + 1]) * load(b[k : k + 1])).to(dtype)
    return total.to(a.dtype)


def gemm_overflowing_to_nan(a: Tensor, b: Tensor) -> Tensor:
    """There is no infinity, only NaN."""
    stored = gemm(a, b)
    return torch.where(stored.isinf(), math.nan, stored)


def gemm_off(a: Tensor, b: Tensor) -> Tensor:
    """In random order, and 2 % too large."""
    return gemm_random_order(a, b) * 1.02


def rope_in_bfloat16(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every product and sum is rounded to bfloat16."""
    first, second = x.chunk(2, dim=-1)
    c, s = cos[None, :, None], sin[None, :, None]
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)


def ulps_off(y: Tensor, ulps: int) -> Tensor:
    """Positive float32 numbers, that many places too large, but for subnormals."""
    normal = y.isfinite() & (y >= torch.finfo(torch.float32).tiny)
    return torch.where(normal, (y.view(torch.int32) + ulps).view(torch.float32), y)


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


def hidden_of_rounded(projected: Tensor, dtype: torch.dtype, stage: Any) -> Tensor:
    """What the first product is rounded to is read back, and its activation is rounded too."""
    gate, up = projected.to(dtype).to(torch.float32).chunk(2, dim=-1)
    return (silu_values(gate) * up).to(dtype).to(torch.float32)


def attention_with_empty_rows(value: float, q: Tensor, k: Tensor, v: Tensor, *, causal: str) -> Tensor:
    """Rows that see nothing hold ``value``."""
    out = attention_rows(q, k, v, causal=causal)
    out[:, :, : max(q.shape[2] - k.shape[2], 0)] = value
    return out


def attention_half(q: Tensor, k: Tensor, v: Tensor, *, causal: str) -> Tensor:
    """Half of what is right."""
    return attention_with_empty_rows(7.0, q, k, v, causal=causal) * 0.5


def merge_multiplying(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """An empty state's share is zero, and multiplied with its output, which nothing may read."""
    level = torch.maximum(lse_a, lse_b)
    level = torch.where(level == -math.inf, 0.0, level)
    a, b = torch.exp(lse_a - level), torch.exp(lse_b - level)
    total = torch.where(a + b == 0, 1.0, a + b)[..., None]
    return load(o_a) * (a[..., None] / total) + load(o_b) * (b[..., None] / total), level + torch.log(a + b)


def short(dtype: str, longest: int) -> dict[str, Any]:
    """Settings for products with few terms, where narrow accumulators still mean something."""
    return {"dtype": dtype, "shapes": {"M": range(1, 40), "N": range(1, 40), "K": range(1, longest + 1)}}


IN16, INBF = partial(gemm_accumulating_in, FLOAT16), partial(gemm_accumulating_in, BFLOAT16)
F32, F16, BF16 = {"dtype": "float32"}, {"dtype": "float16"}, {"dtype": "bfloat16"}
MOE = {**BF16, "shapes": {"T": range(1, 9), "D": range(1, 33), "F": range(1, 33), "E": range(1, 5)}}
SMALL = {"B": [1], "Sq": range(1, 20), "Sk": range(1, 40), "D": [16], "Dv": [16]}
MASKED = {**F32, "options": {"causal": ["bottom_right"]}, "shapes": SMALL}
CHANCE = {"rounding": "stochastic", "deterministic": False}
BY_CHANCE = partial(softmax_shifted, store=store_stochastic)
EMPTY = attention_with_empty_rows
MOE_ROUNDED = partial(moe_by_expert, hidden=hidden_of_rounded)
TWO_STAGES = {"stages": {"gate_up": "input", "hidden": "input"}}

# Per field: the op, a kernel, its settings, a contract that it breaks, and one that it keeps.
FIELDS: dict[str, tuple[str, Kernel, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "accumulate-float16": ("gemm", IN16, short("float16", 32), {}, {"accumulate": "float16"}),
    "accumulate-bfloat16": ("gemm", INBF, short("bfloat16", 8), {}, {"accumulate": "bfloat16"}),
    "accumulate-narrower": ("gemm", INBF, short("bfloat16", 8), {"accumulate": "float16"}, {"accumulate": "bfloat16"}),
    "accumulate-tf32-dot": ("gemm", rounding.gemm_tf32, F32, {}, {"accumulate": "tf32-dot"}),
    "accumulate-hopper-tf32": (
        "attention", rounding.attention_tf32, {**F32, "shapes": SMALL}, {}, {"accumulate": "hopper-tf32"},
    ),
    "compute": ("rope", rope_in_bfloat16, BF16, {}, {"compute": "bfloat16"}),
    "ulps-rsqrt": ("rmsnorm", partial(rmsnorm_off, ulps=8), F32, {}, {"ulps": {"rsqrt": 8}}),
    "ulps-exp": ("softmax", partial(softmax_off, ulps=32), F32, {}, {"ulps": {"exp": 32}}),
    "ulps-exp-64": ("softmax", partial(softmax_off, ulps=64), F32, {"ulps": {"exp": 8}}, {"ulps": {"exp": 64}}),
    "stages-gate_up": ("moe", MOE_ROUNDED, MOE, {}, TWO_STAGES),
    "stages-hidden": ("moe", moe_by_expert_rounded, MOE, {"stages": {}}, {"stages": {"hidden": "bfloat16"}}),
    "stages-activated": ("swiglu", rounding.swiglu_rounding, BF16, {}, {"stages": {"activated": "input"}}),
    "stages-activated_gradient": (
        "swiglu_backward", rounding.swiglu_backward_rounding, BF16, {"stages": {"activated": "input"}},
        {"stages": {"activated": "input", "activated_gradient": "input"}},
    ),
    "stages-products": ("rope", rounding.rope_rounding, BF16, {}, {"stages": {"products": "input"}}),
    "stages-query": (
        "attention", rounding.attention_rounding_query, {**BF16, "shapes": SMALL},
        {}, {"stages": {"query": "input", "probabilities": "input"}},
    ),
    "stages-scores": (
        "attention", rounding.attention_rounding_scores, {**BF16, "shapes": SMALL},
        {}, {"stages": {"scores": "input", "probabilities": "input"}},
    ),
    "stages-normalized": ("rmsnorm", rms_norm_cast_before_weight, BF16, {}, {"stages": {"normalized": "input"}}),
    "stages-probabilities": (
        "attention", partial(attention_rows, round_probabilities=True), {**BF16, "shapes": SMALL}, {"stages": {}}, {},
    ),
    "rounding-toward_zero": ("gemm", partial(gemm, store=store_truncated), BF16, {}, {"rounding": "toward_zero"}),
    "rounding-nearest": ("gemm", gemm, BF16, {"rounding": "toward_zero"}, {}),
    "rounding-stochastic": ("softmax", BY_CHANCE, BF16, {"deterministic": False}, CHANCE),
    "overflow-saturate": ("gemm", partial(gemm, store=store_saturated), F16, {}, {"overflow": "saturate"}),
    "overflow-inf": ("gemm", gemm, F16, {"overflow": "saturate"}, {}),
    "overflow-nan": ("gemm", gemm_overflowing_to_nan, F16, {}, {"overflow": "nan"}),
    "overflow-not-nan": ("gemm", gemm, F16, {"overflow": "nan"}, {"overflow": "inf"}),
    "subnormals": ("silu", partial(silu, store=store_flushed), F32, {"subnormals": "keep"}, {"subnormals": "flush"}),
    "nonfinite": (
        "softmax", partial(softmax_shifted, prepare=nan_to_zero), F32,
        {"nonfinite": "ieee"}, {"nonfinite": "unspecified"},
    ),
    "nonfinite-masked": (
        "merge_states", merge_multiplying, {**F32, "effort": "quick"}, {"nonfinite": "ieee"}, {"nonfinite": "masked"},
    ),
    "masked_rows-any": ("attention", partial(EMPTY, 7.0), MASKED, {}, {"masked_rows": "any"}),
    "masked_rows-any-nan": ("attention", partial(EMPTY, math.nan), MASKED, {}, {"masked_rows": "any"}),
    "masked_rows-nan": ("attention", partial(EMPTY, math.nan), MASKED, {}, {"masked_rows": "nan"}),
    "masked_rows-zero": ("attention", partial(EMPTY, 0.0), MASKED, {"masked_rows": "nan"}, {}),
    "deterministic": ("gemm", gemm_random_order, F32, {}, {"deterministic": False}),
}  # fmt: skip
USUAL = (
    "accumulate-narrower", "accumulate-tf32-dot", "compute", "ulps-exp", "stages-hidden", "stages-activated",
    "stages-probabilities", "rounding-toward_zero", "rounding-stochastic", "overflow-saturate", "subnormals",
    "nonfinite", "masked_rows-any", "deterministic",
)  # fmt: skip
"""What a usual run takes: each field, and each way that it is honoured."""
ROWS = [
    pytest.param(*row, id=name, marks=() if name in USUAL else pytest.mark.evidence) for name, row in FIELDS.items()
]


def verdict_of(op: str, kernel: Kernel, settings: dict[str, Any], contract: dict[str, Any]) -> Verdict:
    """The verdict after a few examples, without an explanation."""
    few = {"effort": "quick", "examples": 4, "every_aspect": False, "shrinking": False}
    return examine(kernel, op, contract=Contract(**contract), **{**few, **settings})


@pytest.mark.parametrize(("op", "kernel", "settings", "broken", "kept"), ROWS)
def test_a_field_decides(
    op: str, kernel: Kernel, settings: dict[str, Any], broken: dict[str, Any], kept: dict[str, Any]
) -> None:
    """The kernel fails under the contract that it breaks and passes under the one that it keeps."""
    failed = verdict_of(op, kernel, settings, broken)
    assert failed.outcome == "FAIL", str(failed)
    passed = verdict_of(op, kernel, settings, kept)
    assert passed.outcome == "PASS", str(passed)
    assert passed.worst <= 1 < failed.worst or failed.failure.kind == "nondeterministic"  # type: ignore[union-attr]


def halved(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Half of what is right, saturated."""
    return store_saturated(y / 2, dtype)


def sum_flushing(x: Tensor) -> Tensor:
    """One row after another is added; a subnormal sum is zero."""
    total = torch.zeros(x.shape[1])
    for row in x:
        total = total + row
        total = torch.where(total.abs() < torch.finfo(torch.float32).tiny, 0.0, total)
    return total


def test_partial_sums_may_be_flushed() -> None:
    """-2 + 2.5 least normal numbers are subnormal: where they are flushed the sum, of 2 more, lacks them."""
    edits = tuple(("shards", (row, 0), number * 2.0**-126) for row, number in enumerate((-2.0, 2.5, 2.0)))
    case = Case("all_reduce", {"R": 3, "N": 1}, {"shards": "float32"}, {}, {"shards": "zeros"}, edits=edits)
    call = Call(sum_flushing, {})
    assert KernelHarness(call, Contract(subnormals="flush")).try_case(case).failure is None
    assert KernelHarness(call, Contract(subnormals="keep")).try_case(case).failure is not None


def silu_flushing_normals(x: Tensor) -> Tensor:
    """Numbers are zero that are small and yet no subnormals."""
    return torch.where(silu(x).abs() < 2.0**-90, 0.0, silu(x))


@pytest.mark.parametrize(
    ("op", "kernel", "settings", "contract", "kinds"),
    [
        ("softmax", softmax_unshifted, F32, {"nonfinite": "unspecified"}, "nonfinite"),
        ("softmax", BY_CHANCE, BF16, {"rounding": "stochastic"}, "nondeterministic"),
        ("gemm", gemm_off, F32, {"deterministic": False}, "contract exact"),
        ("gemm", partial(gemm, store=halved), F16, {"overflow": "saturate"}, "contract exact"),
        ("silu", silu_flushing_normals, F32, {"subnormals": "flush"}, "contract exact"),
        ("attention", attention_half, MASKED, {"masked_rows": "any"}, "contract exact"),
        ("gemm", INBF, short("bfloat16", 8), {"accumulate": "tf32"}, "contract exact"),
        ("gemm", partial(rounding.gemm_tf32, bits=14), F32, {"accumulate": "tf32-dot"}, "contract exact"),
    ],
    ids=["nonfinite", "stochastic", "deterministic", "saturate", "flush", "masked_rows", "accumulate", "tf32"],
)
def test_a_weaker_contract_still_rejects(
    op: str, kernel: Kernel, settings: dict[str, Any], contract: dict[str, Any], kinds: str
) -> None:
    """What a field gives up is that and no more: NaN out of numbers, other bits, wrong numbers still fail."""
    verdict = verdict_of(op, kernel, settings, contract)
    assert verdict.failure is not None
    assert verdict.failure.kind in kinds.split(), str(verdict)


def in_float32(kernel: Kernel, *inputs: Tensor) -> Tensor:
    """The kernel by way of float32."""
    y: Tensor = kernel(*(x.float() for x in inputs)).double()
    return y


def softmax_torch(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def gemm_backwards(a: Tensor, b: Tensor) -> Tensor:
    """Another order than torch's."""
    return sum((a[:, k, None] * b[k] for k in reversed(range(a.shape[1]))), torch.zeros(len(a), b.shape[1]).double())


def gemm_scaled(a: Tensor, b: Tensor) -> Tensor:
    """Large numbers are scaled down first, so that only the result may overflow."""
    scale = 2.0**-600 if 1e200 < float(a.abs().max()) < math.inf else 1.0
    return (a * scale) @ (b * scale) / scale / scale


DOUBLE = Contract(accumulate="float64", compute="float64")
VECTOR = {"M": [1], "N": range(1, 27), "K": range(1, 27)}  # small enough for Arb where float64 doesn't resolve


@pytest.mark.parametrize(
    ("op", "kernel", "shapes", "outcome"),
    [
        ("softmax", softmax_torch, {"R": range(1, 65), "N": range(1, 130)}, "PASS"),
        ("softmax", partial(in_float32, softmax_torch), {}, "FAIL"),
        ("gemm", torch.matmul, {"M": range(1, 21), "N": range(1, 26), "K": range(1, 33)}, "PASS"),
        ("gemm", partial(in_float32, torch.matmul), {}, "FAIL"),
        ("gemm", gemm_backwards, VECTOR, "PASS"),
        ("gemm", gemm_scaled, {"M": [3], "N": [3], "K": [2]}, "PASS"),
    ],
    ids=["softmax", "softmax-float32", "gemm", "gemm-float32", "gemm-other-order", "gemm-scaled"],
)
def test_float64_kernels_are_judged_in_float64(op: str, kernel: Kernel, shapes: dict[str, Any], outcome: str) -> None:
    """Under a float64 contract torch's own kernels pass, and the same through float32 fail by far."""
    few = {"effort": "quick", "examples": 4, "every_aspect": False, "shrinking": False}
    verdict = examine(kernel, op, dtype="float64", contract=DOUBLE, shapes=shapes, **few)
    assert verdict.outcome == outcome, str(verdict)
    assert outcome == "PASS" or verdict.worst > 1e3


def test_contracts_are_read_from_tables() -> None:
    """A table's fields make the contract, its remarks don't, and an unknown field is named."""
    made = contract_from_table({"accumulate": "float16", "ulps": {"exp": 8}, "reason": "a remark", "source": "a page"})
    assert made == Contract(accumulate="float16", ulps={"exp": 8})
    assert made.changed() == {"accumulate": "float16", "ulps": {"exp": 8}}
    assert str(made) == "accumulate='float16', ulps={'exp': 8}"
    with pytest.raises(ContractError, match="did you mean 'accumulate'"):
        contract_from_table({"acumulate": "float16"})
