"""The effort of `assay audit`: how much it measures, and an estimate of its duration before it starts."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from assay.formats.errors import UnknownOption

if TYPE_CHECKING:
    import torch

    from assay.precision.auditing import Audit

__all__ = ["QUICK", "USUAL", "Effort", "Pace", "check_effort", "pace_of", "span"]

_SIMULATED = 1.6
"""Duration of a measurement in plain forward passes: values are rounded, and compared in float64."""
_BEFORE = 20.0
"""Duration in forward passes of the passes before the first measurement: recording, fitting and predicting."""
_CHOICE = 10
"""Approximate measurements that choose one assignment."""
_SIMPLE = 3
"""Further measurements per weight scheme: the simple assignments, over the held-out sequences."""
_LEAST, _MOST = 6, 96  # calibration measurements that a time budget may choose


@dataclass(frozen=True, slots=True)
class Effort:
    """``count``: the argument of `Audit.calibrate`. ``points``: how many assignments of the front are measured."""

    count: int
    points: int

    @property
    def measurements(self) -> int:
        """Return the approximate number of measurements over the sequences that are chosen on."""
        return self.count + _CHOICE


USUAL, QUICK = Effort(20, 16), Effort(10, 6)


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a model here: seconds of one measurement over the chosen and over the held-out sequences."""

    choice: float
    held_out: float
    simple: int = 60
    """Simple assignments that are measured besides the recommended one."""

    def left(self, effort: Effort) -> float:
        """Return the seconds of all measurements."""
        return effort.measurements * self.choice + (effort.points + self.simple) * self.held_out

    def whole(self, effort: Effort) -> float:
        """Return the seconds of the audit, to about a factor of two."""
        return _BEFORE / _SIMULATED * self.choice + self.left(effort)

    def within(self, seconds: float) -> Effort:
        """Return the largest effort that fits into ``seconds``, but at least `_LEAST`."""
        efforts = [
            Effort(count, USUAL.points if count >= USUAL.count else QUICK.points) for count in range(_LEAST, _MOST + 1)
        ]
        return max(
            (each for each in efforts if self.left(each) <= seconds), key=lambda each: each.count, default=efforts[0]
        )

    def confirmed(self, result: Audit) -> Pace:
        """Return the pace of the first measurement if that is slower; cached measurements don't count."""
        began = time.monotonic()
        sequences = len(result.noise_floor.weights)
        each = (time.monotonic() - began) / sequences
        choice, held_out = (each * count for count in (result.observed.sequences, sequences))
        return replace(self, choice=max(self.choice, choice), held_out=max(self.held_out, held_out))


def pace_of(
    model: torch.nn.Module,
    batches: Sequence[Mapping[str, Any]],
    held_out: Sequence[Mapping[str, Any]] | None,
    menu: Collection[str],
) -> Pace:
    """Estimate the pace from one forward pass of a batch; menu: the schemes to choose from."""
    import torch

    from assay.precision.observation.running import call, evaluating, in_float32, normalised
    from assay.precision.schemes import SCHEMES

    model = in_float32(model)
    (batch,) = normalised(batches[:1], model)
    spent = 0.0
    for _ in range(2):  # the first one also warms up
        began = time.monotonic()
        with torch.no_grad(), evaluating(model):
            call(model, batch)
        spent = time.monotonic() - began
        if spent > 1:
            break
    each = _SIMULATED * spent / len(batch["input_ids"])
    choice, other = (sum(len(one["input_ids"]) for one in part or batches) for part in (batches, held_out))
    return Pace(each * choice, each * other, _SIMPLE * sum(SCHEMES[name].weight is not None for name in menu))


def check_effort(quick: bool, budget: float | None) -> None:
    """Raise if both are given, or the budget has no time."""
    if quick and budget is not None:
        raise UnknownOption("--quick and --budget both say how much is measured; give one of them")
    if budget is not None and not budget > 0:
        raise UnknownOption(f"--budget {budget:g}; expected a number above 0")


def span(seconds: float) -> str:
    """Return a duration in words."""
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )
