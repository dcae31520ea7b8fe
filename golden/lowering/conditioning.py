"""Where a reference's own formula is ill-conditioned: differences that cancel, and numbers that overflow on the way.

What a difference loses is lost by every kernel that keeps to the formula, and so allowed; whoever reads a verdict
should know of it. A difference of x and y with errors loses log2(max(|x|, |y|) / |x - y|) bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from assay.golden.arithmetic import BallArithmetic
from assay.golden.arithmetic.ball import Ball
from assay.golden.lowering.evaluation import Evaluation, asking_line

_BITS = 6.0  # fewer are lost anywhere
_SHARE = 0.02  # of the elements of an operation
_NOTED = 2.0**5  # u: results that are known better are well enough


@dataclass
class _Loss:
    """Of a line: its elements, those that cancelled or overflowed, and the bits that half of the former lose."""

    of: int = 0
    cancelled: int = 0
    bits: float = 0.0
    overflowed: int = 0


class Watched(Evaluation):  # type: ignore[no-untyped-call]
    """An evaluation that notes what each line loses."""

    def __init__(self, xp: BallArithmetic, operands: torch.dtype | None = None, answers: Sequence[Any] = ()) -> None:
        super().__init__(xp, operands, answers)
        self.losses: dict[str, _Loss] = {}

    def computed(self, names: str, numbers: Sequence[Any], result: Any) -> None:
        """Note one elementwise operation."""
        balls = [number for number in numbers if isinstance(number, Ball)]
        if not isinstance(result, Ball) or result.rad is None or not result.mid.numel():
            return
        finite = torch.ones_like(result.mid, dtype=torch.bool)
        for ball in balls:
            finite = finite & ball.radius.isfinite() & ball.mid.isfinite()
        overflowed = int((finite & (result.radius.isinf() | result.mid.isinf())).sum())
        cancelled, bits = 0, 0.0
        if len(balls) == 2 and names.startswith(("add.", "sub.", "rsub.")):
            one, two = balls
            inexact = (one.radius > 0) | (two.radius > 0)
            lost = torch.log2(torch.maximum(one.mid.abs(), two.mid.abs()) / result.mid.abs())
            much = inexact & finite & (lost >= _BITS) & result.radius.isfinite()
            cancelled = int(much.sum())
            bits = float(lost[much].clamp(max=53).median()) if cancelled else 0.0
        if cancelled or overflowed:
            loss = self.losses.setdefault(asking_line(), _Loss())
            loss.of, loss.cancelled = max(loss.of, result.mid.numel()), max(loss.cancelled, cancelled)
            loss.bits, loss.overflowed = max(loss.bits, bits), max(loss.overflowed, overflowed)


def remarks(losses: Mapping[str, _Loss], results: Sequence[Any], unit: float) -> list[str]:
    """What is worth saying, in words, of lines that lose much, if the results are the worse for it."""
    balls = [result for result in results if isinstance(result, Ball) and result.rad is not None]
    shares = [torch.broadcast_to(b.radius, b.mid.shape)[b.mid != 0] / b.mid[b.mid != 0].abs() for b in balls]
    known = torch.cat([share.reshape(-1) for share in shares]) if shares else torch.zeros(0)
    known = known[known.isfinite()]
    allowed = float(known.quantile(0.9)) if 0 < known.numel() <= 2**24 else 0.0
    found = []
    for line, loss in losses.items():
        if loss.cancelled >= _SHARE * loss.of and allowed > _NOTED * unit:
            stable = max(allowed / 2.0**loss.bits, unit)
            found.append(
                f"{line}: a difference loses {loss.bits:.0f} bits at {loss.cancelled} of {loss.of} elements; results "
                f"may be off by {allowed:.1e} of themselves, those of a form without it by about {stable:.1e}"
            )
        if loss.overflowed >= _SHARE * loss.of:
            found.append(
                f"{line}: {loss.overflowed} of {loss.of} elements overflow, and what follows isn't judged; a form that "
                "doesn't (a shifted exponent, a scaled norm) would be"
            )
    return found
