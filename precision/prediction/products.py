"""The products of a backward pass over all batches, as a quadratic form takes them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from assay.precision.errors import BadModel
from assay.precision.metrics import Metric, padding_of
from assay.precision.observation.observing import Observed
from assay.precision.observation.running import batch_size, evaluating
from assay.precision.prediction.backward import Cotangents, back_through_blocks, back_through_model
from assay.precision.prediction.chain import Chain
from assay.precision.prediction.perturbations import Change, Key, Term
from assay.precision.prediction.profiles import cotangents_of
from assay.precision.prediction.quadratic_form import Products
from assay.precision.prediction.sensitivity import Sensitivity, change_of
from assay.precision.prediction.turns import Turns

_IN_PLACE = re.compile("in-?place")  # in autograd's errors

Visitor = TypeVar("Visitor", bound=Sensitivity)

AGAIN = 3
"""Further cotangents: four together halve what one leaves open."""


def differentiate(
    model: torch.nn.Module,
    batches: Sequence[Any],
    metric: Metric,
    observed: Observed,
    *,
    again: int = 0,
    seed: int = 0,
    change: Change = change_of,
    chain: Chain | None = None,
    exact: bool = False,
    done: Callable[[int], None] = lambda count: None,
) -> Products:
    """The products of every scheme of ``observed`` at every site with a random cotangent of the metric's output.

    again: so many further cotangents, for all sites but tables of embeddings. What few rows or sequences make, as
    errors within attention, one cotangent tells within a factor of two only. The rows of a weight are looked at in
    turns, those of a large one sampled (`prediction.turns`) unless all products are to be ``exact``. seed: of the
    cotangents, and of which rows are looked at. change: what a scheme changes in a tensor. chain: the model as one
    over these batches, which is led back through block by block. ``done`` is told how many batches are.
    Raises BadModel for outputs without a gradient.
    """
    further = {name: menu for name, menu in observed.menus.items() if observed.by_name[name].place != "embedding"}
    seeds = [seed + 1_000_003 * turn for turn in range(1 + again if any(further.values()) else 1)]
    generators = [torch.Generator().manual_seed(each) for each in seeds]
    cotangents = Cotangents(metric, generators, [observed.menus, *[further] * (len(seeds) - 1)])

    def visitor_of(size: int, index: int) -> Sensitivity:
        turns = Turns(index, len(batches), len(seeds), seed, exact)
        visitor = Sensitivity(observed.menus, observed.qparams, observed.tied, size, turns, change, set(further))
        visitor.mask = padding_of(batches[index])
        return visitor

    def form(visitor: Sensitivity, index: int) -> None:
        with evaluating(model):
            if chain is None:
                back_through_model(model, batches[index], visitor, cotangents)
            else:
                back_through_blocks(chain, index, visitor, cotangents)

    return products_of(batches, visitor_of, form, done)


def products_of(
    batches: Sequence[Any],
    visitor_of: Callable[[int, int], Visitor],
    form: Callable[[Visitor, int], None],
    done: Callable[[int], None] = lambda count: None,
) -> Products:
    """The products that ``form`` has a visitor form of each batch, with copies of values where the model writes over
    them.

    ``visitor_of`` a batch's size and number; ``form`` takes the visitor and the batch's number, runs the model and
    differentiates with respect to the visitor's anchor; ``done`` is told how many batches are.
    """
    terms: list[list[dict[Key, Term]]] = []
    sizes = [batch_size(batch) for batch in batches]
    copies = False

    def passed(index: int) -> list[dict[Key, Term]]:
        visitor = visitor_of(sizes[index], index)
        visitor.copies = copies
        with torch.enable_grad():
            form(visitor, index)
        return [visitor.every[turn] for turn in sorted(visitor.every)]

    for index in range(len(batches)):
        try:
            terms.append(passed(index))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # where the model wrote over what the backward pass needs, copies are kept of it
            if copies or not _IN_PLACE.search(str(error)):
                raise _undifferentiable(error) from None
            copies = True
            try:
                terms.append(passed(index))
            except RuntimeError as second:
                raise _undifferentiable(second) from None
        done(index + 1)
    first = _gathered([each[0] for each in terms], sizes)
    further = [_gathered(each, sizes, first.keys) for each in list(zip(*terms, strict=True))[1:]]
    if not further:
        return first
    again = (np.stack([each.sums for each in further], 1), np.stack([each.squares for each in further], 1))
    variance = sum((each.variance for each in further), first.variance)
    return replace(first, again=again, variance=variance / cotangents_of(again[1]) ** 2)


def _undifferentiable(error: RuntimeError) -> BadModel:
    reason = str(error).partition("\n")[0]
    return BadModel(f"expected a model that gradients lead back through, got one that torch refuses: {reason}")


def _gathered(batches: Sequence[Mapping[Key, Term]], sizes: Sequence[int], keys: tuple[Key, ...] = ()) -> Products:
    """The batches' products side by side, of these keys or of all."""
    keys = keys or tuple(dict.fromkeys(key for batch in batches for key in batch))
    sums, squares, sampling, variance = [], [], np.ones(len(keys)), np.zeros(len(keys))
    for batch, size in zip(batches, sizes, strict=True):
        nothing = Term(torch.zeros(size), torch.zeros(size), 1)
        found = [batch.get(key, nothing) for key in keys]
        sums.append(torch.stack([term.sums for term in found]).double().numpy())
        squares.append(torch.stack([term.squares for term in found]).double().numpy())
        sampling = np.maximum(sampling, [term.sampling for term in found])
        variance += [term.variance for term in found]
    return Products(keys, np.concatenate(sums, 1), np.concatenate(squares, 1), sampling, variance)
