"""Experiments on a definition: which change of it gives what a faulty kernel gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from assay.golden import spec
from assay.golden.lowering import reference_spec
from assay.verify import Contract
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.explanation.experiments.extent import Extent
from assay.verify.explanation.experiments.search import Experiments
from assay.verify.explanation.facts import breaking_calls
from assay.verify.explanation.fault_models.mutators import narrow_accumulator
from assay.verify.findings import Failure
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness

_SECONDS = 20.0  # enough on a busy machine; most take a tenth of a second


def causes_of(kernel: Callable[..., Any], op: str, sizes: dict[str, int] | None = None) -> list[str]:
    """The explanations by experiment of a kernel's failure in an ordinary case."""
    sampler = Sampler(spec(op), "float32")
    case = with_values(
        sampler.case(seeded(1), style="tile"), "normal", unused="plain", protocol="once", layouts={}, memory="plain"
    )
    case = replace(case, sizes=sizes or case.sizes)
    harness = KernelHarness(Call(kernel, {}), Contract())
    failure = harness.try_case(case).failure or Failure("contract", case, "")
    calls = breaking_calls(harness, failure, case, sampler, 1.0)
    found = Experiments(_SECONDS, 1).explained(calls)
    return [explanation.description for explanation in found]


def norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, outside: float = 0.0, count: int = 0) -> Tensor:
    count = count or x.shape[-1]
    return x / ((x.pow(2).sum(-1, keepdim=True) / count + eps).sqrt() + outside) * weight


def block_norm(x: Tensor, weight: Tensor) -> Tensor:
    return norm(x, weight, count=-(-x.shape[-1] // 64) * 64)


def lower_rows(x: Tensor, weight: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0])[:, None]
    return torch.where(rows < 4, norm(x, weight), norm(x, torch.ones_like(weight)))


OPS: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "left out": (
        lambda x, w, b: x @ w.T, "linear", "`bias` is left out, in `matmul(x, swap(weight), plus=bias)`",
    ),
    "eps": (lambda x, w: norm(x, w, eps=1e-3), "rmsnorm", "the square root of eps is taken for it"),
    "extent": (block_norm, "rmsnorm", "`x.shape[-1]` is rounded up to a multiple of 64, in `sum(x) / x.shape[-1]`"),
    "index": (lambda x, w: norm(x, w.roll(1)), "rmsnorm", "weight is read one index earlier along N, the last before"),
    "rows": (lower_rows, "rmsnorm", "at R from 4 on the result is what the definition gives if `c` is left out"),
    "tail": (
        lambda a, b: a[:, : a.shape[1] // 16 * 16] @ b[: a.shape[1] // 16 * 16], "gemm",
        "the terms of each product beyond the last whole block of 16 are left out, in `matmul(a, b)`",
    ),
    "sign": (
        lambda y, dy: y * (dy + (y * dy).sum(-1, keepdim=True)), "softmax_backward",
        "`total` is added, not subtracted, in `dy - total`",
    ),
    "argument": (lambda x: x * torch.sigmoid(2 * x), "silu", "sigmoid is taken of twice its argument, in `sigmoid(x)`"),
    "exchanged": (lambda a, b: functional.silu(b) * a, "swiglu", "gate and up are exchanged"),
    "rounded": (
        lambda y, dy: y * (dy - (y * dy).bfloat16().float().sum(-1, keepdim=True)), "softmax_backward",
        "`y * dy` is rounded to bfloat16",
    ),
    "kept": (
        lambda y, dy: y * (dy - narrow_accumulator("bfloat16", 16).sum(None, y * dy)), "softmax_backward",
        "is rounded to bfloat16 after each 16 terms",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_the_change_of_an_op(name: str) -> None:
    """The change that was made is named first, in a user's words."""
    kernel, op, words = OPS[name]
    causes = causes_of(kernel, op)
    assert causes
    assert words in causes[0]


def gated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = x * torch.sigmoid(x * w)
    return h / (h.pow(2).mean(-1, keepdim=True).sqrt() + 0.5) + b


REFERENCES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "function": (
        lambda x, w, b: gated_of(x, w, b, torch.tanh),
        "tanh is taken for the logistic function, in line ",
    ),
    "constant": (lambda x, w, b: gated_of(x, w, b, torch.sigmoid, 0.25), "`0.5` is halved, in line "),
}


def gated_of(x: Tensor, w: Tensor, b: Tensor, function: Callable[[Tensor], Tensor], constant: float = 0.5) -> Tensor:
    h = x * function(x * w)
    return h / (h.pow(2).mean(-1, keepdim=True).sqrt() + constant) + b


@pytest.mark.parametrize("name", REFERENCES)
def test_the_change_of_a_reference(name: str) -> None:
    """The change is named with the line of the reference that it is in."""
    kernel, words = REFERENCES[name]
    op = reference_spec(gated, "x[T,D], w[D], b[D] -> y[T,D]").qualified_name
    causes = causes_of(kernel, op)
    assert causes
    assert words in causes[0]
    assert "`h = x * torch.sigmoid(x * w)`" in causes[0] or "h.pow(2).mean" in causes[0]


NOTHING: dict[str, tuple[Callable[..., Tensor], str]] = {
    "right": (norm, "rmsnorm"),
    "noise": (lambda x, w: norm(x, w) * (1 + 0.01 * torch.rand(x.shape)), "rmsnorm"),
    "zero": (lambda x, w: torch.zeros_like(x), "rmsnorm"),
    "other elements": (lambda x, w: torch.where(x > 0, norm(x, w), norm(x, torch.ones_like(w))), "rmsnorm"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_no_cause_where_no_change_gives_all(name: str) -> None:
    """Errors of no change, one number everywhere, and wrong elements apart along no dimension get no cause."""
    kernel, op = NOTHING[name]
    assert causes_of(kernel, op) == []


def test_two_changes_at_once() -> None:
    """Where no change alone gives all, two are named together."""
    (cause,) = causes_of(lambda a, b: b * torch.tanh(b) * a, "swiglu")
    assert "gate and up are exchanged, and tanh is taken for the logistic function" in cause


def test_where_a_change_holds() -> None:
    """Indices apart along a dimension are an extent; wrong elements between right ones are none."""
    rows = torch.arange(8)[:, None].expand(8, 5)
    below = Extent()
    below.add(rows >= 3, rows < 3, ("R", "N"))
    assert below.in_words() == "at R from 3 on"
    mixed = Extent()
    mixed.add((rows + torch.arange(5)) % 2 == 0, (rows + torch.arange(5)) % 2 == 1, ("R", "N"))
    assert mixed.in_words() is None
    assert Extent().in_words() == ""


def test_one_cause_of_several_aspects() -> None:
    """What explains one aspect explains the next, by the same name."""
    experiments = Experiments(_SECONDS, 2)
    sampler = Sampler(spec("swiglu"), "float32")
    harness = KernelHarness(Call(lambda a, b: functional.silu(b) * a, {}), Contract())
    names = []
    for seed in (1, 2):
        case = with_values(
            sampler.case(seeded(seed), style="tile"), "normal", unused="plain", protocol="once", layouts={}
        )
        calls = breaking_calls(harness, Failure("contract", case, ""), case, sampler, 1.0)
        names.append([explanation.name for explanation in experiments.explained(calls)])
    assert names[0]
    assert names[1] == names[0][:1]


def test_a_reference_that_refuses_sizes() -> None:
    """Facts and causes come from the sizes that a reference takes."""
    op = reference_spec(refusing, "x[T,D], w[D], b[D] -> y[T,D]").qualified_name
    causes = causes_of(lambda x, w, b: gated_of(x, w, b, torch.tanh), op, sizes={"T": 4, "D": 16})
    assert causes
    assert "tanh is taken for the logistic function" in causes[0]


def refusing(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    if x.shape[-1] % 8:
        raise ValueError("D must be a multiple of 8")
    return gated(x, w, b)
