"""What a scheme needs to know about one site before it can be simulated: scales, column factors, zero-points."""

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
"""Shares of the largest magnitude that a searched scale may cover."""
_POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Exponents of the column factors that are searched for AWQ."""
_SAMPLE = 128
"""Rows of a weight that such searches look at."""
_BALANCES = (0.35, 0.5, 0.65, 0.8)
"""SmoothQuant's alpha: how much of the input's spread moves into the weight."""


@dataclass(frozen=True, slots=True)
class Moments:
    """What the calibration data showed of an input: columns [K] of mean and largest magnitude and mean square, rows."""

    mean: Tensor
    square: Tensor
    largest: Tensor
    rows: Tensor
    """A sample of inputs [R, K]."""

    @classmethod
    def joint(cls, several: Sequence[Moments]) -> Moments:
        """Of inputs that share column factors: one input seen by several linears, or those of several experts."""
        mean, square, largest = (
            torch.stack([getattr(one, name) for one in several]) for name in ("mean", "square", "largest")
        )
        return cls(mean.mean(0), square.mean(0), largest.amax(0), torch.cat([one.rows for one in several]))


@dataclass(frozen=True, slots=True)
class FakeQuantizer:
    """How one tensor of one site is stored; called with its values, it gives those that are read back (float32)."""

    quantizer: Quantizer
    scales: Scales | None = None
    """None: taken from the values at hand."""
    columns: Tensor | None = None
    """Factors [K] on the columns before storing, taken off after."""
    rotated: bool = False
    divisor: Tensor | None = None
    """NVFP4's scale of the tensor, fixed for an input while those of its groups are not."""
    packed: Tensor | None = None
    """Blocks of ggml that a weight is stored in, uint8 [..., N, row bytes]; None for an input, which is stored anew."""

    def __call__(self, x: Tensor) -> Tensor:
        if self.rotated:
            return _rotate(self._stored(_rotate(x)))
        if self.columns is not None:
            return self._stored(x * self.columns).div_(self.columns)
        return self._stored(x)

    @property
    def bytes(self) -> int:
        """Of what is held here."""
        scales = () if self.scales is None else (self.scales.scale, self.scales.zero, self.scales.divisor)
        held = (*scales, self.columns, self.divisor, self.packed)
        return sum(each.nbytes for each in held if isinstance(each, Tensor))

    def of_rows(self, start: int, stop: int) -> FakeQuantizer:
        """How rows start to stop of a weight [N, K] are stored; of blocks, ``start`` is the first row of one."""
        if self.packed is not None:
            return replace(self, packed=self.packed[start:stop])
        if self.scales is None or self.scales.scale.shape[0] == 1:
            return self
        size = self.quantizer.size if self.quantizer.per == "block" else 1
        return self._scaled(slice(start // size, -(-stop // size)))

    def at_rows(self, index: Tensor, columns: int) -> FakeQuantizer:
        """How the rows of an index [...] of a weight [N, K] of so many columns are stored; of blocks each with a scale
        for every element."""
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
            read = (
                rounded(x, self.quantizer.blocks) if self.packed is None else unpack(self.packed, self.quantizer.blocks)
            )
            return read.to(x.device)
        if self.divisor is not None:
            return store(x, self.quantizer, scales_of(x, self.quantizer, divisor=self.divisor))
        return store(x, self.quantizer, self.scales)


def smooth_factors(scheme: Scheme, weight: Tensor, seen: Moments) -> Tensor:
    """Factors [K] on the weight's columns, max|x|^a / max|w|^(1-a), with the a that leaves the least error of x W'.

    weight: [N, K], of all linears that share the input one below the other.
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
    """How the weight and the input are stored with these factors on the weight's columns and off the input's."""
    assert scheme.weight is not None
    assert scheme.activation is not None
    of_weight = FakeQuantizer(scheme.weight, scales_of(weight * factors, scheme.weight), factors)
    return of_weight, FakeQuantizer(scheme.activation, columns=1 / factors)


def awq_factors(quantizer: Quantizer, weights: Sequence[Tensor], seen: Moments) -> Tensor:
    """Factors [K], mean|x|^p with the p that leaves the least error of the output, inputs taken as uncorrelated.

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
    """How an input or other values are stored: static scales from what calibration showed, others from the values."""
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
    """How a weight [N, K] or [E, N, K] is stored: scales by the quantizer's rule, weighted by its input where known.

    importance: of its columns, [K]; None: not known. factors: on its columns, for a quantizer with the rule "awq".
    largest: magnitude of all weights that share the scale of a tensor with this one, [1, 1]; None: it has its own.
    extremes: of the weight, where others ask for them too.
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
    """How a weight [N, K] or [E, N, K] is stored in blocks of ggml; importance: [K], of its input, or None."""
    assert quantizer.blocks is not None
    return FakeQuantizer(quantizer, packed=pack(weight, quantizer.blocks, importance))


def _clipped(quantizer: Quantizer, weight: Tensor, importance: Tensor | None) -> Scales:
    """Scales that leave the least squared error, each for itself, columns weighted by ``importance`` [K]."""
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
    """Factors of geometric middle one, so that no format's range is spent on their size."""
    return factors / (factors.max() * factors.min()).sqrt()


def _rotate(x: Tensor) -> Tensor:
    """x [..., K] rotated, which spreads an outlier over its block and keeps every product: every block of b columns is
    multiplied by the orthogonal, symmetric Sylvester matrix H_b / sqrt(b).

    b is the largest power of two that divides K; the rotation is its own inverse, so weights and inputs that are both
    rotated have the product they had.
    """
    size = x.shape[-1] & -x.shape[-1]
    return (torch.unflatten(x, -1, (-1, size)) @ _matrix(size).to(x)).flatten(-2)


@cache
def _matrix(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)
