"""Accumulators: how partial sums are kept, in a format, in the block accumulator of a tensor core, or between ranks.

Source of the block bound: P. Blanchard, N. J. Higham, F. Lopez, T. Mary, S. Pranesh, *Mixed precision block fused
multiply-add*, SISC 42 (2020) C124, and the truncating variant derived in `Accumulator.gamma`. The models with their
sources are in ``configs/accumulators.toml``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from assay.configs import table
from assay.formats.errors import UnknownFormat
from assay.formats.format import FORMATS, Format, format_named
from assay.runtime.errors import unknown


@dataclass(frozen=True)
class Accumulator:
    """A way to keep partial sums: in a format, in a tensor core's block accumulator, or in ranks that each have a part.

    In a format each partial sum is rounded to nearest.

    A block accumulator aligns ``block`` products and the running sum to the largest exponent among them, truncates each
    to ``fraction`` bits, adds, and keeps ``output`` bits of the result. With ``promotion``, the running sum is moved
    into ``format`` every ``promotion`` terms. With ``ranks``, that many float32 sums, each of a part of the terms, are
    rounded to ``format`` and added in it, as in an all-reduce of partial sums. ``of_input``: ``format`` is that of a
    kernel's first tensor, if it has 16 bits or more. ``inputs`` are the formats that the unit accepts (empty: any);
    wider operands are truncated toward zero to the format ``operands``. In the alignment a zero has the exponent
    ``zero`` (float32 output), and with ``group``, ``group`` products are first added exactly, at the exponent of their
    scales.
    """

    format: Format
    block: int = 0
    fraction: int = 0
    output: int = 0
    promotion: int = 0
    ranks: int = 0
    of_input: bool = False
    inputs: tuple[str, ...] = ()
    operands: str = ""
    zero: int = -126
    group: int = 0

    def meeting(self, input_format: Format) -> Accumulator:
        """Return the accumulator of a kernel whose first tensor is in ``input_format``."""
        if self.of_input and input_format.bits >= 16:
            return replace(self, format=input_format)
        if input_format.precision <= format_named(self.operands or "float64").precision:
            return replace(self, operands="")  # kernels multiply tensors of 16 bits in their own format
        return self

    @property
    def cut(self) -> float:
        """Return the relative error of reducing an operand to ``operands``: 2^(1-p) for p bits; zero for none."""
        return 2 * format_named(self.operands).unit_roundoff if self.operands else 0.0

    def takes(self, name: str) -> bool:
        """Return whether the contract of a kernel with tensors of this format may name the unit."""
        cuts = self.operands != "" and name == "float32"
        return not self.inputs or name in self.inputs or cuts

    def gamma(self, terms: int) -> float:
        """Return the error bound of a sum of ``terms`` products, in any order, relative to the sum of magnitudes.

        In a format: gamma_n = n u / (1 - n u). In blocks of L with F fraction and P output bits, one block loses at
        most (L + 1) 2^-F max(|c|, |a_k b_k|) + 2^-P |out|, so a chain of T = ceil(n / L) blocks at most T ((L + 1) 2^-F
        + 2^-P) of the sum of magnitudes, increased by itself to first order in the partial sums.

        With R ranks a term goes through at most n roundings to float32, the rounding of its rank's sum to ``format``,
        and the R - 1 additions in it, for any number of terms per rank: (1 + gamma_n) (1 + gamma_R) - 1, each with its
        own u.
        """
        if self.ranks:
            own = _gamma(terms, FORMATS["float32"].unit_roundoff)
            return (1 + own) * (1 + _gamma(self.ranks, self.format.unit_roundoff)) - 1
        if not self.block:
            return _gamma(terms, self.format.unit_roundoff)
        chunk = min(terms, self.promotion) if self.promotion else terms
        per_block = (self.block + 1) * 2.0**-self.fraction + 2.0**-self.output
        chain = math.expm1(min(700.0, math.ceil(chunk / self.block) * per_block))
        chunks = math.ceil(terms / chunk) if chunk else 0
        return (1 + chain) * (1 + _gamma(chunks, self.format.unit_roundoff)) - 1 if self.promotion else chain

    @property
    def exact_bits(self) -> int:
        """Return the b for which sums of magnitude below 2^b of their lowest set bit are exact in any order."""
        return min(self.fraction, self.output) if self.block else self.format.precision


def _gamma(terms: int, unit_roundoff: float) -> float:
    product = terms * unit_roundoff
    return product / (1 - product) if product < 1 else math.inf


@cache
def accumulator_named(name: str) -> Accumulator:
    """Return the accumulator of that name: a format's, or a model of ``configs/accumulators.toml``.

    Raises `UnknownFormat` for a name that is neither.
    """
    models = table("accumulators")
    if name in models:
        row = {key: value for key, value in models[name].items() if key != "source"}
        row["inputs"] = tuple(row.get("inputs", ()))
        return Accumulator(format=format_named(row.pop("format", "float32")), **row)
    try:
        return Accumulator(format_named(name))
    except UnknownFormat:
        raise UnknownFormat(unknown("accumulator", name, [*FORMATS, *models])) from None
