"""A model's forward pass with every site open: linears, embeddings, attention's stages, norms, residual stream, logits.

A function mode sees each call of torch below the model, whatever module or exported graph makes it, and hands the ones
that are sites to a visitor: one that collects, one that differentiates, one that simulates an assignment. Parameters
give linears their names, the stack of modules gives the rest theirs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["LookUp", "Product", "Tap", "Visitor", "opened"]

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [..., K] and a weight [N, K] to their product [..., N], bias added."""
LookUp = Callable[[torch.Tensor], torch.Tensor]
"""A table [V, D] to the rows [..., D] that indices stand for."""


class Visitor(Protocol):
    """What is done at the sites. Every method gives back what the model goes on with."""

    def linear(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, expert: int | None, product: Product
    ) -> torch.Tensor:
        """A product with a parameter: weight [N, K]; ``expert``: its place in a parameter [E, N, K]."""

    def embedding(self, name: str, ids: torch.Tensor, weight: torch.Tensor, look_up: LookUp) -> torch.Tensor:
        """Rows of a parameter [V, D]; look_up(weight) looks them up."""

    def values(self, name: str, x: torch.Tensor, part: str = "") -> torch.Tensor:
        """Values that pass a site without a weight; ``part``: which of a site's tensors, keys or values of a cache."""


class Tap(TorchFunctionMode):
    """The open forward pass. Used by `opened`."""

    def __init__(self, model: torch.nn.Module, visitor: Visitor) -> None:
        super().__init__()
        self.visitor = visitor
        self.path: list[str] = []
        self.last_linear = ""
        self.gathered: list[tuple[torch.Tensor, int]] = []
        """Rows that the modules now open have gathered, the last ones last, and of how many: how experts get tokens."""
        self._parameters = _by_storage(model)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self, func, args, kwargs or {})

    def named(self, weight: object) -> tuple[str, int | None, int] | None:
        """Name of the parameter that a tensor is or is a part of, the part's index, and the parameter's dimensions."""
        if not isinstance(weight, torch.Tensor) or weight.is_meta:
            return None
        for name, parameter in self._parameters.get(weight.untyped_storage().data_ptr(), ()):
            offset = weight.storage_offset() - parameter.storage_offset()
            if 0 <= offset < max(parameter.numel(), 1):
                part = None
                if parameter.dim() == 3 and weight.dim() == 2:
                    part = offset // parameter.stride(0)
                return name, part, parameter.dim()
        return None

    def site(self, suffix: str) -> str:
        """Name of a site of the module that is running."""
        return f"{self.path[-1] if self.path else ''}:{suffix}"

    def product(
        self, weight: torch.Tensor, x: torch.Tensor, found: tuple[str, int | None, int], product: Product
    ) -> torch.Tensor:
        name, expert, _ = found
        self.last_linear = name
        return self.visitor.linear(name, x, weight, expert, product)


@contextmanager
def opened(model: torch.nn.Module, visitor: Visitor) -> Iterator[Tap]:
    """Within, calls of ``model`` go by way of the visitor. Hooks are taken off afterwards, whatever happens."""
    tap = Tap(model, visitor)
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(_enter(tap, name, module), with_kwargs=True))
        handles.append(module.register_forward_hook(_leave(tap, name, module), always_call=True))
    try:
        with tap:
            yield tap
    finally:
        for handle in handles:
            handle.remove()


def _enter(tap: Tap, name: str, module: torch.nn.Module) -> Callable[..., Any]:
    norm = _is_norm(module)

    def enter(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tap.path.append(name)
        if norm and args and isinstance(args[0], torch.Tensor):
            with outside(tap):
                return (tap.visitor.values(f"{name}:input", args[0]), *args[1:]), kwargs
        return None

    return enter


def _leave(tap: Tap, name: str, module: torch.nn.Module) -> Callable[..., Any]:
    suffix = "output" if _is_norm(module) else "residual" if _is_layer(name, module) else None

    def leave(_module: object, _args: object, output: Any) -> Any:
        tap.path.pop()
        if not _is_norm(module):
            tap.gathered.clear()
        if suffix is None or output is None:
            return None
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, torch.Tensor) or not first.is_floating_point():
            return None
        with outside(tap):
            first = tap.visitor.values(f"{name}:{suffix}", first)
        return (first, *output[1:]) if isinstance(output, tuple) else first

    return leave


def outside(tap: Tap) -> AbstractContextManager[object]:
    """Without the mode: what a visitor computes is no part of the model."""
    return torch._C.DisableTorchFunction()


def _is_norm(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("Norm") or isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm)


def _is_layer(name: str, module: torch.nn.Module) -> bool:
    """Whether a module is one of a stack of layers: numbered, and with modules of its own."""
    return re.search(r"(^|\.)\d+$", name) is not None and any(module.children())


def _by_storage(model: torch.nn.Module) -> dict[int, list[tuple[str, torch.Tensor]]]:
    """Parameters (and buffers, which exported programs may hold weights in) by the storage that they lie in."""
    found: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dim() in (2, 3) and tensor.is_floating_point():
            found.setdefault(tensor.untyped_storage().data_ptr(), []).append((name.removesuffix(".weight"), tensor))
    return found


def _linear(tap: Tap, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    found = tap.named(weight)
    if found is None:
        return func(*args, **kwargs)
    return tap.product(weight, x, found, lambda a, w: torch.nn.functional.linear(a, w, bias))


def _matmul(tap: Tap, func: Any, args: Any, kwargs: Any) -> Any:
    """x @ W with a parameter W [K, N]."""
    found = tap.named(args[1]) if len(args) == 2 and not kwargs else None
    if found is None or args[1].dim() != 2:
        return func(*args, **kwargs)
    return tap.product(args[1].mT, args[0], found, lambda a, w: torch.matmul(a, w.mT))


def _addmm(tap: Tap, func: Any, args: Any, kwargs: Any) -> Any:
    """bias + x @ W with a parameter W [K, N], as GPT-2's Conv1D and exported graphs have it."""
    found = tap.named(args[2]) if len(args) == 3 and not kwargs else None
    if found is None:
        return func(*args, **kwargs)
    return tap.product(args[2].mT, args[1], found, lambda a, w: torch.addmm(args[0], a, w.mT))


def _embedding(tap: Tap, func: Any, args: Any, kwargs: Any) -> Any:
    # aten.embedding has the weight first, torch.nn.functional.embedding the indices.
    first = 0 if args[0].is_floating_point() else 1
    weight, ids = args[first], args[1 - first]
    found = tap.named(weight)
    if found is None:
        return func(*args, **kwargs)

    def look_up(w: torch.Tensor) -> torch.Tensor:
        return func(*(w if value is weight else value for value in args), **kwargs)

    return tap.visitor.embedding(found[0], ids, weight, look_up)


def _getitem(tap: Tap, func: Any, args: Any, kwargs: Any) -> Any:
    _note_gather(tap, args[0], args[1])
    return func(*args, **kwargs)


def _index_select(tap: Tap, func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) == 3 and args[1] == 0:
        _note_gather(tap, args[0], args[2])
    return func(*args, **kwargs)


def _note_gather(tap: Tap, x: Any, index: Any) -> None:
    index = index[0] if isinstance(index, tuple | list) and len(index) == 1 else index
    if isinstance(index, torch.Tensor) and index.dim() == 1 and index.dtype == torch.int64 and x.dim() == 2:
        tap.gathered.append((index, x.shape[0]))


def _attention(
    tap: Tap,
    func: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    return _opened_attention(tap, *args, **kwargs)


def _opened_attention(
    tap: Tap,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention by its definition, its stages open: q [..., H, S, D], k and v [..., Hkv, S, D]."""
    values = tap.visitor.values
    k, v = values(tap.site("kv_cache"), k, "keys"), values(tap.site("kv_cache"), v, "values")
    q, k, v = values(tap.site("q"), q), values(tap.site("k"), k), values(tap.site("v"), v)
    if q.dim() > 2 and k.shape[-3] != q.shape[-3]:
        repeats = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
    scores = (q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ k.mT
    scores = values(tap.site("scores"), scores)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    probabilities = values(tap.site("probabilities"), _MaskedSoftmax.apply(scores, attn_mask))  # type: ignore[no-untyped-call]
    return values(tap.site("output"), probabilities @ v)


class _MaskedSoftmax(torch.autograd.Function):
    """Softmax along the last dimension under a boolean mask (True: visible) or one that is added; none where nothing is
    visible. One function, for behind a mask the gradient of a softmax is zero by itself."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask
        probabilities = scores.softmax(-1)
        if mask is not None and mask.dtype == torch.bool and not bool(mask.any(-1).all()):
            probabilities.masked_fill_(~mask.any(-1, keepdim=True), 0.0)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (p,) = ctx.saved_tensors
        return torch._softmax_backward_data(g, p, -1, p.dtype), None


def _softmax(tap: Tap, func: Any, args: Any, kwargs: Any) -> Any:
    """A softmax in a module whose name says attention: eager attention's scores and probabilities."""
    if not tap.path or not re.search(r"att", tap.path[-1].rpartition(".")[2]):
        return func(*args, **kwargs)
    scores = tap.visitor.values(tap.site("scores"), args[0])
    return tap.visitor.values(tap.site("probabilities"), func(scores, *args[1:], **kwargs))


_aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[[Tap, Any, Any, Any], Any]] = {
    torch.nn.functional.linear: _linear,
    _aten.linear.default: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    _aten.matmul.default: _matmul,
    _aten.mm.default: _matmul,
    torch.addmm: _addmm,
    _aten.addmm.default: _addmm,
    torch.nn.functional.embedding: _embedding,
    _aten.embedding.default: _embedding,
    torch.nn.functional.scaled_dot_product_attention: _attention,
    _aten.scaled_dot_product_attention.default: _attention,
    torch.nn.functional.softmax: _softmax,
    torch.softmax: _softmax,
    torch.Tensor.softmax: _softmax,
    torch.Tensor.__getitem__: _getitem,
    torch.index_select: _index_select,
    torch.Tensor.index_select: _index_select,
}
