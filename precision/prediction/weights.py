"""Products of a weight's change under every scheme with the gradient of each sequence: of all rows, or of a sample.

A gradient is formed for some rows of one product at a time and never kept. Where rows are drawn (`turns`), a batch's
cotangents share them, so that the schemes store them once: until the last cotangent comes by, of each no more is kept
than what it gives these rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from assay.precision.observation.operations import groups
from assay.precision.observation.qparams import QParams
from assay.precision.prediction.perturbations import Change, Perturbation, Term
from assay.precision.prediction.rows import Rows
from assay.precision.prediction.turns import Looked, Turns
from assay.precision.schemes import FakeQuantizer, Scheme

_AT_ONCE = 1 << 22
"""Elements of weights' gradients, and of their changes, that are held at once; but no fewer rows than a block's."""
_CACHED = 1 << 18
"""Elements of a weight that are looked at together, for a core's cache to hold what is made of them."""

Formed = tuple[int, Perturbation, Term]
"""A cotangent's number, and what a perturbation does under it."""


@dataclass(frozen=True, slots=True)
class Met:
    """A product of a weight [N, K] as the backward pass meets it: x [..., G * K], cotangents g [..., G * N] of the
    result, of which sequence each row is, and the number of the cotangent."""

    x: torch.Tensor
    g: torch.Tensor
    rows: Rows
    cotangent: int


@dataclass(slots=True)
class Sample:
    """Of one product the rows that are drawn of its weight, and what each cotangent so far gives them, [..., n]."""

    drawn: tuple[float, Looked] | None = None
    given: dict[int, torch.Tensor] = field(default_factory=dict)


class WeightProducts:
    """<g_b' x_b, change of the weight> for every sequence b of a batch.

    ``batch``: its sequences; ``turns``: who looks at which rows; ``further``: the weights that further cotangents meet
    too, None: all. Cotangents come by from the last to the first.
    """

    def __init__(
        self, qparams: QParams, batch: int, turns: Turns, change: Change, further: Container[str] | None
    ) -> None:
        self._qparams = qparams
        self._batch = batch
        self._turns = turns
        self._change = change
        self._further = further
        self._runs: Counter[tuple[str, int | None]] = Counter()

    def formed(
        self,
        name: str,
        menu: Mapping[Perturbation, Scheme],
        weight: torch.Tensor,
        expert: int | None,
        met: Met,
        sample: Sample,
    ) -> Iterator[Formed]:
        """The products of the weight of a site, under the cotangent that meets it; of a ``sample``, which is this
        product's own, under all when the last one does."""
        if not menu:
            return
        turns = self._turns if self._further is None or name in self._further else self._turns.alone()
        if groups.count(met.x, weight) > 1 or not turns.drawn(len(weight)):
            yield from self._in_turns(name, menu, weight, expert, met, turns)
            return
        if sample.drawn is None:
            sample.drawn = self._drawn(name, weight, expert, met, turns)
        sample.given[met.cotangent] = met.g[..., sample.drawn[1].rows]
        if met.cotangent == 0:
            yield from self._sampled(name, menu, weight, expert, met, sample)

    def _in_turns(
        self,
        name: str,
        menu: Mapping[Perturbation, Scheme],
        weight: torch.Tensor,
        expert: int | None,
        met: Met,
        turns: Turns,
    ) -> Iterator[Formed]:
        several = groups.count(met.x, weight)
        sampling, parts = turns.parts(weight, met.cotangent, min(_AT_ONCE // self._batch, _CACHED))
        fitted = self._qparams.by_rows(name, list(menu.values()), weight, expert)
        for looked in parts:
            assert isinstance(looked.rows, slice)
            x, g, held, here = groups.some_rows(met.x, met.g, several, looked.rows.start, looked.rows.stop)
            gradients = met.rows.outer(g, x, held, self._batch)[:, here].permute(1, 2, 0)
            parts_of, products = self._products(weight[looked.rows], gradients, menu, fitted(looked.rows))
            products *= looked.root_weights
            sums, squares = products.sum(0).cpu(), products.square_().sum(0).cpu()
            for part, each, square in zip(parts_of, sums, squares, strict=True):
                yield met.cotangent, part, Term(each, square, sampling)

    def _drawn(
        self, name: str, weight: torch.Tensor, expert: int | None, met: Met, turns: Turns
    ) -> tuple[float, Looked]:
        lengths = met.x.flatten(0, -2).square().sum(1)
        sizes = (lengths @ met.g.flatten(0, -2).square()) * self._qparams.norms(name, weight, expert).square()
        self._runs[name, expert] += 1  # what runs several times draws anew each time
        return turns.sample(sizes, f"{name} {expert} {self._runs[name, expert]}")

    def _sampled(
        self,
        name: str,
        menu: Mapping[Perturbation, Scheme],
        weight: torch.Tensor,
        expert: int | None,
        met: Met,
        sample: Sample,
    ) -> Iterator[Formed]:
        assert sample.drawn is not None
        sampling, looked = sample.drawn
        assert isinstance(looked.rows, torch.Tensor)
        fitted = self._qparams.by_rows(name, list(menu.values()), weight, expert, few=True)
        step = max(min(_AT_ONCE // (self._batch * len(sample.given)), _CACHED) // weight.shape[-1], 1)
        parts: list[Perturbation] = []
        found = []
        for some in torch.split(torch.arange(len(looked.rows)), step):
            index = looked.rows[some]
            gradients = torch.cat([met.rows.outer(g[..., some], met.x, 1, self._batch) for g in sample.given.values()])
            parts, products = self._products(weight[index], gradients.permute(1, 2, 0), menu, fitted(index))
            found.append(products)
        products = torch.cat(found).mul_(looked.root_weights)
        sums, squares = products.sum(0).cpu(), products.square_()
        variance, squares = looked.variance(squares).tolist(), squares.sum(0).cpu()
        for place, cotangent in enumerate(sample.given):
            own = slice(place * self._batch, (place + 1) * self._batch)
            for number, part in enumerate(parts):
                shared = 0.0 if cotangent else variance[number]  # of all cotangents together
                yield cotangent, part, Term(sums[number, own], squares[number, own], sampling, shared)

    def _products(
        self,
        piece: torch.Tensor,
        gradients: torch.Tensor,
        menu: Mapping[Perturbation, Scheme],
        fitted: list[FakeQuantizer | None],
    ) -> tuple[list[Perturbation], torch.Tensor]:
        """Of rows [n, K] of a weight and their gradients [n, K, B] what changes them, and the products [n, S, B]."""
        forms = [(part, stored) for part, stored in zip(menu, fitted, strict=True) if stored is not None]
        step = max(_AT_ONCE // max(piece.numel(), 1), 1)
        found = [piece.new_empty(len(piece), 0, gradients.shape[-1])]
        for first in range(0, len(forms), step):
            some = forms[first : first + step]
            changes = piece.new_empty(len(piece), len(some), piece.shape[-1])
            for place, (_, stored) in enumerate(some):
                changes[:, place] = self._change(stored, piece)
            found.append(changes @ gradients)
        return [part for part, _ in forms], torch.cat(found, 1)
