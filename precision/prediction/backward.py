"""Backward passes of all cotangents and batches, through the graph of the whole model or block by block along a chain.

Block by block, a block runs once more from its stored input and all cotangents pass through it before the next, so that
autograd holds the values of one block only, and the cotangents share its weights and the schemes' changes there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from assay.precision.errors import BadModel
from assay.precision.metrics import Metric, padding_of
from assay.precision.observation.observing import Observed
from assay.precision.observation.operations import traced
from assay.precision.observation.running import batch_size, call, evaluating, mapping
from assay.precision.prediction.chain import Chain
from assay.precision.prediction.perturbations import Change, Key, Term
from assay.precision.prediction.quadratic_form import Products, cotangents_of
from assay.precision.prediction.row_sampling import RowSampler
from assay.precision.prediction.sensitivity import Sensitivity, change_of
from assay.runtime.memory import trim_heap


@dataclass(frozen=True, slots=True)
class Cotangents:
    """Random cotangents of a metric's output, each with the menus that products are formed for."""

    metric: Metric
    generators: Sequence[torch.Generator]
    menus: Sequence[Mapping[str, Sequence[str]]]

    def drawn(self, output: Tensor, batch: Any) -> list[Tensor]:
        """Return a cotangent from each generator for the output of a batch. Raises BadModel for an output without a
        gradient."""
        if not output.requires_grad:
            raise BadModel(
                "expected outputs that gradients lead back from, got none: take torch.no_grad, inference_mode, "
                "argmax and casts to integers out of forward"
            )
        detached = output.detach()
        return [self.metric.cotangent(detached, mapping(batch), generator) for generator in self.generators]

    def backpropagate(
        self,
        visitor: Sensitivity,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Sequence[Tensor | None]],
        inputs: Sequence[Tensor] = (),
    ) -> list[Sequence[Tensor | None]]:
        """Form the products of every cotangent of the outputs, None where they are zero, by the visitor, and return the
        cotangents of the inputs."""
        gradients: list[Sequence[Tensor | None]] = [[None] * len(inputs)] * len(cotangents)
        for index in reversed(range(len(cotangents))):  # the first one last: it lets go of the values
            visitor.begin(index, self.menus[index])
            every = zip(outputs, cotangents[index], strict=True)
            pairs = [(output, g) for output, g in every if g is not None and output.requires_grad]
            if not pairs:
                continue
            roots, grad_outputs = zip(*pairs, strict=True)
            sought = [visitor.anchor, *(each for each in inputs if each.requires_grad)]
            _, *grads = torch.autograd.grad(roots, sought, grad_outputs, retain_graph=index > 0, allow_unused=True)
            gradients[index] = [grads.pop(0) if each.requires_grad else None for each in inputs]
        return gradients


def backward_through_blocks(chain: Chain, batch: int, visitor: Sensitivity, cotangents: Cotangents) -> None:
    """Form all products of a batch from one graph of each block, the last block's first."""

    def leaves(block: int) -> list[Tensor]:
        values = chain.state(batch, block)
        return [value.detach().requires_grad_(value.is_floating_point()) for value in values]

    trim_heap()  # what comes after the blocks may take more than any block does
    visitor.shares = chain.bytes_of_block()
    last = len(chain.blocks)
    state = leaves(last)
    output = chain.output(batch, tuple(state), cotangents.metric, visitor)
    drawn = cotangents.drawn(output, chain.batches[batch])
    given = cotangents.backpropagate(visitor, [output], [[each] for each in drawn], state)
    for block in reversed(range(last)):
        visitor.forget()
        state = leaves(block)
        with traced(chain.model, visitor):
            outputs = chain.through(batch, block, tuple(state))
        given = cotangents.backpropagate(visitor, outputs, given, state)
    visitor.forget()
    first = chain.before(batch, visitor)
    if first is None:
        raise BadModel("expected the same values before the blocks at every call, got other ones: take out randomness")
    cotangents.backpropagate(visitor, first, given)


_INPLACE = re.compile("in-?place")  # in autograd's errors

AnySensitivity = TypeVar("AnySensitivity", bound=Sensitivity)

AGAIN = 3
"""Further cotangents: four together halve the standard error of one."""


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
    """Return the products of every scheme of ``observed`` at every site with random cotangents of the metric's output.

    again: the number of further cotangents, for all sites but embedding tables. Where few rows or sequences dominate,
    as within attention, one cotangent is accurate within a factor of two only. Rows of large weights are sampled
    (`row_sampling`) unless ``exact``. seed: of the cotangents and the rows. change: a scheme's change of a tensor.
    chain: the model as a chain over these batches, for passes block by block. ``done`` receives the number of finished
    batches. Raises BadModel for outputs without a gradient.
    """
    further = {name: menu for name, menu in observed.menus.items() if observed.by_name[name].type != "embedding"}
    seeds = [seed + 1_000_003 * index for index in range(1 + again if any(further.values()) else 1)]
    generators = [torch.Generator().manual_seed(each) for each in seeds]
    cotangents = Cotangents(metric, generators, [observed.menus, *[further] * (len(seeds) - 1)])

    def visitor_of(size: int, index: int) -> Sensitivity:
        sampler = RowSampler(index, len(batches), len(seeds), seed, exact)
        visitor = Sensitivity(observed.menus, observed.qparams, observed.tied, size, sampler, change, set(further))
        visitor.mask = padding_of(batches[index])
        return visitor

    def form(visitor: Sensitivity, index: int) -> None:
        batch = batches[index]
        with evaluating(model):
            if chain is not None:
                backward_through_blocks(chain, index, visitor, cotangents)
                return
            with traced(model, visitor):
                outputs = call(model, batch)
            output = metric.output(outputs, mapping(batch))
            cotangents.backpropagate(visitor, [output], [[each] for each in cotangents.drawn(output, batch)])

    return products_of(batches, visitor_of, form, done)


def products_of(
    batches: Sequence[Any],
    visitor_of: Callable[[int, int], AnySensitivity],
    form: Callable[[AnySensitivity, int], None],
    done: Callable[[int], None] = lambda count: None,
) -> Products:
    """Return the products that ``form`` makes with a visitor of each batch, with copies of values where the model
    overwrites them.

    ``visitor_of`` takes a batch's size and index; ``form`` takes the visitor and the index, runs the model and
    differentiates with respect to the visitor's anchor; ``done`` receives the number of finished batches.
    """
    terms: list[list[dict[Key, Term]]] = []
    sizes = [batch_size(batch) for batch in batches]
    copies = False

    def passed(index: int) -> list[dict[Key, Term]]:
        visitor = visitor_of(sizes[index], index)
        visitor.copies = copies
        with torch.enable_grad():
            form(visitor, index)
        return [visitor.terms_by_cotangent[index] for index in sorted(visitor.terms_by_cotangent)]

    for index in range(len(batches)):
        while len(terms) == index:
            try:
                terms.append(passed(index))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if copies or not _INPLACE.search(str(error)):
                    reason = str(error).partition("\n")[0]
                    raise BadModel(
                        f"expected a model that gradients lead back through, got one that torch refuses: {reason}"
                    ) from None
                copies = True  # of what the backward pass needs, which the model wrote over
        done(index + 1)
    first = _gathered([each[0] for each in terms], sizes)
    further = [_gathered(each, sizes, first.keys) for each in list(zip(*terms, strict=True))[1:]]
    if not further:
        return first
    again = (np.stack([each.sums for each in further], 1), np.stack([each.squares for each in further], 1))
    variance = sum((each.variance for each in further), first.variance)
    return replace(first, again=again, variance=variance / cotangents_of(again[1]) ** 2)


def _gathered(batches: Sequence[Mapping[Key, Term]], sizes: Sequence[int], keys: tuple[Key, ...] = ()) -> Products:
    """Concatenate the batches' products, of these keys or of all."""
    keys = keys or tuple(dict.fromkeys(key for batch in batches for key in batch))
    sums, squares, sampling, variance = [], [], np.ones(len(keys)), np.zeros(len(keys))
    for batch, size in zip(batches, sizes, strict=True):
        nothing = Term(torch.zeros(size), torch.zeros(size), 1)
        terms = [batch.get(key, nothing) for key in keys]
        sums.append(torch.stack([term.sums for term in terms]).double().numpy())
        squares.append(torch.stack([term.squares for term in terms]).double().numpy())
        sampling = np.maximum(sampling, [term.sampling for term in terms])
        variance += [term.variance for term in terms]
    return Products(keys, np.concatenate(sums, 1), np.concatenate(squares, 1), sampling, variance)
