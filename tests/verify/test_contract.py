"""Each field of a contract changes a verdict: who keeps only the weaker promise fails under the stronger; names."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.cli.settings import contract_fields
from assay.golden.lowering.spec import STAGES
from assay.golden.registry import spec, specs
from assay.kernels.libraries.pytorch import softmax
from assay.kernels.libraries.pytorch_eager import rms_norm_cast_before_weight
from assay.verify import Contract, Verdict
from assay.verify.cases.case import Case
from assay.verify.contract import contract_from_table
from assay.verify.errors import ContractError
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness
from assay.verify.named_contracts import bases, contract_named, fields_of_base
from assay.verify.settings import Settings
from tests.zoo import rounding
from tests.zoo.attention import attention_rows
from tests.zoo.conduct import gemm_random_order
from tests.zoo.functions import silu, silu_values
from tests.zoo.numerics import load, nan_to_zero, store_flushed, store_saturated, store_truncated
from tests.zoo.products import gemm, moe_by_expert, moe_by_expert_rounded
from tests.zoo.softmax import softmax_online, softmax_shifted, softmax_unshifted

from .examined import fails, failure_of, first, passes, quick

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


def scaled_difference(a: Any, b: Any, c: Any) -> Any:
    return (a - b) * c


def decayed_sums(x: Any, g: Any) -> Any:
    """y_t = exp(g_t) y_(t-1) + x_t."""
    total, out = torch.zeros(()), []
    for t in range(x.shape[0]):
        total = total * torch.exp(g[t]) + x[t]
        out.append(total)
    return torch.stack(out)


def decayed_sums_of_prefix_sums(x: Tensor, g: Tensor) -> Tensor:
    """In one chunk."""
    level = g.cumsum(0)
    seen = torch.ones(len(x), len(x)).tril().bool()
    return torch.exp(torch.where(seen, level[:, None] - level[None, :], -torch.inf)) @ x


def attention_with_empty_rows(value: float, q: Tensor, k: Tensor, v: Tensor, *, causal: str) -> Tensor:
    """Rows that see nothing hold ``value``."""
    out = attention_rows(q, k, v, causal=causal)
    out[:, :, : max(q.shape[2] - k.shape[2], 0)] = value
    return out


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
DECAYED = {**F32, "tensors": "x[N], g[N]=in(-40, 0) -> y[N]", "shapes": {"N": range(1, 65)}}
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
    "order": (
        scaled_difference, lambda a, b, c: a * c - b * c, {**F32, "tensors": "a[N], b[N], c[N] -> y[N]"},
        {"nonfinite": "unspecified"}, {"nonfinite": "unspecified", "order": "any"},
    ),
    "order-chunked": (
        decayed_sums, decayed_sums_of_prefix_sums, DECAYED,
        {"nonfinite": "unspecified", "order": "any"}, {"nonfinite": "unspecified", "order": "chunked"},
    ),
    "chunk": (
        decayed_sums, decayed_sums_of_prefix_sums, DECAYED,
        {"nonfinite": "unspecified", "order": "chunked", "chunk": 1}, {"nonfinite": "unspecified", "order": "chunked"},
    ),
    "deterministic": ("gemm", gemm_random_order, F32, {}, {"deterministic": False}),
}  # fmt: skip
USUAL = (
    "accumulate-narrower", "accumulate-tf32-dot", "compute", "ulps-exp", "stages-hidden", "stages-activated",
    "stages-probabilities", "rounding-toward_zero", "rounding-stochastic", "overflow-saturate", "subnormals",
    "nonfinite", "masked_rows-any", "order", "order-chunked", "deterministic",
)  # fmt: skip
"""What a usual run takes: each field, and each way that it is honoured."""


def verdict_of(op: Any, kernel: Kernel, settings: dict[str, Any], contract: dict[str, Any]) -> Verdict:
    return first(kernel, op, contract=Contract(**contract), **{"examples": 4, **settings})


@pytest.mark.parametrize(
    ("op", "kernel", "settings", "broken", "kept"),
    [pytest.param(*row, id=name, marks=() if name in USUAL else pytest.mark.evidence) for name, row in FIELDS.items()],
)
def test_a_field_decides(
    op: Any, kernel: Kernel, settings: dict[str, Any], broken: dict[str, Any], kept: dict[str, Any]
) -> None:
    failed, passed = fails(verdict_of(op, kernel, settings, broken)), passes(verdict_of(op, kernel, settings, kept))
    assert passed.worst <= 1 < failed.worst or failure_of(failed).kind == "nondeterministic"


def sum_flushing(x: Tensor) -> Tensor:
    """One row after another is added; a subnormal sum is zero."""
    total = torch.zeros(x.shape[1])
    for row in x:
        total = total + row
        total = torch.where(total.abs() < torch.finfo(torch.float32).tiny, 0.0, total)
    return total


def test_partial_sums_may_be_flushed() -> None:
    edits = tuple(("shards", (row, 0), number * 2.0**-126) for row, number in enumerate((-2.0, 2.5, 2.0)))
    case = Case("all_reduce", {"R": 3, "N": 1}, {"shards": "float32"}, {}, {"shards": "zeros"}, edits=edits)
    call = Call(sum_flushing, {})
    assert KernelHarness(call, Contract(subnormals="flush")).try_case(case).failure is None
    assert KernelHarness(call, Contract(subnormals="keep")).try_case(case).failure is not None


@pytest.mark.parametrize(
    ("op", "kernel", "settings", "contract", "kinds"),
    [
        ("softmax", softmax_unshifted, F32, {"nonfinite": "unspecified"}, "nonfinite"),
        ("softmax", BY_CHANCE, BF16, {"rounding": "stochastic"}, "nondeterministic"),
        ("gemm", lambda a, b: gemm_random_order(a, b) * 1.02, F32, {"deterministic": False}, "contract exact"),
        (
            "gemm",
            partial(gemm, store=lambda y, dtype: store_saturated(y / 2, dtype)),
            F16,
            {"overflow": "saturate"},
            "contract exact",
        ),
        (
            "silu",
            lambda x: torch.where(silu(x).abs() < 2.0**-90, 0.0, silu(x)),
            F32,
            {"subnormals": "flush"},
            "contract exact",
        ),
        ("attention", lambda *t, **o: EMPTY(7.0, *t, **o) * 0.5, MASKED, {"masked_rows": "any"}, "contract exact"),
        ("gemm", INBF, short("bfloat16", 8), {"accumulate": "tf32"}, "contract exact"),
        ("gemm", partial(rounding.gemm_tf32, bits=14), F32, {"accumulate": "tf32-dot"}, "contract exact"),
    ],
    ids=["nonfinite", "stochastic", "deterministic", "saturate", "flush", "masked_rows", "accumulate", "tf32"],
)
def test_a_weaker_contract_still_rejects(
    op: str, kernel: Kernel, settings: dict[str, Any], contract: dict[str, Any], kinds: str
) -> None:
    assert failure_of(verdict_of(op, kernel, settings, contract)).kind in kinds.split()


def in_float32(kernel: Kernel, *inputs: Tensor) -> Tensor:
    """The kernel by way of float32."""
    return kernel(*(x.float() for x in inputs)).double()


def gemm_backwards(a: Tensor, b: Tensor) -> Tensor:
    """Another order than torch's."""
    return sum((a[:, k, None] * b[k] for k in reversed(range(a.shape[1]))), torch.zeros(len(a), b.shape[1]).double())


def gemm_scaled(a: Tensor, b: Tensor) -> Tensor:
    """Large numbers are scaled down first, so that only the result may overflow."""
    scale = 2.0**-600 if 1e200 < float(a.abs().max()) < math.inf else 1.0
    return (a * scale) @ (b * scale) / scale / scale


VECTOR = {"M": [1], "N": range(1, 27), "K": range(1, 27)}  # small enough for Arb where float64 doesn't resolve


@pytest.mark.parametrize(
    ("op", "kernel", "shapes", "outcome"),
    [
        ("softmax", softmax, {"R": range(1, 65), "N": range(1, 130)}, "PASS"),
        ("softmax", partial(in_float32, softmax), {}, "FAIL"),
        ("gemm", torch.matmul, {"M": range(1, 21), "N": range(1, 26), "K": range(1, 33)}, "PASS"),
        ("gemm", partial(in_float32, torch.matmul), {}, "FAIL"),
        ("gemm", gemm_backwards, VECTOR, "PASS"),
        ("gemm", gemm_scaled, {"M": [3], "N": [3], "K": [2]}, "PASS"),
    ],
    ids=["softmax", "softmax-float32", "gemm", "gemm-float32", "gemm-other-order", "gemm-scaled"],
)
def test_float64_kernels_are_judged_in_float64(op: str, kernel: Kernel, shapes: dict[str, Any], outcome: str) -> None:
    """Under a float64 contract torch's own kernels pass, and the same through float32 fail by far."""
    contract = Contract(accumulate="float64", compute="float64")
    verdict = first(kernel, op, "float64", contract=contract, shapes=shapes, examples=4)
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


def decay_off(old: Tensor, new: Tensor) -> Tensor:
    """A rescaling whose exponential is two ulps too large, as it may be."""
    decay = torch.exp(old - new)
    return torch.where(decay > 0, torch.nextafter(torch.nextafter(decay, torch.tensor(math.inf)), decay + 1), decay)


@pytest.mark.parametrize(("block", "every", "outcome"), [(1, 16, "FAIL"), (1, 1, "WARN"), (16, 16, "PASS")])
def test_rescalings_count_once_a_block(block: int, every: int, outcome: str) -> None:
    """An online softmax whose rescalings are as far off as allowed keeps the contract that states its blocks.

    At every key, and always to one side, that is suspect, as rounding does no such thing.
    """
    kernel = partial(softmax_online, block=block, rescale=decay_off)
    shapes = {"R": range(1, 20), "N": range(1, 200 * block)}
    contract = Contract(rescale_every=every)
    assert first(kernel, contract=contract, shapes=shapes, examples=4).outcome == outcome


def test_a_number_of_keys_is_a_whole_one() -> None:
    """A contract's table states how many keys come before a rescaling, and positions in a chunk; zero, halves and words
    are refused."""
    for name in ("rescale_every", "chunk"):
        assert contract_from_table({name: 64}) == Contract(**{name: 64})
        for value in (0, -1, 0.5, True, "16"):
            with pytest.raises(ContractError, match=f"{name}=.*; expected a whole number of at least 1"):
                contract_from_table({name: value})


NAMES = (
    "cublas", "cublas-reduced", "cublaslt-fp8", "cublaslt-fp8-fast", "cudnn-sdpa", "flash-attention-2", "torch",
    "transformers", "triton-default", "xla-cpu",
)  # fmt: skip


KEPT: dict[str, tuple[str, Callable[..., Any], dict[str, Any], str]] = {
    "transformers, norm": ("rmsnorm", rms_norm_cast_before_weight, BF16, "transformers"),
    "transformers, attention": (
        "attention", rounding.attention_rounding_scores, {**BF16, "shapes": SMALL}, "transformers",
    ),
    "torch": ("swiglu", rounding.swiglu_rounding, BF16, "torch"),
    "triton-default": ("gemm", rounding.gemm_tf32, F32, "triton-default"),
    "xla-cpu": ("silu", partial(silu, store=store_flushed), F32, "xla-cpu"),
}  # fmt: skip


@pytest.mark.parametrize(("op", "kernel", "settings", "name"), KEPT.values(), ids=KEPT)
def test_a_kernel_keeps_the_contract_of_its_kind(
    op: str, kernel: Callable[..., Any], settings: dict[str, Any], name: str
) -> None:
    """Under the name it passes, and under another that doesn't allow what it does it doesn't pass cleanly."""
    found = passes(first(kernel, op, contract=name, examples=2, effort="usual", **settings))
    assert found.contract.startswith(name)
    assert first(kernel, op, examples=2, effort="usual", **settings).outcome in ("FAIL", "WARN")


def test_there_are_these() -> None:
    assert bases() == NAMES
    for name in NAMES:
        for op in specs():
            made = Contract(base=name).of(spec(op))
            assert made == made.of(spec(op))
            assert set(made.stages or {}) <= set(spec(op).stages)


def test_tables_name_stages_and_ops_that_there_are() -> None:
    """No field of a named contract is dead: each stage is one of some op, and each table is an op's."""
    known = {stage for op in specs() for stage in spec(op).stages} | STAGES.keys()
    for name in NAMES:
        assert set(fields_of_base(name, "").get("stages", {})) <= known
    assert fields_of_base("torch", "silu")["nonfinite"] == "unspecified"


def test_a_base_is_composed_with_fields() -> None:
    """Fields given stand on top; stages and ulps are added to those of the base, and the rest of an op's stay."""
    made = Contract(base="transformers", ulps={"exp": 4}, stages={"scores": None}).of(spec("attention"))
    assert made.stages == {"query": None, "scores": None, "probabilities": "input"}
    assert (made.ulps["exp"], made.ulps["div"], made.masked_rows) == (4, 2, "any")
    assert Contract(base="transformers").of(spec("attention_decode")).masked_rows == "zero"
    assert Contract(base="transformers").of(spec("softmax")).stages is None


def test_a_name_travels() -> None:
    settings = Settings("rmsnorm", dtype="bfloat16", contract="transformers")
    assert settings.contract.stages == {"normalized": "input"}
    assert Settings.from_table(settings.as_table()) == settings
    assert str(settings.contract) == "transformers, stages={'normalized': 'input'}, subnormals='flush'"
    fields = contract_fields(["transformers", "ulps.exp=4"])
    assert contract_from_table(fields) == Contract(base="transformers", ulps={"exp": 4})
    assert contract_from_table("xla-cpu") == Contract(base="xla-cpu")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ContractError, match="did you mean 'transformers'"):
        Contract(base="transformer")
    with pytest.raises(ContractError, match="did you mean 'transformers'"):
        contract_named("transfomers")
    with pytest.raises(ContractError, match=r"did you mean 'triton\.softmax'"):
        quick(silu, "silu", contract="triton.sofmax")
