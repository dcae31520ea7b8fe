"""A model as a chain, noted while a visitor that changes nothing sees its forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from assay.precision.metrics import Metric
from assay.precision.observation.handlers import is_layer, is_norm, traced
from assay.precision.observation.running import call, evaluating
from assay.precision.observation.tracer import LookUp, Product, Tracer, Visitor
from assay.precision.prediction.chain import Chain, Flat


class Recording:
    """Of a model over some batches, each of which is to run once within `over`."""

    def __init__(self, model: torch.nn.Module, batches: Sequence[Any]) -> None:
        blocks = _largest_stack(model)
        self._model = model
        self._chain = Chain(model, batches, blocks) if len(blocks) > 1 else None
        self._noted = 0

    @property
    def possible(self) -> bool:
        """Whether the model may be a chain, as far as it has run."""
        return self._chain is not None

    @contextmanager
    def over(self, batch: int, visitor: Visitor) -> Iterator[Tracer]:
        """As `traced`, for the forward pass of a batch."""
        chain = self._chain
        if chain is None:
            with traced(self._model, visitor) as tracer:
                yield tracer
            return
        recorder = _Recorder(chain, batch, visitor)
        with ExitStack() as after:
            for block in chain.blocks:
                after.callback(block.register_forward_pre_hook(recorder.enter, with_kwargs=True).remove)
            tracer = after.enter_context(traced(self._model, recorder))
            for block in chain.blocks:
                after.callback(block.register_forward_hook(recorder.leave).remove)
            yield tracer
        self._noted += 1
        if not recorder.ended():
            self._chain = None

    def chain(self, metric: Metric) -> Chain | None:
        """The chain that the model is, by two forward passes more of the first batch; None where it isn't one."""
        chain = self._chain
        if chain is None or self._noted < len(chain.batches):
            return None
        with torch.no_grad(), evaluating(self._model):
            return chain if chain.holds(metric) else None


def chain_of(model: torch.nn.Module, batches: Sequence[Any], metric: Metric) -> Chain | None:
    """The chain that a model is, by a forward pass a batch and two more of the first; None where it isn't one."""
    recording = Recording(model, batches)
    for batch, given in enumerate(batches):
        if not recording.possible:
            return None
        with torch.no_grad(), evaluating(model), recording.over(batch, _Unchanging()):
            call(model, given)
    return recording.chain(metric)


class _Unchanging:
    """A visitor that only passes on."""

    def __init__(self) -> None:
        self.tracer: Tracer | None = None

    def linear(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, expert: int | None, product: Product
    ) -> torch.Tensor:
        return product(x, weight)

    def embedding(self, name: str, ids: torch.Tensor, weight: torch.Tensor, look_up: LookUp) -> torch.Tensor:
        return look_up(weight)

    def values(self, name: str, x: torch.Tensor, part: str = "") -> torch.Tensor:
        return x


class _Recorder:
    """What stands before a visitor that changes nothing, and the hooks around blocks: what they are given goes to the
    chain."""

    def __init__(self, chain: Chain, batch: int, visitor: Visitor) -> None:
        self._visitor = visitor
        self._chain = chain
        self._batch = batch
        self._inside = False
        self._entered = 0
        self._between: set[str] = set()
        self._first: list[Any] = []
        self._given: Flat | None = None
        self._whole = True

    @property
    def tracer(self) -> Tracer | None:
        """The visitor's."""
        return self._visitor.tracer

    @tracer.setter
    def tracer(self, tracer: Tracer | None) -> None:
        self._visitor.tracer = tracer

    def linear(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, expert: int | None, product: Product
    ) -> torch.Tensor:
        self._met(name)
        return self._visitor.linear(name, x, weight, expert, product)

    def embedding(self, name: str, ids: torch.Tensor, weight: torch.Tensor, look_up: LookUp) -> torch.Tensor:
        self._met(name)
        return self._visitor.embedding(name, ids, weight, look_up)

    def values(self, name: str, x: torch.Tensor, part: str = "") -> torch.Tensor:
        self._met(name)
        return self._visitor.values(name, x, part)

    def _met(self, name: str) -> None:
        if self._entered and not self._inside:
            self._between.add(name)
        else:
            self._chain.places.setdefault(name, set()).add(self._entered)

    def enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        chain, place = self._chain, self._entered
        expected = place < len(chain.blocks) and module is chain.blocks[place]
        self._whole = self._whole and expected and not self._inside and not self._between
        if not self._whole:
            return
        self._inside, self._entered = True, place + 1
        flat = Flat.of((args, kwargs))
        if place == 0:
            self._first = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
            chain.calls[self._batch].append(flat)
            return
        given = self._given
        assert given is not None
        pairs = [(at, out) for at in flat.tensors for out in given.tensors if flat.leaves[at] is given.leaves[out]]
        entries, exits = [at for at, _ in pairs], [out for _, out in pairs]
        if place == 1 and not chain.entries:
            chain.entries, chain.exits = entries, exits
        begun = place > 1 or all(isinstance(self._first[at], torch.Tensor) for at in entries)
        if not entries or not begun or (entries, exits) != (chain.entries, chain.exits):
            self._whole = False
            return
        if place == 1:
            chain.calls[self._batch][0] = chain.calls[self._batch][0].without(entries)
            chain.shelve(self._batch, [self._first[at] for at in entries])
            self._first = []
        chain.calls[self._batch].append(flat.without(entries))
        chain.shelve(self._batch, [flat.leaves[at] for at in entries])

    def leave(self, _module: object, _args: object, output: Any) -> None:
        before, self._given, self._inside = self._given, Flat.of(output), False
        self._whole = self._whole and (before is None or before.spec == self._given.spec)

    def ended(self) -> bool:
        """Note what the last block gave; whether the blocks were a chain's."""
        chain, given = self._chain, self._given
        if not self._whole or given is None or self._entered < len(chain.blocks):
            return False
        for name in self._between:
            chain.places.setdefault(name, set()).add(chain.after)
        chain.tensors, chain.given = given.tensors, given.without(given.tensors)
        chain.shelve(self._batch, [given.leaves[place] for place in given.tensors])
        return True


def _largest_stack(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of the stack with the most parameters, in order."""
    stacks: dict[str, list[torch.nn.Module]] = {}
    for name, module in model.named_modules():
        if is_layer(name, module) and not is_norm(module):
            stacks.setdefault(name.rpartition(".")[0], []).append(module)
    sizes = {name: sum(p.numel() for block in stack for p in block.parameters()) for name, stack in stacks.items()}
    return stacks[max(sizes, key=lambda name: sizes[name])] if sizes else []
