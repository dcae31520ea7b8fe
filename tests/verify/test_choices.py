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


def top_p(logits: Tensor) -> Tensor:
    p = torch.softmax(logits.float(), -1)
    ordered, index = torch.sort(p, dim=-1, descending=True)
    ordered = torch.where(torch.cumsum(ordered, -1) - ordered > 0.7, 0.0, ordered)
    kept = torch.zeros_like(p).scatter(1, index, ordered)
    return kept / kept.sum(-1, keepdim=True)


def sampled(flip: bool = False, few: bool = False, norm: bool = True) -> Callable[[Tensor], Tensor]:
    """Return a kernel of top-p; ``flip``: of equal tokens it takes the last."""

    def kernel(logits: Tensor) -> Tensor:
        p = torch.softmax(logits.float(), -1)
        p = p.flip(-1) if flip else p
        ordered, index = torch.sort(p, dim=-1, descending=True, stable=True)
        total = torch.cumsum(ordered, -1)
        ordered = ordered.masked_fill((total if few else total - ordered) > 0.7, 0.0)
        kept = torch.zeros_like(p).scatter_(1, index, ordered)
        kept = kept.flip(-1) if flip else kept
        return kept / kept.sum(-1, keepdim=True) if norm else kept

    return kernel


TIED_LOGITS = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0], [0.5, -1.0, 2.0, 0.25, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])


def test_top_p_by_sort_and_scatter() -> None:
    tensors = "logits[T,V] -> p:float32[T,V]"
    for kernel, is_wrong in (
        (sampled(), False),
        (sampled(flip=True), False),
        (sampled(few=True), True),
        (sampled(norm=False), True),
    ):
        assert failed(kernel, top_p, tensors, logits=TIED_LOGITS) == is_wrong


def expert_choice(x: Tensor, scores: Tensor) -> Tensor:
    weights, tokens = torch.topk(scores.t(), 2, dim=-1)
    y = torch.zeros_like(x)
    for expert in range(scores.shape[1]):
        y = y.index_add(0, tokens[expert], weights[expert][:, None] * x[tokens[expert]] * (expert + 1))
    return y


def test_experts_that_choose_tokens() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0], [2.0, 2.5]])
    scores = torch.tensor([[0.5, 0.25], [0.5, 0.75], [0.5, 0.25], [0.125, 1.0]])

    def chosen(first: int, second: int, weighted: bool = True) -> Callable[..., Tensor]:
        def kernel(x: Tensor, scores: Tensor) -> Tensor:
            y = torch.zeros_like(x)
            for expert, tokens in enumerate(((first, second), (1, 3))):
                for token in tokens:
                    y[token] += (scores[token, expert] if weighted else 1.0) * x[token] * (expert + 1)
            return y

        return kernel

    tensors = "x[T,D], scores[T,E] -> y[T,D]"
    for kernel, is_wrong in (
        (chosen(0, 1), False),
        (chosen(2, 1), False),
        (chosen(2, 0), False),
        (chosen(0, 3), True),
        (chosen(1, 1), True),
        (chosen(0, 1, weighted=False), True),
    ):
        result = judged(kernel, expert_choice, tensors, x=x, scores=scores)
        assert (result.failure is not None) == is_wrong


def beams(logits: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, width, words = logits.shape
    total = torch.log_softmax(logits.float(), -1) + scores[..., None]
    best, flat = torch.topk(total.reshape(rows, width * words), width, dim=-1)
    return best, flat // words, flat % words


def test_a_step_of_beam_search() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 3, 7, generator=generator)
    logits[1] = (logits[1] > 0.5).float()
    scores = torch.tensor([[-0.5, -1.0, -1.25], [-1.0, -1.0, -1.0]])

    def step(lost: int = 0, last: bool = False, modulus: int = 7) -> Callable[..., Any]:
        def kernel(logits: Tensor, scores: Tensor) -> Any:
            total = (torch.log_softmax(logits, -1) + scores[..., None])[:, : 3 - lost].flatten(1)
            order = torch.argsort(total.flip(-1) if last else total, dim=-1, descending=True, stable=True)[:, :3]
            flat = total.shape[-1] - 1 - order if last else order
            return total.gather(1, flat), flat // modulus, flat % modulus

        return kernel

    tensors = "logits[B,3,V], scores[B,3] -> best[B,3], beam:int64[B,3], word:int64[B,3]"
    for kernel, is_wrong in ((step(), False), (step(last=True), False), (step(lost=2), True), (step(modulus=3), True)):
        assert failed(kernel, beams, tensors, logits=logits, scores=scores) == is_wrong


def suppressed(at_least: bool = False, ascending: bool = False, dead: bool = False) -> Callable[..., Tensor]:
    """Return non-maximum suppression of intervals: right by default; else with >=, in the other order, or by intervals
    that are suppressed themselves."""

    def kernel(low: Tensor, high: Tensor, score: Tensor) -> Tensor:
        order = torch.argsort(score, descending=not ascending, stable=True)
        low, high = low[order], high[order]
        inter = (torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)).clamp(min=0)
        ratio = inter / ((high - low)[:, None] + (high - low) - inter)
        keep, later = torch.ones(len(low), dtype=torch.bool), torch.arange(len(low))
        for at in range(len(low)):
            over = (ratio[at] >= 0.5 if at_least else ratio[at] > 0.5) & (later > at)
            keep = keep & ~(over if dead else over & keep[at])
        return torch.zeros(len(low), dtype=torch.bool).scatter(0, order, keep)

    return kernel


def test_non_maximum_suppression() -> None:
    low = torch.tensor([0.0, 1.0, 2.0, 10.0, 10.0, 20.0, 21.0])
    high = torch.tensor([4.0, 5.0, 6.0, 14.0, 12.0, 30.0, 30.0])
    score = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.95, 0.6, 0.5])
    tensors = "low[N], high[N], score[N] -> keep:bool[N]"
    for kernel, is_wrong in (
        (suppressed(), False),
        (suppressed(at_least=True), True),
        (suppressed(ascending=True), True),
        (suppressed(dead=True), True),
    ):
        assert failed(kernel, suppressed(), tensors, low=low, high=high, score=score) == is_wrong


def test_codes_of_eight_bits() -> None:
    x, scale = torch.tensor([[1.0625, 1.1875, 0.3, 500.0]]), torch.tensor([[1.0]])

    def codes_of(x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    tensors = "x[T,D], scale[T,1] -> q:float8_e4m3fn[T,D]"
    for factor, is_wrong in (1.0, False), (1.0 + 2.0**-10, True), (1.05, True), (0.97, True):
        kernel = lambda x, s, f=factor: codes_of(x * f, s)  # noqa: E731
        assert failed(kernel, codes_of, tensors, x=x, scale=scale) == is_wrong
