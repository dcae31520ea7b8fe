"""Number formats, rounding into them, and accumulators; independent of kernels and models.

A `Format` is data; ``round_to(values, format)`` rounds float64 values to it, exactly and once. Used by `golden`,
`interpreter`, `verify` and `precision`.
"""

from typing import TYPE_CHECKING

from assay.runtime.modules import lazy

if TYPE_CHECKING:
    from assay.formats.accumulator import Accumulator, accumulator_named
    from assay.formats.codes import all_values, decode, encode
    from assay.formats.format import FORMATS, Format, format_named
    from assay.formats.rounding import next_down, next_up, round_to, ulp

__all__ = [
    "FORMATS",
    "Accumulator",
    "Format",
    "accumulator_named",
    "all_values",
    "decode",
    "encode",
    "format_named",
    "next_down",
    "next_up",
    "round_to",
    "ulp",
]

__getattr__, __dir__ = lazy(__name__)
