"""Filters of logits: whichever of equal tokens they keep, and wherever a sum is rounded, they pass; others don't."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from assay.verify import examine

Tensor = torch.Tensor
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "options": {"top_k": [None, 3], "top_p": [0.4]},
    "shapes": {"R": [1, 3], "V": [1, 2, 17]},
    "layouts": ["contiguous"],
    "examples": 5,
    "effort": "quick",
    "every_aspect": False,
}


def from_least(x: Tensor, *, top_k: int | None, top_p: float) -> Tensor:
    """Sorted upwards; every token equal to the k-th stays."""
    if top_k is not None:
        x = x.masked_fill(x < x.topk(min(top_k, x.shape[1])).values[:, -1:], -math.inf)
    ranked, order = x.sort(descending=False)
    dropped = ranked.softmax(1).cumsum(1) <= 1 - top_p
    dropped[:, -1:] = False
    return x.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -math.inf)


def from_most(x: Tensor, *, top_k: int | None, top_p: float, itself: bool = False) -> Tensor:
    """Sorted downwards; of equal tokens the first ones stay. ``itself``: a share counts to what comes before it."""
    ranked, order = x.sort(descending=True, stable=True)
    place = torch.arange(x.shape[1])
    if top_k is not None:
        ranked = ranked.masked_fill(place >= top_k, -math.inf)
    share = ranked.softmax(1)
    before = share.cumsum(1) - (0.0 if itself else share)
    kept = ranked.masked_fill((before >= top_p) & (place > 0), -math.inf)
    return torch.empty_like(x).scatter(1, order, kept)


@pytest.mark.parametrize("kernel", [from_least, from_most])
def test_honest_filters_pass(kernel: Callable[..., Tensor]) -> None:
    verdict = examine(kernel, "top_filter", **SETTINGS)
    assert verdict.passed, str(verdict)


def test_a_filter_that_drops_the_crossing_token_fails() -> None:
    """The token with which the shares reach p belongs to those that are kept; the verdict says so."""

    def kernel(x: Tensor, *, top_k: int | None, top_p: float) -> Tensor:
        return from_most(x, top_k=top_k, top_p=top_p, itself=True)

    verdict = examine(kernel, "top_filter", **SETTINGS)
    assert verdict.outcome == "FAIL"
    assert "the token with which the shares reach p is missing" in str(verdict)
