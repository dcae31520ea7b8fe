"""The arithmetic of wrong numbers: sizes and sides of errors, the arguments that they belong to, flushed ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.golden import spec
from assay.verify import Contract
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.explanation.fault_models.fault_tolerance import observation_of
from assay.verify.explanation.residuals import residuals
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness


def errors_of(kernel: Callable[[Tensor], Tensor], values: str = "normal", op: str = "gelu") -> str:
    """What is said of a kernel's errors in three calls; empty if nothing is."""
    sampler = Sampler(spec(op), "float32")
    case = sampler.case(seeded(1), style="tile")
    case = with_values(case, values, unused="plain", protocol="once", layouts={}, memory="plain", edits=())
    harness = KernelHarness(Call(kernel, {}), Contract())
    sizes = [dict.fromkeys(case.sizes, size) for size in (7, 9, 12)]
    seen = [observation_of(harness, replace(case, sizes=each, seed=seed)) for seed, each in enumerate(sizes)]
    return " ".join(fact.words for fact in residuals([each for each in seen if each], "numbers"))


def gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x.double()).float()


def rounded(x: Tensor) -> Tensor:
    return gelu(x).bfloat16().float() * (1 + 2**-12)


KERNELS: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "rounded": (rounded, "normal", r"errors .* of y are up to 2\^-[89]\.\d of the right ones, half .*, to both sides"),
    "too small": (lambda x: gelu(x) * (1 - 2**-9), "normal", r"up to 2\^-9\.0 of .*, 100% of them toward zero"),
    "large arguments": (
        lambda x: torch.where(x > 1.0, 1.001, 1.0) * gelu(x), "normal",
        r"wrong where x is 1\.\d+ to .*, and right up to 0\.",
    ),
    "a band of magnitudes": (
        lambda x: torch.where((x.abs() > 0.5) & (x.abs() < 1), 1.1, 1.0) * gelu(x), "normal",
        r"wrong where \|x\| is 0\.[5-9]\d* to 0\.9\d*, and right up to 0\.4\d* and from 1\.\d* on",
    ),
    "flushed": (
        lambda x: torch.where(gelu(x).abs() < 2**-126, 0.0, gelu(x)), "subnormal",
        "are 0, and the right ones below the least normal number of float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_errors_are_measured(name: str) -> None:
    kernel, values, words = KERNELS[name]
    assert re.search(words, errors_of(kernel, values))


@pytest.mark.parametrize(
    "kernel", [gelu, lambda x: -gelu(x), lambda x: torch.where(torch.arange(x.shape[-1]) == 2, 2, 1) * gelu(x)]
)
def test_nothing_is_said_of_right_numbers_large_errors_and_single_places(kernel: Callable[[Tensor], Tensor]) -> None:
    assert errors_of(kernel) == ""
