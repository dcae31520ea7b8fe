"""The products of a backward pass over all batches, as a quadratic form takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from assay.precision.model.opening import opened
from assay.precision.model.parts import Part
from assay.precision.model.running import batch_size, call, settled
from assay.precision.model.sensitivity import Sensitivity, Term
from assay.precision.prediction import Products

__all__ = ["products_of"]


def products_of(
    model: torch.nn.Module,
    batches: Sequence[Any],
    visitor_of: Callable[[int, int], Sensitivity],
    backward: Callable[[Sensitivity, Any, Any], None],
    done: Callable[[int], None] = lambda count: None,
) -> Products:
    """One forward and one backward pass a batch, with copies of values where the model writes over them.

    ``visitor_of`` a batch's size and number; ``backward`` takes visitor, outputs and batch, and differentiates with
    respect to the visitor's anchor; ``done`` is told how many batches are.
    """
    terms: list[dict[tuple[str, Part], Term]] = []
    sizes = [batch_size(batch) for batch in batches]
    copies = False

    def passed(index: int) -> Sensitivity:
        visitor = visitor_of(sizes[index], index)
        visitor.copies = copies
        with torch.enable_grad(), settled(model):
            with opened(model, visitor) as tap:
                visitor.tap = tap
                outputs = call(model, batches[index])
            backward(visitor, outputs, batches[index])
        return visitor

    for index in range(len(batches)):
        try:
            visitor = passed(index)
        except RuntimeError as error:
            if copies or "inplace" not in str(error):
                raise
            copies = True
            visitor = passed(index)
        terms.append(visitor.terms)
        done(index + 1)
    return _gathered(terms, sizes)


def _gathered(batches: Sequence[Mapping[tuple[str, Part], Term]], sizes: Sequence[int]) -> Products:
    """The batches' products side by side."""
    keys = tuple(dict.fromkeys(key for batch in batches for key in batch))
    parts: dict[str, list[np.ndarray]] = {"sums": [], "squares": []}
    thinning = np.ones(len(keys))
    for batch, size in zip(batches, sizes, strict=True):
        nothing = Term(torch.zeros(size), torch.zeros(size), 1)
        found = [batch.get(key, nothing) for key in keys]
        for name, part in parts.items():
            part.append(torch.stack([getattr(term, name) for term in found]).double().numpy())
        thinning = np.maximum(thinning, [term.thinning for term in found])
    return Products(keys, np.concatenate(parts["sums"], 1), np.concatenate(parts["squares"], 1), thinning)
