"""The sites of a forward pass as autograd functions, which hand a visitor their cotangents in the backward pass.

None keeps a streamed weight: what is held of it is how it is read again.
"""

from __future__ import annotations

from typing import Any

import torch

from assay.precision.model.heap import give_back
from assay.precision.model.streaming import Streamed

__all__ = ["ProductOf", "RowsOf", "ValuesOf"]

_LARGE = 1 << 18
"""Elements of a weight whose products leave the heap worth giving back."""


class ProductOf(torch.autograd.Function):
    """A product with a weight."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Any,
        x: Any,
        weight: Any,
        held: Any,
        visitor: Any,
        name: Any,
        expert: Any,
        product: Any,
        rows: Any,
        copied: Any,
    ) -> Any:
        ctx.save_for_backward(x.clone() if copied else x)
        ctx.rest = held, visitor, name, expert, product, rows
        result = product(x, weight)
        return result.clone() if copied else result

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        held, visitor, name, expert, product, rows = ctx.rest
        weight = _now(held)
        gx = g @ weight
        visitor.on_linear(name, x, weight, expert, product, rows, g, gx)
        if weight.numel() >= _LARGE:
            give_back()
        return None, gx, *(None,) * 8


class RowsOf(torch.autograd.Function):
    """Rows of a table."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Any, weight: Any, held: Any, visitor: Any, name: Any, ids: Any, look_up: Any, copied: Any
    ) -> Any:
        ctx.rest = held, visitor, name, ids
        result = look_up(weight)
        return result.clone() if copied else result

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        held, visitor, name, ids = ctx.rest
        visitor.on_embedding(name, _now(held), ids, g)
        return (None,) * 8


class ValuesOf(torch.autograd.Function):
    """Values without a weight."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, x: Any, visitor: Any, name: Any, part: Any, rows: Any, copied: Any) -> Any:
        ctx.save_for_backward(x.clone() if copied else x)
        ctx.rest = visitor, name, part, rows
        return x.clone() if copied else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        visitor, name, part, rows = ctx.rest
        visitor.on_values(name, x, part, rows, g)
        return None, g, *(None,) * 5


def _now(held: torch.Tensor | Streamed) -> torch.Tensor:
    return held() if isinstance(held, Streamed) else held
