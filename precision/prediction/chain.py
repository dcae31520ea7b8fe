"""A model as a chain: what comes before its blocks, the blocks, each given what the one before gives, what comes after.

Blocks are the modules of the largest stack of layers, called once each, in their order. A forward pass of each batch
(`recording`) notes the values that go from block to block, and what else a block is called with (masks, positions).
That nothing else hangs on those values is checked, not believed: a disturbed run has to give the same outputs block by
block as whole. A model that fails this has no chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from assay.precision.metrics import Metric
from assay.precision.observation.handlers import traced
from assay.precision.observation.running import call, mapping
from assay.precision.observation.streaming import streamed_parameters
from assay.precision.observation.tracer import LookUp, Product, Tracer, Visitor
from assay.runtime.tensors import TensorCache

_SAME = 1e-6
"""Relative difference of outputs that a device's own indeterminacy may make."""

_ROOM = 1 << 30
"""Bytes that values of several assignments, and weights kept for them or for several cotangents, may take; of a model
in memory half of its own float32 bytes, if that is more."""

State = tuple[torch.Tensor, ...]
"""The values that a block is given by the one before; of the last block, all tensors that it gives."""


@dataclass(frozen=True, slots=True)
class Flat:
    """Arguments or outputs of a module."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, tree: Any) -> Flat:
        leaves, spec = tree_flatten(tree)
        return cls(tuple(leaves), spec)

    def filled(self, places: Sequence[int], values: Sequence[Any]) -> Any:
        """The tree with something else at some places."""
        return tree_unflatten(self.without(places, values).leaves, self.spec)

    def without(self, places: Sequence[int], values: Sequence[Any] | None = None) -> Flat:
        """The same with None, or ``values``, at some places."""
        leaves = list(self.leaves)
        for place, value in zip(places, values or [None] * len(places), strict=True):
            leaves[place] = value
        return Flat(tuple(leaves), self.spec)

    @property
    def tensors(self) -> list[int]:
        """Places of tensors."""
        return [place for place, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]


class Chain:
    """The blocks of a model over some batches, with the values that the model by itself has before each of them.

    ``places``: of each name that a visitor is given where that is: 0 before the blocks, l + 1 in block l, `after` them.
    """

    def __init__(self, model: torch.nn.Module, batches: Sequence[Any], blocks: Sequence[torch.nn.Module]) -> None:
        self.model = model
        self.batches = batches
        self.blocks = blocks
        self.after = len(blocks) + 1
        self.places: dict[str, set[int]] = {}
        self.calls: list[list[Flat]] = [[] for _ in batches]
        self.given = Flat((), tree_flatten(())[1])
        """The form of what a block gives, without tensors."""
        self.tensors: list[int] = []
        """Where these are."""
        self.entries: list[int] = []
        """Where in a block's arguments the values of the chain are, and where in what the block before gives."""
        self.exits: list[int] = []
        self._cache = TensorCache()
        self._cached: list[list[range]] = [[] for _ in batches]

    def state(self, batch: int, block: int) -> State:
        """What the model by itself gives to a block, or what the last one gives."""
        return tuple(self._cache[place] for place in self._cached[batch][block])

    def bytes_of_state(self) -> int:
        """Of the values before the first block, over all batches."""
        values = (value for batch in range(len(self.batches)) for value in self.state(batch, 0))
        return sum(value.numel() * value.element_size() for value in values)

    def bytes_of_block(self) -> int:
        """Of the largest block's weights in float32, or of all others if these are more."""
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in self.blocks]
        others = sum(parameter.numel() for parameter in self.model.parameters()) - sum(sizes)
        return 4 * max(*sizes, others)

    def room(self) -> int:
        """Bytes that may be taken beside the model."""
        streamed = bool(streamed_parameters(self.model))
        return max(_ROOM, 0 if streamed else 2 * sum(parameter.numel() for parameter in self.model.parameters()))

    def before(self, batch: int, visitor: Visitor) -> State | None:
        """What the first block is given where a visitor changes something before it; None where that changes other
        arguments too."""
        known = self.calls[batch][0]
        with traced(self.model, visitor):
            reached = _arguments(self.blocks[0], lambda: call(self.model, self.batches[batch]))
        if reached is None:  # what comes before has skipped it
            return None
        given = Flat.of(reached)
        same = (torch.equal(given.leaves[place], known.leaves[place]) for place in known.tensors)
        if given.spec != known.spec or not all(same):
            return None
        return tuple(given.leaves[place] for place in self.entries)

    def through(self, batch: int, block: int, state: State) -> State:
        """What a block makes of the values, which are left as they are. Within `traced`."""
        args, kwargs = self.calls[batch][block].filled(self.entries, [value.clone() for value in state])
        given = Flat.of(self.blocks[block](*args, **kwargs))
        places = self.exits if block < len(self.blocks) - 1 else self.tensors
        return tuple(given.leaves[place] for place in places)

    def output(self, batch: int, state: State, metric: Metric, visitor: Visitor) -> torch.Tensor:
        """What is compared of the model's outputs, of what the last block gives, which the visitor has seen."""
        given = self.given.filled(self.tensors, [value.clone() for value in state])
        with ExitStack() as after:
            for block in self.blocks:  # whose hooks don't see this call
                block.__dict__["_call_impl"] = lambda *_args, **_kwargs: given
                after.callback(block.__dict__.pop, "_call_impl")
            after.enter_context(traced(self.model, visitor))
            return metric.output(call(self.model, self.batches[batch]), mapping(self.batches[batch]))

    def shelve(self, batch: int, values: Sequence[torch.Tensor]) -> None:
        """Keep the values before the next block, or after the last."""
        start = len(self._cache)
        for value in values:
            self._cache.add(value)
        self._cached[batch].append(range(start, len(self._cache)))

    def holds(self, metric: Metric) -> bool:
        """Whether a disturbance before the first block comes out of the chain as it comes out of the model, which runs
        last, lest what it left behind leads the chain. After each block the undisturbed values pass it too, as other
        assignments' do: what a block leaves elsewhere for those after it is these values' then."""
        visitor = _Disturber()

        def disturbed(_module: object, args: Any, kwargs: Any) -> Any:
            visitor.on = False
            flat = Flat.of((args, kwargs))
            return flat.filled(self.entries, [_disturbed(flat.leaves[place]) for place in self.entries])

        state = self.before(0, visitor)
        visitor.on = False
        if state is None:
            return False
        state = tuple(_disturbed(value) for value in state)
        for block in range(len(self.blocks)):
            with traced(self.model, visitor):
                state = self.through(0, block, state)
                self.through(0, block, self.state(0, block))
        output = self.output(0, state, metric, visitor)
        visitor.on = True
        with self.blocks[0].register_forward_pre_hook(disturbed, with_kwargs=True), traced(self.model, visitor):
            whole = metric.output(call(self.model, self.batches[0]), mapping(self.batches[0]))
        return float((output - whole).norm()) <= _SAME * float(whole.norm())


class _Disturber:
    """A visitor that disturbs what comes out of weights, while it is ``on``."""

    def __init__(self) -> None:
        self.on = True
        self.tracer: Tracer | None = None

    def linear(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, expert: int | None, product: Product
    ) -> torch.Tensor:
        return _disturbed(product(x, weight)) if self.on else product(x, weight)

    def embedding(self, name: str, ids: torch.Tensor, weight: torch.Tensor, look_up: LookUp) -> torch.Tensor:
        return _disturbed(look_up(weight)) if self.on else look_up(weight)

    def values(self, name: str, x: torch.Tensor, part: str = "") -> torch.Tensor:
        return x


def _disturbed(x: Any) -> Any:
    """Values changed by up to a twentieth, each by another share, the same every time; integers as they are."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    shares = torch.arange(x.numel(), device=x.device, dtype=x.dtype).reshape(x.shape).sin()
    return x * (1 + 0.05 * shares)


class _ReachedError(Exception):
    """The first block is called."""

    def __init__(self, given: Any) -> None:
        super().__init__("reached")
        self.given = given


def _arguments(block: torch.nn.Module, run: Callable[[], object]) -> Any:
    """(args, kwargs) that a module is called with first; what comes after it doesn't run. Within `traced`, so that the
    hook is the last, and those that close what was opened find it open."""

    def reached(_module: object, args: Any, kwargs: Any) -> None:
        raise _ReachedError((args, kwargs))

    with block.register_forward_pre_hook(reached, with_kwargs=True):
        try:
            run()
        except _ReachedError as found:
            return found.given
    return None
