"""The schemes that a site may have, and the quantisation parameters of each there."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from assay.precision.observation import groups
from assay.precision.observation.sites import Site, Statistics
from assay.precision.observation.streaming import Weights
from assay.precision.schemes import SCHEMES, FakeQuantizer, Moments, Quantizer, Scheme
from assay.precision.schemes.fitting import awq_factors, fit_blocks, fit_values, fit_weight, smooth_factors, smoothed
from assay.precision.schemes.quantizer import Extremes

_T = TypeVar("_T")
_EXPERTS = 8  # Experts of a layer that determine its column factors


def menu_of(site: Site, formats: Collection[str]) -> tuple[str, ...]:
    """Return the schemes of ``formats`` that a site may have: made for its type, with groups that divide its rows.

    A convolution's input has no scales within the tensor, since windows overlap, and no column factors, since a column
    is one position of the kernel.
    """
    columns, menu = site.shape[-1] if site.shape else 0, []
    for name in formats:
        scheme = SCHEMES[name]
        used = [quantizer for quantizer in (scheme.weight, scheme.activation, scheme.queries) if quantizer is not None]
        fits = not any(quantizer.per == "group" and columns and columns % quantizer.size for quantizer in used)
        if site.role == "convolution":
            within = scheme.activation is not None and scheme.activation.per not in ("element", "tensor")
            fits &= not (within or scheme.transform != "none" or any(quantizer.rule == "awq" for quantizer in used))
        if fits and site.type in scheme.site_types:
            menu.append(name)
    return tuple(menu)


class QParams:
    """Quantisation parameters, fitted to each site at first use: scales and column factors, never whole weights.

    ``weights``: of the sites. ``together``: groups of linears that share column factors, since the operation before
    them can absorb one set only. ``fused``: groups that run as one product, whose tensor has one scale. ``keep``: bytes
    of weight scales to cache, which for groups of 32 take an eighth of a byte for each weight and scheme; None: all.
    Within a bound only searched or packed scales are cached: others take one pass over the weight.
    """

    def __init__(
        self,
        seen: Mapping[tuple[str, str], Statistics],
        weights: Mapping[str, Weights] | None = None,
        together: Sequence[Sequence[str]] = (),
        fused: Sequence[Sequence[str]] = (),
        *,
        keep: int | None = None,
    ) -> None:
        self._keep = keep
        self._kept = 0
        self._full = False
        self._seen = seen
        self._weights = weights or {}
        self._together = {name: tuple(names) for names in together for name in names}
        self._fused = {name: tuple(names) for names in fused for name in names}
        self._fitted: dict[tuple[object, ...], Any] = {}

    def weight(self, name: str, scheme: Scheme, weight: Tensor, expert: int | None = None) -> FakeQuantizer | None:
        """Return how a scheme stores the weight of a site; None: unchanged. Schemes that store it in the same way share
        one object."""
        quantizer = scheme.weight
        if quantizer is None:
            return None
        if scheme.transform == "smooth":
            return self._smoothed(name, scheme, weight, expert)[0]
        key = self._key(name, scheme, expert)
        if self._keep is None or key in self._fitted:
            return self._cached(key, lambda: self._fit(name, scheme, weight, weight, expert))
        fitted = self._fit(name, scheme, weight, weight, expert)
        if _is_searched(quantizer) and not self._full:
            self._full = self._kept + fitted.bytes > self._keep
            if not self._full:
                self._kept += fitted.bytes
                self._fitted[key] = fitted
        return fitted

    def by_rows(
        self, name: str, schemes: Sequence[Scheme], weight: Tensor, expert: int | None, *, few: bool = False
    ) -> Callable[[slice | Tensor], list[FakeQuantizer | None]]:
        """Return a function from rows of the weight of a site, a slice of whole blocks or an index, to how the schemes
        store them; None: unchanged.

        Where scales aren't cached, only these rows are read, once for all schemes, except for the few schemes that are
        fitted to the whole weight. few: only some rows will be requested, so nothing is fitted to all rows that can be
        fitted to these; required for an index.
        """

        def is_whole(scheme: Scheme) -> bool:
            quantizer = scheme.weight
            if quantizer is None or scheme.transform != "none" or self._key(name, scheme, expert) in self._fitted:
                return True
            if few:
                return quantizer.per == "block"
            return self._keep is None or (_is_searched(quantizer) and not self._full)

        def fitted(scheme: Scheme) -> FakeQuantizer | None:
            if few and scheme.weight is not None and scheme.weight.per == "block":  # of few scales
                key = self._key(name, scheme, expert)
                return self._cached(key, lambda: self._fit(name, scheme, weight, weight, expert))
            return self.weight(name, scheme, weight, expert)

        whole = {each.name: fitted(each) for each in schemes if is_whole(each)}

        def of(rows: slice | Tensor) -> list[FakeQuantizer | None]:
            piece = weight[rows]
            extremes = Extremes(piece)

            def stored(scheme: Scheme) -> FakeQuantizer | None:
                if scheme.name not in whole:
                    return self._fit(name, scheme, weight, piece, expert, extremes)
                fitted_whole = whole[scheme.name]
                if fitted_whole is None:
                    return None
                if isinstance(rows, slice):
                    return fitted_whole.of_rows(rows.start, rows.stop)
                return fitted_whole.at_rows(rows, weight.shape[-1])

            return [stored(scheme) for scheme in schemes]

        return of

    def norms(self, name: str, weight: Tensor, expert: int | None) -> Tensor:
        """Return the norms of the rows of the weight [N, K] of a site, [N]."""
        return self._cached(("norms", name, expert), lambda: torch.linalg.vector_norm(weight, dim=1))

    def _key(self, name: str, scheme: Scheme, expert: int | None) -> tuple[object, ...]:
        return "weight", name, expert, scheme.weight, scheme.transform == "hadamard"

    def _fit(
        self,
        name: str,
        scheme: Scheme,
        weight: Tensor,
        piece: Tensor,
        expert: int | None,
        extremes: Extremes | None = None,
    ) -> FakeQuantizer:
        """Fit a piece of a weight: all of it, or some rows with their extremes."""
        quantizer, rotated = scheme.weight, scheme.transform == "hadamard"
        assert quantizer is not None
        if quantizer.blocks:
            return fit_blocks(quantizer, piece, _folded(self.importance(name), piece))
        factors = None
        if quantizer.rule == "awq" and self._moments(name) is not None:
            group = self._together.get(name, (name,))
            key = "awq factors", group, quantizer
            factors = self._cached(key, lambda: awq_factors(quantizer, *self._joint(name, weight)))
        largest = None if rotated else self._largest(name, quantizer)
        if largest is None and piece is not weight and _is_whole(quantizer):
            largest = self._cached(("largest", name, expert), lambda: _magnitude(weight))
        seen = self._moments(name) if _is_searched(quantizer) else None  # no other rule asks for the importance
        importance = _folded(None if seen is None else seen.square, piece)
        return fit_weight(quantizer, piece, importance, factors, rotated, largest, extremes)

    def values(self, name: str, scheme: Scheme, part: str = "") -> FakeQuantizer | None:
        """Return how a scheme stores the values of a site, of a cache its keys, values or ``queries``; None:
        unchanged."""
        quantizer, rotated = scheme.queries if part == "queries" else scheme.activation, scheme.transform == "hadamard"
        if quantizer is None:
            return None
        return self._cached(
            ("values", name, part, quantizer, rotated),
            lambda: fit_values(quantizer, self._moments(name, part), rotated),
        )

    def input(self, name: str, scheme: Scheme, weight: Tensor, expert: int | None = None) -> FakeQuantizer | None:
        """Return how a scheme stores the input of a linear, with which its weight may share factors; None:
        unchanged."""
        if scheme.transform == "smooth":
            return self._smoothed(name, scheme, weight, expert)[1]
        return self.values(name, scheme)

    def importance(self, name: str) -> Tensor | None:
        """Return the importance of the columns [K] of a weight, with which ggml weights its errors; None without
        observed inputs."""
        return None if (seen := self.squares(name)) is None else seen[0] / seen[1]

    def squares(self, name: str) -> tuple[Tensor, int] | None:
        """Return sums of squares of the input's columns [K] of a weight, and the number of rows; None without observed
        inputs."""
        seen = self._seen.get((name, ""))
        return None if seen is None or not seen.rows else seen.importance()

    def _smoothed(
        self, name: str, scheme: Scheme, weight: Tensor, expert: int | None
    ) -> tuple[FakeQuantizer, FakeQuantizer]:
        def factors() -> Tensor:
            weights, seen = self._joint(name, weight)
            return smooth_factors(scheme, torch.cat(weights), seen)

        shared = self._cached(("smooth factors", self._together.get(name, (name,)), scheme.name), factors)
        return self._cached(("smooth", name, expert, scheme.name), lambda: smoothed(scheme, weight, shared))

    def _largest(self, name: str, quantizer: Quantizer) -> Tensor | None:
        """Return the largest magnitude of all weights of a fused product, [1, 1]; None where they share no scale."""
        group = self._fused.get(name, (name,))
        if len(group) == 1 or not _is_whole(quantizer):
            return None
        whole = (_magnitude(weight) for each in group for weight in self._weights[each].values())
        return self._cached(("largest", group), lambda: torch.stack(list(whole)).amax(0))

    def _joint(self, name: str, weight: Tensor) -> tuple[list[Tensor], Moments]:
        """Return the weights of a product, [N, K] each, and the moments of its input; of many experts, a few."""
        group = self._together.get(name, (name,))
        default: Mapping[int | None, Tensor] = {None: weight}
        weights, moments = [], []
        for each in group:
            held = self._weights.get(each, default)
            experts = sorted(held, key=lambda expert: -1 if expert is None else expert)
            weights += [held[expert] for expert in experts[:: -(-len(experts) // _EXPERTS)]]
            moments += [] if (seen := self._moments(each)) is None else [seen]
        return weights, Moments.joint(moments)

    def _moments(self, name: str, part: str = "") -> Moments | None:
        seen = self._seen.get((name, part))
        return seen.moments() if seen is not None and seen.rows else None

    def _cached(self, key: tuple[object, ...], make: Callable[[], _T]) -> _T:
        if key not in self._fitted:
            self._fitted[key] = make()
        fitted: _T = self._fitted[key]
        return fitted


def _folded(importance: Tensor | None, weight: Tensor) -> Tensor | None:
    return None if importance is None else groups.mean(importance, weight.shape[-1])


def _magnitude(weight: Tensor) -> Tensor:
    least, most = weight.aminmax()
    return torch.maximum(-least, most).reshape(1, 1)


def _is_searched(quantizer: Quantizer) -> bool:
    """Return whether fitting a weight's scales takes more than one pass over it."""
    return bool(quantizer.blocks) or quantizer.rule in ("mse", "output")


def _is_whole(quantizer: Quantizer) -> bool:
    """Return whether there is a scale of the whole tensor."""
    return quantizer.per == "tensor" or quantizer.scale_format == "float8_e4m3fn"
