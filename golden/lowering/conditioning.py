"""Where a reference's own formula is ill-conditioned: cancelling differences and intermediate overflow.

Every kernel that keeps to the formula loses as much, so the tolerance allows it; the verdict reports it. A difference
of inexact x and y loses log2(max(|x|, |y|) / |x - y|) bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from assay.golden.arithmetic import BallArithmetic
from assay.golden.arithmetic.ball import Ball
from assay.golden.lowering.choices import Choices
from assay.golden.lowering.dispatch import Lowering, calling_line

_MIN_BITS = 6.0  # every formula loses fewer somewhere
_MIN_SHARE = 0.02  # of the elements of an operation
_MIN_ERROR = 2.0**5  # in unit roundoffs: results with smaller radii are good enough


@dataclass
class Loss:
    """Of a line: its elements, how many cancelled or overflowed, and the median bits lost by cancellation."""

    elements: int = 0
    cancelled: int = 0
    bits: float = 0.0
    overflowed: int = 0


class ConditioningLowering(Lowering):  # type: ignore[no-untyped-call]
    """A lowering that records what each line of the reference loses."""

    def __init__(
        self, xp: BallArithmetic, operand_dtype: torch.dtype | None = None, choices: Choices | None = None
    ) -> None:
        super().__init__(xp, operand_dtype, choices)
        self.losses: dict[str, Loss] = {}

    def observe(self, names: str, numbers: Sequence[Any], result: Any) -> None:
        """Record one elementwise operation."""
        balls = [number for number in numbers if isinstance(number, Ball)]
        if not isinstance(result, Ball) or result.rad is None or not result.mid.numel():
            return
        finite = torch.ones_like(result.mid, dtype=torch.bool)
        for ball in balls:
            finite = finite & ball.radius.isfinite() & ball.mid.isfinite()
        overflowed = int((finite & (result.radius.isinf() | result.mid.isinf())).sum())
        cancelled, bits = 0, 0.0
        if len(balls) == 2 and names.startswith(("add.", "sub.", "rsub.")):
            x, y = balls
            inexact = (x.radius > 0) | (y.radius > 0)
            lost = torch.log2(torch.maximum(x.mid.abs(), y.mid.abs()) / result.mid.abs())
            cancels = inexact & finite & (lost >= _MIN_BITS) & result.radius.isfinite()
            cancelled = int(cancels.sum())
            bits = float(lost[cancels].clamp(max=53).median()) if cancelled else 0.0
        if cancelled or overflowed:
            loss = self.losses.setdefault(calling_line(), Loss())
            loss.elements, loss.cancelled = max(loss.elements, result.mid.numel()), max(loss.cancelled, cancelled)
            loss.bits, loss.overflowed = max(loss.bits, bits), max(loss.overflowed, overflowed)


def remarks(losses: Mapping[str, Loss], results: Sequence[Any], unit: float) -> list[str]:
    """Describe the lines that lose much, if the results suffer; ``unit`` is the unit roundoff."""
    balls = [result for result in results if isinstance(result, Ball) and result.rad is not None]
    relative = [torch.broadcast_to(b.radius, b.mid.shape)[b.mid != 0] / b.mid[b.mid != 0].abs() for b in balls]
    errors = torch.cat([error.reshape(-1) for error in relative]) if relative else torch.zeros(0)
    errors = errors[errors.isfinite()]
    allowed = float(errors.quantile(0.9)) if 0 < errors.numel() <= 2**24 else 0.0  # torch's limit on quantile's input
    texts = []
    for line, loss in losses.items():
        if loss.cancelled >= _MIN_SHARE * loss.elements and allowed > _MIN_ERROR * unit:
            stable = max(allowed / 2.0**loss.bits, unit)
            texts.append(
                f"{line}: a difference loses {loss.bits:.0f} bits at {loss.cancelled} of {loss.elements} elements; "
                f"results may be off by {allowed:.1e} of themselves, those of a form without it by about {stable:.1e}"
            )
        if loss.overflowed >= _MIN_SHARE * loss.elements:
            texts.append(
                f"{line}: {loss.overflowed} of {loss.elements} elements overflow, and what follows isn't judged; a "
                "form that doesn't (a shifted exponent, a scaled norm) would be"
            )
    return texts
