"""Definitions of microscaled, sparse, ragged and collective ops against loops over scalars, and their own bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.golden import Golden, evaluate
from assay.golden.errors import InputError, ShapeError
from tests.golden.test_independent import agree

Tensor = torch.Tensor
INF, NAN = math.inf, math.nan
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def golden_of(op: str, *tensors: Any, **options: Any) -> Golden:
    golden = evaluate(op, *tensors, **options)
    assert isinstance(golden, Golden)
    return golden


def rng_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def floats(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.from_numpy(np.asarray(rng.standard_normal(shape) * scale)).float()


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_mxfp8_by_scalars(seed: int) -> None:
    """Each product times the powers of two of its block of 32 along K; exponents as far apart as e8m0 goes."""
    rng = rng_of(seed)
    a, b = floats(rng, 3, 96, scale=8).to(torch.float8_e4m3fn), floats(rng, 96, 2, scale=8).to(torch.float8_e4m3fn)
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


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_nvfp4_by_scalars(seed: int) -> None:
    """Low nibbles are even places; scales by 16 along K; both multipliers multiply."""
    rng = rng_of(seed)
    a, b = (torch.from_numpy(rng.integers(0, 256, (rows, 16))).to(torch.uint8) for rows in (2, 3))
    scales = [torch.from_numpy(rng.random((rows, 2)) + 0.1).float().to(torch.float8_e4m3fn) for rows in (2, 3)]
    globals_ = [torch.tensor(float(np.float32(rng.random() + 0.1))) for _ in range(2)]
    expected = torch.zeros(2, 3, dtype=torch.float64)
    for m, n, k in np.ndindex(2, 3, 32):
        factors = []
        for packed, scale, row in ((a, scales[0], m), (b, scales[1], n)):
            byte = int(packed[row, k // 2])
            factors.append(E2M1[byte >> 4 if k % 2 else byte & 15] * float(scale[row, k // 16]))
        expected[m, n] += factors[0] * factors[1] * float(globals_[0]) * float(globals_[1])
    assert agree(golden_of("gemm_nvfp4", a, b, *scales, *globals_), expected)


def sparse(rng: np.random.Generator, rows: int, inner: int) -> tuple[Tensor, Tensor]:
    places = [sorted(rng.choice(4, 2, replace=False)) for _ in range(rows * inner // 4)]
    return floats(rng, rows, inner // 2), torch.tensor(np.array(places).reshape(rows, inner // 2)).to(torch.uint8)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_two_to_four_is_the_dense_product(seed: int) -> None:
    """Values put at their places among zeros, and multiplied by b."""
    rng = rng_of(seed)
    (values, index), b = sparse(rng, 3, 16), floats(rng, 16, 5)
    dense = torch.zeros(3, 16, dtype=torch.float64)
    for m, j in np.ndindex(3, 8):
        dense[m, 4 * (j // 2) + int(index[m, j])] = float(values[m, j])
    assert agree(golden_of("gemm_2to4", values, index, b), dense @ b.double())


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


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["none", "bottom_right"]), st.sampled_from([None, 0.3]))
def test_ragged_attention_is_attention_of_each_sequence(seed: int, causal: str, scale: float | None) -> None:
    """Sequences of any lengths, none among them: every one as if it were alone."""
    rng = rng_of(seed)
    lengths = [rng.integers(0, 5, 4) for _ in range(2)]
    cu = [offsets(*part) for part in lengths]
    q = floats(rng, int(cu[0][-1]), 4, 3, scale=2)
    k, v = (floats(rng, int(cu[1][-1]), 2, 3, scale=2) for _ in range(2))
    golden = golden_of("attention_varlen", q, k, v, *cu, causal=causal, scale=scale)
    for b in range(4):
        rows, keys = (slice(int(part[b]), int(part[b + 1])) for part in cu)
        one = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        alone = golden_of("attention", *one, causal=causal, scale=scale)
        assert torch.equal(golden.value[rows], alone.value[0].transpose(0, 1))


@pytest.mark.parametrize("wrong", [[0, 2, 1, 3], [1, 2, 2, 3], [0, 1, 2, 2], [0, 1, 2, 4]])
def test_offsets_must_rise_from_zero_to_the_end(wrong: list[int]) -> None:
    """Any other row of numbers is refused, by name."""
    q, cu = torch.ones(3, 1, 2), offsets(1, 1, 1)
    with pytest.raises(InputError, match="cu_seqlens_k must"):
        evaluate("attention_varlen", q, q, q, cu, torch.tensor(wrong).int())


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 30.0, 700.0]))
def test_merged_states_are_attention_to_all_keys(seed: int, spread: float) -> None:
    """Attention over two halves of the keys, merged, is attention over all of them."""
    rng = rng_of(seed)
    q, (k, v) = floats(rng, 1, 2, 3, 4), (floats(rng, 1, 2, 6, 4) for _ in range(2))
    options = {"scale": spread, "return_lse": True}
    whole, halves = (evaluate("attention", q, k, v, **options)), []
    for part in (slice(0, 2), slice(2, 6)):
        halves += [
            g.value[0].transpose(0, 1) for g in evaluate("attention", q, k[:, :, part], v[:, :, part], **options)
        ]
    merged = evaluate("merge_states", *halves)
    for ours, theirs in zip(merged, whole, strict=True):
        expected = theirs.value[0].transpose(0, 1)
        assert float((ours.value - expected).abs().max()) <= 1e-12 * (1 + float(expected.abs().max()))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_over_ranks(dtype: torch.dtype) -> None:
    """Exactly what math.fsum gives."""
    shards = floats(rng_of(1), 7, 33).to(dtype)
    expected = [math.fsum(column) for column in shards.double().T.tolist()]
    assert agree(golden_of("all_reduce", shards), expected)
