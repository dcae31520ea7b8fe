"""The gated delta rule's radius holds honest kernels of any kind, and grows with the length as no exponential does."""

from itertools import product
from typing import Any

import pytest
import torch

from assay.formats.format import format_named
from assay.golden import evaluate, spec
from assay.golden.arithmetic import Arb, BallArithmetic
from assay.golden.evaluation.call import run
from assay.verify.contract import Contract
from tests.golden.allowance import Use, by_thirds, report, rows, uses
from tests.golden.float32 import Functions
from tests.golden.honest_delta import delta_rules

Tensor = torch.Tensor
GATES = {"slow": -0.05, "steep": -5.0, "none": 0.0}


def call(length: int, keys: str, gates: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, k, v, gate and beta of two heads, 8 wide; ``keys`` random, all the same, or of length one in turn."""
    q, k, v = (rows("normal", length, 16, seed=seed).reshape(1, length, 2, 8) for seed in (1, 2, 3))
    if keys == "same":
        k = k[:, :1].expand(k.shape)
    k = k / k.norm(dim=-1, keepdim=True)
    gate = GATES[gates] * rows("positive", length, 2, seed=4).reshape(1, length, 2)
    beta = rows("positive", length, 2, seed=5).reshape(1, length, 2)
    return q.to(dtype), k.to(dtype), v.to(dtype), gate, torch.ones_like(beta) if keys == "same" else beta.to(dtype)


@by_thirds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_honest_kernels_keep_the_contract(dtype: torch.dtype, third: slice, record_property: Any) -> None:
    """By recurrence and by chunks, through inverses or not, rounded where a product takes it: within the radius."""
    name = str(dtype).removeprefix("torch.")
    found: list[Use] = []
    kinds = (("random", "slow"), ("random", "steep"), ("same", "none"), ("same", "slow"))
    for length, (keys, gates), normalized in [*product((65, 1, 2, 17), kinds, (False, True))][third]:
        tensors, options = call(length, keys, gates, dtype), {"scale": 0.25, "normalized": normalized}
        results = delta_rules(Functions(1 if normalized else -1), *tensors, **options)
        found += uses("gated_delta_rule", tensors, options, results, dtype=name, where=f"{length}, {keys}")
    report("gated_delta_rule", found, record_property)


def test_what_is_allowed_grows_no_faster_than_powers_of_the_length() -> None:
    """Four times the places take less than 4^4 the tolerance, where a bound carried forward would take millions."""
    model = Contract().model(spec("gated_delta_rule"), format_named("float32"))
    worst = []
    for length in (32, 128):
        ball: Any = run(spec("gated_delta_rule"), BallArithmetic(model), call(length, "random", "none"), {})[0]
        worst.append(float(ball.radius.max()))
    assert 0 < worst[1] < min(4**4 * worst[0], 0.5)


@pytest.mark.parametrize("gates", GATES)
def test_goldens_of_long_sequences_are_certified_by_float64(gates: str) -> None:
    """Keys that are all the same leave five digits of 128 places, and the radius holds what Arb knows."""
    tensors = call(128, "same", gates)
    golden = evaluate("gated_delta_rule", *tensors)
    assert not isinstance(golden, tuple)
    assert float(golden.radius.max()) < 1e-5
    short = tuple(x[:, :20] for x in tensors)
    proven = evaluate("gated_delta_rule", *short, digits=30)
    assert not isinstance(proven, tuple)
    off = (golden.value[:, :20] - proven.value).abs()
    assert bool((off <= golden.radius[:, :20] + 1e-25).all())


def test_a_solution_lies_in_the_balls_of_its_system() -> None:
    """Any matrix and right side within the balls, solved by Arb, gives what lies within the solution's."""
    lower = rows("normal", 9, 9, seed=1).double() / 2
    right = rows("normal", 9, 3, seed=2).double()
    float32 = BallArithmetic(Contract().model(spec("gemm"), format_named("float32")))
    balls = float32.solve_unit_lower(float32.exact(lower) * 0.1, float32.exact(right) * 0.3)
    arb = Arb(40)
    for sign in (-1, 0, 1):
        moved = [x * factor * (1 + sign * 2.0**-24) for x, factor in ((lower, 0.1), (right, 0.3))]
        with arb.precision():
            exact = arb.solve_unit_lower(*map(arb.exact, moved))
        off = torch.tensor([[float(x.mid()) for x in row] for row in exact]) - balls.mid
        assert bool((off.abs() <= balls.radius + 1e-15).all())
        assert bool((balls.radius < 1e-4).all())


@pytest.mark.parametrize(
    ("place", "value", "dtype"), [(0, 6e4, torch.float16), (2, 3e38, torch.float32), (2, 3e38, torch.bfloat16)]
)
def test_nothing_is_said_where_an_honest_kernel_may_overflow(place: int, value: float, dtype: torch.dtype) -> None:
    """Scores that the scale makes small too late, and values less what the state holds of them, before beta."""
    tensors = list(call(4, "same", "none", dtype))
    large = torch.full_like(tensors[place][..., :1], value)
    signs = 1 - 2.0 * (torch.arange(4) % 2).reshape(1, 4, 1, 1) if place else tensors[1].sign()
    tensors[place] = (large * signs).expand(tensors[place].shape).contiguous().to(dtype)
    tensors[4] = tensors[4] * 0.5
    model = Contract().model(spec("gated_delta_rule"), format_named(str(dtype).removeprefix("torch.")))
    options = {"scale": 2.0**-4, "normalized": False}
    ball: Any = run(spec("gated_delta_rule"), BallArithmetic(model), tuple(tensors), options)[0]
    assert bool(ball.mid.isfinite().all())
    assert bool(ball.radius[:, 1:].isinf().all())
