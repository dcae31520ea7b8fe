"""The arithmetics that a definition is evaluated in.

| arithmetic       | a number is                     | for                                                      |
|------------------|---------------------------------|----------------------------------------------------------|
| `Real`           | a float64 tensor                | plain reference, speed baseline                          |
| `BallArithmetic` | a float64 midpoint and a radius | certified goldens; with a contract's model, tolerances   |
| `Exact`          | two float64 and a radius        | 25 to 30 digits at the speed of float64                  |
| `Arb`            | an Arb ball                     | proven enclosures where float64 does not resolve         |
| `Multiprecision` | an mpmath number                | the independent second witness                           |
"""

from assay.golden.arithmetic.ball import Ball
from assay.golden.arithmetic.ball_composite import BallArithmetic
from assay.golden.arithmetic.base import Arithmetic
from assay.golden.arithmetic.exact import Exact
from assay.golden.arithmetic.model import EVALUATION, Accumulator, RoundingModel
from assay.golden.arithmetic.objects import Arb, Multiprecision
from assay.golden.arithmetic.real import Real

__all__ = [
    "EVALUATION",
    "Accumulator",
    "Arb",
    "Arithmetic",
    "Ball",
    "BallArithmetic",
    "Exact",
    "Multiprecision",
    "Real",
    "RoundingModel",
]
