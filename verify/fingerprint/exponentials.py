"""The sum of exponentials inside softmax, its logarithm, and log-sum-exp.

Beside exp(0) = 1 stands one exponential of chosen size s, all others being zero. log-sum-exp is then log(1 + s), about
s, and softmax gives the first element 1 / (1 + s): both are 0 and 1 just where the sum has lost s.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from assay.verify.fingerprint.subject import Subject, Unseen, in_bits

_COLUMNS, _SECOND = 64, 37
_ROWS = 16
_MOST = 30
_WELL = 0.3  # how far a sum may be off that holds s


@dataclass(frozen=True)
class Exponentials:
    """Sums of exponentials of one op; ``less_one`` is what the sum is less one, by a row's first result.

    It raises `ZeroDivisionError` or `OverflowError` where the result shows none.
    """

    subject: Subject
    less_one: Callable[[float], float]

    def width(self) -> str:
        """Bits that the sum keeps; raises `Unseen`."""
        bits, is_limit = self._width()
        return f"at least {bits} bits" if is_limit else in_bits(bits)

    def rounding(self) -> str:
        """What becomes of 3/4 of the last bit; raises `Unseen`."""
        bits, is_limit = self._width()
        if is_limit:
            raise Unseen("the sum is as wide as the results show")
        gap = 2.0 ** (1 - bits)
        return "to nearest" if self._sum(0.75 * gap) > gap / 2 else "toward zero"

    def _width(self) -> tuple[int, bool]:
        """How many bits, and whether that is as many as the results can show."""
        out = self.subject.out
        most = _MOST if self.less_one(1.0) else out.precision  # results near one show no more than their own digits
        bits = 1
        for shift in range(1, most):
            size = 1.01 * 2.0**-shift
            if abs(self._sum(size) / size - 1) > _WELL:
                break
            bits = shift + 1
        if bits < 4:
            raise Unseen("sums of two exponentials are far from what they should be")
        return bits, bits == most

    def _sum(self, size: float) -> float:
        """The sum less one, as the result shows it, for an exponential of that size; raises `Unseen`."""
        (tensor, *_) = self.subject.question.definition.tensors
        format = self.subject.format_of(tensor.name)
        x = torch.full((_ROWS, _COLUMNS), -math.inf, dtype=torch.float64)
        x[:, 0], x[:, _SECOND] = 0.0, math.log(size)
        x = x.to(torch.float32).to(getattr(torch, format.name)).double()
        actual = math.exp(float(x[0, _SECOND]))
        y = self.subject.call(dict(zip(tensor.dims, x.shape, strict=True)), {tensor.name: x})[0]
        first = float(y.flatten()[0])
        try:
            seen = self.less_one(first)
        except (ZeroDivisionError, OverflowError):
            seen = math.nan
        if not math.isfinite(seen):
            raise Unseen(f"with -inf among the inputs the result is {first:g}, which shows no sum of exponentials")
        return seen * size / actual
