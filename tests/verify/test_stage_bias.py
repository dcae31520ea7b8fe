"""The test of bias where a stage, or the store, rounds few values or such as lie just beside a number of the format."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.formats.format import format_named
from assay.formats.rounding import round_to
from assay.golden.registry import define
from assay.verify import Contract, examine
from assay.verify.comparison.bias import WEIGHTS, stage_roundings
from assay.verify.examination.phases import bias_cases
from assay.verify.examination.plan import make_plan
from assay.verify.findings import Failure
from assay.verify.settings import Settings

Kernel = Callable[..., Tensor]
CONTRACT = Contract(nonfinite="unspecified", stages={"inner": "input"})
NEXT = 1 + 2.0**-12
INNER: dict[str, tuple[Callable[..., Any], Kernel]] = {
    "silu": (lambda xp, x: xp.gate_mul(x, xp.sigmoid(x)), torch.nn.functional.silu),
    "gelu": (
        lambda xp, x: xp.gate_mul(x, (xp.erf(x * xp.constant(lambda root, pi: 1 / root(2)), absolute=True) + 1) * 0.5),
        torch.nn.functional.gelu,
    ),
    "exp": (lambda xp, x: xp.exp(x), torch.exp),
    "sigmoid": (lambda xp, x: xp.sigmoid(x), torch.sigmoid),
    "tanh": (lambda xp, x: xp.tanh(x), torch.tanh),
    "third": (lambda xp, x: x / 3.0, lambda x: x / 3),
    "square": (lambda xp, x: x * x, torch.square),
    "just below": (lambda xp, x: x * (2 - NEXT), lambda x: x * (2 - NEXT)),
    "just above": (lambda xp, x: x * NEXT, lambda x: x * NEXT),
}
"""The function whose value is the stage of an op, and torch's; the stage is then multiplied."""


def op_of(name: str) -> str:
    """The op that multiplies the rounded function of one tensor by another."""
    inner, op = INNER[name][0], f"staged_{name.replace(' ', '_')}"

    @define(op, "x[R,N], up[R,N] -> y[R,N]", stages={"inner": None}, rows="R", columns="N", public=False)
    def definition(xp: Any, x: Any, up: Any) -> Any:
        return xp.round(inner(xp, x), "inner") * up

    return op


def kernel_of(name: str, inner: str | None = "nearest", store: str = "nearest") -> Kernel:
    """The op's kernel, with its stage and its store rounded in these modes; None: the stage is left as it is."""

    def kernel(x: Tensor, up: Tensor) -> Tensor:
        value = INNER[name][1](x.float())
        value = value if inner is None else round_to(value, x.dtype, inner).float()  # type: ignore[arg-type]
        return round_to(value * up.float(), x.dtype, store).to(x.dtype)  # type: ignore[arg-type]

    return kernel


def leaning_of(kernel: Kernel, op: str, dtype: str, **settings: Any) -> Failure | None:
    """What the phase of bias finds."""
    asked = make_plan(kernel, Settings(op, dtype, **{"contract": CONTRACT, **settings}))
    failures = (asked.harness.try_case(case).failure for case in bias_cases(asked.sampler))
    return next((failure for failure in failures if failure is not None), None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", INNER)
def test_a_stage_rounded_to_nearest_or_not_at_all_does_not_lean(name: str, dtype: str) -> None:
    """What the contract says is no bias, though each call rounds the same values to the same side."""
    op = op_of(name)
    assert leaning_of(kernel_of(name), op, dtype) is None
    assert leaning_of(kernel_of(name, None), op, dtype) is None


@pytest.mark.parametrize("name", [name for name in INNER if not name.startswith("just")])
def test_a_truncated_stage_or_store_is_still_found(name: str) -> None:
    op = op_of(name)
    for planted in ({"inner": "toward_zero"}, {"store": "toward_zero"}):
        failure = leaning_of(kernel_of(name, **planted), op, "bfloat16")
        assert failure is not None, planted
        assert failure.kind in ("contract", "bias")


def test_a_truncated_stage_within_the_radius_is_found_by_its_bias() -> None:
    """Where a wide store hides each single error, the series of calls shows them all on one side."""
    op = op_of("third")

    def kernel(x: Tensor, up: Tensor) -> Tensor:
        held = round_to(x.float() / 3, "bfloat16", "toward_zero").float()
        return (round_to(x.float() / 3 * 0.5, "bfloat16").float() * up.float() + held * 0.5 * up.float()).to(x.dtype)

    failure = leaning_of(kernel, op, "bfloat16")
    assert failure is not None
    assert failure.kind == "bias"
    assert failure.side in ("downward", "toward zero")


def test_part_of_a_stage_rounded_does_not_lean() -> None:
    op = op_of("silu")

    def kernel(x: Tensor, up: Tensor) -> Tensor:
        value = torch.nn.functional.silu(x.float())
        value[::2] = value[::2].to(x.dtype).float()
        return (value * up.float()).to(x.dtype)

    assert leaning_of(kernel, op, "bfloat16") is None


@define("by_logarithm", "x[R,N] -> y[R,N]", rows="R", columns="N", public=False)
def by_logarithm(xp: Any, x: Any) -> Any:
    """|x| by way of two functions: of every eighth float16 number bfloat16 has a midpoint."""
    return xp.exp(xp.log(xp.abs(x)))


def test_results_that_crowd_at_midpoints_do_not_lean() -> None:
    """Errors of a float32 ulp that decide to which side a midpoint is stored are the contract's own."""

    def kernel(x: Tensor) -> Tensor:
        return (torch.exp(torch.log(x.float().abs())) * (1 - 2.0**-23)).to(torch.bfloat16)

    settings = {"contract": Contract(nonfinite="unspecified"), "out_dtype": "bfloat16"}
    assert leaning_of(kernel, "by_logarithm", "float16", **settings) is None


def test_attention_with_equal_scores_does_not_lean() -> None:
    """Probabilities just below one are all rounded up before the division; it is the kernel's to choose the place."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        groups = q.shape[1] // max(k.shape[1], 1)
        keys, values = (x.float().repeat_interleave(groups, 1) for x in (k, v))
        scores = q.float() @ keys.transpose(-1, -2) * scale
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return weights.to(q.dtype).float() @ values / weights.sum(-1, keepdim=True)

    shapes = {"B": [1], "Hkv": [1], "H": [1], "Sq": [16], "Sk": [48], "D": [16], "Dv": [16]}
    settings = {"shapes": shapes, "options": {"scale": [2.0**-10]}, "contract": Contract(), "out_dtype": "float32"}
    assert leaning_of(kernel, "attention", "bfloat16", **settings) is None


def test_ways_are_those_of_the_stages_that_round() -> None:
    """Each combination of stages coarser than the arithmetic, attention's weights in three ways; no more than that."""

    def count(stages: dict[str, str]) -> int:
        model = Contract().model(definition, format_named("bfloat16"))
        return len(list(stage_roundings(replace(model, stages={name: format_named(f) for name, f in stages.items()}))))

    definition = make_plan(kernel_of("exp"), Settings(op_of("exp"), "bfloat16")).sampler.definition
    assert count({}) == count({"a": "float32"}) == 0
    assert count({"a": "bfloat16"}) == 1
    assert count({"a": "bfloat16", "b": "float16"}) == 3
    assert count({"probabilities": "bfloat16"}) == len(WEIGHTS)
    assert count(dict.fromkeys("abcde", "bfloat16")) == 6


def test_the_gated_activation_that_was_reported_passes() -> None:
    """silu rounded to bfloat16, times up: what Hugging Face's eager code does, under the contract that says so."""
    verdict = examine(kernel_of("silu"), op_of("silu"), dtype="bfloat16", effort="quick", contract=CONTRACT)
    assert verdict.passed, str(verdict)
