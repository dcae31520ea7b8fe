"""Which experts a router chose: right in a run if no other expert has a higher score on the run's own logits."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.compare.report import Region
from assay.compare.runs.run import Run, Slot
from assay.compare.structure import Plan, Structure

_TIE = 1e-6
"""Of the largest score: sigmoid and softmax in float32, a sum with a bias, and sums of two scores of a group round."""


def choice_of(plan: Plan, structure: Structure, a: Run, b: Run) -> Region | None:
    """Return the region of a router's choice, from the region of its weights; None for another region.

    "open" in both runs where they chose other experts, each rightly by its own logits.
    """
    if plan.definition != "routing_weights":
        return None
    region = Region(plan.name.removesuffix(".weights") + ".choice", "router")
    chosen = []
    for run, side in ((a, region.a), (b, region.b)):
        logits, ids = (run.whole(slot) for slot in plan.inputs if isinstance(slot, Slot))
        if logits is None or ids is None:
            return None
        wrong = _wrong(logits, ids.long(), _bias(plan, run), structure.groups_of_experts, plan.options["scoring"])
        side.status = "beyond" if bool(wrong.any()) else "within"
        if side.status == "beyond":
            region.cause = "experts are chosen that have no score among the highest"
            region.where = f"at {int(wrong.sum())} of {len(wrong)} tokens"
        chosen.append(ids.sort(-1).values)
    flipped = (chosen[0] != chosen[1]).any(-1)
    if region.statuses == ("within", "within") and bool(flipped.any()):
        region.a.status = region.b.status = "open"
        region.where = (
            f"at {int(flipped.sum())} of {len(flipped)} tokens the runs choose other experts, each by its logits"
        )
    return region


def _bias(plan: Plan, run: Run) -> Tensor | None:
    """Return the bias that counts in the choice alone (DeepSeek-V3)."""
    module = plan.outputs[0].module
    return run.parameter(module, "e_score_correction_bias")


def _wrong(logits: Tensor, ids: Tensor, bias: Tensor | None, groups: tuple[int, int], scoring: str) -> Tensor:
    """Return which tokens [T] chose an expert although one that they didn't has a higher score.

    ``groups``: how many groups of experts there are, and how many of them a token may choose from: those with the
    highest sum of their two best scores.
    """
    scores = logits.double().sigmoid() if scoring == "sigmoid" else logits.double().softmax(-1)
    scores = scores if bias is None else scores + bias.double()
    tie = _TIE * scores.abs().amax(-1)
    count, kept = groups
    if count > 1:
        best = scores.reshape(len(scores), count, -1).topk(2, -1).values.sum(-1)
        least = best.topk(kept, -1).values[:, -1:]
        # A group at the limit may be in or out: its experts may be chosen, but needn't be.
        inside = (best >= least + 2 * tie[:, None]).repeat_interleave(scores.shape[1] // count, -1)
        allowed = (best >= least - 2 * tie[:, None]).repeat_interleave(scores.shape[1] // count, -1)
    else:
        inside = allowed = torch.ones_like(scores, dtype=torch.bool)
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, value=True)
    lowest = scores.masked_fill(~taken, torch.inf).amin(-1)
    passed_over = scores.masked_fill(taken | ~inside, -torch.inf).amax(-1)
    return (passed_over > lowest + tie) | (taken & ~allowed).any(-1)
