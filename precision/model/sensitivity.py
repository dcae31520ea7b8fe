"""Every scheme at every site from one backward pass: the products of the output's cotangent with what schemes change.

For a cotangent v at the output, t[s, q] = <J_s' v, d_sq>, where d_sq is what scheme q changes at site s, summed over
all tokens and features of a sequence before anything is squared; then, for every assignment c at once,
E (sum_s t[s, c(s)])^2 is the metric's quadratic form, cross terms included. A weight's change needs the gradient of
each sequence only, which is formed for one product at a time and never kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from assay.precision.model.menu import Fits
from assay.precision.model.simulation import split_product
from assay.precision.model.tap import LookUp, Product, Tap
from assay.precision.schemes import SCHEMES, Stored

__all__ = ["Sensitivity"]

_AT_ONCE = 1 << 24
"""Elements of weight changes that are held at once."""

Columns = dict[tuple[str, str], torch.Tensor]
"""Products [B] of each (site, scheme)."""


@dataclass(slots=True)
class _Rows:
    """Which sequence each row of a flattened tensor is of: ``each`` rows in order, or an index [n]; else unknown."""

    each: int = 0
    index: torch.Tensor | None = None

    def sums(self, products: torch.Tensor, batch: int) -> torch.Tensor:
        """Sums over the rows [n] of every sequence, [B]; all in the first where the sequences are unknown."""
        if self.each:
            return products.reshape(batch, -1).sum(1)
        found = products.new_zeros(batch)
        if self.index is None:
            found[0] = products.sum()
            return found
        return found.index_add_(0, self.index, products)


class Sensitivity:
    """A visitor that leaves the forward pass as it is and, in the backward pass, forms products for every menu.

    ``columns`` of the batch stand in `columns` once `torch.autograd.grad` has run; `known` is False where some rows
    could not be given to sequences: then only the batch's sum over sequences means anything.
    """

    def __init__(self, menus: Mapping[str, Sequence[str]], fits: Fits, tied: Mapping[str, str], batch: int) -> None:
        self.columns: Columns = {}
        self.known = True
        self.tap: Tap | None = None
        self._menus = menus
        self._fits = fits
        self._tied = tied
        self._batch = batch
        self.anchor = torch.zeros((), requires_grad=True)
        self._changes: tuple[torch.Tensor | None, dict[object, torch.Tensor]] = (None, {})

    def linear(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, expert: int | None, product: Product
    ) -> torch.Tensor:
        return _Product.apply(self.anchor, x, weight.detach(), self, name, expert, product, self._rows(x))  # type: ignore[no-untyped-call]

    def embedding(self, name: str, ids: torch.Tensor, weight: torch.Tensor, look_up: LookUp) -> torch.Tensor:
        if ids.dim() == 2 and ids.shape[0] == 1 and self._batch > 1:  # positions, which all sequences share
            ids, shared = ids.expand(self._batch, -1), look_up
            look_up = lambda w: shared(w).expand(self._batch, -1, -1)  # noqa: E731
        return _LookUp.apply(self.anchor, ids, weight.detach(), self, name, look_up)  # type: ignore[no-untyped-call]

    def values(self, name: str, x: torch.Tensor, part: str = "") -> torch.Tensor:
        return _Values.apply(self.anchor, x, self, name, part, self._rows(x))  # type: ignore[no-untyped-call]

    def _rows(self, x: torch.Tensor) -> _Rows:
        count = x.numel() // max(x.shape[-1], 1)
        gathered = self.tap.gathered if self.tap is not None else []
        if x.dim() == 2 and gathered and gathered[-1][0].numel() == count:
            index, source = gathered[-1]
            return _Rows(index=index * self._batch // source)
        if count and count % self._batch == 0 and (x.dim() != 2 or not gathered):
            return _Rows(each=count // self._batch)
        self.known = False
        return _Rows()

    def on_linear(
        self,
        name: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        expert: int | None,
        product: Product,
        rows: _Rows,
        g: torch.Tensor,
        gx: torch.Tensor,
    ) -> None:
        """Products of a linear: x [..., K], weight [N, K], cotangents g [..., N] of its output and gx of its input."""
        menu = self._menus.get(name, ())
        weights = {scheme: self._fits.weight(name, SCHEMES[scheme], weight, expert) for scheme in menu}
        of_weights = self._weight_products(weights.values(), x, weight, g, rows)
        of_inputs: dict[object, torch.Tensor] = {}
        for scheme in menu:
            total = of_weights[id(weights[scheme])]
            stored = self._fits.input(name, SCHEMES[scheme], weight, expert)
            if stored is not None:
                key = _identity(stored)
                if key not in of_inputs:
                    of_inputs[key] = self._sums(gx, self._change(x, stored), rows)
                total = total + of_inputs[key]
            self._add(name, scheme, total)
        for suffix in (":accumulator", ":all_reduce"):
            for scheme in self._menus.get(name + suffix, ()):
                split = SCHEMES[scheme].split
                assert split is not None
                change = split_product(x, weight, split, product) - product(x, weight)
                self._add(name + suffix, scheme, self._sums(g, change, rows))

    def on_embedding(
        self, name: str, ids: torch.Tensor, weight: torch.Tensor, look_up: LookUp, g: torch.Tensor
    ) -> None:
        """Products of a table [V, D]: cotangents g [B, ..., D] of the rows that were looked up."""
        owner = self._tied.get(name, name)
        for scheme in self._menus.get(owner, ()):
            stored = self._fits.weight(owner, SCHEMES[scheme], weight)
            if stored is not None:
                self._add(owner, scheme, self._sums(g, look_up(stored(weight) - weight), self._rows(g)))

    def on_values(self, name: str, x: torch.Tensor, part: str, rows: _Rows, g: torch.Tensor) -> None:
        """Products of values x and their cotangents g, of one shape."""
        for scheme in self._menus.get(name, ()):
            stored = self._fits.values(name, SCHEMES[scheme], part)
            if stored is not None:
                self._add(name, scheme, self._sums(g, self._change(x, stored), rows))

    def _add(self, name: str, scheme: str, products: torch.Tensor) -> None:
        key = (name, scheme)
        self.columns[key] = self.columns[key] + products if key in self.columns else products

    def _sums(self, g: torch.Tensor, change: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """[B + 1]: the products of every sequence, and behind them the sum of squares of all their terms."""
        terms = g * change
        squares = torch.linalg.vecdot(terms.flatten(), terms.flatten())
        sums = (
            terms.reshape(self._batch, -1).sum(1) if rows.each else rows.sums(terms.flatten(0, -2).sum(-1), self._batch)
        )
        return torch.cat([sums, squares[None]])

    def _change(self, x: torch.Tensor, stored: Stored) -> torch.Tensor:
        """What storing an input changes. Linears that share an input, as q, k and v do, share its changes."""
        kept, changes = self._changes
        if kept is None or kept.data_ptr() != x.data_ptr() or kept.shape != x.shape:
            changes = {}
            self._changes = (x, changes)
        key = _identity(stored)
        if key not in changes:
            changes[key] = stored(x) - x
        return changes[key]

    def _weight_products(
        self, menu: Iterable[Stored | None], x: torch.Tensor, weight: torch.Tensor, g: torch.Tensor, rows: _Rows
    ) -> dict[int, torch.Tensor]:
        """<g_b' x_b, change of the weight> for every sequence b, [B], by the stored form's id."""
        wanted = {id(stored): stored for stored in menu}
        found = {id(None): torch.zeros(self._batch + 1)}
        wanted.pop(id(None), None)
        if not wanted:
            return found
        gradients = self._gradients(x, g, rows).flatten(1)
        step = max(_AT_ONCE // max(weight.numel(), 1), 1)
        keys = list(wanted)
        for start in range(0, len(keys), step):
            some = keys[start : start + step]
            changes = torch.stack([(wanted[key](weight) - weight).flatten() for key in some])  # type: ignore[misc]
            sums = changes @ gradients.T
            squares = changes.square_() @ gradients.square().sum(0)
            found |= dict(zip(some, torch.cat([sums, squares[:, None]], 1), strict=True))
        return found

    def _gradients(self, x: torch.Tensor, g: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """The weight's gradient of every sequence, [B, N, K]."""
        if rows.each:
            return g.reshape(self._batch, -1, g.shape[-1]).mT @ x.reshape(self._batch, -1, x.shape[-1])
        x, g = x.flatten(0, -2), g.flatten(0, -2)
        found = x.new_zeros(self._batch, g.shape[-1], x.shape[-1])
        if rows.index is None:
            found[0] = g.mT @ x
            return found
        for sequence in torch.unique(rows.index).tolist():
            chosen = rows.index == sequence
            found[sequence] = g[chosen].mT @ x[chosen]
        return found


def _identity(stored: Stored) -> object:
    """What tells stored forms of one tensor apart."""
    if stored.scales is None and stored.columns is None and stored.divisor is None:
        return stored.quantizer, stored.rotated
    return id(stored)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Any, x: Any, weight: Any, visitor: Any, name: Any, expert: Any, product: Any, rows: Any
    ) -> Any:
        ctx.save_for_backward(x)
        ctx.rest = weight, visitor, name, expert, product, rows
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        weight, visitor, name, expert, product, rows = ctx.rest
        gx = g @ weight
        visitor.on_linear(name, x, weight, expert, product, rows, g, gx)
        return None, gx, *(None,) * 6


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Any, ids: Any, weight: Any, visitor: Any, name: Any, look_up: Any) -> Any:
        ctx.rest = ids, weight, visitor, name, look_up
        return look_up(weight)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        ids, weight, visitor, name, look_up = ctx.rest
        visitor.on_embedding(name, ids, weight, look_up, g)
        return (None,) * 6


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Any, x: Any, visitor: Any, name: Any, part: Any, rows: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.rest = visitor, name, part, rows
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        visitor, name, part, rows = ctx.rest
        visitor.on_values(name, x, part, rows, g)
        return None, g, *(None,) * 4
