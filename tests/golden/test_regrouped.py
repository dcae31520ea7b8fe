"""Loops of references, and kernels that group their sums and products otherwise, under the contract's order "any"."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import sampled_from

from assay.formats.format import format_named
from assay.golden.arithmetic import BallArithmetic
from assay.golden.evaluation.call import run
from assay.golden.evaluation.golden import Golden, golden_of
from assay.golden.lowering import reference_spec
from assay.verify.contract import Contract

Tensor = torch.Tensor


def delta_loop(q: Any, k: Any, v: Any, beta: Any) -> Any:
    """o_t = q_t S_t, S_t = S_(t-1) + beta_t k_t (v_t - k_t S_(t-1)); q, k, v [T, D], beta [T]."""
    state, out = torch.zeros(k.shape[-1], v.shape[-1]), []
    for t in range(k.shape[0]):
        held = (k[t, :, None] * state).sum(0)
        state = state + k[t, :, None] * (beta[t] * (v[t] - held))[None, :]
        out.append((q[t, :, None] * state).sum(0))
    return torch.stack(out)


def delta_chunk(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """By the inverse of the triangular matrix of every eight positions."""
    state, out = torch.zeros(k.shape[-1], v.shape[-1]), []
    for queries, keys, values, b in zip(*(x.split(8) for x in (q, k, v, beta[:, None])), strict=True):
        one = torch.eye(len(keys))
        inverse = torch.linalg.solve_triangular(
            one + (b * (keys @ keys.T)).tril(-1), one, upper=False, unitriangular=True
        )
        updates = inverse @ (b * values) - inverse @ (b * keys) @ state
        out.append(queries @ state + (queries @ keys.T).tril() @ updates)
        state = state + keys.T @ updates
    return torch.cat(out)


def scan_loop(x: Any, step: Any, b: Any, c: Any) -> Any:
    """h_t = exp(-step_t) h_(t-1) + step_t x_t b_t, y_t = h_t c_t, as Mamba-2; x, b, c [T, D], step [T]."""
    state, out = torch.zeros(x.shape[-1], b.shape[-1]), []
    for t in range(x.shape[0]):
        state = state * torch.exp(-step[t]) + (step[t] * x[t])[:, None] * b[t][None, :]
        out.append((state * c[t][None, :]).sum(-1))
    return torch.stack(out)


def scan_chunk(x: Tensor, step: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """c b first, one chunk."""
    level = -step.cumsum(0)
    decay = torch.exp(level[:, None] - level[None, :]).tril()
    return ((c @ b.T) * decay * step[None, :]) @ x


def scan_prefixed(x: Tensor, step: Tensor, b: Tensor, c: Tensor, width: int) -> Tensor:
    """By chunks, decays as exponentials of differences of prefix sums, c b first: as Mamba-2's kernels."""
    state, out = torch.zeros(x.shape[-1], b.shape[-1]), []
    for values, steps, b_, c_ in zip(*(y.split(width) for y in (x, step, b, c)), strict=True):
        level = -steps.cumsum(0)
        seen = torch.ones(len(steps), len(steps)).tril().bool()
        decay = torch.exp(torch.where(seen, level[:, None] - level[None, :], -torch.inf))
        within = ((c_ @ b_.T) * decay * steps[None, :]) @ values
        out.append(within + (c_ * torch.exp(level)[:, None]) @ state.T)
        last = torch.exp(level[-1] - level)
        state = torch.exp(level[-1]) * state + (values * (steps * last)[:, None]).T @ b_
    return torch.cat(out)


def scan_doubled(x: Tensor, step: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """By doubling steps, all positions at once."""
    state, decay, reach = (step[:, None] * x)[:, :, None] * b[:, None, :], torch.exp(-step), 1
    while reach < len(x):
        state = torch.cat([state[:reach], decay[reach:, None, None] * state[:-reach] + state[reach:]])
        decay = torch.cat([decay[:reach], decay[reach:] * decay[:-reach]])
        reach *= 2
    return (state * c[:, None, :]).sum(-1)


LOOPS: dict[str, tuple[Callable[..., Any], str, tuple[Callable[..., Tensor], ...]]] = {
    "delta": (delta_loop, "q[T,D], k[T,D], v[T,D], beta[T] -> o[T,D]", (delta_loop, delta_chunk)),
    "scan": (scan_loop, "x[T,D], step[T], b[T,D], c[T,D] -> y[T,D]", (scan_loop, scan_chunk, scan_doubled)),
}


def drawn(name: str, kind: str, length: int, seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    gate = 3 if name == "delta" else 1
    tensors = [torch.randn(length, 4, generator=source) for _ in range(4)]
    tensors = [{"normal": x, "integers": (5 * x).round(), "huge": 1e12 * x}[kind] for x in tensors]
    tensors[gate] = torch.rand(length, generator=source)
    return tensors


def limits(name: str, order: str, tensors: list[Tensor]) -> tuple[Golden, Golden]:
    """The golden, and what the contract with this order allows."""
    definition = reference_spec(LOOPS[name][0], LOOPS[name][1])
    model = Contract(order=order).model(definition, format_named("float32"))
    results = [golden_of(run(definition, BallArithmetic(*with_model), tensors, {})[0]) for with_model in ((), (model,))]
    return results[0], results[1]


@pytest.mark.parametrize("name", LOOPS)
def test_every_grouping_of_a_loop_is_inside(name: str) -> None:
    used, judged = 0.0, 0
    for kind, length in (("normal", 16), ("integers", 16), ("normal", 5), ("huge", 9)):
        if (name, kind) == ("delta", "huge"):  # zero times a later position's NaN is no grouping
            continue
        tensors = drawn(name, kind, length, seed=length)
        golden, allowed = limits(name, "any", tensors)
        known = allowed.radius.isfinite()
        judged += int(known.count_nonzero())
        for kernel in LOOPS[name][2]:
            off = ((kernel(*tensors).double() - golden.value).abs() - golden.radius)[known]
            assert bool((off <= allowed.radius[known]).all()), (kind, kernel)
            used = max(used, float((off / allowed.radius[known]).max()))
    assert judged > 60
    assert used > 0.02


def test_a_chunk_that_overflows_where_the_loop_does_not_is_open() -> None:
    """Long keys let the state grow, and products with an inverse more so: as written, finite numbers are judged."""
    tensors = drawn("delta", "normal", 32, seed=3)
    tensors[1] = 8 * tensors[1]
    y = delta_chunk(*tensors)
    assert not bool(y.isfinite().all())
    _, written = limits("delta", "written", tensors)
    _, allowed = limits("delta", "any", tensors)
    assert bool((written.radius.isfinite() & ~y.isfinite()).any())
    assert bool(allowed.radius[~y.isfinite()].isinf().all())


def test_a_wrong_kernel_is_outside_in_any_order() -> None:
    tensors = drawn("scan", "normal", 16, seed=1)
    golden, allowed = limits("scan", "any", tensors)
    wrong = scan_chunk(tensors[0], 1.001 * tensors[1], *tensors[2:]).double()
    assert float(((wrong - golden.value).abs() > allowed.radius).double().mean()) > 0.5


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=sampled_from(range(1000)),
    length=sampled_from((1, 7, 16, 40)),
    width=sampled_from((1, 4, 16, 64)),
    size=sampled_from((2.0**-6, 1.0, 8.0, 40.0)),
)
def test_decays_of_prefix_sums_are_inside_of_order_chunked(seed: int, length: int, width: int, size: float) -> None:
    tensors = drawn("scan", "normal", length, seed=seed)
    tensors[1] = size * tensors[1]
    golden, allowed = limits("scan", "chunked", tensors)
    for kernel in (*LOOPS["scan"][2], partial(scan_prefixed, width=width)):
        off = (kernel(*tensors).double() - golden.value).abs() - golden.radius
        assert bool((off <= allowed.radius).all()), kernel


def test_decays_of_prefix_sums_are_a_freedom_of_their_own() -> None:
    """After a large step a difference of prefix sums has its error; order "any" does not hold it, "chunked" does."""
    tensors = drawn("scan", "normal", 64, seed=1)
    tensors[1] = 0.1 * tensors[1]
    tensors[1][0] = 80.0
    off = {}
    for order in ("any", "chunked"):
        golden, allowed = limits("scan", order, tensors)
        off[order] = ((scan_prefixed(*tensors, width=64).double() - golden.value).abs() / allowed.radius).max()
    assert off["any"] > 1 > 10 * off["chunked"]


def test_a_wrong_kernel_is_outside_of_order_chunked() -> None:
    """Decays a fiftieth too strong, in chunks of 16."""
    tensors = drawn("scan", "normal", 40, seed=1)
    golden, allowed = limits("scan", "chunked", tensors)
    level = 1.02 * tensors[1]
    wrong = scan_prefixed(tensors[0] / 1.02, level, *tensors[2:], width=16).double()
    assert float(((wrong - golden.value).abs() > allowed.radius).double().mean()) > 0.3


def average_loop(x: Any, a: Any) -> Any:
    """y_t = a y_(t-1) + (1 - a) x_t of x [T, D], a [D]."""
    y, out = torch.zeros_like(x[0]), []
    for t in range(x.shape[0]):
        y = a * y + (1 - a) * x[t]
        out.append(y)
    return torch.stack(out)


def average_factored(x: Tensor, a: Tensor) -> Tensor:
    """x_t + a (y - x_t): a comes last, and the difference first."""
    y, out = torch.zeros_like(x[0]), []
    for t in range(x.shape[0]):
        y = x[t] + a * (y - x[t])
        out.append(y)
    return torch.stack(out)


def weighted_rows(x: Any, w: Any) -> Any:
    return (x * w[:, None]).sum(-1)


def weighted_sums(x: Tensor, w: Tensor) -> Tensor:
    """The weight of a row comes last."""
    return x.sum(-1) * w


FACTORED: dict[str, tuple[Callable[..., Any], str, Callable[..., Tensor]]] = {
    "average": (average_loop, "x[T,D], a[D] -> y[T,D]", average_factored),
    "rows": (weighted_rows, "x[T,D], w[T] -> y[T]", weighted_sums),
}


@pytest.mark.parametrize("name", FACTORED)
@pytest.mark.parametrize("size", [1.0, 2.0**125])
def test_a_factor_that_comes_last_may_overflow(name: str, size: float) -> None:
    """What overflows because a factor comes last is open; ordinary numbers are judged, and wrong ones outside."""
    reference, signature, kernel = FACTORED[name]
    source = torch.Generator().manual_seed(5)
    x, factor = size * torch.randn(12, 12, generator=source), torch.rand(12, generator=source)
    x[0], x[1] = 7 * size, -7 * size  # 7 * 2^125 is less than the largest number, their difference more
    factor[0] = 0.25
    model = Contract(order="any").model(reference_spec(reference, signature), format_named("float32"))
    golden, allowed = (
        golden_of(run(reference_spec(reference, signature), BallArithmetic(*given), [x, factor], {})[0])
        for given in ((), (model,))
    )
    y, known = kernel(x, factor), allowed.radius.isfinite()
    assert bool(y.isfinite().all()) == (size == 1)
    assert bool(known.all()) == (size == 1)
    off = (y.double() - golden.value).abs() - golden.radius
    assert bool((off <= allowed.radius)[known].all())
    wrong = kernel(1.001 * x, factor).double()
    assert size > 1 or float(((wrong - golden.value).abs() > allowed.radius).double().mean()) > 0.9


@pytest.mark.parametrize("step", [1.0, 30.0])
def test_a_product_of_decays_may_underflow_before_the_term(step: float) -> None:
    """Of 1e30 exp(-120) a scan by doubling gives zero; with decays that stay normal a wrong kernel is outside."""
    tensors = drawn("scan", "normal", 8, seed=1)
    tensors[0][0], tensors[0][1:], tensors[1][:] = 1e30, 0.0, step
    golden, allowed = limits("scan", "any", tensors)
    for kernel in LOOPS["scan"][2]:
        assert bool(((kernel(*tensors).double() - golden.value).abs() <= allowed.radius + golden.radius).all()), kernel
    small = golden.value[4].abs() < 1e-10
    assert bool(small.all()) == (step > 1)
    tensors[0][0] *= 1.001
    wrong = (scan_doubled(*tensors).double() - golden.value).abs() > allowed.radius
    assert float(wrong.double().mean()) > (0.9 if step == 1 else 0.2)


def test_a_scan_keeps_what_its_decays_lose_below_the_least_number() -> None:
    """The recurrence of an op holds a scan of pairs as written too."""
    model = Contract().model(reference_spec(*LOOPS["scan"][:2]), format_named("float32"))
    xp = BallArithmetic(model)
    decay, term = torch.full((9,), -30.0, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    term[0] = 1e30
    y = xp.recurrence(xp.exp(xp.exact(decay)), xp.exact(term))
    assert float(y.mid[5]) > 1e-36  # exp(-150) is zero in float32
    assert float(y.radius[5]) >= float(y.mid[5])
    assert float(y.radius[2]) < 1e-4 * float(y.mid[2])


def test_prefix_sums_that_overflow_leave_a_decay_open() -> None:
    """A difference of two infinities is NaN, where each decay alone is zero; with smaller steps NaN is wrong."""
    tensors = drawn("scan", "normal", 3, seed=2)
    for step, is_open in ((2e38, True), (1e30, False)):
        tensors[1] = torch.full((3,), step)
        _, allowed = limits("scan", "chunked", tensors)
        assert bool(scan_prefixed(*tensors, width=64).isnan().any()) == is_open
        assert bool(allowed.radius.isinf().any()) == is_open
