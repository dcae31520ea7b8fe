"""Every scheme at every site from one backward pass: the products of the output's cotangent with what schemes change.

For a cotangent v at the output, t[s, q] = <J_s' v, d_sq>, where d_sq is what scheme q changes at site s, summed over
all tokens and features of a sequence before anything is squared; then, for every assignment c at once,
E (sum_s t[s, c(s)])^2 is the metric's quadratic form, cross terms included. A weight's change needs the gradient of
each sequence only, which is formed for some rows of one product at a time and never kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from assay.precision.model.backward import ProductOf, RowsOf, ValuesOf
from assay.precision.model.menu import Fits
from assay.precision.model.parts import Part, parts_of
from assay.precision.model.simulation import SPLITS, split_product
from assay.precision.model.streaming import Streamed
from assay.precision.model.tap import LookUp, Product, Tap
from assay.precision.schemes import SCHEMES, Stored

__all__ = ["Sensitivity", "Term"]

_AT_ONCE = 1 << 24
"""Elements of weights' gradients, and of their changes, that are held at once; but no fewer rows than _BLOCK."""
_BLOCK = 128
"""Rows of a weight that are looked at together: a multiple of those of every scheme's blocks."""
_TURNS = 4
"""Batches that may share a weight's rows among them."""
_ENOUGH = 1 << 16
"""Elements of values that tell the size of an error: more are thinned to these, but not below _ROWS rows."""
_ROWS = 256


@dataclass(slots=True)
class Term:
    """One part of one site in one batch."""

    sums: torch.Tensor
    """[B], float32: the products of every sequence."""
    squares: torch.Tensor
    """[B], float32: the squares of each product's terms, a row of the tensor each, summed."""
    thinning: int
    """One row of this many was looked at, but for the largest."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which sequence each row of a flattened tensor is of: ``each`` rows in order, or an index [n]; else unknown.

    Unknown are rows that sequences share and those that came by a way that isn't followed. Their products are given to
    the first sequence as one, whose expected square is that of all, for cotangents of sequences are independent.
    """

    each: int = 0
    index: torch.Tensor | None = None

    def sums(self, products: torch.Tensor, batch: int) -> torch.Tensor:
        """Sums over the rows [n] of every sequence, [B]."""
        if self.each:
            return products.reshape(batch, -1).sum(1)
        found = products.new_zeros(batch)
        if self.index is None:
            found[0] = products.sum()
            return found
        return found.index_add_(0, self.index.to(found.device), products)

    def thinned(self, index: torch.Tensor | None) -> _Rows:
        """Of some of the rows."""
        if index is None:
            return self
        if self.each:
            return _Rows(index=index // self.each)
        return _Rows(index=None if self.index is None else self.index[index])


class Sensitivity:
    """A visitor that leaves the forward pass as it is and, in the backward pass, forms products for every menu.

    The batch's `terms` are there once `torch.autograd.grad` has run with respect to `anchor`. ``batch``: its sequences;
    ``turn``: its number and how many batches there are, which look at a weight's rows in turns.
    """

    def __init__(
        self,
        menus: Mapping[str, Sequence[str]],
        fits: Fits,
        tied: Mapping[str, str],
        batch: int,
        turn: tuple[int, int] = (0, 1),
        seed: int = 0,
    ) -> None:
        self.terms: dict[tuple[str, Part], Term] = {}
        self.anchor = torch.zeros((), requires_grad=True)
        self.tap: Tap | None = None
        self.copies = False
        """Whether values are kept in copies, for a model that writes over them."""
        self._menus = menus
        self._fits = fits
        self._tied = tied
        self._batch = batch
        self._turn = turn
        self._draw = torch.Generator().manual_seed(seed + turn[0])
        self._changes: tuple[torch.Tensor | None, _Thin, dict[object, tuple[Stored, torch.Tensor]]] = (
            None,
            _Thin(),
            {},
        )

    def linear(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, expert: int | None, product: Product
    ) -> torch.Tensor:
        held = self._held(weight)
        return ProductOf.apply(
            self.anchor, x, weight.detach(), held, self, name, expert, product, self._rows(x), self.copies
        )  # type: ignore[no-untyped-call]

    def embedding(self, name: str, ids: torch.Tensor, weight: torch.Tensor, look_up: LookUp) -> torch.Tensor:
        if ids.dim() == 2 and ids.shape[0] == 1 and self._batch > 1:  # positions, which all sequences share
            shared = look_up
            look_up = lambda w: shared(w).expand(self._batch, -1, -1)  # noqa: E731
            ids = ids.expand(self._batch, -1)
        return RowsOf.apply(self.anchor, weight.detach(), self._held(weight), self, name, ids, look_up, self.copies)  # type: ignore[no-untyped-call]

    def values(self, name: str, x: torch.Tensor, part: str = "") -> torch.Tensor:
        return ValuesOf.apply(self.anchor, x, self, name, part, self._rows(x), self.copies)  # type: ignore[no-untyped-call]

    def _held(self, weight: torch.Tensor) -> torch.Tensor | Streamed:
        """What the backward pass has the weight from."""
        streamed = self.tap.streamed(weight) if self.tap is not None else None
        return streamed or weight.detach()

    def _rows(self, x: torch.Tensor) -> _Rows:
        count = x.numel() // max(x.shape[-1], 1)
        gathered = self.tap.gathered if self.tap is not None else []
        if x.dim() == 2 and gathered:
            index, source, _ = gathered[-1]
            return _Rows(index=index * self._batch // source if index.numel() == count else None)
        if x.dim() == 3 and x.shape[1] == self._batch != x.shape[0]:  # [T, B, K]
            return _Rows(index=torch.arange(count, device=x.device) % self._batch)
        shared = x.dim() > 2 and x.shape[0] == 1 < self._batch
        return _Rows() if shared or not count or count % self._batch else _Rows(each=count // self._batch)

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
        owner = self._tied.get(name, name)
        schemes = [SCHEMES[scheme] for scheme in self._menus.get(owner, ())]
        weights = {parts_of(s)[0]: self._fits.weight(owner, s, weight, expert) for s in schemes if s.weight}
        self._on_weight(owner, weights, x, weight, g, rows)
        inputs = {parts_of(s)[-1]: self._fits.input(owner, s, weight, expert) for s in schemes if s.activation}
        self._on_values(owner, inputs, x, gx, rows)
        for suffix in SPLITS:
            for scheme in self._menus.get(name + suffix, ()):
                split = SCHEMES[scheme].split
                assert split is not None
                change = split_product(x, weight, [split], product) - product(x, weight)
                self._add(name + suffix, parts_of(SCHEMES[scheme])[0], self._term(g * change, rows))

    def on_embedding(self, name: str, weight: torch.Tensor, ids: torch.Tensor, g: torch.Tensor) -> None:
        """Products of a table [V, D]: cotangents g [..., D] of the rows ids [B, ...] or [T] that were looked up.

        A row that a sequence looks up often changes in one way at all these places: its cotangents are added first.
        """
        owner = self._tied.get(name, name)
        count = ids.numel()
        shared = ids.dim() == 1 and bool((ids.diff() > 0).all())  # positions, which all sequences share
        known = not shared and count % self._batch == 0
        sequence = torch.arange(count, device=g.device) * (self._batch if known else 0) // count
        places, of = torch.unique(sequence * weight.shape[0] + ids.flatten(), return_inverse=True)
        g = g.new_zeros(len(places), g.shape[-1]).index_add_(0, of, g.flatten(0, -2))
        ids, rows = places % weight.shape[0], _Rows(index=places // weight.shape[0] if known else None)
        schemes = [SCHEMES[scheme] for scheme in self._menus.get(owner, ())]
        for part, scheme in {parts_of(s)[0]: s for s in schemes if s.weight}.items():
            stored = self._fits.weight(owner, scheme, weight)
            if stored is not None:
                self._add(owner, part, self._term(g * _changes_of_rows(stored, weight, ids), rows))

    def on_values(self, name: str, x: torch.Tensor, part: str, rows: _Rows, g: torch.Tensor) -> None:
        """Products of values x and their cotangents g, of one shape."""
        schemes = [SCHEMES[scheme] for scheme in self._menus.get(name, ())]
        self._on_values(name, {parts_of(s)[-1]: self._fits.values(name, s, part) for s in schemes}, x, g, rows)

    def _on_values(
        self, name: str, menu: Mapping[Part, Stored | None], x: torch.Tensor, g: torch.Tensor, rows: _Rows
    ) -> None:
        """Linears that share an input, as q, k and v do, share its changes, and so does the norm that it comes from."""
        kept, thin, changes = self._changes
        if kept is None or (kept.data_ptr(), kept.shape, kept.stride()) != (x.data_ptr(), x.shape, x.stride()):
            thin, changes = self._thin(x), {}
            self._changes = (x, thin, changes)
        some = thin.of(x)
        cotangents = thin.of(g)
        few = rows.thinned(thin.index)
        for part, stored in menu.items():
            if stored is None:
                continue
            key = _identity(stored)
            if key not in changes:
                changes[key] = stored, stored(some) - some  # both: an identity is only one's own as long as one lives
            self._add(name, part, self._term(cotangents * changes[key][1], few, thin))

    def _thin(self, x: torch.Tensor) -> _Thin:
        """One row at random of every few, and all of those that are much larger than the mean."""
        count = x.numel() // x.shape[-1]
        step = max(min(x.numel() // _ENOUGH, count // _ROWS, 16), 1)
        if step == 1:
            return _Thin()
        sizes = x.detach().flatten(0, -2).abs().amax(-1)
        large = sizes > step * sizes.mean()
        picks = torch.arange(0, count, step) + torch.randint(step, (-(-count // step),), generator=self._draw)
        picks = picks[picks < count].to(x.device)
        picks = picks[~large[picks]]
        index = torch.cat([large.nonzero()[:, 0], picks])
        return _Thin(step, index, torch.where(large[index], 1.0, step**0.5))

    def _term(self, terms: torch.Tensor, rows: _Rows, thin: _Thin | None = None) -> Term:
        sums = terms.flatten(0, -2).sum(-1)
        if thin is not None and thin.roots is not None:
            sums = sums * thin.roots
        step = 1 if thin is None else thin.step
        return Term(rows.sums(sums, self._batch).cpu(), rows.sums(sums.square(), self._batch).cpu(), step)

    def _add(self, name: str, part: Part, term: Term) -> None:
        before = self.terms.get((name, part))
        if before is not None:
            thinning = max(before.thinning, term.thinning)
            term = Term(before.sums + term.sums, before.squares + term.squares, thinning)
        self.terms[name, part] = term

    def _on_weight(
        self,
        name: str,
        menu: Mapping[Part, Stored | None],
        x: torch.Tensor,
        weight: torch.Tensor,
        g: torch.Tensor,
        rows: _Rows,
    ) -> None:
        """<g_b' x_b, change of the weight> for every sequence b."""
        wanted = [(part, stored) for part, stored in menu.items() if stored is not None]
        if not wanted:
            return
        turns, mine = self._rows_in_turn(weight)
        for start, stop in mine:
            piece = weight[start:stop]
            gradients = self._gradients(x, g[..., start:stop], rows).permute(1, 2, 0)
            step = max(_AT_ONCE // max(piece.numel(), 1), 1)
            for first in range(0, len(wanted), step):
                some = wanted[first : first + step]
                changes = torch.stack([stored.of_rows(start, stop)(piece) - piece for _, stored in some], 1)
                products = (changes @ gradients).mul_(turns**0.5)
                sums, squares = products.sum(0).cpu(), products.square_().sum(0).cpu()
                for (part, _), each, square in zip(some, sums, squares, strict=True):
                    self._add(name, part, Term(each, square, turns))

    def _rows_in_turn(self, weight: torch.Tensor) -> tuple[int, list[tuple[int, int]]]:
        """How many batches look at all rows of a weight together, and this one's ranges. So none is stored anew for
        every batch; as many batches look at each row."""
        index, count = self._turn
        blocks = -(-weight.shape[0] // _BLOCK)
        turns = max(turns for turns in range(1, _TURNS + 1) if count % turns == 0 and turns <= blocks)
        size = -(-blocks // turns) * _BLOCK
        first = index % turns * size
        mine = weight[first : first + size]
        return turns, [(first + start, first + stop) for start, stop in _some_rows(mine, self._batch)]

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


@dataclass(frozen=True, slots=True)
class _Thin:
    """Some of a tensor's rows, or all."""

    step: int = 1
    """How many rows the smaller ones of them stand for."""
    index: torch.Tensor | None = None
    roots: torch.Tensor | None = None
    """Of each row the root of how many it stands for: squares grow with them, sums of independent rows with that."""

    def of(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        return flat.contiguous() if self.index is None else flat[self.index]


def _some_rows(weight: torch.Tensor, batch: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of rows of a weight [N, K] whose gradients, of so many sequences, are few enough to be held."""
    count = max(_AT_ONCE // max(batch * weight.shape[-1], 1) // _BLOCK, 1) * _BLOCK
    return ((start, min(start + count, weight.shape[0])) for start in range(0, weight.shape[0], count))


def _changes_of_rows(stored: Stored, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What is changed in the rows ids [...] of a table [V, D]: [..., D]."""
    if stored.quantizer.per != "block":
        rows = weight[ids]
        return stored.at_rows(ids)(rows) - rows
    flat = ids.flatten()
    found = weight.new_empty(*flat.shape, weight.shape[-1])
    for start, stop in _some_rows(weight):
        here = ((flat >= start) & (flat < stop)).nonzero()[:, 0]
        if here.numel():
            piece = weight[start:stop]
            found[here] = (stored.of_rows(start, stop)(piece) - piece)[flat[here] - start]
    return found.reshape(*ids.shape, -1)


def _identity(stored: Stored) -> object:
    """What tells stored forms of one tensor apart."""
    if stored.scales is None and stored.columns is None and stored.divisor is None:
        return stored.quantizer, stored.rotated
    return id(stored)
