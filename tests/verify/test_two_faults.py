"""Two faults of one kernel, one of which gives NaN: what explains the one isn't lost by the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.golden import spec
from assay.verify import Contract
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.explanation.explain import explain
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness

OPTIONS: dict[str, list[Any]] = {"causal": ["bottom_right"]}
SIZES = {"B": 1, "H": 4, "Sq": 5, "D": 8, "Hkv": 2, "Sk": 3, "Dv": 8}


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: str, modulo: bool, nan: bool) -> Tensor:
    """Two key/value heads; the first rows see nothing where there are more queries than keys."""
    heads, of = torch.arange(q.shape[1]), q.shape[1] // k.shape[1]
    heads = heads % k.shape[1] if modulo else heads // of
    scores = q @ k[:, heads].transpose(-1, -2) * q.shape[-1] ** -0.5
    rows = torch.arange(scores.shape[-2])[:, None] + scores.shape[-1] - scores.shape[-2]
    weights = scores.masked_fill(torch.arange(scores.shape[-1]) > rows, -torch.inf).softmax(-1)
    return (weights if nan else weights.nan_to_num(0.0)) @ v[:, heads]


def causes_of(kernel: Callable[..., Tensor], **sizes: int) -> list[str]:
    sampler = Sampler(spec("attention"), "float32", OPTIONS)
    drawn = replace(sampler.case(seeded(1), style="small"), sizes={**SIZES, **sizes})
    case = with_values(drawn, "normal", layouts={}, unused="plain", protocol="once", memory="plain")
    harness = KernelHarness(Call(kernel, OPTIONS), Contract())
    failure = harness.try_case(case).failure
    assert failure is not None
    found = explain(harness, failure, case, sampler, seconds=30.0)
    return [explanation.description for explanation in found.explanations]


@pytest.mark.parametrize("nan", [True, False])
def test_each_of_two_faults_is_explained_beside_the_other(nan: bool) -> None:
    def kernel(*tensors: Tensor, causal: str = "") -> Tensor:
        return attention(*tensors, causal=causal, modulo=True, nan=nan)

    heads = causes_of(kernel, Sk=7)  # all rows see a key there
    assert "key/value head h modulo Hkv" in heads[0]
    assert heads[0].endswith("the NaN and infinite wrong elements beside these are another fault's") is nan
    if nan:
        assert "a row that sees nothing is NaN" in causes_of(kernel)[0]
