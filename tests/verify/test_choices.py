"""What a reference leaves open is read from a kernel's outputs: right kernels pass, whatever they chose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from assay.golden.lowering import reference_spec
from assay.verify.cases.case import Case
from assay.verify.comparison.oracle import Oracle
from assay.verify.comparison.result import Result
from assay.verify.contract import Contract

Tensor = torch.Tensor


def judged(kernel: Callable[..., Any], reference: Callable[..., Any], tensors: str, **values: Tensor) -> Result:
    """Judge a kernel's outputs for these tensors."""
    spec = reference_spec(reference, tensors)
    sizes = spec.signature().bind(spec.name, [tuple(value.shape) for value in values.values()])
    dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in values.items()}
    got = kernel(*values.values())
    case = Case(spec.qualified_name, sizes, dtypes)
    return Oracle(Contract()).judge(case, values, got if isinstance(got, tuple) else (got,))


def failed(*arguments: Any, **values: Tensor) -> bool:
    """Whether a kernel fails; nothing may be left undecided of one that doesn't."""
    result = judged(*arguments, **values)
    assert result.failure is not None or not result.left_out, result.left_out
    return result.failure is not None


GROUPS, KEPT, K = 4, 2, 2


def deepseek(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(logits.float())
    biased = scores + bias
    rows, experts = biased.shape
    group = torch.topk(biased.view(rows, GROUPS, experts // GROUPS), 2, dim=-1)[0].sum(-1)
    kept = torch.zeros_like(group).scatter(1, torch.topk(group, KEPT, dim=-1)[1], 1.0)
    kept = kept.unsqueeze(-1).expand(rows, GROUPS, experts // GROUPS).reshape(rows, experts)
    ids = torch.topk(torch.where(kept > 0, biased, float("-inf")), K, dim=-1)[1]
    weights = torch.gather(scores, 1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), ids


def router(fill: float = float("-inf"), best: int = 2, norm: bool = True, biased: bool = False, last: bool = False):  # type: ignore[no-untyped-def]
    """Return a router's kernel; ``last``: it takes the last of equal scores."""

    def chosen(x: Tensor, k: int) -> Tensor:
        if last:
            return x.shape[-1] - 1 - torch.argsort(x.flip(-1), dim=-1, descending=True, stable=True)[..., :k]
        return torch.argsort(x, dim=-1, descending=True, stable=True)[..., :k]

    def kernel(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(logits.float())
        grouped = (scores + bias).view(len(scores), GROUPS, -1)
        group = grouped.topk(best, dim=-1)[0].sum(-1)
        kept = torch.zeros(len(scores), GROUPS, dtype=torch.bool).scatter_(1, chosen(group, KEPT), True)
        ids = chosen(grouped.masked_fill(~kept[..., None], fill).flatten(1), K)
        weights = (scores + bias if biased else scores).gather(1, ids)
        return (weights / (weights.sum(-1, keepdim=True) + 1e-20) if norm else weights), ids

    return kernel


def routed(negative: bool) -> dict[str, Tensor]:
    """Scores of which every second row has ties of all kinds."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 16, generator=generator)
    logits[::2] = (logits[::2] > 0).float()
    bias = torch.randn(16, generator=generator) * 0.1
    bias[:] = bias.round(decimals=1)
    return {"logits": logits.bfloat16(), "bias": bias - 3 if negative else bias}


WEIGHTS = "logits[T,E], bias:float32[E] -> w:float32[T,2]"
ROUTED = f"{WEIGHTS}, ids:int64[T,2]"


@pytest.mark.parametrize("kernel", [router(), router(last=True)])
def test_a_right_router_passes_whichever_of_equal_experts_it_takes(kernel: Any) -> None:
    assert not failed(kernel, deepseek, ROUTED, **routed(False))
    assert not failed(lambda *x: kernel(*x)[0], lambda *x: deepseek(*x)[0], WEIGHTS, **routed(False))


@pytest.mark.parametrize("wrong", [{"fill": 0.0}, {"best": 1}, {"norm": False}, {"biased": True}])
def test_a_wrong_router_fails(wrong: dict[str, Any]) -> None:
    values = routed(negative="fill" in wrong)
    assert judged(router(**wrong), deepseek, ROUTED, **values).failure is not None
    alone = judged(lambda *x: router(**wrong)(*x)[0], lambda *x: deepseek(*x)[0], WEIGHTS, **values)
    assert alone.failure is not None


def codes(x: Tensor, scale: Tensor) -> Tensor:
    return torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8)


def away(x: Tensor) -> Tensor:
    return torch.sign(x) * torch.floor(x.abs() + 0.5)


def quantised(round_: Callable[[Tensor], Tensor], factor: float = 1.0, low: int = -128) -> Callable[..., Tensor]:
    return lambda x, scale: torch.clamp(round_(x / scale * factor), low, 127)


def test_exact_ties_follow_the_rule_of_the_reference() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 3.25, 300.0, -300.0]]) * torch.tensor([[0.25], [1.0], [8.0]])
    scale, tensors = torch.tensor([[0.25], [1.0], [8.0]]), "x[T,D], scale[T,1] -> q:int8[T,D]"
    dequantised = "x[T,D], scale[T,1] -> y:float32[T,D]"
    for kernel, is_wrong in (
        (quantised(torch.round), False),
        (quantised(away), True),
        (quantised(torch.trunc), True),
        (quantised(torch.round, 1.01), True),
        (quantised(torch.round, low=-127), True),
    ):
        whole = failed(lambda *v, k=kernel: k(*v).to(torch.int8), codes, tensors, x=x, scale=scale)
        again = failed(
            lambda x, s, k=kernel: k(x, s) * s, lambda x, s: codes(x, s).float() * s, dequantised, x=x, scale=scale
        )
        assert (whole, again) == (is_wrong, is_wrong)


def test_a_tie_that_division_leaves_open_takes_either_code() -> None:
    scale = torch.tensor([[3.0]])
    x = torch.tensor([[1.5, 4.5, 7.5, 2.0]])
    tensors = "x[T,D], scale[T,1] -> y:float32[T,D]"

    def reference(x: Tensor, s: Tensor) -> Tensor:
        return torch.round(x / s) * s

    for round_ in (torch.round, away):
        assert not failed(lambda x, s: round_(x / s) * s, reference, tensors, x=x, scale=scale)  # noqa: B023
    assert failed(lambda x, s: (round_(x / s) + 1) * s, reference, tensors, x=x, scale=scale)


def test_a_row_of_ties_hides_neither_the_error_of_another_row_nor_its_own() -> None:
    x = torch.tensor([[1.0, 1.0, 2.0], [1.0, 3.0, 2.0]])
    weight = torch.tensor([5.0, 7.0, 9.0])

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return weight[x.argmin(-1)]

    tensors = "x[T,D], weight[D] -> y[T]"
    for answer, is_wrong in ([5.0, 5.0], False), ([7.0, 5.0], False), ([9.0, 5.0], True), ([7.0, 9.0], True):
        kernel = lambda x, weight: torch.tensor(answer)  # noqa: B023, E731
        assert failed(kernel, reference, tensors, x=x, weight=weight) == is_wrong


def test_more_answers_than_are_tried_leave_single_elements_undecided() -> None:
    x = torch.zeros(2, 64)
    x[1] = torch.arange(64.0)
    weight = 2.0 ** torch.arange(64.0)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return weight[x.topk(8, dim=-1).indices].sum(-1)

    result = judged(lambda x, w: torch.tensor([3.0, float(w[-8:].sum())]), reference,
                    "x[T,D], weight[D] -> y[T]", x=x, weight=weight)  # fmt: skip
    assert result.failure is None
    assert sum(result.left_out.values()) == 1
    assert result.judged == 1
