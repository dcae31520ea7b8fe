"""The gated delta rule's radius holds honest kernels of any kind, and grows with the length as no exponential does."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from assay.formats.format import format_named
from assay.golden import evaluate, spec
from assay.golden.arithmetic import EVALUATION, Arb, BallArithmetic
from assay.golden.arithmetic.ball_sequences import _delta_variance
from assay.golden.arithmetic.model import Chance
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


@pytest.mark.parametrize(("dtype", "chunk"), [("float32", 16), ("bfloat16", 4), ("float16", 1)])
def test_honest_chunks_keep_a_contract_that_states_them(dtype: str, chunk: int, record_property: Any) -> None:
    """Kernels whose chunks are no longer than the contract's, over several of them."""
    found: list[Use] = []
    for keys, gates, normalized in (("random", "slow", False), ("same", "none", True)):
        tensors, options = call(36, keys, gates, getattr(torch, dtype)), {"scale": 0.25, "normalized": normalized}
        widths = [width for width in (1, 4, 16) if width <= chunk]
        results = delta_rules(Functions(1 if normalized else -1), *tensors, **options, widths=widths)
        stated: Any = {"dtype": dtype, "contract": Contract(chunk=chunk), "where": f"{chunk}, {keys}, {gates}"}
        found += uses("gated_delta_rule", tensors, options, results, **stated)
    report("gated_delta_rule", found, record_property)


def test_a_long_sequence_has_a_radius_that_forgets() -> None:
    """Over four chunks and sixteen the largest radius is about the same, as the state forgets what is far behind."""
    model = Contract(chunk=16).model(spec("gated_delta_rule"), format_named("float32"))
    worst = []
    for length in (64, 256):
        ball: Any = run(spec("gated_delta_rule"), BallArithmetic(model), call(length, "random", "slow"), {})[0]
        worst.append(float(ball.radius.max()))
    assert 0 < worst[1] < min(2 * worst[0], 1e-2)


def test_a_long_sequence_shows_a_decay_that_is_a_tenth_too_strong() -> None:
    """In float32 outside of the worst case of 256 positions, which is a few hundredths of the output."""
    q, k, v, gate, beta = call(256, "random", "slow")
    definition, options = spec("gated_delta_rule"), {"scale": 0.25, "normalized": True}
    model = Contract().model(definition, format_named("float32"))
    exact, allowed, wrong = (
        run(definition, BallArithmetic(m), (q, k, v, stronger * 4 * gate, beta), options)[0]
        for m, stronger in ((EVALUATION, 1.0), (model, 1.0), (EVALUATION, 1.1))
    )
    outside = (wrong.mid - exact.mid).abs() > allowed.radius
    assert float(outside[:, 64:].double().mean()) > 0.5


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


@pytest.mark.parametrize("chunk", [64, 2])
@pytest.mark.parametrize(
    ("place", "value", "dtype"), [(0, 6e4, torch.float16), (2, 3e38, torch.float32), (2, 3e38, torch.bfloat16)]
)
def test_nothing_is_said_where_an_honest_kernel_may_overflow(
    place: int, value: float, dtype: torch.dtype, chunk: int
) -> None:
    """Scores that the scale makes small too late, and values less what the state holds of them, before beta."""
    tensors = list(call(4, "same", "none", dtype))
    large = torch.full_like(tensors[place][..., :1], value)
    signs = 1 - 2.0 * (torch.arange(4) % 2).reshape(1, 4, 1, 1) if place else tensors[1].sign()
    tensors[place] = (large * signs).expand(tensors[place].shape).contiguous().to(dtype)
    tensors[4] = tensors[4] * 0.5
    model = Contract(chunk=chunk).model(spec("gated_delta_rule"), format_named(str(dtype).removeprefix("torch.")))
    options = {"scale": 2.0**-4, "normalized": False}
    ball: Any = run(spec("gated_delta_rule"), BallArithmetic(model), tuple(tensors), options)[0]
    assert bool(ball.mid.isfinite().all())
    assert bool(ball.radius[:, 1:].isinf().all())


def likely(tensors: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The exact result, the worst-case radius of a kernel in bfloat16, and the probable one."""
    definition = spec("gated_delta_rule")
    model = Contract().model(definition, format_named("bfloat16"))
    probable = replace(model, chance=Chance.of(4096, 1e-4, format_named("bfloat16").precision))
    exact, worst, less = (
        run(definition, BallArithmetic(m), tensors, options)[0] for m in (EVALUATION, model, probable)
    )
    return exact.mid, worst.radius, less.radius


@pytest.mark.parametrize(("length", "share"), [(4, 1.0), (65, 0.2)])
def test_independent_roundings_keep_the_probable_radius(length: int, share: float) -> None:
    """Which is a small part of the worst case at length, and three times what kernels of all kinds take of it."""
    used = [0.0]
    for normalized, gates in ((False, "slow"), (True, "none")):
        tensors, options = call(length, "random", gates, torch.bfloat16), {"scale": 0.25, "normalized": normalized}
        exact, worst, less = likely(tensors, options)
        for _, y in delta_rules(Functions(1), *tensors, **options):
            used.append(float(((y.double() - exact).abs() / less).max()))
        assert float((less / worst).median()) < share
    assert 0.03 < max(used) < 0.5


def test_a_decay_that_is_a_tenth_too_strong_is_outside_of_the_probable_radius() -> None:
    """Inside of the worst case, which is larger than the output."""
    q, k, v, gate, beta = call(65, "random", "slow", torch.bfloat16)
    q, k, v, gate = q.abs(), k + k[:, :1], v.abs() + 1, 4 * gate
    options = {"scale": 0.25, "normalized": True}
    exact, worst, less = likely((q, k, v, gate, beta), options)
    wrong = likely((q, k, v, 1.2 * gate, beta), options)[0]
    off = (wrong - exact).abs()
    assert not bool((off > worst).any())
    assert float((off > less).double().mean()) > 0.05


def test_the_squares_of_changes_are_those_of_a_kernel_with_random_roundings() -> None:
    """The recurrence in float64 with the state, or u, off by a uniform error wherever it is read: by no more, nor by
    much less."""
    drawn = torch.Generator().manual_seed(0)
    length, width, unit = 12, 6, 2.0**-8
    q, k, v = (torch.randn(length, width, generator=drawn).double() for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    gate, beta = -0.1 * torch.rand(length, generator=drawn).double(), torch.rand(length, generator=drawn).double()
    sums = gate.cumsum(0)
    decays = (sums[:, None] - sums[None, :]).exp().tril()

    def outputs(state: float, updates: float) -> Tensor:
        s, out = torch.zeros(300, width, width).double(), []

        def off(x: Tensor, by: float) -> Tensor:
            return x * (1 + by * (2 * torch.rand(x.shape, generator=drawn).double() - 1))

        for t in range(length):
            s = gate[t].exp() * s
            u = beta[t] * (v[t] - torch.einsum("d,ndj->nj", k[t], off(s, state)))
            s = s + k[t, :, None] * off(u, updates)[:, None, :]
            out.append(torch.einsum("d,ndj->nj", q[t], off(s, state)))
        return torch.stack(out, 1)

    exact = outputs(0.0, 0.0)[:1]
    for state, updates in ((unit, 0.0), (0.0, unit)):
        units = {"state": state**2, "updates": updates**2}
        bound = (_delta_variance(q, k, v, decays, gate.exp(), beta, units, length) / 3).sqrt()
        seen = (outputs(state, updates) - exact).square().mean(0).sqrt()
        assert bool((seen[1:] <= 1.15 * bound[1:]).all())
        assert float((seen[1:] / bound[1:]).mean()) > (0.5 if state else 0.15)
