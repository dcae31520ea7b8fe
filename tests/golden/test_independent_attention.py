"""Attention and the mixture of experts against loops over scalars, written from the text of the interface."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.golden import Golden, evaluate
from tests.golden.test_independent import agree, golden_of

INF, NAN = math.inf, math.nan
calm = settings(deadline=None)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed + sum(shape)).standard_normal(shape) * scale).float()


def is_visible(i: int, j: int, queries: int, keys: int, causal: str, window: tuple[int, int] | None) -> bool:
    """Whether query i sees key j: the interface's first reading."""
    offset = 0 if causal == "top_left" else keys - queries
    inside = window is None or i + offset - window[0] <= j <= i + offset + window[1]
    return inside and (causal == "none" or j <= i + offset)


def attention_by_loops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, queries, width = q.shape
    keys, shared = k.shape[2], heads // k.shape[1]
    out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -INF, dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        logits: dict[int, float] = {}
        for j in range(keys):
            if not is_visible(i, j, queries, keys, causal, window):
                continue
            score = sum(float(q[b, h, i, d]) * float(k[b, h // shared, j, d]) for d in range(width))
            score *= 1 / math.sqrt(width) if scale is None else scale
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            if slopes is not None:
                score -= float(slopes[h]) * abs(i + keys - queries - j)
            logits[j] = score
        every = [*logits.values(), *([] if sinks is None else [float(sinks[h])])]
        if not every:
            continue
        total = sum(math.exp(value - max(every)) for value in every)
        lse[b, h, i] = max(every) + math.log(total)
        for j, score in logits.items():
            out[b, h, i] += math.exp(score - max(every)) / total * v[b, h // shared, j]
    return out, lse


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[torch.Tensor], dict[str, Any]]:
    queries, keys, groups, shared = (draw(st.integers(1, 5)), draw(st.integers(1, 5)), *draw(SHARING))
    seed, spread = draw(st.integers(0, 1000)), draw(st.sampled_from([1.0, 5.0]))
    tensors = [
        normal(2, groups * shared, queries, 3, seed=seed, scale=spread),
        normal(2, groups, keys, 3, seed=seed + 1),
        normal(2, groups, keys, 4, seed=seed + 2),
    ]
    options: dict[str, Any] = {
        "causal": draw(st.sampled_from(["none", "bottom_right", "top_left"])),
        "scale": draw(st.sampled_from([None, 0.3, -1.0])),
        "window": draw(st.sampled_from([None, (0, 0), (1, 0), (0, 2), (3, 1)])),
        "softcap": draw(st.sampled_from([None, 1.5])),
    }
    if draw(st.booleans()):
        options["slopes"] = normal(groups * shared, seed=seed + 3).abs()
    if draw(st.booleans()):
        options["sinks"] = normal(groups * shared, seed=seed + 4)
    return tensors, options


SHARING = st.sampled_from([(1, 1), (1, 2), (2, 2), (3, 1)])


@settings(calm, max_examples=150)
@given(calls())
def test_attention_is_what_the_interface_says(call: tuple[list[torch.Tensor], dict[str, Any]]) -> None:
    """Masks, windows, grouped heads, softcap, ALiBi, sinks and lse in any combination, by loops over scalars."""
    tensors, options = call
    out, lse = attention_by_loops(*tensors, **options)
    golden, golden_lse = evaluate("attention", *tensors, return_lse=True, **options, alibi="slopes" in options)  # type: ignore[misc]
    assert agree(golden, out)
    seen = torch.isfinite(lse)
    assert agree(Golden(golden_lse.value[seen], golden_lse.radius[seen]), lse[seen])
    assert bool((golden_lse.value[~seen] == -INF).all())
    assert bool((golden.value[~seen] == 0).all())
    assert bool((golden.radius[~seen] == 0).all())


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_attention_is_torchs(causal: str) -> None:
    """Without extras, torch's own attention in float64, whose causal mask is aligned at the top left."""
    q, k, v = normal(2, 4, 5, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 8, seed=1)
    expected = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=causal == "top_left", enable_gqa=True
    )
    assert agree(golden_of("attention", q, k, v, causal=causal), expected)


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


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_routing_by_loops(scoring: str, renormalize: bool, top_k: int) -> None:
    """The k largest scores, largest first: softmax over all experts or sigmoid of each, over their sum if asked."""
    logits = normal(6, 5, scale=2.0)
    weights, ids = evaluate("moe_route", logits, top_k=top_k, scoring=scoring, renormalize=renormalize)  # type: ignore[misc]
    for token, row in enumerate(logits.double().tolist()):
        scores = [1 / (1 + math.exp(-x)) if scoring == "sigmoid" else math.exp(x) for x in row]
        total = sum(scores) if scoring == "softmax" else 1.0
        best = sorted(range(5), key=lambda e, scores=scores: -scores[e])[:top_k]  # type: ignore[misc]
        share = [scores[e] / total for e in best]
        expected = [s / sum(share) for s in share] if renormalize else share
        assert ids.value[token].tolist() == best
        assert agree(Golden(weights.value[token], weights.radius[token]), expected)


def test_ties_go_to_the_first_expert() -> None:
    """Equal logits are taken in order; those whose scores only round to the same are not equal."""
    ids = evaluate("moe_route", torch.tensor([[1.0, 3.0, 3.0, 0.0]]), top_k=3)[1].value  # type: ignore[index]
    assert ids.tolist() == [[1, 2, 0]]
    ids = evaluate("moe_route", torch.tensor([[40.0, 41.0, 42.0]]), scoring="sigmoid")[1].value  # type: ignore[index]
    assert ids.tolist() == [[2, 1]]


def test_experts_by_loops() -> None:
    """y = sum_k w_k down_k (silu(gate_k x) * up_k x), gate rows first; an expert named twice counts twice."""
    tokens, width, inner, experts, choices = 6, 5, 3, 4, 3
    x, up_down = normal(tokens, width), normal(experts, 2 * inner, width)
    down, weights = normal(experts, width, inner), normal(tokens, choices).abs()
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, experts, (tokens, choices))).to(torch.int32)
    ids[0] = 2
    expected = torch.zeros(tokens, width, dtype=torch.float64)
    for t, c in itertools.product(range(tokens), range(choices)):
        expert = int(ids[t, c])
        gate, up = (up_down[expert].double() @ x[t].double()).split(inner)
        hidden = [g / (1 + math.exp(-g)) * u for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
        for d in range(width):
            produced = sum(float(down[expert, d, f]) * hidden[f] for f in range(inner))
            expected[t, d] += float(weights[t, c]) * produced
    assert agree(golden_of("moe", x, up_down, down, weights, ids), expected)
