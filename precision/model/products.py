"""The products of a backward pass over all batches, as a quadratic form takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from assay.precision.model.opening import opened
from assay.precision.model.running import batch_size, call, settled
from assay.precision.model.sensitivity import Part, Sensitivity, Term
from assay.precision.prediction import Products

__all__ = ["products_of"]


def products_of(
    model: torch.nn.Module,
    batches: Sequence[Any],
    visitor_of: Callable[[int, int], Sensitivity],
    backward: Callable[[Sensitivity, Any, Any], None],
    done: Callable[[int], None] = lambda count: None,
) -> Products:
    """One forward and one backward pass a batch.

    ``visitor_of`` a batch's size and number; ``backward`` takes visitor, outputs and batch, and differentiates with
    respect to the visitor's anchor; ``done`` is told how many batches are.
    """
    terms: list[dict[tuple[str, Part], Term]] = []
    known = True
    sizes = [batch_size(batch) for batch in batches]
    for index, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        visitor = visitor_of(size, index)
        with torch.enable_grad(), settled(model):
            with opened(model, visitor) as tap:
                visitor.tap = tap
                outputs = call(model, batch)
            backward(visitor, outputs, batch)
        terms.append(visitor.terms)
        known = known and visitor.known
        done(index + 1)
    return _gathered(terms, sizes, known)


def _gathered(batches: Sequence[Mapping[tuple[str, Part], Term]], sizes: Sequence[int], known: bool) -> Products:
    """The batches' products side by side; one sample a batch where sequences could not be told apart."""
    keys = tuple(dict.fromkeys(key for batch in batches for key in batch))
    parts: dict[str, list[np.ndarray]] = {"sums": [], "squares": []}
    thinning = np.ones(len(keys))
    for batch, size in zip(batches, sizes, strict=True):
        nothing = Term(torch.zeros(size), torch.zeros(size), 1)
        found = [batch.get(key, nothing) for key in keys]
        for name, part in parts.items():
            each = torch.stack([getattr(term, name) for term in found]).double().numpy()
            part.append(each if known else each.sum(1, keepdims=True))
        thinning = np.maximum(thinning, [term.thinning for term in found])
    return Products(keys, np.concatenate(parts["sums"], 1), np.concatenate(parts["squares"], 1), thinning)
