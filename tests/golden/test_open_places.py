"""Where infinities and NaN make the order of evaluation visible, a contract says nothing; everywhere else it does."""

import math
from typing import Any

import pytest
import torch

from assay.formats.format import format_named
from assay.golden import Golden, evaluate, spec
from assay.golden.arithmetic import BallArithmetic
from assay.golden.evaluation.call import run
from assay.golden.evaluation.golden import golden_of
from assay.verify.comparison.judge import Tolerance, judge, tolerance
from assay.verify.contract import Contract

Tensor = torch.Tensor
INF, NAN = math.inf, math.nan
FLOAT32 = format_named("float32")


def tolerances(op: str, *tensors: Tensor, **options: Any) -> list[Tolerance]:
    """What the default contract admits, for each result."""
    definition, contract = spec(op), Contract()
    balls = run(definition, BallArithmetic(contract.model(definition, FLOAT32)), tensors, options)
    goldens = evaluate(op, *tensors, **options)
    pairs = zip(
        goldens if isinstance(goldens, tuple) else (goldens,),
        balls if isinstance(balls, tuple) else (balls,),
        strict=True,
    )
    return [tolerance(golden, golden_of(ball), FLOAT32, contract) for golden, ball in pairs]


def judged(op: str, *tensors: Tensor, **options: Any) -> list[Tensor]:
    """For each result a mask of what the default contract speaks of."""
    return [allowed.judged for allowed in tolerances(op, *tensors, **options)]


def some(*shape: int, seed: int = 0, **places: Any) -> Tensor:
    """Normal numbers, with ``inf`` or ``nan`` at a place."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    for name, place in places.items():
        x[place] = {"inf": INF, "minus": -INF, "nan": NAN}[name]
    return x


def everywhere(masks: list[Tensor]) -> bool:
    return all(bool(mask.all()) for mask in masks)


@pytest.mark.parametrize("op", ["layernorm_backward", "rmsnorm_backward"])
def test_an_infinity_opens_the_rows_of_a_norm_that_it_reaches(op: str) -> None:
    """An infinite weight opens dx, an infinite dy its row of dx and its column of dweight; NaN opens nothing."""
    x, weight, dy = some(3, 5), some(5, seed=1), some(3, 5, seed=2)
    assert everywhere(judged(op, some(3, 5, nan=(1, 2)), weight, dy))
    assert everywhere(judged(op, x, weight, some(3, 5, nan=(1, 2))))
    dx, *rest = judged(op, x, some(5, inf=3), dy)
    assert not dx.any()
    assert everywhere(rest)
    dx, dweight, *rest = judged(op, x, weight, some(3, 5, minus=(1, 2)))
    assert dx.all(1).tolist() == [True, False, True]
    assert not dx[1].any()
    assert dweight.tolist() == [True, True, False, True, True]
    assert everywhere(rest)


def test_an_infinity_opens_its_row_of_softmax_backward() -> None:
    """inf - inf stands where another order has an infinity; NaN opens nothing."""
    y = torch.softmax(some(3, 5), 1)
    (dx,) = judged("softmax_backward", y, some(3, 5, inf=(1, 2)))
    assert dx.all(1).tolist() == [True, False, True]
    assert not dx[1].any()
    assert everywhere(judged("softmax_backward", y, some(3, 5, nan=(1, 2))))


def test_infinities_open_swiglu_backward_where_a_factor_may_vanish() -> None:
    """At gate = inf dgate is open, and where silu' may be zero before an infinite factor; dup is no number there."""
    gate = torch.tensor([[1.0, INF, -INF, -200.0, NAN]])
    one = torch.ones(1, 5)
    dgate, dup = judged("swiglu_backward", gate, one, one)
    assert dgate.tolist() == [[True, False, True, True, True]]
    assert dup.all()
    dgate, dup = tolerances("swiglu_backward", gate, one, one * INF)
    assert dgate.judged.tolist() == [[True, False, True, False, True]]
    assert dup.judged.all()
    for flushed, right in ((NAN, True), (-INF, True), (INF, True), (0.0, False), (-1e38, False)):
        got = torch.tensor([[INF, INF, NAN, flushed, NAN]])
        assert bool(judge(got, dup).broken.any()) != right, flushed


def test_an_infinity_opens_the_gradients_of_its_token_and_experts() -> None:
    """In a token dx and dweights of it, and those of its experts; NaN opens nothing, but in routing its row."""
    ids = torch.tensor([[0, 1], [2, 2], [1, 0]], dtype=torch.int32)
    rest = some(3, 4, 5, seed=1), some(3, 5, 2, seed=2), torch.rand(3, 2), ids, some(3, 5, seed=3)
    dx, dw_gate_up, dw_down, dweights = judged("moe_backward", some(3, 5, inf=(1, 2)), *rest)
    assert dx.all(1).tolist() == dweights.all(1).tolist() == [True, False, True]
    assert dw_gate_up.flatten(1).all(1).tolist() == dw_down.flatten(1).all(1).tolist() == [True, True, False]
    assert everywhere(judged("moe_backward", some(3, 5, nan=(1, 2)), *rest))
    for name in ("inf", "nan"):
        (found,) = judged("moe_route_backward", some(3, 5, **{name: (1, 2)}), torch.rand(3, 2))
        assert found.all(1).tolist() == [True, False, True]


def test_logits_that_open_a_row_of_cross_entropy_backward() -> None:
    """+inf anywhere, and in an ignored row whatever is not finite; NaN in a row that counts is judged."""
    target = torch.tensor([0, 1, -100, -100, 2])
    for name, rows in (("inf", (0, 2)), ("nan", (2, 3)), ("minus", (2,))):
        for row in rows:
            (found,) = judged("cross_entropy_backward", some(5, 4, **{name: (row, 1)}), target)
            assert found.all(1).tolist() == [place != row for place in range(5)], (name, row)
    assert everywhere(judged("cross_entropy_backward", some(5, 4, nan=(1, 1)), target))


def test_what_opens_the_gradients_of_attention() -> None:
    """NaN opens keys masked for rows that it reaches (one in v no dv), infinities all that the row reaches."""
    shape = 1, 1, 4, 8
    q, k, v, dout = (some(*shape, seed=seed) for seed in range(4))
    place = 0, 0, 1, 3
    causal = {"causal": "top_left"}
    for tensors in ((some(*shape, nan=place), k, v, dout), (q, k, v, some(*shape, nan=place))):
        dq, dk, dv = judged("attention_backward", *tensors, **causal)
        assert dq.all()
        for found in (dk, dv):
            assert found[0, 0].all(1).tolist() == [True, True, False, False]
    dq, dk, dv = judged("attention_backward", some(*shape, inf=place), k, v, dout, **causal)
    assert dq[0, 0].all(1).tolist() == [True, False, True, True]
    assert not dk.any()
    assert not dv.any()
    for tensors, open_dv in (
        ((q, some(*shape, nan=place), v, dout), True),
        ((q, k, some(*shape, nan=place), dout), False),
    ):
        dq, dk, dv = judged("attention_backward", *tensors, **causal)
        assert dq.all()
        assert dk[0, 0].all(1).tolist() == [True, True, False, False]
        assert dv[0, 0].all(1).tolist() == [True, True, not open_dv, not open_dv]
    largest = torch.finfo(torch.float32).max
    dq, dk, dv = judged("attention_backward", q, k, torch.full(shape, largest), torch.full(shape, largest), **causal)
    assert not dq.any()
    assert not dk.any()
    assert dv.any()
    dq, dk, dv = judged("attention_backward", q, some(*shape, inf=(0, 0, 3, 2)), v, dout, **causal)
    assert dq[0, 0].all(1).tolist() == [True, True, True, False]


def test_an_infinite_output_of_a_visible_state_is_open() -> None:
    """a - s (a - b) is NaN there; an empty state's output and NaN are judged."""
    o, lse = some(2, 1, 3), some(2, 1)
    infinite, empty = some(2, 1, 3, inf=(0, 0, 1)), torch.full((2, 1), -INF)
    out, total = judged("merge_states", infinite, lse, o, lse)
    assert out.reshape(-1).tolist() == [True, False, True, True, True, True]
    assert total.all()
    assert everywhere(judged("merge_states", infinite, empty, o, lse))
    assert everywhere(judged("merge_states", some(2, 1, 3, nan=(0, 0, 1)), lse, o, lse))


def test_a_state_that_is_nan_stays_nan() -> None:
    """Of two states the first is infinite and the second, infinity times zero, NaN: so is every sum of them behind."""
    u, b = torch.tensor([[[INF, 0.0]]]), torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    one, definition = torch.ones(1, 1, 2), spec("selective_scan")
    tensors = (u, one, -torch.ones(1, 2), b, one.expand(1, 2, 2), torch.zeros(1))
    (ball,) = run(definition, BallArithmetic(Contract().model(definition, FLOAT32)), tensors, {"softplus": False})
    assert ball.mid.isnan().all()


def test_a_key_that_is_its_own_value_may_spoil_what_it_weighs() -> None:
    """A weight of NaN makes NaN of an infinite value; of one that an infinite score makes zero nothing is said."""
    drawn = torch.Generator().manual_seed(0)
    q, q_rope, cache, rope = (
        torch.randn(shape, generator=drawn) for shape in ((1, 2, 4), (1, 2, 2), (1, 5, 4), (1, 5, 2))
    )
    table, lengths = torch.zeros(1, 1).int(), torch.tensor([5]).int()
    q[0, 0, 3], q[0, 1, 3], cache[0, 2, 3] = 1.0, -1.0, INF
    golden = evaluate("mla_decode", q, q_rope, cache, rope, table, lengths)
    assert isinstance(golden, Golden)
    assert bool(golden.value[0, 0].isnan().all())
    (mask,) = judged("mla_decode", q, q_rope, cache, rope, table, lengths)
    assert mask[0].any(-1).tolist() == [True, False]
