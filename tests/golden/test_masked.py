"""Masked and unused numbers reach no golden, what sees nothing is zero, and parts of attention give the whole."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.golden import evaluate
from assay.golden.arithmetic import BallArithmetic
from tests.golden.drawing import Case, cases
from tests.golden.test_independent import HARSH, agree, golden_of, goldens_of

INF, NAN = math.inf, math.nan
Tensor = torch.Tensor


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed + sum(shape)).standard_normal(shape) * scale).float()


@pytest.mark.parametrize("behind", [NAN, INF, -INF, 3e38, 1e20])
@pytest.mark.parametrize("digits", [None, 30])
@pytest.mark.parametrize("which", ["keys", "values", "both"])
def test_nothing_behind_the_mask_reaches_the_golden(behind: float, digits: int | None, which: str) -> None:
    """Keys and values that no query sees change neither value nor sharpness, whatever they hold."""
    q, k, v = normal(1, 2, 3, 4), normal(1, 1, 5, 4), normal(1, 1, 5, 2)
    clean_out, clean_lse = evaluate("attention", q, k, v, causal="top_left", return_lse=True, digits=digits)  # type: ignore[misc]
    k, v = k.clone(), v.clone()
    if which != "values":
        k[:, :, 3:] = behind
    if which != "keys":
        v[:, :, 3:] = behind
    out, lse = evaluate("attention", q, k, v, causal="top_left", return_lse=True, digits=digits)  # type: ignore[misc]
    assert agree(out, clean_out.value)
    assert agree(lse, clean_lse.value)


def test_what_one_row_sees_another_need_not() -> None:
    """An infinite value reaches just the rows that see it, and NaN makes NaN."""
    q, k, v = normal(1, 1, 3, 4), normal(1, 1, 3, 4), normal(1, 1, 3, 2)
    v[0, 0, 1, 0], v[0, 0, 2, 1] = INF, NAN
    value = golden_of("attention", q, k, v, causal="bottom_right").value[0, 0]
    assert torch.isfinite(value[0]).all()
    assert value[1, 0] == INF
    assert torch.isfinite(value[1, 1])
    assert value[2, 0] == INF
    assert value[2, 1].isnan()


@pytest.mark.parametrize("digits", [None, 30])
@pytest.mark.parametrize("behind", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("entry", [-1, 10**9])
@settings(deadline=None, max_examples=8)
@given(case=cases("attention_decode", without=HARSH))
def test_nothing_unused_reaches_the_golden(entry: int, behind: float, digits: int | None, case: Case) -> None:
    """Slots without a position and pages behind the last change neither value nor sharpness, whatever they hold."""
    q, k, v, table, lengths = case.tensors
    page = k.shape[1]
    used = torch.zeros(k.shape[:2], dtype=torch.bool)
    for b, length in enumerate(lengths.tolist()):
        for p in range(length):
            used[table[b, p // page], p % page] = True
    clean = golden_of("attention_decode", *case.tensors, digits=digits, **case.options)
    k, v = (torch.where(used[:, :, None, None], cache, torch.tensor(behind).to(cache)) for cache in (k, v))
    table = torch.where(torch.arange(table.shape[1]) * page >= lengths[:, None], entry, table).int()
    spoiled = golden_of("attention_decode", q, k, v, table, lengths, digits=digits, **case.options)
    assert torch.equal(clean.value, spoiled.value)
    assert torch.equal(clean.radius, spoiled.radius)


def test_what_sees_nothing_is_exactly_zero() -> None:
    """A row before the first key and an empty sequence, with a log-sum-exp of -inf and radii of zero."""
    out, lse = goldens_of("attention", *(normal(1, 1, n, 4) for n in (3, 2, 2)), causal="bottom_right", return_lse=True)
    cache, table = normal(1, 2, 1, 4), torch.zeros(1, 1).int()
    empty = golden_of("attention_decode", normal(1, 1, 4), cache, cache, table, table[0])
    for nothing in (out.value[:, :, 0], out.radius[:, :, 0], empty.value, empty.radius):
        assert not nothing.any()
    assert lse.value[0, 0, 0] == -INF


def test_a_cache_without_pages_serves_empty_sequences() -> None:
    """No page, pages of no slot, or a table of no column: every sequence is empty, and its output zero."""
    q, empty = torch.ones(2, 2, 3), torch.zeros(2).int()
    for pages, page, most in ((0, 4, 2), (3, 0, 2), (3, 4, 0)):
        cache = torch.full((pages, page, 1, 3), NAN)
        golden = golden_of("attention_decode", q, cache, cache, torch.full((2, most), -1).int(), empty)
        assert golden.value.tolist() == torch.zeros(2, 2, 3).tolist()


def test_what_is_masked_never_reaches_a_gradient() -> None:
    """NaN in a key, a value, a query or an upstream gradient stays with those that see it."""
    q, k, v, dout = normal(1, 1, 3, 4), normal(1, 1, 5, 4), normal(1, 1, 5, 4), normal(1, 1, 3, 4)
    clean = goldens_of("attention_backward", q, k, v, dout, causal="top_left")
    k[..., 4, :], v[..., 4, 1] = NAN, INF  # no query sees the last keys
    same = goldens_of("attention_backward", q, k, v, dout, causal="top_left")
    assert all(torch.equal(a.value, b.value) for a, b in zip(clean, same, strict=True))
    q[..., 0, 2] = NAN  # the first query sees the first key only
    dq, dk, dv = goldens_of("attention_backward", q, k, v, dout, causal="top_left")
    for found, before in ((dq, clean[0]), (dk, clean[1]), (dv, clean[2])):
        assert found.value[..., 0, :].isnan().all()
        assert torch.equal(found.value[..., 1:, :], before.value[..., 1:, :])


def test_gradients_in_blocks_are_those_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However rows are blocked the gradients are the same to within their radii."""
    tensors = normal(1, 4, 7, 3), normal(1, 2, 5, 3), normal(1, 2, 5, 2), normal(1, 4, 7, 2)
    whole = goldens_of("attention_backward", *tensors, causal="bottom_right")
    monkeypatch.setattr(BallArithmetic, "blocks", lambda self, rows, width: [(0, 1), (1, 3), (3, rows)])
    parts = goldens_of("attention_backward", *tensors, causal="bottom_right")
    for a, b in zip(whole, parts, strict=True):
        assert ((a.value - b.value).abs() <= a.radius + b.radius).all()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([1.0, 30.0, 700.0]))
def test_merged_states_are_attention_to_all_keys(seed: int, spread: float) -> None:
    q, k, v = normal(1, 2, 3, 4, seed=seed), normal(1, 2, 6, 4, seed=seed), normal(1, 2, 6, 4, seed=seed + 1)
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
