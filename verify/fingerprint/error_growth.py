"""How a kernel's error grows with the length of its reduction: a fit of c n^p, with its interval.

Of random roundings the error of a sum of n terms grows like n^(1/2) in sequence, and hardly at all pairwise; of
one-sided ones like n. The regression is of log error on log n; its interval is Student's, over the lengths.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from assay.formats.rounding import round_to
from assay.golden.registry import Spec
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.harness.runner import KernelHarness

LENGTHS = (32, 64, 128, 256, 512, 1024)
_STUDENT = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # by degrees of freedom
_LEAST_POINTS = 3


@dataclass(frozen=True)
class Growth:
    """Errors (root mean square, relative to that of the results) at each length, and exponent p of the fit c n^p.

    ``low`` and ``high`` are its 95 % interval; ``store`` is the error that rounding the exact result has.
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
        """c of the fit c n^p, through the mean of the points' logarithms."""
        logs = [math.log(e) - self.exponent * math.log(n) for n, e in zip(self.lengths, self.errors, strict=True) if e]
        return math.exp(sum(logs) / len(logs))


def reduced(definition: Spec) -> str | None:
    """The symbol whose length an op sums over; None where it sums nothing, or no one symbol is the sum's length.

    Paged and ragged attention sum over each sequence's own length, a mixture of experts over two dimensions.
    """
    over = definition.reduction.over if definition.reduction else ""
    return over if over.isidentifier() else None


def growth(
    harness: KernelHarness, sampler: Sampler, *, lengths: Sequence[int] = LENGTHS, repeats: int = 3
) -> Growth | None:
    """The growth of errors on positive numbers; None where the kernel can't be called with three lengths or errs never.

    None also where the op has no `reduced` symbol. An error is that of the stored result, the store's own included:
    where results are narrow, that hides the rest, and the `Growth`'s ``store`` tells.
    """
    symbol = reduced(sampler.definition)
    if symbol is None:
        return None
    points = []
    for length in sampler.shapes.get(symbol, lengths):
        errors = [_errors(harness, _case(sampler, symbol, length, seed)) for seed in range(repeats)]
        if all(error is not None for error in errors):
            own, store = (math.sqrt(sum(e[i] ** 2 for e in errors if e) / repeats) for i in (0, 1))
            points.append((length, own, store))
    fitted = [(n, own) for n, own, _ in points if own > 0]
    if len(fitted) < _LEAST_POINTS:
        return None
    slope, half = _fit([math.log(n) for n, _ in fitted], [math.log(error) for _, error in fitted])
    sizes, own_errors, stores = zip(*points, strict=True)
    return Growth(symbol, sizes, own_errors, stores, slope, slope - half, slope + half)


def _fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope of the regression line, and half the width of its 95 % interval (Student's)."""
    slope, intercept = statistics.linear_regression(x, y)
    freedom = len(x) - 2
    rest = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = statistics.variance(x) * (len(x) - 1)
    return slope, _STUDENT[min(freedom, len(_STUDENT) - 1)] * math.sqrt(rest / freedom / spread)


def _case(sampler: Sampler, symbol: str, length: int, seed: int) -> Case:
    base = with_values(sampler.case(seeded(seed), style="small"), "positive", layouts={}, protocol="once")
    return replace(base, sizes={**base.sizes, symbol: length}, memory="plain", unused="plain")


def _errors(harness: KernelHarness, case: Case) -> tuple[float, float] | None:
    """The error of the kernel's results as they are stored, and that of the exact result once it is stored."""
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
