"""The arithmetics that a definition is evaluated in.

An arithmetic takes float64 and integer tensors as exact (`Arithmetic.exact`, `integers`), and evaluates a definition in
its numbers, all but those of `Real` and mpmath with a radius that encloses the exact result. Definitions call
`Arithmetic`'s methods; `assay.golden.evaluation` chooses the arithmetic and reads the radius; the fault models of
`assay.verify` derive arithmetics with a fault.

| arithmetic       | a number is                     | for                                                      |
|------------------|---------------------------------|----------------------------------------------------------|
| `Real`           | a float64 tensor                | plain reference, speed baseline                          |
| `BallArithmetic` | a float64 midpoint and a radius | certified goldens; with a contract's model, tolerances   |
| `Exact`          | two float64 and a radius        | 25 to 30 digits at the speed of float64                  |
| `Arb`            | an Arb ball                     | proven enclosures where float64 does not resolve         |
| `Multiprecision` | an mpmath number                | the independent second witness                           |
"""

from assay.golden.arithmetic.arbitrary_precision import Arb, Multiprecision
from assay.golden.arithmetic.ball import Ball
from assay.golden.arithmetic.ball_attention import BallArithmetic
from assay.golden.arithmetic.base import Arithmetic, Idx, Indices, N, Number
from assay.golden.arithmetic.exact import Exact
from assay.golden.arithmetic.model import EVALUATION, RoundingModel
from assay.golden.arithmetic.real import Real

__all__ = [
    "EVALUATION",
    "Arb",
    "Arithmetic",
    "Ball",
    "BallArithmetic",
    "Exact",
    "Idx",
    "Indices",
    "Multiprecision",
    "N",
    "Number",
    "Real",
    "RoundingModel",
]
