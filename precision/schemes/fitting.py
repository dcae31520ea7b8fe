"""Parameters of a scheme for one site, fitted before it can be simulated: scales, column factors, zero-points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from assay.precision.schemes.ggml import pack, rounded, unpack
from assay.precision.schemes.quantizer import Extremes, Quantizer, Scales, divisor_of, grouped, scales_of, store
from assay.precision.schemes.scheme import Scheme

_CLIPS = tuple(1.0 - 0.04 * step for step in range(11))
"""Shares of the largest magnitude that a search for scales tries."""
_POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)  # Exponents of the column factors that a search for AWQ tries
_SAMPLE = 128  # Rows of a weight that such searches evaluate
_BALANCES = (0.35, 0.5, 0.65, 0.8)  # SmoothQuant's alpha: how much of the input's spread moves into the weight


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics of an input over the calibration data: mean and largest magnitude and mean square of columns [K],
    rows."""

    mean: Tensor
    square: Tensor
    largest: Tensor
    rows: Tensor
    """A sample of inputs [R, K]."""

    @classmethod
    def joint(cls, several: Sequence[Moments]) -> Moments:
        """Return the moments of inputs that share column factors: one input of several linears, or those of several
        experts."""
        mean, square, largest = (
            torch.stack([getattr(one, name) for one in several]) for name in ("mean", "square", "largest")
        )
        return cls(mean.mean(0), square.mean(0), largest.amax(0), torch.cat([one.rows for one in several]))


@dataclass(frozen=True, slots=True)
class FakeQuantizer:
    """How one tensor of one site is stored; called with its values, it returns those that are read back (float32)."""

    quantizer: Quantizer
    scales: Scales | None = None
    """None: computed at run time."""
    columns: Tensor | None = None
    """Factors [K] that multiply the columns before storing and divide them after."""
    rotated: bool = False
    divisor: Tensor | None = None
    """NVFP4's scale of the tensor, static for an input while those of its groups are dynamic."""
    packed: Tensor | None = None
    """ggml blocks of a weight, uint8 [..., N, row bytes]; None for an input, which is stored at run time."""

    def __call__(self, x: Tensor) -> Tensor:
        if self.rotated:
            return _rotate(self._stored(_rotate(x)))
        if self.columns is not None:
            return self._stored(x * self.columns).div_(self.columns)
        return self._stored(x)

    @property
    def bytes(self) -> int:
        """Bytes of its tensors."""
        scales = () if self.scales is None else (self.scales.scale, self.scales.zero, self.scales.divisor)
        held = (*scales, self.columns, self.divisor, self.packed)
        return sum(each.nbytes for each in held if isinstance(each, Tensor))

    def of_rows(self, start: int, stop: int) -> FakeQuantizer:
        """Return the quantizer of rows start to stop of a weight [N, K]; of blocks, ``start`` is the first row of
        one."""
        if self.packed is not None:
            return replace(self, packed=self.packed[start:stop])
        if self.scales is None or self.scales.scale.shape[0] == 1:
            return self
        size = self.quantizer.size if self.quantizer.per == "block" else 1
        return self._scaled(slice(start // size, -(-stop // size)))

    def at_rows(self, index: Tensor, columns: int) -> FakeQuantizer:
        """Return the quantizer of the rows of an index [...] of a weight [N, K] with ``columns`` columns; blocks get a
        scale for each element."""
        if self.packed is not None:
            return replace(self, packed=self.packed[index.cpu()])
        if self.scales is not None and self.quantizer.per == "block":
            size, (scale, zero) = self.quantizer.size, (self.scales.scale, self.scales.zero)

            def each(held: Tensor) -> Tensor:
                return held[index // size].flatten(-3).repeat_interleave(size, -1)[..., :columns]

            scales = Scales(each(scale), None if zero is None else each(zero))
            return replace(self, quantizer=replace(self.quantizer, per="row"), scales=scales)
        if self.scales is None or self.scales.scale.shape[0] == 1:
            return self
        return self._scaled(index)

    def _scaled(self, rows: slice | Tensor) -> FakeQuantizer:
        assert self.scales is not None
        zero = None if self.scales.zero is None else self.scales.zero[rows]
        return replace(self, scales=Scales(self.scales.scale[rows], zero, self.scales.divisor))

    def _stored(self, x: Tensor) -> Tensor:
        if self.quantizer.blocks:
            kind, packed = self.quantizer.blocks, self.packed
            return (rounded(x, kind) if packed is None else unpack(packed, kind)).to(x.device)
        if self.divisor is not None:
            return store(x, self.quantizer, scales_of(x, self.quantizer, divisor=self.divisor))
        return store(x, self.quantizer, self.scales)


def smooth_factors(scheme: Scheme, weight: Tensor, seen: Moments) -> Tensor:
    """Return factors [K] for the weight's columns, max|x|^a / max|w|^(1-a), with the a of least error of x W'.

    weight: [N, K], of all linears that share the input, concatenated.
    """
    inputs = seen.largest.clamp(min=1e-5 * float(seen.largest.max().clamp(min=1e-30)))
    weights = weight.abs().amax(tuple(range(weight.dim() - 1)))
    weights = weights.clamp(min=1e-5 * float(weights.max().clamp(min=1e-30)))
    exact = seen.rows @ weight.mT

    def error(factors: Tensor) -> float:
        of_weight, of_input = smoothed(scheme, weight, factors)
        return float((of_input(seen.rows) @ of_weight(weight).mT - exact).square().sum())

    return min((_centred(inputs.pow(a) / weights.pow(1 - a)) for a in _BALANCES), key=error)


def smoothed(scheme: Scheme, weight: Tensor, factors: Tensor) -> tuple[FakeQuantizer, FakeQuantizer]:
    """Return the quantizers of the weight and the input with these factors on the weight's columns and off the
    input's."""
    assert scheme.weight is not None
    assert scheme.activation is not None
    of_weight = FakeQuantizer(scheme.weight, scales_of(weight * factors, scheme.weight), factors)
    return of_weight, FakeQuantizer(scheme.activation, columns=1 / factors)


def awq_factors(quantizer: Quantizer, weights: Sequence[Tensor], seen: Moments) -> Tensor:
    """Return factors [K], mean|x|^p with the p of least error of the output, inputs taken as uncorrelated.

    weights: [N, K], of all linears that share the input.
    """
    ends = list(itertools.accumulate(map(len, weights)))
    step = max(ends[-1] // _SAMPLE, 1)  # factors belong to columns: some rows will do, at equal distances
    sample = torch.cat([each[(len(each) - end) % step :: step] for each, end in zip(weights, ends, strict=True)])
    means = seen.mean.clamp(min=1e-4 * float(seen.mean.max().clamp(min=1e-30)))

    def error(factors: Tensor) -> float:
        stored = FakeQuantizer(quantizer, columns=factors)(sample)
        return float((stored - sample).square_().mul_(seen.square).sum())

    return min((_centred(means.pow(power)) for power in _POWERS), key=error)


def fit_values(quantizer: Quantizer, seen: Moments | None, rotated: bool = False) -> FakeQuantizer:
    """Return how an input or other values are stored: static scales from the calibration data, others at run time."""
    if quantizer.scale_format == "float8_e4m3fn" and seen is not None and not rotated:
        return FakeQuantizer(quantizer, divisor=divisor_of(seen.largest, quantizer))
    if quantizer.dynamic or quantizer.per == "element" or seen is None:
        return FakeQuantizer(quantizer, rotated=rotated)
    # One row that holds the largest magnitude: all that a static scale of the tensor depends on.
    return FakeQuantizer(quantizer, scales_of(seen.largest[None], quantizer))


def fit_weight(
    quantizer: Quantizer,
    weight: Tensor,
    importance: Tensor | None,
    factors: Tensor | None = None,
    rotated: bool = False,
    largest: Tensor | None = None,
    extremes: Extremes | None = None,
) -> FakeQuantizer:
    """Return how a weight [N, K] or [E, N, K] is stored: scales by the quantizer's rule, weighted by its input where
    known.

    importance: of its columns, [K]; None: not known. factors: on its columns, for a quantizer with the rule "awq".
    largest: magnitude of all weights that share the tensor's scale with this one, [1, 1]; None: it has its own.
    extremes: of the weight, shared by several quantizers.
    """
    source = extremes or weight
    if quantizer.per == "element":
        return FakeQuantizer(quantizer)
    if rotated:
        return FakeQuantizer(quantizer, scales_of(_rotate(weight), quantizer), rotated=True)
    if largest is not None and quantizer.per == "tensor":
        return FakeQuantizer(quantizer, scales_of(largest, quantizer))
    if largest is not None:
        return FakeQuantizer(quantizer, scales_of(source, quantizer, divisor=divisor_of(largest, quantizer)))
    if quantizer.rule in ("absmax", "awq") or (importance is None and quantizer.rule != "mse"):
        return FakeQuantizer(quantizer, scales_of(source if factors is None else weight * factors, quantizer), factors)
    return FakeQuantizer(quantizer, _clipped(quantizer, weight, importance if quantizer.rule == "output" else None))


def fit_blocks(quantizer: Quantizer, weight: Tensor, importance: Tensor | None) -> FakeQuantizer:
    """Return how a weight [N, K] or [E, N, K] is stored in ggml blocks; importance: [K], of its input, or None."""
    assert quantizer.blocks is not None
    return FakeQuantizer(quantizer, packed=pack(weight, quantizer.blocks, importance))


def _clipped(quantizer: Quantizer, weight: Tensor, importance: Tensor | None) -> Scales:
    """Return scales of least squared error, each searched separately, columns weighted by ``importance`` [K]."""
    columns = torch.ones_like(weight) if importance is None else importance.expand_as(weight).contiguous()
    weights, axes = grouped(columns, quantizer)
    best: Scales | None = None
    least = torch.empty(0)
    for share in _CLIPS:
        scales = scales_of(weight, quantizer, share)
        error, _ = grouped((store(weight, quantizer, scales) - weight).square(), quantizer)
        cost = (error * weights).sum(axes, keepdim=True)
        if best is None:
            best, least = scales, cost
            continue
        better = cost < least
        least = torch.where(better, cost, least)
        zero = None if best.zero is None or scales.zero is None else torch.where(better, scales.zero, best.zero)
        best = Scales(torch.where(better, scales.scale, best.scale), zero)
    assert best is not None
    return best


def _centred(factors: Tensor) -> Tensor:
    # Their geometric mid-range is one, so that they use up no format's range.
    return factors / (factors.max() * factors.min()).sqrt()


def _rotate(x: Tensor) -> Tensor:
    """Return x [..., K] rotated, which spreads an outlier over its block and preserves products: every block of b
    columns is multiplied by the orthogonal, symmetric Sylvester matrix H_b / sqrt(b).

    b is the largest power of two that divides K; the rotation is its own inverse, so rotated weights and inputs have
    the same product as before.
    """
    size = x.shape[-1] & -x.shape[-1]
    return (torch.unflatten(x, -1, (-1, size)) @ _matrix(size).to(x)).flatten(-2)


@cache
def _matrix(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)
