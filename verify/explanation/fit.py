"""How well a fault model accounts for the calls seen so far, and how much room it leaves their outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from assay.formats.rounding import next_down, next_up
from assay.verify.comparison.judge import Judgement, judge
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.explanation.fault_models.fault_tolerance import Observation, limits_of
from assay.verify.explanation.inquiry import Inquiry

Tensor = torch.Tensor
_UNSAID = 24.0  # bits of room of an element of which an explanation says nothing


@dataclass(frozen=True)
class Fit:
    """How well a fault model accounts for calls: what it explains and leaves, its room in bits, the worst ratio."""

    fault: FaultModel
    order: int
    left: int = 0
    explained: int = 0
    room: tuple[float, float] = (0.0, 0.0)  # of elements that break the contract, of all
    elements: tuple[int, int] = (0, 0)
    ratio: float = 0.0

    @property
    def rank(self) -> tuple[int, ...]:
        """The less room for the mean element that breaks the contract, then for any, the likelier; or the earlier."""
        means = (room / max(count, 1) for room, count in zip(self.room, self.elements, strict=True))
        return (*(round(4 * mean) for mean in means), self.order)

    def on(self, observation: Observation, inquiry: Inquiry) -> Fit:
        """The same with one more call; a fault model that can't be evaluated on it doesn't account for it."""
        judgements: tuple[Judgement, ...] | None = None
        with inquiry.asking(self.fault):
            if not self.fault.concerns(observation.case):
                return replace(self, left=self.left + observation.breaks)
            limits = limits_of(self.fault, observation)
            judgements = None if limits is None else tuple(map(judge, observation.outputs, limits))
        if judgements is None:
            return replace(self, left=self.left + max(observation.breaks, 1))
        silent = self.fault.family == "unwritten"  # which says of some elements that they may be anything
        here = sum(
            int((was & ~now.broken & (now.tolerance.judged | silent)).sum())
            for was, now in zip(observation.broken, judgements, strict=True)
        )
        rooms = [_room(now) for now in judgements]
        broken = sum(float(room[was].sum()) for room, was in zip(rooms, observation.broken, strict=True))
        return replace(
            self,
            left=self.left + sum(int(now.broken.sum()) for now in judgements),
            explained=self.explained + here + observation.chooses_wrongly,
            room=(self.room[0] + broken, self.room[1] + sum(float(room.sum()) for room in rooms)),
            elements=(self.elements[0] + observation.breaks, self.elements[1] + sum(room.numel() for room in rooms)),
            ratio=max(self.ratio, *(now.worst for now in judgements)),
        )


def _room(judgement: Judgement) -> Tensor:
    """Bits of room of each element: the logarithm of how many numbers of the output's format lie within."""
    allowed = judgement.tolerance
    golden = torch.where(allowed.golden.isfinite(), allowed.golden, 0.0)
    gap = torch.maximum(next_up(golden, allowed.out) - golden, golden - next_down(golden, allowed.out))
    span = (allowed.ends.high - allowed.ends.low) / gap.clamp(min=5e-324)
    bits = torch.log2(1 + span.nan_to_num(nan=0.0, posinf=2.0**_UNSAID)).clamp(max=_UNSAID)
    return torch.where(allowed.judged, bits, _UNSAID)
