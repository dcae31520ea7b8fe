"""Experts by the dozen: an examination has room for them, and its check is not hollow."""

import random
from typing import Any

import pytest
from torch import Tensor

from assay.golden.registry import spec
from assay.verify import examine
from assay.verify.cases.sampler import Sampler
from assay.verify.examination.phases import gate_cases
from assay.verify.explanation.fault_models.evaluation import kernel_of

HONEST = kernel_of(None, "moe_int4")
ASKED: dict[str, Any] = {"dtype": "bfloat16", "effort": "quick", "examples": 2, "shrinking": False}


def few_experts(x: Tensor, w_gate_up: Tensor, *rest: Tensor) -> Tensor:
    """A mixture that reads 5 bits of an expert's number."""
    *tables, ids = rest
    return HONEST(x, w_gate_up, *tables, ids % 32)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.evidence) for seed in (1, 2))])
def test_a_mixture_of_64_experts_passes(seed: int) -> None:
    verdict = examine(
        HONEST, "moe_int4", shapes={"E": [64], "D": [32], "F": [32]}, layouts=["contiguous"], seed=seed, **ASKED
    )
    assert verdict.outcome == "PASS", str(verdict)


@pytest.mark.parametrize("shapes", [{"E": [64]}, {}])
def test_a_mixture_of_32_of_64_experts_is_found(shapes: dict[str, Any]) -> None:
    """Where 64 are asked for, and where the op's own sizes are drawn."""
    verdict = examine(few_experts, "moe_int4", shapes=shapes, every_aspect=False, **ASKED)
    assert verdict.outcome == "FAIL", str(verdict)


def test_no_size_is_cut_in_vain() -> None:
    """Of what is too large only sizes that make it so are halved: many experts leave the tokens as they were drawn."""
    sampler = Sampler(spec("moe_int4"), "bfloat16", shapes={"E": [64], "g": [8], "T": range(1, 200)})
    choose = random.Random(0).choice
    drawn = [sampler.case(choose, style="tile") for _ in range(60)]
    assert all(sampler.fits(case.sizes) for case in drawn)
    assert sum(case.sizes["T"] > 8 for case in drawn) > 50
    gated = gate_cases(Sampler(spec("moe_int4"), "bfloat16", shapes={"E": [64]}), "tile")
    assert [case.sizes["T"] for case in gated] == [64]
