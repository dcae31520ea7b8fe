"""The products of a backward pass over all batches, as a quadratic form takes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from assay.precision.errors import BadModel
from assay.precision.metrics import Metric
from assay.precision.observation.handlers import traced
from assay.precision.observation.observing import Observed
from assay.precision.observation.running import batch_size, call, evaluating, mapping
from assay.precision.prediction.perturbations import Key, Term
from assay.precision.prediction.quadratic_form import Products
from assay.precision.prediction.sensitivity import Change, Sensitivity, change_of

Visitor = TypeVar("Visitor", bound=Sensitivity)

AGAIN = 3
"""Further cotangents for values: four together halve what one leaves open."""
_VALUES = ("activation", "kv_cache")


def differentiate(
    model: torch.nn.Module,
    batches: Sequence[Any],
    metric: Metric,
    observed: Observed,
    *,
    seed: int = 0,
    change: Change = change_of,
    done: Callable[[int], None] = lambda count: None,
) -> Products:
    """The products of every scheme of ``observed`` at every site with a random cotangent of the metric's output.

    seed: of the cotangents, and of which rows are looked at. change: what a scheme changes in a
    tensor. Raises BadModel for outputs without a gradient.
    """
    generator = torch.Generator().manual_seed(seed)

    def backward(visitor: Sensitivity, outputs: Any, batch: Any) -> None:
        output = metric.output(outputs, mapping(batch))
        if not output.requires_grad:
            raise BadModel(
                "expected outputs that gradients lead back from, got none: take torch.no_grad, inference_mode, "
                "argmax and casts to integers out of forward"
            )
        cotangent = metric.cotangent(output.detach(), mapping(batch), generator)
        torch.autograd.grad(output, visitor.anchor, cotangent, allow_unused=True)

    def visitor_of(size: int, index: int) -> Sensitivity:
        return Sensitivity(observed.menus, observed.qparams, observed.tied, size, (index, len(batches)), seed, change)

    return products_of(model, batches, visitor_of, backward, done)


def differentiate_again(
    model: torch.nn.Module,
    batches: Sequence[Any],
    metric: Metric,
    observed: Observed,
    products: Products,
    *,
    seed: int = 0,
    done: Callable[[int], None] = lambda count: None,
) -> Products:
    """The products with `AGAIN` further cotangents for values without a weight: activations and KV caches.

    What few rows make, as errors within attention, one cotangent tells within a factor of two only; the products of a
    weight, which most of the time goes to, are sums over all rows of a sequence. ``done`` is told how many batches are.
    Gives ``products`` itself where there are no such sites.
    """
    menus = {name: menu for name, menu in observed.menus.items() if observed.by_name[name].place in _VALUES}
    if not any(menus.values()):
        return products
    only = replace(observed, menus=menus)
    row = {key: place for place, key in enumerate(products.keys)}
    sums, squares = (np.zeros((len(products.keys), AGAIN, products.sums.shape[1])) for _ in range(2))
    for turn in range(AGAIN):
        other = seed + 1_000_003 * (turn + 1)
        found = differentiate(model, batches, metric, only, seed=other, done=partial(_later, done, turn * len(batches)))
        rows = [row[key] for key in found.keys]
        sums[rows, turn], squares[rows, turn] = found.sums, found.squares
    return replace(products, again=(sums, squares))


def _later(done: Callable[[int], None], before: int, count: int) -> None:
    done(before + count)


def products_of(
    model: torch.nn.Module,
    batches: Sequence[Any],
    visitor_of: Callable[[int, int], Visitor],
    backward: Callable[[Visitor, Any, Any], None],
    done: Callable[[int], None] = lambda count: None,
) -> Products:
    """One forward and one backward pass a batch, with copies of values where the model writes over them.

    ``visitor_of`` a batch's size and number; ``backward`` takes visitor, outputs and batch, and differentiates with
    respect to the visitor's anchor; ``done`` is told how many batches are.
    """
    terms: list[dict[Key, Term]] = []
    sizes = [batch_size(batch) for batch in batches]
    copies = False

    def passed(index: int) -> dict[Key, Term]:
        visitor = visitor_of(sizes[index], index)
        visitor.copies = copies
        with torch.enable_grad(), evaluating(model):
            with traced(model, visitor):
                outputs = call(model, batches[index])
            backward(visitor, outputs, batches[index])
        return visitor.terms

    for index in range(len(batches)):
        try:
            terms.append(passed(index))
        except RuntimeError:  # as autograd has it where the model wrote over what the backward pass needs
            if copies:
                raise
            copies = True
            terms.append(passed(index))
        done(index + 1)
    return _gathered(terms, sizes)


def _gathered(batches: Sequence[Mapping[Key, Term]], sizes: Sequence[int]) -> Products:
    """The batches' products side by side."""
    keys = tuple(dict.fromkeys(key for batch in batches for key in batch))
    sums, squares, sampling = [], [], np.ones(len(keys))
    for batch, size in zip(batches, sizes, strict=True):
        nothing = Term(torch.zeros(size), torch.zeros(size), 1)
        found = [batch.get(key, nothing) for key in keys]
        sums.append(torch.stack([term.sums for term in found]).double().numpy())
        squares.append(torch.stack([term.squares for term in found]).double().numpy())
        sampling = np.maximum(sampling, [term.sampling for term in found])
    return Products(keys, np.concatenate(sums, 1), np.concatenate(squares, 1), sampling)
