"""The default contract's radius holds honest float32 divergences, losses, convolutions, scans and merged states."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.golden import honest_scans
from tests.golden.allowance import Call, Kernels, by_thirds, report, rows, used_along_rows

SOME = ("normal", "steep", "large mean", "lognormal", "peaked")


def distilled(kind: str, n: int) -> Iterator[Call]:
    for temperature in (1.0, 3.0):
        yield (rows(kind, 3, n), rows("wide", 3, n, seed=1)), {"temperature": temperature, "reduction": "none"}
    yield (rows("normal", 3, n), rows(kind, 3, n, seed=1)), {"temperature": 1.0, "reduction": "none"}


def mixed(kind: str, n: int) -> Iterator[Call]:
    for beta in (0.5, 0.125):
        yield (rows(kind, 3, n), rows("normal", 3, n, seed=1)), {"beta": beta, "reduction": "none"}


def capped(kind: str, n: int) -> Iterator[Call]:
    options = {"reduction": "none", "softcap": 30.0, "z_loss": 1e-3, "label_smoothing": 0.0, "ignore_index": -100}
    yield (rows(kind, 3, n), torch.arange(3) % n), options


def convolved(kind: str, n: int) -> Iterator[Call]:
    for activation in ("none", "silu"):
        x = rows(kind, 6, n).reshape(2, 3, n)
        yield (x, rows("normal", 3, 4), rows(kind, 1, 3, seed=1)[0]), {"activation": activation}


def partial(kind: str, n: int) -> Iterator[Call]:
    for states, level, mean in ((1, "wide", 0.0), (2, "wide", 0.0), (5, "wide", 0.0), (5, "normal", 3000.0)):
        lse = rows(level, 3 * states, 2, seed=1) + mean
        lse[::4] = -math.inf
        yield (rows(kind, 6 * states, n).reshape(3, states, 2, n), lse.reshape(3, states, 2)), {}


def scanned(kind: str, n: int) -> Iterator[Call]:
    for decay in (-0.5, -1e-3, -20.0):
        delta = rows("positive", 6, n, seed=1).reshape(2, 3, n)
        a, skip = decay * (1 + rows("positive", 3, 4)), rows("normal", 1, 3)[0]
        b, c = (rows("normal", 8, n, seed=seed).reshape(2, 4, n) for seed in (2, 3))
        yield (rows(kind, 6, n).reshape(2, 3, n), delta, a, b, c, skip), {"softplus": False}


def attended(kind: str, n: int) -> Iterator[Call]:
    for decay in (0.0, -0.01, -3.0):
        q, k = (rows(one, n, 16, seed=seed).reshape(1, n, 2, 8) for one, seed in (("normal", 1), (kind, 2)))
        gate = decay * rows("positive", n, 2).reshape(1, n, 2)
        yield (q, k, rows("normal", n, 8).reshape(1, n, 2, 4), gate), {"gated": True, "scale": 0.25}


OPS: dict[str, tuple[str, Kernels, Callable[[str, int], Iterator[Call]]]] = {
    "kl_div": ("kl_div", honest_scans.kl_divs, distilled),
    "jsd": ("jsd", honest_scans.jsds, mixed),
    "cross_entropy, capped": ("cross_entropy", honest_scans.capped_entropies, capped),
    "causal_conv1d": ("causal_conv1d", honest_scans.convolutions, convolved),
    "selective_scan": ("selective_scan", honest_scans.scans, scanned),
    "linear_attention": ("linear_attention", honest_scans.linear_attentions, attended),
    "merge_cascade": ("merge_cascade", honest_scans.cascades, partial),
}


@by_thirds
@pytest.mark.parametrize("name", OPS)
def test_honest_kernels_keep_the_contract(name: str, third: slice, record_property: Any) -> None:
    """Any order of summation, any formula in use, functions as bad as allowed: within the radius."""
    op, kernels, calls = OPS[name]
    report(name, used_along_rows(op, kernels, calls, SOME[third]), record_property)
