"""Explanations of kernels that other people wrote: faults that a survey of their repositories met, and no others."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.golden.registry import define, forgotten
from assay.verify import Verdict, examine
from assay.verify.contract import Contract
from assay.verify.examination.diagnosis import Promises, sizes_in_words
from assay.verify.examination.plan import Plan, make_plan
from assay.verify.settings import Settings

from .explained import OTHERS as KERNELS
from .explained import explanation_of_other

Scores = Callable[[Tensor, Tensor, float], Tensor]
LOG2E = 1.4426950408889634
WIDER = {"B": [1], "Hkv": [1], "H": [2], "Sq": [5, 65], "Sk": [7, 64], "D": [8, 64], "Dv": [8]}
HEADS = {"B": [1], "Hkv": [1], "H": [2], "Sq": [1, 5], "Sk": [1, 7, 33], "D": [16], "Dv": [16]}


@pytest.fixture(scope="module", autouse=True)
def own_ops() -> Iterator[None]:
    """Ops of a user, which other tests don't know."""
    with forgotten():

        @define("own_log_sigmoid", "x[R,N] -> y[R,N]", rows="R", columns="N")
        def own_log_sigmoid(xp: Any, x: Any) -> Any:
            """log(1 / (1 + e^-x))."""
            return -xp.function("softplus", -x)

        @define("own_group", "x[R,N], weight[N] -> y[R,N]", rows="R")
        def own_group(xp: Any, x: Any, weight: Any) -> Any:
            """A norm over a row."""
            centred, root = xp.standardize(x, 1e-5)
            return centred * root * weight

        yield


def cut(x: Tensor) -> Tensor:
    """Float32 as a tensor core reads it in TF32."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def attention(scores: Scores, matmul: Any = torch.matmul, *, base_2: bool = False) -> Callable[..., Tensor]:
    """Online attention in one block, with these scores."""

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        found = scores(q, k, q.shape[-1] ** -0.5)
        found = found - found.amax(-1, keepdim=True)
        weights = torch.exp2(found) if base_2 else torch.exp(found)
        held = weights if v.dtype == torch.float32 else weights.to(v.dtype).float()
        return (matmul(held, v.float()) / weights.sum(-1, keepdim=True)).to(q.dtype)

    return kernel


def products(q: Tensor, k: Tensor) -> Tensor:
    """Element by element, in the dtype of the inputs."""
    return q[..., :, None, :] * k[..., None, :, :]


def log_softmax_dropping_nan(x: Tensor) -> Tensor:
    """Its maximum and its sum pass a NaN over."""
    held = torch.where(x.isnan(), -torch.inf, x.float())
    largest = held.amax(-1, keepdim=True)
    total = torch.exp(held - largest).nan_to_num(0.0).sum(-1, keepdim=True)
    return (x.float() - largest - torch.log(total)).to(x.dtype)


def loss_with_maximum_from_zero(logits: Tensor, target: Tensor) -> Tensor:
    """FlagGems' loop begins at zero."""
    largest = logits.float().amax(-1, keepdim=True).clamp(min=0)
    total = largest + torch.log(torch.exp(logits.float() - largest).sum(-1, keepdim=True))
    ignored = target == -100
    loss = (total - logits.float().gather(1, target.clamp(min=0)[:, None]))[:, 0]
    return torch.where(ignored, 0.0, loss).sum() / (~ignored).sum()


def rms_norm_of_two_passes(x: Tensor, weight: Tensor) -> Tensor:
    """The second pass takes the last stride for one."""
    root = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    span = (x.shape[0] - 1) * x.stride(0) + x.shape[1] + x.storage_offset()
    fits = span <= x.untyped_storage().nbytes() // x.itemsize
    again = x.as_strided(x.shape, (x.stride(0), 1)) if fits else x
    return (again.float() * root * weight.float()).to(x.dtype)


def by_squares(x: Tensor, weight: Tensor) -> Tensor:
    """Liger's group norm."""
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt((x * x).mean(-1, keepdim=True) - mean * mean + 1e-5) * weight


def hugging_face(gate: Tensor, up: Tensor) -> Tensor:
    """silu in the input dtype."""
    return torch.nn.functional.silu(gate.float()).to(gate.dtype) * up


OTHERS: dict[str, tuple[Any, str, str, dict[str, Any], str]] = {
    "tanh": (lambda x: 2 * torch.sigmoid(2 * x) - 1, "tanh", "float32", {}, "tanh_by_sigmoid"),
    "softplus": (lambda x: torch.log(1 + torch.exp(x)), "softplus", "float32", {}, "softplus_without_maximum"),
    "log-sigmoid": (lambda x: torch.log(torch.sigmoid(x)), "own_log_sigmoid", "float32", {}, "softplus_by_sigmoid"),
    "group norm": (by_squares, "own_group", "float32", {}, "variance_from_squares"),
    "second pass": (
        rms_norm_of_two_passes, "rmsnorm", "bfloat16", {"layouts": ["contiguous", "transposed"]},
        "second_pass_of_rmsnorm_ignores_stride",
    ),
    "loss": (loss_with_maximum_from_zero, "cross_entropy", "float32", {}, "loss_maximum_from_zero"),
    "NaN dropped": (log_softmax_dropping_nan, "log_softmax", "float32", {}, "nan_dropped_by_maximum"),
    "gated": (hugging_face, "swiglu", "bfloat16", {}, "activation_rounded"),
    "gelu": (
        lambda x: x * 0.5 * (1 + torch.erf(x * 0.5**0.5)), "gelu", "float32", {}, "gelu_of_minus_infinity",
    ),
    "swiglu": (
        lambda gate, up: gate * torch.sigmoid(gate) * up, "swiglu", "float32", {}, "gated_product_of_minus_infinity",
    ),
    "query rounded": (
        attention(lambda q, k, scale: (q * scale).to(q.dtype).float() @ k.float().mT),
        "attention", "bfloat16", {"shapes": WIDER, "examples": 30}, "query_rounded",
    ),
    "query rounded, base 2": (
        attention(lambda q, k, scale: (q * (scale * LOG2E)).to(q.dtype).float() @ k.float().mT, base_2=True),
        "attention", "bfloat16", {"shapes": HEADS}, "query_rounded_in_base_2",
    ),
    "overflow of q k": (
        attention(lambda q, k, scale: products(q, k).float().sum(-1) * scale),
        "attention", "float16", {"shapes": HEADS}, "scores_multiplied_in_input_dtype",
    ),
    "sums of q k": (
        attention(lambda q, k, scale: products(q, k).sum(-1).float() * scale),
        "attention", "bfloat16", {"shapes": WIDER}, "scores_in_input_dtype",
    ),
    "attention in TF32": (
        attention(lambda q, k, scale: cut(q) @ cut(k).mT * scale, lambda a, b: cut(a) @ cut(b)),
        "attention", "float32", {"shapes": HEADS}, "products_in_tf32",
    ),
    "product in TF32": (lambda a, b: cut(a) @ cut(b), "gemm", "float32", {}, "products_in_tf32"),
}  # fmt: skip
"""Kernels, ops, dtypes and settings, and the fault that is to be named first for the gravest failure."""


QUICK = (
    "softmax_blocks_of_32", "layer_norm_by_moments", "loss_loading_ignored", "log_sigmoid_naive", "nucleus",
    "gemm_whole_chunks", "int4_high_first", "merged",
)  # fmt: skip
"""Some of tests/zoo/foreign.py that were explained wrongly or not at all, and the like without a fault model."""


@cache
def found(name: str, *, every_aspect: bool = True) -> Verdict:
    """The verdict on one of them, at quick effort."""
    kernel, op, dtype, settings, _ = OTHERS[name]
    more = {"layouts": ["contiguous"], "examples": 3, "every_aspect": every_aspect, **settings}
    return examine(kernel, op, dtype=dtype, effort="quick", **more)


AGAIN = ("sums of q k", "query rounded", "overflow of q k", "swiglu", "product in TF32")
"""Those that say of another op, or in another way, what one of the others says."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.evidence if name in AGAIN else ()) for name in OTHERS]
)
def test_the_fault_of_someone_elses_kernel_is_named(name: str) -> None:
    """The first entry is the true one; none of a fault that shows beside special values is wrong."""
    verdict = found(name) if name in ("tanh", "softplus") else found(name, every_aspect=False)
    assert verdict.broken
    assert verdict.explanations, str(verdict)
    assert verdict.explanations[0].name == OTHERS[name][-1]


@pytest.mark.parametrize("name", QUICK)
def test_a_kernel_of_another_style_is_explained_or_left_alone(name: str) -> None:
    """One that no fault model was made of: its cause is named first, and nothing where none is its cause."""
    other = next(other for other in KERNELS if other.name == name)
    told = explanation_of_other(other)
    assert told.outcome == "right", told


@pytest.mark.evidence
@pytest.mark.parametrize("name", [other.name for other in KERNELS])
def test_no_aspect_of_a_kernel_of_another_style_is_explained_wrongly(name: str) -> None:
    """All of them, and all that each breaks."""
    told = explanation_of_other(next(other for other in KERNELS if other.name == name), every_aspect=True)
    assert told.outcome in ("right", "passes"), told


def test_a_state_is_not_named_for_numbers_that_are_always_wrong() -> None:
    """No output is zero: no first call left zeros there, and what looks like a flush is not said to be kept."""
    for aspect in found("tanh").broken.values():
        assert all(explanation.name != "first_call_wrong" for explanation in aspect.explanations)

    def sixteen(x: Tensor) -> Tensor:
        return (2 * torch.sigmoid(2 * x.float()) - 1).to(x.dtype)

    verdict = examine(sixteen, "tanh", dtype="bfloat16", effort="quick", layouts=["contiguous"])
    assert verdict.outcome == "FAIL"
    assert "it keeps Contract(subnormals='flush')" not in str(verdict)


def plan_for(kernel: Any, op: str, dtype: str, **settings: Any) -> Plan:
    """What `examine` would ask of a kernel."""
    return make_plan(kernel, Settings(op, dtype, **settings))


def test_a_contract_is_kept_only_after_an_examination_under_it() -> None:
    """At quick effort: True, False where the same aspect breaks, None where another does."""

    def rounded(gate: Tensor, up: Tensor) -> Tensor:
        return hugging_face(gate, up)

    plan = plan_for(rounded, "swiglu", "bfloat16", layouts=["contiguous"])
    assert Promises(plan, ["numbers"]).keeps(
        "numbers", Contract(compute="bfloat16", nonfinite="unspecified", subnormals="flush")
    )
    assert Promises(plan, ["numbers"]).keeps("numbers", Contract()) is False

    def short(x: Tensor) -> Tensor:
        y = torch.softmax(x.float(), -1)
        return (y[:, : y.shape[1] // 16 * 16] if y.shape[1] > 16 else y).to(x.dtype)

    plan = plan_for(short, "softmax", "bfloat16", layouts=["contiguous"])
    assert Promises(plan, ["numbers"]).keeps("numbers", Contract()) is None


def truncates(x: Tensor) -> Tensor:
    """A softmax whose store cuts, but for one column that is off by more."""
    y = torch.softmax(x.float(), -1)
    cut_off = (y.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return torch.where(torch.arange(x.shape[1]) == 40, y * 1.02, cut_off).bfloat16()


def rounds_activation(gate: Tensor, up: Tensor) -> Tensor:
    """A rounded activation, but for what is off where up is large."""
    y = hugging_face(gate, up)
    return torch.where(up.float().abs() > 30, y * 1.02, y)


@pytest.mark.parametrize(
    ("kernel", "op"),
    [(truncates, "softmax"), pytest.param(rounds_activation, "swiglu", marks=pytest.mark.evidence)],
)
def test_a_contract_that_is_nearly_kept_is_not_said_to_be(kernel: Any, op: str) -> None:
    """Most of what is wrong looks like it, and some does not."""
    verdict = examine(kernel, op, dtype="bfloat16", effort="quick", layouts=["contiguous"])
    assert verdict.outcome == "FAIL"
    assert "it keeps" not in str(verdict)


def tail(x: Tensor) -> Tensor:
    """A softmax whose columns beyond the last whole 16 are not entered."""
    whole = x.shape[1] // 16 * 16 if x.shape[1] > 16 else x.shape[1]
    return torch.nn.functional.pad(torch.softmax(x[:, :whole].float(), -1), (0, x.shape[1] - whole)).to(x.dtype)


def test_a_card_says_which_sizes_are_right() -> None:
    """Of a fault of sizes the report tells those that pass and those that don't, on the card too."""
    verdict = examine(tail, "softmax", dtype="float32", effort="quick", layouts=["contiguous"])
    known = verdict.aspects["shapes"].known
    assert "N: right at 1, 2, 3, 7, 8, 16, 32, 64, 128, 256, wrong at 17, 31, 33, 65, 100, 129, 257" in known
    (row,) = [line for line in str(verdict).splitlines() if line.startswith("  shapes ")]
    assert "right at 1, 2, 3" in row
    assert "data:" not in row


def first_thousand(x: Tensor) -> Tensor:
    """A softmax whose sum leaves out the columns beyond 1,024."""
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / weights[:, :1024].sum(-1, keepdim=True)


def test_a_fault_of_long_rows_says_from_where_on() -> None:
    """Sizes up to that of the failure are tried, and it stands among those that are wrong."""
    verdict = examine(first_thousand, "softmax", dtype="float32", effort="quick", layouts=["contiguous"])
    known = verdict.aspects["shapes"].known
    assert known.partition(";")[0].endswith("512, 513, 1024, wrong at 1025")
    assert "N: right up to 1,024, wrong from 1,025 on" in [
        fact.words for fact in verdict.facts if fact.kind == "begins"
    ]


def test_of_what_nothing_explains_the_data_are_told() -> None:
    """Which distributions are right, and which wrong."""

    def wrong(x: Tensor) -> Tensor:
        y = torch.softmax(x.float(), -1)
        return torch.where((x > 20).any(-1, keepdim=True), y * 0.75, y)

    verdict = examine(wrong, "softmax", dtype="float32", effort="quick", layouts=["contiguous"])
    assert verdict.explanations == ()
    known = next(iter(verdict.broken.values())).known
    assert "right on normal, positive, integers, powers, small" in known
    assert "steep" in known.partition("wrong on")[2]


def test_one_fault_is_told_once() -> None:
    """A graver aspect tells it, and the others say so in their row and their heading."""
    verdict = found("softplus")
    others = [name for name, aspect in verdict.broken.items() if aspect.note]
    assert others
    assert verdict.gravest.note == ""
    assert str(verdict).count("  likely ") == 1
    assert all(f"{name} broken, by the same fault as" in str(verdict) for name in others)


def test_sizes_are_only_those_that_the_caller_gave() -> None:
    """A restricted symbol is tried where it may be."""
    plan = plan_for(tail, "softmax", "float32", shapes={"N": [16, 48, 50]}, layouts=["contiguous"])
    case = replace(plan.sampler.case(lambda values: values[-1], style="small"), protocol="once")
    failure = plan.harness.try_case(replace(case, sizes={"R": 2, "N": 50})).failure
    assert failure is not None
    assert sizes_in_words(failure, plan)[0].startswith("N: right at 16, 48, wrong at 50") or "N" in plan.sampler.shapes
