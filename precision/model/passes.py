"""Forward and backward passes over the calibration data, and the quadratic form that they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from assay.precision.model.running import call, settled
from assay.precision.model.sensitivity import Part, Sensitivity, Term
from assay.precision.model.tap import opened
from assay.precision.prediction import Products, QuadraticForm

__all__ = ["form_of"]


def form_of(
    model: torch.nn.Module,
    batches: Sequence[Any],
    sizes: Sequence[int],
    visitor_of: Callable[[int, int], Sensitivity],
    backward: Callable[[Sensitivity, Any, Any], None],
    progress: Callable[[int, int], None],
) -> QuadraticForm:
    """One forward and backward pass a batch: products of every scheme at every site.

    visitor_of: a fresh visitor for a batch's index and its number of sequences. backward: given the visitor, the
    model's outputs and the batch, starts the backward pass.
    """
    terms: list[dict[tuple[str, Part], Term]] = []
    known = True
    for index, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        visitor = visitor_of(index, size)
        with torch.enable_grad(), settled(model):
            with opened(model, visitor) as tap:
                visitor.tap = tap
                outputs = call(model, batch)
            backward(visitor, outputs, batch)
        terms.append(visitor.terms)
        known = known and visitor.known
        progress(index + 1, len(batches))
    return QuadraticForm(_gathered(terms, sizes, known))


