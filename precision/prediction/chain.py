"""A model as a chain: the part before its blocks, the blocks, each given the output of the one before, the part after.

Blocks are the modules of the largest stack of layers, called once each, in their order. A forward pass of each batch
(`Recording`) notes the values that go from block to block, and what else a block is called with (masks, positions).
That nothing else depends on those values is checked: a disturbed run has to give the same outputs block by block as in
one piece. A model that fails this has no chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from assay.precision.metrics import Metric
from assay.precision.observation.operations import is_layer, is_norm, traced
from assay.precision.observation.running import call, evaluating, mapping
from assay.precision.observation.streaming import streamed_parameters
from assay.precision.observation.tracer import LookUp, Product, Tracer, Visitor
from assay.runtime.tensors import TensorCache

_SAME = 1e-6  # Relative difference of outputs that a device's nondeterminism may make

_ROOM = 1 << 30
"""Bytes for the values of several assignments, and for weights shared by them or by several cotangents; for a model in
memory half of its own float32 bytes, if that is more."""

State = tuple[Tensor, ...]
"""The values that a block receives from the one before; of the last block, all its output tensors."""


@dataclass(frozen=True, slots=True)
class Flat:
    """Flattened arguments or outputs of a module."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, tree: Any) -> Flat:
        leaves, spec = tree_flatten(tree)
        return cls(tuple(leaves), spec)

    def without(self, positions: Sequence[int], values: Sequence[Any] | None = None) -> Flat:
        """Return the same with None, or ``values``, at some positions."""
        leaves = list(self.leaves)
        for position, value in zip(positions, values or [None] * len(positions), strict=True):
            leaves[position] = value
        return Flat(tuple(leaves), self.spec)

    def filled(self, positions: Sequence[int], values: Sequence[Any]) -> Any:
        """Return the tree with other values at some positions."""
        return tree_unflatten(self.without(positions, values).leaves, self.spec)

    @property
    def tensors(self) -> list[int]:
        """Positions of tensors."""
        return [position for position, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]


class Chain:
    """The blocks of a model over some batches, with the unchanged model's values before each of them.

    ``positions``: the block of each site's name: 0 before the blocks, l + 1 in block l, `after` them.
    """

    def __init__(self, model: torch.nn.Module, batches: Sequence[Any], blocks: Sequence[torch.nn.Module]) -> None:
        self.model = model
        self.batches = batches
        self.blocks = blocks
        self.after = len(blocks) + 1
        self.positions: dict[str, set[int]] = {}
        self.calls: list[list[Flat]] = [[] for _ in batches]
        self.given = Flat((), tree_flatten(())[1])  # The form of what a block gives, without tensors
        self.tensors: list[int] = []  # Where these are
        self.entries: list[int] = []
        """Where in a block's arguments the values of the chain are, and where in what the block before gives."""
        self.exits: list[int] = []
        self._cache = TensorCache()
        self._cached: list[list[range]] = [[] for _ in batches]

    def state(self, batch: int, block: int) -> State:
        """Return the unchanged model's input of a block, or the last block's output."""
        return tuple(self._cache[position] for position in self._cached[batch][block])

    def bytes_of_state(self) -> int:
        """Return the bytes of the values before the first block, over all batches."""
        values = (value for batch in range(len(self.batches)) for value in self.state(batch, 0))
        return sum(value.numel() * value.element_size() for value in values)

    def bytes_of_block(self) -> int:
        """Return the bytes of the largest block's weights in float32, or of all other weights if these are more."""
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in self.blocks]
        others = sum(parameter.numel() for parameter in self.model.parameters()) - sum(sizes)
        return 4 * max(*sizes, others)

    def free_bytes(self) -> int:
        """Return the bytes that may be used in addition to the model."""
        streamed = bool(streamed_parameters(self.model))
        return max(_ROOM, 0 if streamed else 2 * sum(parameter.numel() for parameter in self.model.parameters()))

    def before(self, batch: int, visitor: Visitor) -> State | None:
        """Return the first block's input where a visitor changes something before it; None where that changes other
        arguments too."""
        known = self.calls[batch][0]

        def reached(_module: object, args: Any, kwargs: Any) -> None:
            raise _ReachedError((args, kwargs))

        # The last hook, so that those of `traced` that close sites find them open.
        with traced(self.model, visitor), self.blocks[0].register_forward_pre_hook(reached, with_kwargs=True):
            try:
                call(self.model, self.batches[batch])
                return None  # what comes before the block has skipped it
            except _ReachedError as error:
                given = Flat.of(error.args[0])
        same = (torch.equal(given.leaves[position], known.leaves[position]) for position in known.tensors)
        if given.spec != known.spec or not all(same):
            return None
        return tuple(given.leaves[position] for position in self.entries)

    def through(self, batch: int, block: int, state: State) -> State:
        """Return a block's output for these values, which are not modified. Within `traced`."""
        args, kwargs = self.calls[batch][block].filled(self.entries, [value.clone() for value in state])
        given = Flat.of(self.blocks[block](*args, **kwargs))
        positions = self.exits if block < len(self.blocks) - 1 else self.tensors
        return tuple(given.leaves[position] for position in positions)

    def output(self, batch: int, state: State, metric: Metric, visitor: Visitor) -> Tensor:
        """Return the model's compared output for the last block's output, which the visitor has seen."""
        given = self.given.filled(self.tensors, [value.clone() for value in state])
        with ExitStack() as after:
            for block in self.blocks:  # whose hooks don't see this call
                block.__dict__["_call_impl"] = lambda *_args, **_kwargs: given
                after.callback(block.__dict__.pop, "_call_impl")
            after.enter_context(traced(self.model, visitor))
            return metric.output(call(self.model, self.batches[batch]), mapping(self.batches[batch]))

    def cache_values(self, batch: int, values: Sequence[Tensor]) -> None:
        """Store the values before the next block, or after the last."""
        start = len(self._cache)
        for value in values:
            self._cache.add(value)
        self._cached[batch].append(range(start, len(self._cache)))

    def holds(self, metric: Metric) -> bool:
        """Return whether a disturbance before the first block gives the same output by the chain as by the model.

        The model runs last, so that its side effects can't help the chain. After each block the undisturbed values pass
        through it too, as other assignments' do, so that a block's side effects are those of these values.
        """
        visitor = _Disturber()

        def disturbed(_module: object, args: Any, kwargs: Any) -> Any:
            visitor.on = False
            flat = Flat.of((args, kwargs))
            return flat.filled(self.entries, [_disturbed(flat.leaves[position]) for position in self.entries])

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


class _Disturber(Visitor):
    on = True

    def linear(self, name: str, x: Tensor, weight: Tensor, expert: int | None, product: Product) -> Tensor:
        return _disturbed(product(x, weight)) if self.on else product(x, weight)

    def embedding(self, name: str, ids: Tensor, weight: Tensor, look_up: LookUp) -> Tensor:
        return _disturbed(look_up(weight)) if self.on else look_up(weight)


def _disturbed(x: Any) -> Any:
    """Return values changed by up to a twentieth, each by another share, the same every time; integers unchanged."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    shares = torch.arange(x.numel(), device=x.device, dtype=x.dtype).reshape(x.shape).sin()
    return x * (1 + 0.05 * shares)


class _ReachedError(Exception):
    """The first block is called, with the (args, kwargs) that the error holds."""


class Recording:
    """Records a model as a chain over some batches, each of which runs once within `over`."""

    def __init__(self, model: torch.nn.Module, batches: Sequence[Any]) -> None:
        blocks = _largest_stack(model)
        self._model = model
        self._chain = Chain(model, batches, blocks) if len(blocks) > 1 else None
        self._noted = 0

    @property
    def possible(self) -> bool:
        """Whether the model may be a chain, from the runs so far."""
        return self._chain is not None

    @contextmanager
    def over(self, batch: int, visitor: Visitor) -> Iterator[Tracer]:
        """As `traced`, for the forward pass of a batch."""
        chain = self._chain
        if chain is None:
            with traced(self._model, visitor) as tracer:
                yield tracer
            return
        recorder = _Recorder(chain, batch)
        with ExitStack() as after:
            for block in chain.blocks:
                after.callback(block.register_forward_pre_hook(recorder.enter, with_kwargs=True).remove)
            tracer = after.enter_context(traced(self._model, visitor))
            tracer.reaches = recorder.note
            for block in chain.blocks:
                after.callback(block.register_forward_hook(recorder.leave).remove)
            yield tracer
        self._noted += 1
        if not recorder.ended():
            self._chain = None

    def chain(self, metric: Metric) -> Chain | None:
        """Return the model's chain, verified by two more forward passes of the first batch; None where it isn't one."""
        chain = self._chain
        if chain is None or self._noted < len(chain.batches):
            return None
        with torch.no_grad(), evaluating(self._model):
            return chain if chain.holds(metric) else None


def chain_of(model: torch.nn.Module, batches: Sequence[Any], metric: Metric) -> Chain | None:
    """Return the model's chain, by one forward pass for each batch and two more of the first; None where it isn't
    one."""
    recording = Recording(model, batches)
    for batch, given in enumerate(batches):
        if not recording.possible:
            return None
        with torch.no_grad(), evaluating(model), recording.over(batch, Visitor()):
            call(model, given)
    return recording.chain(metric)


class _Recorder:
    """Notes the sites and the inputs and outputs of blocks in one forward pass, which a visitor leaves unchanged."""

    def __init__(self, chain: Chain, batch: int) -> None:
        self._chain = chain
        self._batch = batch
        self._inside = False
        self._entered = 0
        self._between: set[str] = set()
        self._first: list[Any] = []
        self._given: Flat | None = None
        self._whole = True

    def note(self, name: str) -> None:
        if self._entered and not self._inside:
            self._between.add(name)
        else:
            self._chain.positions.setdefault(name, set()).add(self._entered)

    def enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        chain, position = self._chain, self._entered
        expected = position < len(chain.blocks) and module is chain.blocks[position]
        self._whole = self._whole and expected and not self._inside and not self._between
        if not self._whole:
            return
        self._inside, self._entered = True, position + 1
        flat = Flat.of((args, kwargs))
        if position == 0:
            self._first = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in flat.leaves]
            chain.calls[self._batch].append(flat)
            return
        given = self._given
        assert given is not None
        pairs = [(at, out) for at in flat.tensors for out in given.tensors if flat.leaves[at] is given.leaves[out]]
        entries, exits = [at for at, _ in pairs], [out for _, out in pairs]
        if position == 1 and not chain.entries:
            chain.entries, chain.exits = entries, exits
        begun = position > 1 or all(isinstance(self._first[at], Tensor) for at in entries)
        if not entries or not begun or (entries, exits) != (chain.entries, chain.exits):
            self._whole = False
            return
        if position == 1:
            chain.calls[self._batch][0] = chain.calls[self._batch][0].without(entries)
            chain.cache_values(self._batch, [self._first[at] for at in entries])
            self._first = []
        chain.calls[self._batch].append(flat.without(entries))
        chain.cache_values(self._batch, [flat.leaves[at] for at in entries])

    def leave(self, _module: object, _args: object, output: Any) -> None:
        before, self._given, self._inside = self._given, Flat.of(output), False
        self._whole = self._whole and (before is None or before.spec == self._given.spec)

    def ended(self) -> bool:
        """Record the last block's output; return whether the blocks were a chain."""
        chain, given = self._chain, self._given
        if not self._whole or given is None or self._entered < len(chain.blocks):
            return False
        for name in self._between:
            chain.positions.setdefault(name, set()).add(chain.after)
        chain.tensors, chain.given = given.tensors, given.without(given.tensors)
        chain.cache_values(self._batch, [given.leaves[position] for position in given.tensors])
        return True


def _largest_stack(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of the stack with the most parameters, in order."""
    stacks: dict[str, list[torch.nn.Module]] = {}
    for name, module in model.named_modules():
        if is_layer(name, module) and not is_norm(module):
            stacks.setdefault(name.rpartition(".")[0], []).append(module)
    return max(stacks.values(), key=lambda stack: sum(p.numel() for b in stack for p in b.parameters()), default=[])
