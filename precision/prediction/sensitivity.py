"""Every scheme at every site from one backward pass: products of the output's cotangent with each scheme's change.

For a cotangent v at the output, t[s, q] = <J_s' v, d_sq>, where d_sq is the change of scheme q at site s, summed over
all tokens and features of a sequence before anything is squared; then, for every assignment c at once, E (sum_s t[s,
c(s)])^2 is the metric's quadratic form, cross terms included. A weight's change needs the gradient of each sequence,
which is formed for some rows of one product at a time and never stored. Where rows are sampled (`row_sampling`), a
batch's cotangents share the rows, so that schemes store them once: until the last cotangent only its values at these
rows are stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from assay.precision.observation import groups
from assay.precision.observation.qparams import QParams
from assay.precision.observation.running import rows_kept
from assay.precision.observation.streaming import Streamed
from assay.precision.observation.tracer import LookUp, Product, Steps, Visitor
from assay.precision.prediction.perturbations import Change, Perturbation, Term, perturbations_of, value_perturbation
from assay.precision.prediction.row_sampling import Rows, RowSample, RowSampler, Subsample
from assay.precision.prediction.simulation import SPLITS, split_product
from assay.precision.schemes import SCHEMES, FakeQuantizer, Scheme
from assay.runtime.memory import trim_heap


class PassThrough(torch.autograd.Function):
    """``run(x)`` in the forward pass; in the backward pass ``back(x, g)``, which gives x's cotangent, or None.

    ``back`` must not hold a streamed weight, only its reader. ``copied``: x is stored, and the result returned, as a
    copy that the model can't overwrite.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Any, x: Any, run: Any, back: Any, copied: Any) -> Any:
        ctx.save_for_backward(x.clone() if copied else x)
        ctx.back = back
        result = run(x)
        return result.clone() if copied else result

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return None, ctx.back(x, g), None, None, None


_AT_ONCE = 1 << 22  # Elements of weight gradients, and of their changes, held at once; at least the rows of one block
_CACHED = 1 << 18  # Elements of a weight evaluated together, so that their intermediate values fit a core's cache


@dataclass(slots=True)
class SharedRows:
    """The sampled rows of one product's weight, and the cotangents so far at these rows, [..., n]."""

    drawn: tuple[float, RowSample] | None = None
    given: dict[int, Tensor] = field(default_factory=dict)


_Terms = dict[tuple[str, Perturbation], Term]
_Changes = dict[object, tuple[FakeQuantizer, Tensor]]
"""Changes by `_identity`, with their quantizers, whose identities hold only while these live."""

_RELEASE_BYTES = 1 << 25  # Bytes by which products may grow in memory before freed ones are returned
_ENOUGH = 1 << 16
"""Elements of values that suffice to estimate an error: more are subsampled, but to no fewer than _LEAST_ROWS rows."""
_LEAST_ROWS = 256

_Values = tuple[Tensor, Subsample, _Changes]  # Values with the subsample of rows and the changes at these


@dataclass(slots=True)
class _Given:
    """The cotangents so far at one site: the values, and the cotangents at their rows, [n, K] each."""

    of: _Values | None = None
    cotangents: dict[int, Tensor] = field(default_factory=dict)
    overlapping: bool = False
    """Whether rows hold the same values, as windows of a convolution do: their errors add up, which a sample of rows
    can't show."""


class Sensitivity(Visitor):
    """A visitor that leaves the forward pass unchanged and, in the backward pass, forms products for every menu.

    The batch's `terms` are complete once `torch.autograd.grad` has run with respect to `anchor`; for a further
    cotangent it runs again, after `begin`. ``batch``: its sequences; ``sampler``: chooses rows of weights; ``further``:
    the sites that further cotangents evaluate too, None: all.
    """

    def __init__(
        self,
        menus: Mapping[str, Sequence[str]],
        qparams: QParams,
        tied: Mapping[str, str],
        batch: int,
        sampler: RowSampler = RowSampler(),  # noqa: B008 - frozen
        change: Change | None = None,
        further: Container[str] | None = None,
    ) -> None:
        self.terms: _Terms = {}  # Of the cotangent that is led back
        self.terms_by_cotangent = {0: self.terms}  # Of each cotangent
        self.anchor = torch.zeros((), requires_grad=True)
        self.mask: Tensor | None = None  # Which positions of the batch are no padding, [B, T]; None: all
        self.copies = False  # Whether values are kept in copies, for a model that writes over them
        self.shares = 0
        """Bytes of weights that are in memory only while their module runs, and of changes of values, to keep for all
        cotangents until `forget`."""
        self._qparams = qparams
        self._tied = tied
        self._batch = batch
        self._joined: dict[Steps, tuple[SharedRows, _Given]] = {}
        self._change = change or change_of
        self._sampler = sampler
        self._further = further
        self._runs: Counter[tuple[str, int | None]] = Counter()
        self._draw = torch.Generator().manual_seed(sampler.seed + sampler.batch)
        self._changes: dict[object, _Values] = {}
        self._weights: dict[Streamed, Tensor] = {}
        self.begin(0, menus)

    def begin(self, cotangent: int, menus: Mapping[str, Sequence[str]]) -> None:
        """Form products for the cotangent of this index, with these menus, from now on."""
        self.terms, self._menus = self.terms_by_cotangent.setdefault(cotangent, {}), menus
        self._cotangent = cotangent

    def forget(self) -> None:
        """Drop what all cotangents share."""
        self._changes.clear()
        self._weights.clear()

    def linear(self, name: str, x: Tensor, weight: Tensor, expert: int | None, product: Product) -> Tensor:
        owner, read, rows = self._tied.get(name, name), self._reader(weight), self._rows(x)
        steps = self.tracer.steps if self.tracer is not None else None
        kept = SharedRows(), _Given(overlapping=self.tracer is not None and self.tracer.role == "convolution")
        sample, inputs = kept if steps is None else self._joined.setdefault(steps, kept)

        def back(x: Tensor, g: Tensor) -> Tensor:
            """Form products from x [..., K] and the cotangents g [..., N] of the output; return those of x."""
            weight, g = read(), g.to(x.dtype)  # the output's is another within autocast
            gx = groups.input_gradient(g, weight, groups.count(x, weight))
            if steps is None:
                form(weight, rows, x, g, gx)
            elif whole := steps.joined(x, g, gx):
                form(weight, self._rows(whole[0]), *whole)
            return gx

        def form(weight: Tensor, rows: Rows, x: Tensor, g: Tensor, gx: Tensor) -> None:
            schemes = self._schemes(owner)
            if weights := {perturbations_of(s)[0]: s for s in schemes if s.weight}:
                self._on_weight(owner, weights, weight, expert, x, g, rows, sample)
            if menu := {perturbations_of(s)[-1]: s for s in schemes if s.activation}:
                fit = partial(self._qparams.input, owner, weight=weight, expert=expert)
                self._on_values(owner, menu, fit, x, gx, rows, inputs)
            for suffix in SPLITS:
                for scheme in self._schemes(name + suffix):
                    split = [scheme.split] if scheme.split else []
                    change = split_product(x, weight, split, product) - product(x, weight)
                    self._add(name + suffix, perturbations_of(scheme)[0], self._term(g * change, rows))
            trim_heap(_RELEASE_BYTES)

        return self._passed(x, lambda x: product(x, weight.detach()), back)

    def embedding(self, name: str, ids: Tensor, weight: Tensor, look_up: LookUp) -> Tensor:
        shape, read = ids.shape, self._reader(weight)
        shared = len(shape) == 2 and shape[0] == 1 < self._batch  # positions, which all sequences share

        def run(ids: Tensor) -> Tensor:
            rows = look_up(weight.detach())
            return rows.expand(self._batch, -1, -1) if shared else rows

        def back(ids: Tensor, g: Tensor) -> None:
            self._on_embedding(name, read(), ids.expand(self._batch, -1) if shared else ids, g)

        return self._passed(ids, run, back)

    def values(self, name: str, x: Tensor, part: str = "") -> Tensor:
        rows = self._rows(x)
        if part == "queries" and not self._passing(name, part):
            return x
        given = _Given()

        def back(x: Tensor, g: Tensor) -> Tensor:
            if menu := self._passing(name, part):
                self._on_values(name, menu, partial(self._qparams.values, name, part=part), x, g, rows, given)
            return g

        return self._passed(x, lambda x: x.view_as(x), back)

    def _passed(self, x: Tensor, run: Callable[[Tensor], Tensor], back: Callable[..., object]) -> Any:
        def without_padding(x: Tensor, g: Tensor) -> object:
            """Zero the gradients at padding: they are zero, or NaN by a division that is zero there alone."""
            kept = rows_kept(g, self.mask)
            return back(x, g if kept is None else torch.where(kept.view(*g.shape[:-1], 1), g, 0.0))

        return PassThrough.apply(self.anchor, x, run, without_padding, self.copies)  # type: ignore[no-untyped-call]

    def _schemes(self, name: str) -> list[Scheme]:
        return [SCHEMES[scheme] for scheme in self._menus.get(name, ())]

    def _passing(self, name: str, part: str) -> dict[Perturbation, Scheme]:
        return {
            perturbation: scheme for scheme in self._schemes(name) if (perturbation := value_perturbation(scheme, part))
        }

    def _reader(self, weight: Tensor) -> Callable[[], Tensor]:
        """Return the function by which the backward pass reads the weight."""
        streamed = self.tracer.streamed(weight) if self.tracer is not None else None
        if streamed is None:
            return weight.detach
        held = sum(each.numel() * each.element_size() for each in self._weights.values())
        if held + weight.numel() * weight.element_size() <= self.shares:
            self._weights.setdefault(streamed, weight.detach())
        return lambda: self._weights[streamed] if streamed in self._weights else streamed()

    def _rows(self, x: Tensor) -> Rows:
        count = x.numel() // max(x.shape[-1], 1)
        gathered = self.tracer.gathered if self.tracer is not None else []
        if x.dim() == 2 and gathered:
            index, source, _ = gathered[-1]
            return Rows(index=index * self._batch // source if index.numel() == count else None)
        if x.dim() == 3 and x.shape[1] == self._batch != x.shape[0]:  # [T, B, K]
            return Rows(index=torch.arange(count, device=x.device) % self._batch)
        shared = x.dim() > 2 and x.shape[0] == 1 < self._batch
        return Rows() if shared or not count or count % self._batch else Rows(each=count // self._batch)

    def _on_weight(
        self,
        name: str,
        menu: Mapping[Perturbation, Scheme],
        weight: Tensor,
        expert: int | None,
        x: Tensor,
        g: Tensor,
        rows: Rows,
        sample: SharedRows,
    ) -> None:
        """Form <g_b' x_b, change of the weight [N, K]> for every sequence b, x [..., G * K], cotangents g [..., G * N].

        Cotangents come from the last to the first; a sampled weight's products are formed under all of them at the
        first.
        """
        sampler = self._sampler if self._further is None or name in self._further else self._sampler.alone()
        several, schemes = groups.count(x, weight), list(menu.values())
        if several > 1 or not sampler.drawn(len(weight)):
            sampling, parts = sampler.parts(weight, self._cotangent, min(_AT_ONCE // self._batch, _CACHED))
            fitted = self._qparams.by_rows(name, schemes, weight, expert)
            for part in parts:
                assert isinstance(part.rows, slice)
                some_x, some_g, held, here = groups.slice_rows(x, g, several, part.rows.start, part.rows.stop)
                gradients = rows.outer(some_g, some_x, held, self._batch)[:, here].permute(1, 2, 0)
                names, products = self._products(weight[part.rows], gradients, menu, fitted(part.rows))
                products *= part.root_weights
                sums, squares = products.sum(0).cpu(), products.square_().sum(0).cpu()
                for each, total, square in zip(names, sums, squares, strict=True):
                    self._add(name, each, Term(total, square, sampling))
            return
        if sample.drawn is None:
            lengths = x.flatten(0, -2).square().sum(1)
            sizes = (lengths @ g.flatten(0, -2).square()) * self._qparams.norms(name, weight, expert).square()
            self._runs[name, expert] += 1  # what runs several times draws anew each time
            sample.drawn = sampler.sample(sizes, f"{name} {expert} {self._runs[name, expert]}")
        sampling, drawn = sample.drawn
        assert isinstance(drawn.rows, Tensor)
        sample.given[self._cotangent] = g[..., drawn.rows]
        if self._cotangent:
            return
        fitted = self._qparams.by_rows(name, schemes, weight, expert, few=True)
        step = max(min(_AT_ONCE // (self._batch * len(sample.given)), _CACHED) // weight.shape[-1], 1)
        pieces = []
        for some in torch.split(torch.arange(len(drawn.rows)), step):
            index = drawn.rows[some]
            gradients = torch.cat([rows.outer(each[..., some], x, 1, self._batch) for each in sample.given.values()])
            names, products = self._products(weight[index], gradients.permute(1, 2, 0), menu, fitted(index))
            pieces.append(products)
        products = torch.cat(pieces).mul_(drawn.root_weights)
        sums, squares = products.sum(0).cpu(), products.square_()
        variance, squares = drawn.variance(squares).tolist(), squares.sum(0).cpu()
        for slot, cotangent in enumerate(sample.given):
            columns = slice(slot * self._batch, (slot + 1) * self._batch)
            for number, each in enumerate(names):
                shared = 0.0 if cotangent else variance[number]  # of all cotangents together
                term = Term(sums[number, columns], squares[number, columns], sampling, shared)
                self._add(name, each, term, self.terms_by_cotangent[cotangent])

    def _products(
        self, piece: Tensor, gradients: Tensor, menu: Mapping[Perturbation, Scheme], fitted: list[FakeQuantizer | None]
    ) -> tuple[list[Perturbation], Tensor]:
        """Return the perturbations of rows [n, K] of a weight, and their products [n, S, B] with the gradients [n, K,
        B]."""
        forms = [(part, stored) for part, stored in zip(menu, fitted, strict=True) if stored is not None]
        step = max(_AT_ONCE // max(piece.numel(), 1), 1)
        products = [piece.new_empty(len(piece), 0, gradients.shape[-1])]
        for first in range(0, len(forms), step):
            some = forms[first : first + step]
            changes = piece.new_empty(len(piece), len(some), piece.shape[-1])
            for index, (_, stored) in enumerate(some):
                changes[:, index] = self._change(stored, piece)
            products.append(changes @ gradients)
        return [part for part, _ in forms], torch.cat(products, 1)

    def _on_embedding(self, name: str, weight: Tensor, ids: Tensor, g: Tensor) -> None:
        """Form products of a table [V, D]: cotangents g [..., D] of the selected rows ids [B, ...] or [T].

        A row that a sequence selects often changes in the same way at all these positions: its cotangents are added
        first.
        """
        owner = self._tied.get(name, name)
        count = ids.numel()
        shared = ids.dim() == 1 and bool((ids.diff() > 0).all())  # positions, which all sequences share
        known = not shared and count % self._batch == 0 and (ids.dim() == 1 or ids.shape[0] == self._batch)
        sequence = torch.arange(count, device=g.device) * (self._batch if known else 0) // count
        positions, of = torch.unique(sequence * weight.shape[0] + ids.flatten(), return_inverse=True)
        g = g.new_zeros(len(positions), g.shape[-1]).index_add_(0, of, g.flatten(0, -2))
        ids, rows = positions % weight.shape[0], Rows(index=positions // weight.shape[0] if known else None)
        menu = {perturbations_of(s)[0]: s for s in self._schemes(owner) if s.weight}
        fitted, piece = self._qparams.by_rows(owner, list(menu.values()), weight, None, few=True), weight[ids]
        for part, stored in zip(menu, fitted(ids) if menu else (), strict=True):
            if stored is not None:
                self._add(owner, part, self._term(g * self._change(stored, piece), rows))

    def _on_values(
        self,
        name: str,
        menu: Mapping[Perturbation, Scheme],
        fit: Callable[[Scheme], FakeQuantizer | None],
        x: Tensor,
        g: Tensor,
        rows: Rows,
        given: _Given,
    ) -> None:
        """Form products of values x [..., K] with the changes of the ``menu``, for cotangents g of x's shape.

        Linears that share an input, as q, k and v do, share its changes, as does the norm that produced it. If memory
        allows, the cotangents are collected in ``given`` until the last one.
        """
        if given.of is None:
            key = x.data_ptr(), x.shape, x.stride()
            if key not in self._changes:
                if not self.shares:
                    self._changes.clear()
                self._changes[key] = x, Subsample() if given.overlapping else self._subsample(x), {}
            given.of = self._changes[key]
        x, subsample, changes = given.of
        given.cotangents[self._cotangent] = subsample.of(g)
        if self._cotangent and self.shares:
            return
        some, cotangents = subsample.of(x), torch.stack(list(given.cotangents.values()))
        products, terms_of = torch.empty_like(cotangents), {}
        for part, scheme in menu.items():
            stored = fit(scheme)
            if stored is None:
                continue
            form = _identity(stored)
            if form not in changes:
                changes[form] = stored, self._change(stored, some)
            terms_of[part] = torch.mul(cotangents, changes[form][1], out=products).sum(-1)
        if terms_of:
            few, step = rows.subsampled(subsample.index), subsample.step
            every = torch.stack(list(terms_of.values()), 1)
            for cotangent, each_terms in zip(given.cotangents, every, strict=True):
                weighted = each_terms if subsample.root_weights is None else each_terms * subsample.root_weights
                sums, squares = (few.sums(each, self._batch).cpu() for each in (weighted, weighted.square()))
                for part, each, square in zip(terms_of, sums, squares, strict=True):
                    self._add(name, part, Term(each, square, step), self.terms_by_cotangent[cotangent])
        given.of, given.cotangents = None, {}

    def _subsample(self, x: Tensor) -> Subsample:
        """Return one random row of every ``step``, and all rows that are much larger than the mean."""
        count = x.numel() // x.shape[-1]
        step = max(min(x.numel() // _ENOUGH, count // _LEAST_ROWS, 16), 1)
        if step == 1:
            return Subsample()
        sizes = x.detach().flatten(0, -2).abs().amax(-1)
        large = sizes > step * sizes.mean()
        picks = torch.arange(0, count, step) + torch.randint(step, (-(-count // step),), generator=self._draw)
        picks = picks[picks < count].to(x.device)
        picks = picks[~large[picks]]
        index = torch.cat([large.nonzero()[:, 0], picks])
        return Subsample(step, index, torch.where(large[index], 1.0, step**0.5))

    def _term(self, terms: Tensor, rows: Rows) -> Term:
        flat = terms.flatten(0, -2).sum(-1)[None]
        return Term(rows.sums(flat, self._batch).cpu()[0], rows.sums(flat.square(), self._batch).cpu()[0], 1)

    def _add(self, name: str, part: Perturbation, term: Term, terms: _Terms | None = None) -> None:
        terms = self.terms if terms is None else terms
        before = terms.get((name, part))
        if before is not None:
            sampling, variance = max(before.sampling, term.sampling), before.variance + term.variance
            term = Term(before.sums + term.sums, before.squares + term.squares, sampling, variance)
        terms[name, part] = term


def change_of(stored: FakeQuantizer, x: Tensor) -> Tensor:
    """Return the change that storing makes in a tensor."""
    values = stored(x)
    return values - x if values is x else values.sub_(x)


def _identity(stored: FakeQuantizer) -> object:
    """Return a key that is equal for equal stored forms of one tensor."""
    if all(each is None for each in (stored.scales, stored.columns, stored.divisor, stored.packed)):
        return stored.quantizer, stored.rotated
    return id(stored)
