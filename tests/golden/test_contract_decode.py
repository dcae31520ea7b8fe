"""Attention over a paged cache: the contract's radius holds honest kernels, and not coarser ones."""

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.golden.allowance import Use, by_thirds, report, uses, worst
from tests.golden.float32 import Functions
from tests.golden.honest_attention import SCORES, Problem, full, online, split

Tensor = torch.Tensor
Call = tuple[list[Tensor], dict[str, float]]
NAN, INF = math.nan, math.inf


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


@by_thirds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_honest_decoding_keeps_the_contract(dtype: torch.dtype, third: slice, record_property: Any) -> None:
    """Scales of the cache applied to codes or folded into scores and output, functions as bad as allowed: within."""
    found: list[Use] = []
    rng = np.random.default_rng(3)
    every = rng.permutation([*product((1.0, 0.3, 3.1), (1.0, 1.25, 0.7), (1.0, 6.0, 40.0))])
    for turn, (k_scale, v_scale, spread) in enumerate(every[third].tolist()):
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
    report("attention_decode", found, record_property)


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
