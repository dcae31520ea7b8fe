"""What an examination draws for references that choose: biases below all scores, boxes that overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from assay.verify import examine

from .test_choices import ROUTED, deepseek, router

Tensor = torch.Tensor
BOXES = "x[N,2]=sorted, y[N,2]=sorted, scores[N] -> kept[N]"


def overlapping(x: Tensor, y: Tensor) -> Tensor:
    """Which boxes have more than a third of their union in common."""
    sides = [
        (torch.minimum(t[:, None, 1], t[:, 1]) - torch.maximum(t[:, None, 0], t[:, 0])).clamp(min=0) for t in (x, y)
    ]
    area = (x[:, 1] - x[:, 0]) * (y[:, 1] - y[:, 0])
    common = sides[0] * sides[1]
    return common > (area[:, None] + area - common) / 3


def suppressed(x: Tensor, y: Tensor, scores: Tensor) -> Tensor:
    """The scores, descending, of boxes that overlap no better one that is kept; zero for others."""
    order = torch.argsort(scores, descending=True)
    over, keep = overlapping(x, y)[order][:, order], torch.ones(len(scores), dtype=torch.bool)
    for best in range(len(scores)):
        keep = keep & ~(keep[best] & over[best] & (torch.arange(len(scores)) > best))
    return torch.where(keep, scores[order], torch.zeros_like(scores))


def one_by_one(x: Tensor, y: Tensor, scores: Tensor) -> Tensor:
    over, kept, out = overlapping(x.double(), y.double()), list[int](), torch.zeros_like(scores)
    for at, box in enumerate(torch.argsort(scores, descending=True, stable=True).tolist()):
        if not any(over[box, other] for other in kept):
            kept.append(box)
            out[at] = scores[box]
    return out


def by_all_better_ones(x: Tensor, y: Tensor, scores: Tensor) -> Tensor:
    """Boxes that are suppressed themselves suppress others."""
    order = torch.argsort(scores, descending=True, stable=True)
    over = overlapping(x, y)[order][:, order].tril(-1).any(1)
    return torch.where(over, torch.zeros_like(scores), scores[order])


def unsuppressed(x: Tensor, y: Tensor, scores: Tensor) -> Tensor:
    return torch.sort(scores, descending=True)[0]


@pytest.mark.parametrize(
    ("kernel", "outcome"), [(one_by_one, "PASS"), (by_all_better_ones, "FAIL"), (unsuppressed, "FAIL")]
)
def test_boxes_overlap(kernel: Callable[..., Any], outcome: str) -> None:
    """Of corners that are sorted, so that suppression chains occur."""
    settings: dict[str, Any] = {"shapes": {"N": [1, 5, 12]}, "effort": "quick", "shrinking": False}
    verdict = examine(kernel, suppressed, tensors=BOXES, dtype="float32", every_aspect=False, **settings)
    assert verdict.outcome == outcome
    assert not verdict.left_out


@pytest.mark.parametrize(("kernel", "outcome"), [(router(), "PASS"), (router(fill=0.0), "FAIL")])
def test_biases_are_all_negative(kernel: Callable[..., Any], outcome: str) -> None:
    """So that a router which masks groups by zero chooses among the masked."""
    settings: dict[str, Any] = {"shapes": {"E": [16, 32], "T": [1, 7]}, "effort": "quick", "shrinking": False}
    verdict = examine(kernel, deepseek, tensors=ROUTED, dtype="float32", every_aspect=False, **settings)
    assert verdict.outcome == outcome
