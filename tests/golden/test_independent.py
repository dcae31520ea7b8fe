"""Definitions against formulas written anew, from the texts of the interface and of the formats that others define.

Containment can't see a wrong definition, for every arithmetic runs the same one. Here nothing of it is used.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from assay.golden import Golden, evaluate, specs
from assay.golden.errors import InputError, ShapeError
from tests.golden.drawing import REAL, Case, cases
from tests.golden.enclosure import several
from tests.reference import reference

INF, NAN = math.inf, math.nan


def goldens_of(op: str, *tensors: Any, **options: Any) -> tuple[Golden, ...]:
    return several(evaluate(op, *tensors, **options))


def golden_of(op: str, *tensors: Any, **options: Any) -> Golden:
    return goldens_of(op, *tensors, **options)[0]


def agree(golden: Golden, expected: Any, share: float = 1e-11) -> bool:
    """Whether a golden lies at what a float64 evaluation gives, up to that one's own errors, and is sharp: its radius,
    in which errors that cancel add up, is below a sixtieth of float32's unit roundoff of the largest."""
    other = torch.as_tensor(expected, dtype=torch.float64)
    finite = other.isfinite()
    slack = share * (1 + other[finite].abs().max()) if finite.any() else 0.0
    near = ((golden.value - other).abs() <= slack) & (golden.radius <= 100 * slack)
    return golden.value.shape == other.shape and bool(torch.where(finite, near, same(golden.value, other)).all())


def at_the_clamp(case: Case) -> bool:
    """Whether a row's norm is epsilon itself, where the gradient jumps and either side is right."""
    return bool((case.tensors[0].double().square().sum(-1).sqrt() == case.options["eps"]).any())


def same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Equal, NaN included."""
    return (x == y) | (x.isnan() & y.isnan())


HARSH = tuple(kind for kind in REAL if kind not in ("normal", "ties", "cancelling"))
"""Kinds of numbers that leave a float64 evaluation too few digits."""


@pytest.mark.parametrize("op", [op for op in specs() if not op.startswith("quantize_")])
def test_a_golden_is_what_the_reference_gives(op: str) -> None:
    """Every op, under all of its options; tests/verify/test_judge.py judges the codes of quantisers."""

    @settings(deadline=None, max_examples=60 if "attention" in op else 15)
    @given(cases(op, without=HARSH))
    def agrees(case: Case) -> None:
        assume(op != "l2norm_backward" or not at_the_clamp(case))
        goldens = goldens_of(op, *case.tensors, **case.options)
        assert all(map(agree, goldens, reference(op)(*case.tensors, **case.options)))

    agrees()


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
@settings(deadline=None, max_examples=30)
@given(case=cases("attention_decode", without=HARSH))
def test_a_code_stands_for_its_number_times_the_scale(cache: torch.dtype, case: Case) -> None:
    """Of an 8-bit cache too, where products of codes and scales are no float32 numbers."""
    q, k, v, *others = case.tensors
    tensors = (q, k.to(cache), v.to(cache), *others)
    golden = golden_of("attention_decode", *tensors, **case.options)
    assert agree(golden, reference("attention_decode")(*tensors, **case.options)[0])


def test_limits_at_infinity() -> None:
    """silu and gelu vanish at -inf and are x at +inf; a softmax row of all -inf is NaN, a part of it zero."""
    ends = torch.tensor([[-INF, INF, -1e5]])
    for op, options in (("silu", {}), ("gelu", {}), ("gelu", {"approximate": "tanh"})):
        assert golden_of(op, ends, **options).value.tolist() == [[0.0, INF, 0.0]]
    assert golden_of("softmax", torch.full((1, 3), -INF)).value.isnan().all()
    assert agree(golden_of("softmax", torch.tensor([[-INF, 2.0, 2.0]])), [[0.0, 0.5, 0.5]])


EDGES = {
    "exp": [0, INF, 1, 1], "exp2": [0, INF, 1, 1], "expm1": [-1, INF, 0, 0], "log": [NAN, INF, -INF, -INF],
    "log2": [NAN, INF, -INF, -INF], "log1p": [NAN, INF, 0, 0], "tanh": [-1, 1, 0, 0], "erf": [-1, 1, 0, 0],
    "sigmoid": [0, 1, 0.5, 0.5], "softplus": [0, INF, math.log(2), math.log(2)], "sqrt": [NAN, INF, 0, 0],
    "rsqrt": [NAN, 0, INF, -INF], "reciprocal": [0, 0, INF, -INF], "sin": [NAN, NAN, 0, 0], "cos": [NAN, NAN, 1, 1],
}  # fmt: skip
"""At -inf, at inf, and at the two zeros."""


@pytest.mark.parametrize("digits", [None, 30])
@pytest.mark.parametrize("op", EDGES)
def test_functions_at_their_edges(op: str, digits: int | None) -> None:
    """Limits where they exist, poles with the sign of the zero, NaN outside of the domain and of NaN."""
    (golden,) = goldens_of(op, torch.tensor([[-INF, INF, 0.0, -0.0, NAN]]), digits=digits)
    expected = torch.tensor([[*EDGES[op], NAN]], dtype=torch.float64)
    assert torch.equal(golden.value.isnan(), expected.isnan())
    finite = expected.isfinite()
    assert torch.equal(golden.value[~finite & ~expected.isnan()], expected[~finite & ~expected.isnan()])
    assert ((golden.value[finite] - expected[finite]).abs() <= 1e-15).all()
    (outside,) = goldens_of(op, torch.tensor([[-2.0]]), digits=digits)
    assert bool(outside.value.isnan()) is (op in ("log", "log2", "log1p", "sqrt", "rsqrt"))


def test_the_slope_of_swiglu_at_infinity() -> None:
    """Its limits: none at -inf, one at inf."""
    ends = torch.tensor([[-INF, INF]])
    dgate, dup = goldens_of("swiglu_backward", ends, torch.tensor([[3.0, 3.0]]), torch.tensor([[2.0, 2.0]]))
    assert dgate.value.tolist() == [[0.0, 6.0]]
    assert dup.value.tolist() == [[0.0, INF]]


def test_ignored_rows_reach_nothing() -> None:
    """NaN logits of an ignored token change neither loss nor gradients; where all are ignored the mean is NaN."""
    x = torch.from_numpy(np.random.default_rng(23).standard_normal((5, 9)))
    spoiled, target = x.clone(), torch.tensor([0, -100, 8, 3, -100])
    spoiled[1], spoiled[4, 2] = NAN, INF
    for op in ("cross_entropy", "cross_entropy_backward"):
        (clean,), (other,) = (goldens_of(op, logits, target) for logits in (x, spoiled))
        assert torch.equal(clean.value, other.value)
    nobody = torch.full((5,), -100)
    assert goldens_of("cross_entropy", spoiled, nobody)[0].value.isnan()
    assert goldens_of("cross_entropy", spoiled, nobody, reduction="sum")[0].value == 0
    assert not goldens_of("cross_entropy_backward", spoiled, nobody)[0].value.any()


def test_ties_go_to_the_first_expert() -> None:
    """Equal logits are taken in order; those whose scores only round to the same are not equal."""
    ids = evaluate("moe_route", torch.tensor([[1.0, 3.0, 3.0, 0.0]]), top_k=3)[1].value  # type: ignore[index]
    assert ids.tolist() == [[1, 2, 0]]
    ids = evaluate("moe_route", torch.tensor([[40.0, 41.0, 42.0]]), scoring="sigmoid")[1].value  # type: ignore[index]
    assert ids.tolist() == [[2, 1]]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_mxfp8_by_scalars(seed: int) -> None:
    """Each product times the powers of two of its block of 32 along K; exponents as far apart as e8m0 goes."""
    rng = np.random.default_rng(seed)
    a, b = (torch.from_numpy(8 * rng.standard_normal(shape)).to(torch.float8_e4m3fn) for shape in ((3, 96), (96, 2)))
    codes = [torch.from_numpy(rng.integers(0, 255, shape)).to(torch.uint8) for shape in ((3, 3), (3, 2))]
    golden = golden_of("gemm_mxfp8", a, b, *(code.view(torch.float8_e8m0fnu) for code in codes))
    for m in range(3):
        for n in range(2):
            terms = [
                float(a[m, k])
                * float(b[k, n])
                * 2.0 ** (int(codes[0][m, k // 32]) - 127 + int(codes[1][k // 32, n]) - 127)
                for k in range(96)
            ]
            assert abs(math.fsum(terms) - float(golden.value[m, n])) <= float(golden.radius[m, n]) * (1 + 1e-9)


def test_two_values_at_one_place_both_count() -> None:
    """An index that is not ascending names its places all the same; equal ones are added, however they cancel."""
    values, b = torch.tensor([[3.0, 5.0], [1.0, -1.0]]), torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    for index, expected in (([[2, 2], [2, 2]], [800.0, 0.0]), ([[3, 0], [0, 3]], [3005.0, -999.0])):
        golden = golden_of("gemm_2to4", values, torch.tensor(index).to(torch.uint8), b)
        assert golden.value[:, 0].tolist() == expected


def test_rows_of_b_that_are_not_named_do_not_enter() -> None:
    """NaN and infinities there change nothing; where they are named they come out."""
    values, index = torch.tensor([[2.0, 3.0], [2.0, 3.0]]), torch.tensor([[0, 1], [1, 3]]).to(torch.uint8)
    b = torch.tensor([[1.0, 1.0], [1.0, 1.0], [NAN, 1.0], [INF, 1.0]])
    golden = golden_of("gemm_2to4", values, index, b)
    assert golden.value.tolist() == [[5.0, 5.0], [INF, 5.0]]


def test_what_no_sparse_matrix_can_be() -> None:
    """K that is no multiple of four, and places beyond a group."""
    with pytest.raises(ShapeError, match="multiple of 4"):
        evaluate("gemm_2to4", torch.ones(1, 3), torch.zeros(1, 3).to(torch.uint8), torch.ones(6, 1))
    with pytest.raises(InputError, match=r"index must lie in 0\.\.3"):
        evaluate("gemm_2to4", torch.ones(1, 2), torch.full((1, 2), 4).to(torch.uint8), torch.ones(4, 1))


@pytest.mark.parametrize("wrong", [[0, 2, 1, 3], [1, 2, 2, 3], [0, 1, 2, 2], [0, 1, 2, 4]])
def test_offsets_must_rise_from_zero_to_the_end(wrong: list[int]) -> None:
    """Any other row of numbers is refused, by name."""
    q, cu = torch.ones(3, 1, 2), torch.arange(4).int()
    with pytest.raises(InputError, match="cu_seqlens_k must"):
        evaluate("attention_varlen", q, q, q, cu, torch.tensor(wrong).int())


@pytest.mark.parametrize("digits", [None, 30])
def test_empty_states(digits: int | None) -> None:
    """One empty state gives the other exactly, NaN in its output unseen; two give an empty one."""
    o, lse = torch.tensor([[[1.5, -2.0]]]), torch.tensor([[0.7]])
    nothing = torch.full((1, 1, 2), NAN), torch.full((1, 1), -INF)
    for states in ((o, lse, *nothing), (*nothing, o, lse)):
        merged = evaluate("merge_states", *states, digits=digits)
        assert torch.equal(merged[0].value, o.double())
        assert torch.equal(merged[1].value, lse.double())
    out, empty = evaluate("merge_states", *nothing, *nothing, digits=digits)
    assert out.value.tolist() == [[[0.0, 0.0]]]
    assert empty.value.tolist() == [[-INF]]
