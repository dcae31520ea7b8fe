"""`compare`: two recorded runs, region by region: who leaves its bound, why, and what the difference is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch

from assay.compare.alignment import folded_weights, reorder_heads
from assay.compare.choices import choice_of
from assay.compare.errors import CompareError
from assay.compare.explanation.shares import Shares, log_probabilities
from assay.compare.regions import Judge
from assay.compare.report import Divergence, Region, Report
from assay.compare.runs.run import Run, Slot
from assay.compare.structure import Structure
from assay.runtime.tensors import same_bits
from assay.verify.comparison.oracle import one_thread
from assay.verify.contract import Contract, contract_from_table

_CLIP = 0.2
"""PPO's range of probability ratios."""
_SETTINGS_LEFT_OUT = {
    "_name_or_path",
    "transformers_version",
    "use_cache",
    "architectures",
    "_attn_implementation",
    "dtype",
}


_SMALL = 1 << 26  # parameters of a model whose tensors are too small for several threads


def different_bits(a: str | Path, b: str | Path) -> Region | None:
    """Return the first region whose bits differ in the runs although its inputs' don't; None where all are equal.

    Its cause says whether both results keep the contract: then another order of sums, or algorithm, explains it.
    """
    first, second = Run(a), Run(b)
    _match_sequences(first, second)
    structure = Structure(first, first, second)
    judge = Judge(structure, first, second, first, contract_from_table({"base": "torch"}))
    for plan in structure.plans:
        slots = [*(each for each in plan.inputs if isinstance(each, Slot)), *plan.outputs]
        one, two = ([run.whole(slot) for slot in slots] for run in (first, second))
        same = [x is not None and y is not None and same_bits(x, y) for x, y in zip(one, two, strict=True)]
        if all(same):
            continue
        region = judge.region(plan)
        taken = same[: len(slots) - len(plan.outputs)]
        if all(taken) and not region.is_beyond:
            region.cause = "same inputs, other bits, both within the contract: another order of sums, or algorithm"
        elif not all(taken):
            region.cause = region.cause or "its inputs differ, and no region before it explains why"
        return region
    return None


def compare(
    a: str | Path, b: str | Path, *, contract: str | Contract = "torch", weights: str | Path | None = None
) -> Report:
    """Compare two runs that `record` wrote, of the same tokens, and return the `Report`.

    ``contract``: what the code of both promises, a `Contract` or its name ("torch" admits what eager mode and any
    fusion of it round). Where the runs' weights or configurations differ, those of run a count, or those of the run
    ``weights``.

    Raises `CompareError` for runs of other tokens, `RecordingError` for folders that are none.
    """
    first, second = Run(a), Run(b)
    authority = first if weights is None else Run(weights)
    _match_sequences(*dict.fromkeys((first, second, authority)))
    with one_thread() if first.parameters < _SMALL else nullcontext():
        return _compared(first, second, authority, contract)


def _compared(first: Run, second: Run, authority: Run, contract: str | Contract) -> Report:
    promise = contract if isinstance(contract, Contract) else contract_from_table({"base": contract})
    for run in {first, second} - {authority}:
        reorder_heads(authority, run)
    structure = Structure(authority, first, second)
    folded = {run: folded_weights(structure, authority, run) for run in {first, second} - {authority}}
    sums = {plan.outputs[0]: plan for plan in structure.plans if plan.kind == "residual"}
    sums |= {slot: sums[source] for slot, source in structure.sources.items() if source in sums}
    judge = Judge(structure, first, second, authority, promise, folded, sums)
    report = Report(str(first.folder), str(second.folder), settings=_settings(first, second))
    judged: dict[str, Region] = {}
    for plan in structure.plans:
        report.regions += judge.links(plan)
        if (choice := choice_of(plan, structure, first, second)) is not None:
            report.regions.append(choice)
        judged[plan.name] = judge.region(plan)
        report.regions.append(judged[plan.name])
        for block in structure.blocks:  # whole, where a kernel computes it without its projections
            if plan.name == f"{block.name}.down_proj" and "unmatched" in judged[plan.name].statuses:
                report.regions.append(judge.region(block))
    unmatched = (region for region in judged.values() if "unmatched" in region.statuses)
    report.unmatched = [f"{region.name}: {region.where}" for region in unmatched]
    report.unmatched += [f"{name}: {slot} isn't the output of any region" for name, slot in structure.loose]
    _measure(report, structure, judged, first, second)
    return report


def _match_sequences(*runs: Run) -> None:
    """Keep in each run the sequences of tokens that all have, in the first one's order. Raises `CompareError`."""
    for run in runs:
        if not run.ids:
            raise CompareError(f"{run.folder}: no call with token ids was recorded; call the model with input_ids")
    kept: list[list[int]] = [[] for _ in runs]
    free = [list(range(len(run.ids))) for run in runs]
    for ids in runs[0].ids:
        places = [
            next((index for index in left if run.ids[index].equal(ids)), None)
            for run, left in zip(runs, free, strict=True)
        ]
        if None not in places:
            for chosen, left, index in zip(kept, free, places, strict=True):
                assert index is not None
                chosen.append(index)
                left.remove(index)
    if not kept[0]:
        counts = " and ".join(f"{len(run.ids)} of {len(run.ids[0])} tokens and more" for run in runs)
        raise CompareError(
            f"expected runs with a sequence of the same token ids, got sequences {counts} without one in common; "
            "record both with the same text, teacher-forced"
        )
    for run, chosen in zip(runs, kept, strict=True):
        run.keep(chosen)


def _settings(a: Run, b: Run) -> list[str]:
    """Return what differs in the configurations and switches of the runs, in words."""
    found = []
    for name in sorted({*a.config, *b.config} - _SETTINGS_LEFT_OUT):
        one, two = a.config.get(name), b.config.get(name)
        if one != two:
            found.append(f"configuration {name}: {json.dumps(one)} in a, {json.dumps(two)} in b")
    for name, one in a.manifest["flags"].items():
        if one != (two := b.manifest["flags"].get(name)):
            found.append(f"{name}: {one} in a, {two} in b")
    frequencies = [run.parameter("rotary_emb", "inv_freq") for run in (a, b)]
    if frequencies[0] is not None and frequencies[1] is not None and frequencies[0].dtype != frequencies[1].dtype:
        names = [str(each.dtype).removeprefix("torch.") for each in frequencies if each is not None]
        found.append(f"rotary frequencies: {names[0]} in a, {names[1]} in b")
    for name, one in a.manifest["versions"].items():
        if one != (two := b.manifest["versions"].get(name)):
            found.append(f"version of {name}: {one} in a, {two} in b")
    return found


def _measure(report: Report, structure: Structure, judged: Mapping[str, Region], a: Run, b: Run) -> None:
    """Fill in the difference of log-probabilities, and each region's share of it."""
    one, two = (log_probabilities(run, structure.logits) for run in (a, b))
    if one is None or two is None:
        report.unmatched.append("log-probabilities: no logits of all tokens were recorded")
        return
    difference = two - one
    ratio = difference.exp()
    report.divergence = Divergence(
        tokens=len(difference),
        mean=float(difference.abs().mean()),
        greatest=float(difference.abs().max()),
        k1=float(-difference.mean()),
        k3=float((ratio - 1 - difference).mean()),
        clipped=float(((ratio - 1).abs() > _CLIP).double().mean()),
        routing=_agreement(structure, a, b),
    )
    if not float(difference.abs().max()):
        report.explained = 1.0
        return
    shares = Shares(structure, a, b, difference)
    for plan in structure.plans:
        judged[plan.name].share = shares.of(plan)
    report.explained = shares.total


def _agreement(structure: Structure, a: Run, b: Run) -> float | None:
    """Return the share of tokens and layers whose sets of chosen experts are the same."""
    same = []
    for plan in structure.plans:
        if plan.definition == "experts":
            ids = [run.whole(plan.inputs[1]) for run in (a, b)]  # type: ignore[arg-type]
            if ids[0] is not None and ids[1] is not None:
                same.append((ids[0].sort(-1).values == ids[1].sort(-1).values).all(-1))
    return float(torch.cat(same).double().mean()) if same else None
