"""A call whose tensors may be others: of a function, or of a module with its parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from assay.golden.errors import DefinitionError


@dataclass(frozen=True, eq=False)
class Called:
    """A reference or a kernel as a function of tensors alone: the rest of its arguments stay as the example had them.

    ``state`` names the parameters and buffers that are tensors too, after those of the arguments, by their names in the
    module. What else a module holds, and what the call changes in it, is as before afterwards.
    """

    target: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: Any
    places: tuple[int, ...]
    state: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    __name__: str = ""

    def __eq__(self, other: object) -> bool:
        """Whether it is the same call, the tensors that stay compared by their numbers."""
        if not isinstance(other, Called) or len(self.leaves) != len(other.leaves):
            return False
        known = (self.target, self.tree, self.places, self.state, self.keywords)
        if known != (other.target, other.tree, other.places, other.state, other.keywords):
            return False
        kept = set(range(len(self.leaves))) - set(self.places)
        return all(_same(self.leaves[place], other.leaves[place]) for place in kept)

    def __hash__(self) -> int:
        return hash((self.target, self.places, self.state))

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=False):
            leaves[place] = tensor
        args = tree_unflatten(leaves, self.tree)
        if not isinstance(self.target, torch.nn.Module):
            return self.target(*args, **options)
        own = tensors[len(self.places) :]
        kept = {name: buffer.clone() for name, buffer in self.target.named_buffers() if name not in self.state}
        given = {name: tensor.clone() for name, tensor in zip(self.state, own, strict=True)}
        return torch.func.functional_call(self.target, {**kept, **given}, tuple(args), options)

    def of(self, target: Callable[..., Any]) -> Called:
        """The same call of another function or module. Raises `DefinitionError` where that lacks a parameter."""
        if isinstance(self.target, torch.nn.Module) and not isinstance(target, torch.nn.Module) and self.state:
            raise DefinitionError(f"kernel: expected a module with the reference's parameters {', '.join(self.state)}")
        if isinstance(target, torch.nn.Module):
            own = {**dict(target.named_parameters()), **dict(target.named_buffers())}
            shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
            source = self.target if isinstance(self.target, torch.nn.Module) else torch.nn.Module()
            theirs = {**dict(source.named_parameters()), **dict(source.named_buffers())}
            for name in self.state:
                if shapes.get(name) != tuple(theirs[name].shape):
                    has = shapes.get(name, "none")
                    raise DefinitionError(
                        f"kernel: the reference's parameter {name} is {tuple(theirs[name].shape)}, the kernel has {has}"
                    )
            for name in dict(target.named_parameters()):
                if name not in theirs and source is self.target:
                    raise DefinitionError(f"kernel: it has a parameter {name} that the reference lacks")
        return Called(target, self.leaves, self.tree, self.places, self.state, self.keywords, title_of(target))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        alike = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.dtype == other.dtype
        return alike and torch.equal(one, other)
    return bool(one == other)


def title_of(target: Any) -> str:
    """What reports call a function or a module."""
    return getattr(target, "__name__", None) or type(target).__name__
