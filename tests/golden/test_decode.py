"""Attention over a paged cache: against loops over scalars, blind to what it doesn't use, with a radius that holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.golden import Golden, evaluate
from tests.golden.allowance import Use, uses, worst
from tests.golden.float32 import Functions
from tests.golden.honest_attention import SCORES, Problem, full, online, split
from tests.golden.test_independent import agree

Tensor = torch.Tensor
Call = tuple[list[Tensor], dict[str, float]]
NAN, INF = math.nan, math.inf


def golden_of(tensors: list[Tensor], digits: int | None = None, **options: Any) -> Golden:
    golden = evaluate("attention_decode", *tensors, digits=digits, **options)
    assert isinstance(golden, Golden)
    return golden


def decode_by_loops(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """The text of the interface, number by number."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    page, shared, width = k_cache.shape[1], q.shape[1] // k_cache.shape[2], q.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            logits, rows = [], []
            for p in range(int(seq_lens[b])):
                place = int(block_table[b, p // page]), p % page, h // shared
                key = [float(x) * k_scale for x in k_cache[place].double()]
                score = sum(x * y for x, y in zip(key, q[b, h].double().tolist(), strict=True))
                logits.append(score * (1 / math.sqrt(width) if scale is None else scale))
                rows.append(v_cache[place].double() * v_scale)
            total = sum(math.exp(value - max(logits)) for value in logits)
            for value, row in zip(logits, rows, strict=True):
                out[b, h] += math.exp(value - max(logits)) / total * row
    return out


@st.composite
def calls(draw: st.DrawFn, cache: torch.dtype | None = None) -> Call:
    """Pages in any order and shared, lengths from zero to full, stale entries that are no pages at all."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, groups, shared, width = (draw(st.integers(1, 3)) for _ in range(4))
    pages, page, most = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3))
    q = torch.from_numpy(rng.standard_normal((batch, groups * shared, width)) * 2).float()
    caches = [torch.from_numpy(rng.standard_normal((pages, page, groups, width))).float() for _ in range(2)]
    lengths = torch.from_numpy(rng.integers(0, most * page + 1, batch)).int()
    table = torch.from_numpy(rng.integers(0, pages, (batch, most))).int()
    stale = torch.arange(most)[None, :] * page >= lengths[:, None]
    table = torch.where(stale, torch.from_numpy(rng.choice([-1, 0, 10**9], (batch, most))).int(), table)
    options = {
        "scale": draw(st.sampled_from([None, 0.3, -1.0])),
        "k_scale": draw(st.sampled_from([1.0, 0.25, 0.3])),
        "v_scale": draw(st.sampled_from([1.0, 2.0, -0.7])),
    }
    return [q, *(c.to(cache or torch.float32) for c in caches), table, lengths], options


@settings(deadline=None, max_examples=150)
@given(calls())
def test_decoding_is_what_the_interface_says(call: Call) -> None:
    """Pages, lengths, grouped heads and scales in any combination, by loops over scalars; an empty sequence is zero."""
    tensors, options = call
    golden = golden_of(tensors, **options)
    assert agree(golden, decode_by_loops(*tensors, **options))
    empty = tensors[4] == 0
    assert bool((golden.value[empty] == 0).all())
    assert bool((golden.radius[empty] == 0).all())


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_code_stands_for_its_number_times_the_scale(cache: torch.dtype, data: st.DataObject) -> None:
    """Of an 8-bit cache too, where products of codes and scales are no float32 numbers."""
    tensors, options = data.draw(calls(cache))
    assert agree(golden_of(tensors, **options), decode_by_loops(*tensors, **options))


@pytest.mark.parametrize("digits", [None, 30])
@pytest.mark.parametrize("behind", [NAN, INF, -INF, 3e38])
@settings(deadline=None, max_examples=15)
@given(call=calls())
def test_nothing_unused_reaches_the_golden(behind: float, digits: int | None, call: Call) -> None:
    """Slots without a position change neither value nor sharpness, whatever they hold."""
    (q, k, v, table, lengths), options = call
    used = torch.zeros(k.shape[:2], dtype=torch.bool)
    for b, length in enumerate(lengths.tolist()):
        for p in range(length):
            used[table[b, p // k.shape[1]], p % k.shape[1]] = True
    clean = golden_of([q, k, v, table, lengths], digits, **options)
    k, v = (torch.where(used[:, :, None, None], cache, behind) for cache in (k, v))
    spoiled = golden_of([q, k, v, table, lengths], digits, **options)
    assert torch.equal(clean.value, spoiled.value)
    assert torch.equal(clean.radius, spoiled.radius)


def test_a_cache_without_pages_serves_empty_sequences() -> None:
    """No page, pages of no slot, or a table of no column: every sequence is empty, and its output zero."""
    q, empty = torch.ones(2, 2, 3), torch.zeros(2).int()
    for pages, page, most in ((0, 4, 2), (3, 0, 2), (3, 4, 0)):
        cache = torch.full((pages, page, 1, 3), NAN)
        golden = golden_of([q, cache, cache, torch.full((2, most), -1).int(), empty])
        assert golden.value.tolist() == torch.zeros(2, 2, 3).tolist()


def evaluations(
    problem: Problem, out_scale: float, stage: Callable[[Tensor], Tensor] | None, sign: int
) -> Iterator[Any]:
    """The kernels of `honest_attention` that decoding has: blocks, parts, whole rows; then the values' scale."""
    f = Functions(sign)
    for name, method in SCORES.items():
        scores = problem.scores(f, method)
        for how, (out, _) in (
            ("full", full(f, problem, scores, *([stage] if stage else []))),
            ("blocks of 1", online(f, problem, scores, 1, "2, before", *([stage] if stage else []))),
            ("blocks of 16", online(f, problem, scores, 16, "2, after", *([stage] if stage else []))),
            *(() if stage else ((f"{parts} parts", split(f, problem, scores, parts)) for parts in (2, 7))),
        ):
            yield f"{name}, {how}", (out * torch.tensor(out_scale, dtype=torch.float32)).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_honest_decoding_keeps_the_contract(dtype: torch.dtype, record_property: Any) -> None:
    """Scales of the cache applied to codes or folded into scores and output, functions as bad as allowed: within."""
    found: list[Use] = []
    rng = np.random.default_rng(3)
    for turn, (k_scale, v_scale, spread) in enumerate(
        (k, v, spread) for k in (1.0, 0.3, 3.1) for v in (1.0, 1.25, 0.7) for spread in (1.0, 6.0, 40.0)
    ):
        q, (k, v) = rng.standard_normal((1, 2, 3)) * spread, rng.standard_normal((2, 6, 4, 1, 3))
        tensors = [torch.from_numpy(x).float().to(dtype) for x in (q, k, v)]
        table, length = torch.from_numpy(rng.permutation(6))[None].int(), torch.tensor([19]).int()
        q, k, v = (x.float() for x in tensors)
        k, v = (cache[table[0]].reshape(1, 24, 3)[:, :19] for cache in (k, v))
        options = {"k_scale": k_scale, "v_scale": v_scale}
        visible, q = torch.ones(1, 19, dtype=torch.bool), q.transpose(0, 1)
        single = {name: float(np.float32(value)) for name, value in options.items()}
        folded = Problem(q, k, v, visible, float(np.float32(single["k_scale"] / math.sqrt(3))))
        early = Problem(q, k * single["k_scale"], v * single["v_scale"], visible, 1 / math.sqrt(3))
        stage = None if dtype == torch.float32 else lambda weights: weights.to(dtype).float()
        results = [
            *evaluations(folded, single["v_scale"], stage, turn % 3 - 1),
            *evaluations(early, 1.0, stage, turn % 3 - 1),
        ]
        name = str(dtype).removeprefix("torch.")
        found += uses("attention_decode", (*tensors, table, length), options, results, dtype=name, where=str(options))
    most = worst(found)
    record_property("share", most.ratio)
    print(f"attention_decode: {most.ratio:.3f} by {most.kernel}, {most.where}, of {len(found)} evaluations")
    assert most.ratio <= 1, most


def test_coarser_decoding_breaks_the_contract() -> None:
    """Keys, scores or output rounded to bfloat16 are beyond the radius of a float32 query."""
    rng = np.random.default_rng(5)
    q, (k, v) = torch.from_numpy(rng.standard_normal((1, 2, 32))).float(), rng.standard_normal((2, 4, 16, 1, 32))
    k, v = (torch.from_numpy(cache).float().to(torch.float8_e4m3fn) for cache in (k, v))
    tensors, options = (q, k, v, torch.arange(4)[None].int(), torch.tensor([64]).int()), {"k_scale": 0.3}

    def decode(keys: Callable[[Tensor], Tensor], scores: Callable[[Tensor], Tensor]) -> Tensor:
        logits = scores(q[0] @ keys(k.float().reshape(64, 32) * 0.3).T / math.sqrt(32))
        return (torch.softmax(logits, -1) @ v.float().reshape(64, 32))[None]

    def rough(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    def same(x: Tensor) -> Tensor:
        return x

    share = {
        name: worst(uses("attention_decode", tensors, options, [(name, y)])).ratio
        for name, y in (
            ("honest", decode(same, same)),
            ("bfloat16 keys", decode(rough, same)),
            ("bfloat16 scores", decode(same, rough)),
            ("bfloat16 output", rough(decode(same, same))),
        )
    }
    assert share.pop("honest") <= 1
    assert min(share.values()) > 2, share
