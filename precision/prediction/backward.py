"""Cotangents led back to all sites: through the graph of the whole model, or block by block along a chain.

Block by block, a block runs once more from the values before it and all cotangents pass it before the next, so that
autograd holds the values of one block only, and the cotangents share its weights and what schemes change there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from assay.precision.errors import BadModel
from assay.precision.metrics import Metric
from assay.precision.observation.handlers import traced
from assay.precision.observation.running import call, mapping
from assay.precision.prediction.chain import Chain
from assay.precision.prediction.sensitivity import Sensitivity
from assay.runtime.memory import trim_heap


@dataclass(frozen=True, slots=True)
class Cotangents:
    """Random cotangents of a metric's output, each with the menus that products are formed for."""

    metric: Metric
    generators: Sequence[torch.Generator]
    menus: Sequence[Mapping[str, Sequence[str]]]

    def drawn(self, output: torch.Tensor, batch: Any) -> list[torch.Tensor]:
        """One of each for the output of a batch. Raises BadModel for an output without a gradient."""
        if not output.requires_grad:
            raise BadModel(
                "expected outputs that gradients lead back from, got none: take torch.no_grad, inference_mode, "
                "argmax and casts to integers out of forward"
            )
        detached = output.detach()
        return [self.metric.cotangent(detached, mapping(batch), generator) for generator in self.generators]

    def led_back(
        self,
        visitor: Sensitivity,
        outputs: Sequence[torch.Tensor],
        given: Sequence[Sequence[torch.Tensor | None]],
        inputs: Sequence[torch.Tensor] = (),
    ) -> list[Sequence[torch.Tensor | None]]:
        """Of every cotangent the products, by the visitor, and what it is at the inputs.

        ``given``: the cotangents of the outputs, None where they are zero.
        """
        found: list[Sequence[torch.Tensor | None]] = [[None] * len(inputs)] * len(given)
        for turn in reversed(range(len(given))):  # the first one last: it lets go of the values
            visitor.begin(turn, self.menus[turn])
            every = zip(outputs, given[turn], strict=True)
            pairs = [(output, g) for output, g in every if g is not None and output.requires_grad]
            if not pairs:
                continue
            roots, cotangents = zip(*pairs, strict=True)
            sought = [visitor.anchor, *(each for each in inputs if each.requires_grad)]
            _, *grads = torch.autograd.grad(roots, sought, cotangents, retain_graph=turn > 0, allow_unused=True)
            found[turn] = [grads.pop(0) if each.requires_grad else None for each in inputs]
        return found


def back_through_model(model: torch.nn.Module, batch: Any, visitor: Sensitivity, cotangents: Cotangents) -> None:
    """Form all products of a batch from one graph."""
    with traced(model, visitor):
        outputs = call(model, batch)
    output = cotangents.metric.output(outputs, mapping(batch))
    cotangents.led_back(visitor, [output], [[each] for each in cotangents.drawn(output, batch)])


def back_through_blocks(chain: Chain, batch: int, visitor: Sensitivity, cotangents: Cotangents) -> None:
    """Form all products of a batch from one graph of each block, the last block's first."""
    trim_heap()  # what comes after the blocks may take more than any block does
    visitor.shares = chain.bytes_of_block()
    last = len(chain.blocks)
    state = [_leaf(value) for value in chain.state(batch, last)]
    output = chain.output(batch, tuple(state), cotangents.metric, visitor)
    drawn = cotangents.drawn(output, chain.batches[batch])
    given = cotangents.led_back(visitor, [output], [[each] for each in drawn], state)
    for block in reversed(range(last)):
        visitor.forget()
        state = [_leaf(value) for value in chain.state(batch, block)]
        with traced(chain.model, visitor):
            outputs = chain.through(batch, block, tuple(state))
        given = cotangents.led_back(visitor, outputs, given, state)
    visitor.forget()
    first = chain.before(batch, visitor)
    if first is None:
        raise BadModel("expected the same values before the blocks at every call, got other ones: take out randomness")
    cotangents.led_back(visitor, first, given)


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_(value.is_floating_point())
