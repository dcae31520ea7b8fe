"""Which functions of torch are sites, and how a call of each is handed to the visitor."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

import torch

from assay.precision.model.attention import scaled_dot_product
from assay.precision.model.multihead import multihead
from assay.precision.model.tap import Handlers, Tap, Visitor, opened_with

__all__ = ["opened"]


def opened(model: torch.nn.Module, visitor: Visitor) -> AbstractContextManager[Tap]:
    """Within, calls of ``model`` go by way of the visitor. Hooks are taken off afterwards, whatever happens."""
    return opened_with(_HANDLERS, model, visitor)


def _linear(tap: Tap, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias = list(args) + [kwargs.get(name) for name in ("input", "weight", "bias")[len(args) :]]
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
    bias = args[0]  # and nothing else of args, whose weight may be streamed
    return tap.product(args[2].mT, args[1], found, lambda a, w: torch.addmm(bias, a, w.mT))


def _embedding(tap: Tap, func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) < 2:
        args = (*args, *(kwargs[name] for name in ("input", "weight")[len(args) :]))
        kwargs = {name: value for name, value in kwargs.items() if name not in ("input", "weight")}
    # aten.embedding has the weight first, torch.nn.functional.embedding the indices.
    first = 0 if args[0].is_floating_point() else 1
    weight, ids = args[first], args[1 - first]
    found = tap.named(weight)
    if found is None:
        return func(*args, **kwargs)

    before, after = args[:first], args[first + 1 :]

    def look_up(w: torch.Tensor) -> torch.Tensor:
        return func(*before, w, *after, **kwargs)

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
        tap.gathered.append((index, x.shape[0], len(tap.path)))


def _softmax(tap: Tap, func: Any, args: Any, kwargs: Any) -> Any:
    """A softmax in a module whose name says attention: eager attention's scores and probabilities."""
    if not tap.path or not re.search(r"att", tap.path[-1].rpartition(".")[2]):
        return func(*args, **kwargs)
    # Behind a mask that was applied before stand infinities, or the format's least number: no values of the site.
    visible = args[0] > torch.finfo(args[0].dtype).min / 2
    scores = tap.visitor.values(tap.site("scores"), args[0].masked_fill(~visible, 0.0))
    scores = torch.where(visible, scores, args[0])
    return tap.visitor.values(tap.site("probabilities"), func(scores, *args[1:], **kwargs))


_aten = torch.ops.aten
_HANDLERS: Handlers = {
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
    torch.nn.functional.scaled_dot_product_attention: scaled_dot_product,
    _aten.scaled_dot_product_attention.default: scaled_dot_product,
    torch.nn.functional.multi_head_attention_forward: multihead,
    torch.nn.functional.softmax: _softmax,
    torch.softmax: _softmax,
    torch.Tensor.softmax: _softmax,
    torch.Tensor.__getitem__: _getitem,
    torch.index_select: _index_select,
    torch.Tensor.index_select: _index_select,
}
