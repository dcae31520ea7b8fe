"""The growth of a kernel's error with the length n of its reduction: a fit of c n^p, with an interval for p.

With random roundings the error of a sequential sum grows like n^(1/2), and that of a pairwise sum hardly at all; with
one-sided roundings it grows like n. The regression is of log error on log n, with Student's interval.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from assay.formats.rounding import round_to
from assay.golden.registry import Spec
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.harness.runner import KernelHarness

LENGTHS = (32, 64, 128, 256, 512, 1024)
# Quantiles for a two-sided interval of 95 %, by degrees of freedom.
_STUDENT = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_LEAST_POINTS = 3  # a line through two points has no degree of freedom


@dataclass(frozen=True)
class Growth:
    """Errors (root mean square, relative to that of the results) at each length, and the exponent p of the fit c n^p.

    ``low`` and ``high`` bound the 95 % interval of p; ``store`` is the error of rounding the exact result.
    """

    symbol: str
    lengths: tuple[int, ...]
    errors: tuple[float, ...]
    store: tuple[float, ...]
    exponent: float
    low: float
    high: float

    @property
    def factor(self) -> float:
        """Return c of the fit c n^p, through the mean of the points' logarithms."""
        logs = [math.log(e) - self.exponent * math.log(n) for n, e in zip(self.lengths, self.errors, strict=True) if e]
        return math.exp(sum(logs) / len(logs))


def reduced(definition: Spec) -> str | None:
    """Return the symbol whose length an op sums over; None if it sums nothing, or if no single symbol is that length.

    Paged and ragged attention sum over each sequence's own length, a mixture of experts over two dimensions.
    """
    over = definition.reduction.over if definition.reduction else ""
    return over if over.isidentifier() else None


def growth(
    harness: KernelHarness, sampler: Sampler, *, lengths: Sequence[int] = LENGTHS, repeats: int = 3
) -> Growth | None:
    """Return the growth of errors on positive numbers.

    Return None if the op has no `reduced` symbol, if the kernel can't be called with three lengths, or if it has no
    errors. Errors are those of stored results and include the store's rounding, which in a narrow format hides the
    sum's; ``store`` of the `Growth` shows by how much.
    """
    symbol = reduced(sampler.definition)
    if symbol is None:
        return None
    points = []
    for length in sampler.shapes.get(symbol, lengths):
        drawn = [sampler.case(seeded(seed), style="small") for seed in range(repeats)]
        plain = {"layouts": {}, "protocol": "once", "memory": "plain", "unused": "plain"}
        cases = [with_values(case, "positive", sizes={**case.sizes, symbol: length}, **plain) for case in drawn]
        errors = [_errors(harness, case) for case in cases]
        if all(error is not None for error in errors):
            own, store = (math.sqrt(sum(e[i] ** 2 for e in errors if e) / repeats) for i in (0, 1))
            points.append((length, own, store))
    fitted = [(n, own) for n, own, _ in points if own > 0]
    if len(fitted) < _LEAST_POINTS:
        return None
    x, y = ([math.log(value) for value in side] for side in zip(*fitted, strict=True))
    slope, intercept = statistics.linear_regression(x, y)
    freedom = len(x) - 2
    rest = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = statistics.variance(x) * (len(x) - 1)
    half = _STUDENT[min(freedom, len(_STUDENT) - 1)] * math.sqrt(rest / freedom / spread)  # of the 95 % interval
    sizes, own_errors, stores = zip(*points, strict=True)
    return Growth(symbol, sizes, own_errors, stores, slope, slope - half, slope + half)


def _errors(harness: KernelHarness, case: Case) -> tuple[float, float] | None:
    """Return the error of the kernel's stored results, and that of the exact results once they are stored."""
    try:
        result = harness.try_case(case)
    except ValueError:  # sizes that the op can't have
        return None
    if not result.tolerances or not result.outputs:
        return None
    limits = result.tolerances[0]
    index = next(index for index, tensor in enumerate(case.signature.returns) if not tensor.is_integer)
    y, exact = result.outputs[index].detach().cpu().double(), limits.golden
    size = float(exact.square().mean().sqrt())
    if not size or not math.isfinite(size) or not bool(torch.isfinite(y).all()):
        return None
    stored = round_to(exact, limits.out)
    return float((y - exact).square().mean().sqrt()) / size, float((stored - exact).square().mean().sqrt()) / size
