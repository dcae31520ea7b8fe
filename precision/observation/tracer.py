"""A model's forward pass with every site visible: linears, embeddings, attention's stages, norms, residual stream,
logits.

A function mode sees each call of torch below the model, from modules or an exported graph, and hands the sites to a
visitor: one that collects, one that differentiates, one that simulates an assignment. Linears are named by their
parameters, other sites by the stack of running modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from assay.configs import architectures
from assay.precision.errors import BadModel
from assay.precision.observation.streaming import Streamed, source_of, streamed_parameters

Product = Callable[[Tensor, Tensor], Tensor]
"""x [..., K] and a weight [N, K] to their product [..., N], bias added."""
LookUp = Callable[[Tensor], Tensor]
"""A table [V, D] to the rows [..., D] that indices select."""
ParameterRef = tuple[str, int | None]
"""The name of the parameter that a weight is a view of, and the index of the matrix in a parameter [E, N, K]."""
HEAD = ":head"
"""Suffix of the name of an embedding table that is also multiplied with: a second use, as that of a module with the
same weight."""
Handler = Callable[["Tracer", Any, Any, Any], Any]
"""Replaces a function of torch: (tracer, function, args, kwargs) to a result."""


class Steps:
    """The products of a recurrence with one weight, one for each step, which a visitor may treat as one."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen: list[tuple[Tensor, ...]] = []

    def joined(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors [B, K] of all steps as [B, T, K] at the last step; nothing before."""
        self._seen.append(values)
        if len(self._seen) < self._count:
            return ()
        seen, self._seen = self._seen, []
        return tuple(torch.stack(each, 1) for each in zip(*seen, strict=True))


class Visitor:
    """What is done at the sites; this one passes everything on. Each method returns what the model goes on with."""

    tracer: Tracer | None = None
    """The running forward pass, while there is one."""

    def linear(self, name: str, x: Tensor, weight: Tensor, expert: int | None, product: Product) -> Tensor:
        """A product with a parameter: weight [N, K]; ``expert``: its index in a parameter [E, N, K]."""
        return product(x, weight)

    def embedding(self, name: str, ids: Tensor, weight: Tensor, look_up: LookUp) -> Tensor:
        """Rows of a parameter [V, D]; look_up(weight) looks them up."""
        return look_up(weight)

    def values(self, name: str, x: Tensor, part: str = "") -> Tensor:
        """Values at a site without a weight; ``part``: which of its tensors, as keys or values of a cache."""
        return x


class Tracer(TorchFunctionMode):
    """The running forward pass. Used by `operations.traced`."""

    def __init__(self, model: torch.nn.Module, visitor: Visitor, handlers: Mapping[Any, Handler]) -> None:
        super().__init__()
        self._handlers = handlers
        self.visitor = visitor
        self.reaches: Callable[[str], None] = lambda name: None
        """Called with the name of every site before the visitor is."""
        self.path: list[str] = []
        self.ran: set[str] = set()  # Names of the modules that have run
        self._caches: dict[str, bool] = {}
        self.given: set[int] = set()  # Identities of the parameters that functions of torch received
        self.gathered: list[tuple[Tensor, int, int]] = []
        """Row indices that the running modules have gathered, the number of rows indexed, and the depth: how experts
        get their tokens."""
        self.role = ""  # Role of the current product, where it is no linear layer's
        self.steps: Steps | None = None  # Steps of the current product, where it is one step's
        self._parameters: dict[int, list[tuple[str, Tensor]]] = {}  # By the address of their storage
        for name, tensor in tensors_of(model):
            if tensor.dim() > 1 and tensor.is_floating_point() and not tensor.is_meta and opens(tensor):
                held = self._parameters.setdefault(tensor.untyped_storage().data_ptr(), [])
                held.append((name.removesuffix(".weight"), tensor))
        self._modules = dict(model.named_modules())
        self.streams = bool(streamed_parameters(model))  # Whether weights are loaded and dropped with their modules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        several = (arg if isinstance(arg, list | tuple) else (arg,) for arg in args)
        self.given.update(id(each) for some in several for each in some if type(each) is torch.nn.Parameter)
        handler = self._handlers.get(func)
        if handler is None or not opens(*args, *(kwargs or {}).values()):
            return func(*args, **(kwargs or {}))
        return handler(self, func, args, kwargs or {})

    def named(self, weight: object) -> ParameterRef | None:
        """Return the parameter that a tensor is a view of, with the expert; None where there is none."""
        if not isinstance(weight, Tensor):
            return None
        here = self.path[-1] if self.path else ""
        if weight.is_meta:
            if self.streams:
                raise BadModel(f"{here} uses weights of another module, which can't be streamed; load the model whole")
            return None
        # A tied weight has several names: that of the module that runs is meant.
        parameters = self._parameters.get(weight.untyped_storage().data_ptr(), ())
        streamed = [(f"{here}.{attribute}".removesuffix(".weight"), each) for attribute, each in self._own(weight)]
        for name, parameter in streamed or sorted(parameters, key=lambda pair: pair[0] != here):
            offset = weight.storage_offset() - parameter.storage_offset()
            if parameter.dim() > weight.dim() and (parameter.dim(), weight.dim()) != (3, 2):
                continue  # a layer of several experts, or a head of one
            size = parameter.numel() // (parameter.shape[0] if parameter.dim() > weight.dim() else 1)
            if 0 <= offset < max(parameter.numel(), 1) and weight.numel() == size:
                return name, _part(weight, parameter)
        return None

    def holds_matrices(self, weight: Tensor) -> bool:
        """Return whether the first dimension of [E, ...] counts matrices of a parameter, not parts of one matrix, such
        as heads."""
        held = [*self._own(weight), *self._parameters.get(weight.untyped_storage().data_ptr(), ())]
        counts = (count for _, each in held for count in zip(each.shape[:-2], each.stride(), strict=False))
        return weight.dim() > 2 and (weight.shape[0], weight.stride(0)) in counts

    def streamed(self, weight: Tensor) -> Streamed | None:
        """Return how a weight of the running module is read again; None for one that stays in memory."""
        for attribute, parameter in self._own(weight):
            source = source_of(self._modules[self.path[-1]], attribute)
            return None if source is None else Streamed.of(weight, parameter, _part(weight, parameter), source)
        return None

    def _own(self, weight: Tensor) -> list[tuple[str, Tensor]]:
        """Return the running module's parameter that a weight is a view of; streamed parameters are replaced at each
        run."""
        if not self.streams or not self.path:
            return []
        storage = weight.untyped_storage().data_ptr()
        return [
            (attribute, parameter)
            for attribute, parameter in self._modules[self.path[-1]]._parameters.items()
            if parameter is not None and parameter.untyped_storage().data_ptr() == storage
        ]

    def caches(self, decides: Callable[[], bool]) -> bool:
        """Return whether keys and values of the running module's attention are cached while a text grows: always in
        cross attention, else as ``decides`` says, evaluated once for each pass."""
        here = self.path[-1] if self.path else ""
        if here not in self._caches:
            self._caches[here] = architectures.is_cross(here) or decides()
        return self._caches[here]

    def values(self, name: str, x: Tensor, part: str = "") -> Tensor:
        """Return the visitor's values of a site without a weight."""
        self.reaches(name)
        return self.visitor.values(name, x, part)

    def stage(self, suffix: str, x: Tensor, part: str = "") -> Tensor:
        """Return the visitor's values of a site of the running module."""
        return self.values(f"{self.path[-1] if self.path else ''}:{suffix}", x, part)

    def product(
        self,
        weight: Tensor,
        x: Tensor,
        parameter: ParameterRef,
        product: Product,
        role: str = "",
        steps: Steps | None = None,
    ) -> Tensor:
        """Return a product with a parameter; logits of a head or a router are a site of their own."""
        name, expert = parameter
        table = getattr(self._modules.get(name), "weight", weight)
        if isinstance(self._modules.get(name), torch.nn.Embedding) and weight.shape == table.shape:
            name += HEAD if weight.stride() == table.stride() else ""
        self.role, self.steps = role, steps
        self.reaches(name)
        output = self.visitor.linear(name, x, weight, expert, product)
        return self.values(f"{name}:logits", output) if architectures.gives_logits(name) else output


def opens(*args: Any) -> bool:
    """Return whether a call with these arguments can have sites: none is sparse or nested, and neither vmap nor another
    transform of torch.func runs, in which one tensor represents several."""
    strided = all(each.layout == torch.strided and not each.is_nested for each in args if isinstance(each, Tensor))
    return strided and not torch._C._are_functorch_transforms_active()


def _part(weight: Tensor, parameter: Tensor) -> int | None:
    """Return the index of the expert of a parameter [E, N, K] that a weight [N, K] is a view of."""
    if parameter.dim() != 3 or weight.dim() != 2:
        return None
    return (weight.storage_offset() - parameter.storage_offset()) // parameter.stride(0)


def tensors_of(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers (exported programs may hold weights in these) by name."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
