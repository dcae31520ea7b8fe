"""Rounding models: what an evaluation may lose at each operation.

One class serves two ends. With float64's constants it bounds the float64 evaluation that produces a golden, so that
the golden's radius is certified; with the constants of a kernel's contract it bounds every kernel that keeps the
contract, so that the radius is the tolerance.

Sources: N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., ch. 3 (gamma_n); P. Blanchard,
N. J. Higham, F. Lopez, T. Mary, S. Pranesh, *Mixed precision block fused multiply-add*, SISC 42 (2020) C124, and the
truncating variant derived in `Accumulator.gamma`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from assay.precision.formats import Format, format_named
from assay.precision.rounding import round_to

DEFAULT_ULPS = 4.0


@dataclass(frozen=True)
class Accumulator:
    """How partial sums are kept: in a format, rounded to nearest, or in a tensor core's block accumulator.

    A block accumulator aligns ``block`` products and the running sum to the largest exponent among them, truncates
    each to ``fraction`` bits, adds, and keeps ``output`` bits of the result. With ``promotion``, the running sum is
    moved into ``format`` every so many terms.
    """

    format: Format
    block: int = 0
    fraction: int = 0
    output: int = 0
    promotion: int = 0
    inputs: tuple[str, ...] = ()

    def gamma(self, terms: int) -> float:
        """Bound on the error of a sum of ``terms`` products, in any order, relative to the sum of magnitudes.

        In a format: gamma_n = n u / (1 - n u). In blocks of L with F fraction and P output bits, one block loses at
        most (L + 1) 2^-F max(|c|, |a_k b_k|) + 2^-P |out|, so a chain of T = ceil(n / L) blocks at most
        T ((L + 1) 2^-F + 2^-P) of the sum of magnitudes, grown by itself to first order in the partial sums.
        """
        if not self.block:
            return _gamma(terms, self.format.unit_roundoff)
        chunk = min(terms, self.promotion) if self.promotion else terms
        per_block = (self.block + 1) * 2.0**-self.fraction + 2.0**-self.output
        chain = math.expm1(min(700.0, math.ceil(chunk / self.block) * per_block))
        chunks = math.ceil(terms / chunk) if chunk else 0
        return (1 + chain) * (1 + _gamma(chunks, self.format.unit_roundoff)) - 1 if self.promotion else chain

    @property
    def exact_bits(self) -> int:
        """Sums of magnitude below 2^bits of their lowest set bit are exact in any order."""
        return min(self.fraction, self.output) if self.block else self.format.precision


def _gamma(terms: int, unit_roundoff: float) -> float:
    product = terms * unit_roundoff
    return product / (1 - product) if product < 1 else math.inf


@dataclass(frozen=True)
class RoundingModel:
    """What may be lost at each operation.

    ``ulps`` are the errors of elementary functions in ulps of ``compute`` (`DEFAULT_ULPS` where left out); ``stages``
    the formats to which marked intermediates may be rounded; ``flush`` allows zero for a subnormal; ``empty_row`` is
    the value of an attention row that sees nothing (None: any); ``rounding`` how codes are rounded ("nearest",
    "toward_zero", "stochastic": to either neighbour). ``certifies`` marks the model of the float64
    evaluation itself, whose algorithms are known: freedoms that kernels have are not added.
    """

    compute: Format
    accumulate: Accumulator
    ulps: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, Format] = field(default_factory=dict)
    flush: bool = False
    empty_row: float | None = 0.0
    rounding: str = "nearest"
    certifies: bool = False

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of one rounding of an elementwise intermediate."""
        return self.compute.unit_roundoff

    @property
    def largest(self) -> float:
        """Beyond this an intermediate overflows."""
        return min(self.compute.largest, self.accumulate.format.largest)

    def underflow(self, format: Format) -> float:
        """Absolute error of one operation whose result is subnormal in ``format``.

        Processors add a subnormal number ten times slower than others, so the evaluation itself claims no more than
        2^-1000.
        """
        if self.certifies:
            return 2.0**-1000
        if self.flush:
            return format.smallest_normal
        return format.smallest_subnormal / 2 or format.smallest_subnormal

    @property
    def tiny(self) -> float:
        """Absolute error of one elementwise operation whose result is subnormal."""
        return self.underflow(self.compute)

    def function_error(self, function: str) -> float:
        """Relative error allowed to an elementary function: its ulps, each of at most 2 u."""
        return 2 * self.unit_roundoff * self.ulps.get(function, DEFAULT_ULPS)

    def function_underflow(self, function: str) -> float:
        """Absolute error allowed to an elementary function whose result is subnormal: the same ulps, of one size."""
        return 2 * self.tiny * max(1.0, self.ulps.get(function, DEFAULT_ULPS))

    def represents(self, values: torch.Tensor) -> torch.Tensor:
        """Where float64 ``values`` are numbers of the compute format, so that storing them loses nothing."""
        if self.compute.name == "float64":
            return torch.ones_like(values, dtype=torch.bool)
        if self.compute.name == "float32":
            return values == values.to(torch.float32).to(torch.float64)
        return values == round_to(values, self.compute)


_FLOAT64 = format_named("float64")

# Elementary functions of torch in float64: SLEEF's vector versions state 1.0 ulp, libm's are below 1 ulp and CUDA's
# double-precision tables list at most 2; `tests/golden` checks them against Arb. Four leaves room.
EVALUATION = RoundingModel(_FLOAT64, Accumulator(_FLOAT64), certifies=True)
