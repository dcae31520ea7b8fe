"""`compare`: two recorded runs, region by region: who leaves its bound, why, and what the difference is made of."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from assay.compare import definitions
from assay.compare.alignment import folded_weights, reorder_heads
from assay.compare.errors import CompareError
from assay.compare.explanation.causes import cause_of, suspicion_of
from assay.compare.explanation.shares import Shares, log_probabilities
from assay.compare.explanation.weights import difference_of
from assay.compare.judging import Evidence, Missing, evidence_of
from assay.compare.report import Divergence, Region, Report
from assay.compare.runs.run import Run, Slot
from assay.compare.structure import Parameter, Plan, Structure
from assay.runtime.errors import AssayError, one_line
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


_REFUSED = (RuntimeError, ValueError, TypeError, IndexError, AssayError)
"""What a definition raises on shapes that it hasn't."""
_SMALL = 1 << 26  # parameters of a model whose tensors are too small for several threads


@dataclass
class _Judged:
    """A region with its evidence in both runs, None where it is missing."""

    plan: Plan
    region: Region
    a: Evidence | None = None
    b: Evidence | None = None


def different_bits(a: str | Path, b: str | Path) -> Region | None:
    """Return the first region whose bits differ in the runs although its inputs' don't; None where all are equal.

    Its cause says whether both results keep the contract: then another order of sums, or algorithm, explains it.
    """
    first, second = Run(a), Run(b)
    _match_sequences(first, second)
    promise = contract_from_table({"base": "torch"})
    for plan in Structure(first, first, second).plans:
        slots = [*(each for each in plan.inputs if isinstance(each, Slot)), *plan.outputs]
        one, two = ([run.whole(slot) for slot in slots] for run in (first, second))
        same = [x is not None and y is not None and same_bits(x, y) for x, y in zip(one, two, strict=True)]
        if all(same):
            continue
        region = _judge(plan, first, second, first, promise).region
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
    report = Report(str(first.folder), str(second.folder), settings=_settings(first, second))
    judged = []
    for plan in structure.plans:
        judged += _links(plan, structure, first, second, authority)
        judged.append(_judge(plan, first, second, authority, promise, folded, sums))
        for block in structure.blocks:
            if plan.name == f"{block.name}.down_proj" and "unmatched" in _statuses(judged[-1].region):
                judged.append(_judge(block, first, second, authority, promise, folded))
    report.regions = [each.region for each in judged]
    report.unmatched = _unmatched(structure, judged)
    _measure(report, structure, judged, first, second)
    return report


def _statuses(region: Region) -> tuple[str, str]:
    return region.status_a, region.status_b


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


def _judge(
    plan: Plan,
    a: Run,
    b: Run,
    authority: Run,
    contract: Contract,
    folded: Mapping[Run, Container[Parameter]] = MappingProxyType({}),
    sums: Mapping[Slot, Plan] | None = None,
) -> _Judged:
    judged = _Judged(plan, Region(plan.name, plan.kind))
    region, differences, suspicions = judged.region, [], {}
    for run, side in ((a, "a"), (b, "b")):
        differing = [
            words
            for each in plan.inputs
            if type(each) is Parameter
            and each not in folded.get(run, ())
            and (words := difference_of(each, authority, run))
        ]
        changed = [words for words in differing if words.is_fault]
        try:
            own = _with_own_sum(_with_own_frequencies(plan, run), run, sums or {})
            evidence = evidence_of(own, run, contract, authority if changed else _weights(own, run, authority))
        except Missing as missing:
            region.where = region.where or f"run {side}: {missing}"
            if left_out := _left_out(plan, run):
                region.cause = left_out
                setattr(region, f"status_{side}", "beyond")
            continue
        except _REFUSED as error:
            region.where = region.where or f"run {side}: {plan.definition} can't be evaluated on it ({one_line(error)})"
            continue
        setattr(judged, side, evidence)
        suspicions[side] = "" if evidence.is_beyond else suspicion_of(evidence)
        beyond = evidence.is_beyond or suspicions[side]
        setattr(region, f"status_{side}", "beyond" if beyond else "within")
        setattr(region, f"error_{side}", evidence.proved)
        setattr(region, f"times_{side}", evidence.times)
        setattr(region, f"dtype_{side}", str(evidence.given[0].dtype).removeprefix("torch."))
        region.tokens[side] = _by_token(evidence)
        if evidence.is_beyond:
            differences += [words.words for words in changed]
    for side, known in (("b", judged.b), ("a", judged.a)):
        if known is not None and getattr(region, f"status_{side}") == "beyond":
            region.cause = suspicions[side] or "; ".join(differences) or cause_of(known)
            region.where = _where(known)
            break
    return judged


def _with_own_frequencies(plan: Plan, run: Run) -> Plan:
    """Return a rotary table's region in the run's dtype, with its own frequencies where these are the configuration's
    in another dtype: `model.bfloat16()` casts them too."""
    if plan.definition != "rotary_table":
        return plan
    plan = replace(plan, options={**plan.options, "dtype": str(run.main_dtype).removeprefix("torch.")})
    own, stated = run.parameter("rotary_emb", "inv_freq"), plan.inputs[1]
    if own is None or not isinstance(stated, Tensor) or not torch.equal(stated.to(own.dtype), own):
        return plan
    return replace(plan, inputs=(plan.inputs[0], own))


def _with_own_sum(plan: Plan, run: Run, sums: Mapping[Slot, Plan]) -> Plan:
    """Return a norm's region with the sum before it, in a run whose norm adds: the sum needn't be stored."""
    x = plan.inputs[0]
    if plan.definition != "rmsnorm" or not isinstance(x, Slot) or x.module not in run.adding or x not in sums:
        return plan
    return replace(plan, definition="added_rmsnorm", inputs=(plan.inputs[1], *sums[x].inputs))


def _left_out(plan: Plan, run: Run) -> str:
    """Return which term a run's sum has not, in words: of a module that never ran, while the rest is the result."""
    slots = [each for each in plan.inputs if isinstance(each, Slot)]
    missing = [slot for slot in slots if not run.has(slot)]
    given = run.whole(plan.outputs[0])
    terms = [values for slot in slots if (values := run.whole(slot)) is not None]
    if plan.kind != "residual" or not missing or given is None or not terms:
        return ""
    rest = terms[0].double() if plan.definition == "gated_total" else definitions.total(*(x.double() for x in terms))
    if not torch.equal(rest.to(given.dtype), given):
        return ""
    return f"{missing[0]} is missing: {missing[0].module} never ran"


def _weights(plan: Plan, run: Run, authority: Run) -> Run:
    """Return the run whose parameters count: the run's own, where it has them all."""
    own = all(run.parameter(each.module, each.name) is not None for each in plan.inputs if type(each) is Parameter)
    return run if own else authority


_MAPPED = 64  # columns of the page's map, so that a report stays small


def _by_token(evidence: Evidence) -> list[float]:
    """Return the largest excess of each token, of at most 64 groups of tokens."""
    excess = torch.stack(evidence.excess).amax(0)
    return [float(f"{float(part.max()):.3g}") for part in excess.chunk(min(_MAPPED, len(excess)))]


def _where(evidence: Evidence) -> str:
    """Return which tokens are beyond, where not all are."""
    masks = [mask for mask in evidence.wrong if bool(mask.any())]
    if not masks:
        return ""
    wrong = torch.stack(masks).any(0)
    if bool(wrong.all()):
        return "at every token"
    places = wrong.nonzero()[:, 0]
    first, last = int(places[0]), int(places[-1])
    together = len(places) == last - first + 1
    return f"at tokens {first} to {last}" if together else f"at {len(places)} of {len(wrong)} tokens, the first {first}"


def _links(plan: Plan, structure: Structure, a: Run, b: Run, authority: Run) -> list[_Judged]:
    """Return the regions between an output and the input that it is in the authority's run, where a run has another."""
    found = []
    for slot in plan.inputs:
        source = structure.sources.get(slot) if isinstance(slot, Slot) else None
        if source is None or not isinstance(slot, Slot) or source.module == slot.module:
            continue
        link = Plan(f"{source.module or 'logits'} to {slot.module}", "link", "total", (source,), (slot,))
        region = Region(link.name, "link")
        for run, side in ((a, "a"), (b, "b")):
            taken, given = run.whole(slot), run.whole(source)
            if taken is None or given is None:
                continue
            length = min(len(taken), len(given))
            error = (taken[:length].double() - given[:length].to(_narrower(taken, given, run)).double()).abs()
            setattr(region, f"status_{side}", "beyond" if float(error.max() if error.numel() else 0.0) else "within")
            setattr(region, f"error_{side}", math.inf if float(error.max() if error.numel() else 0.0) else 0.0)
            if float(error.max() if error.numel() else 0.0) and not region.cause:
                region.cause = _of_link(taken[:length].double(), given[:length].double(), f"{source}", f"{slot}")
        if region.is_beyond:
            found.append(_Judged(link, region))
    return found


def _narrower(taken: Tensor, given: Tensor, run: Run) -> torch.dtype:
    """Return the dtype in which a value is handed on: the taker's, if it isn't narrower than the run's own."""
    own = run.main_dtype
    allowed = taken.dtype.itemsize >= min(own.itemsize, given.dtype.itemsize)
    return taken.dtype if allowed else given.dtype


def _of_link(taken: Tensor, given: Tensor, source: str, slot: str) -> str:
    factor = float((taken * given).sum() / given.pow(2).sum()) if float(given.pow(2).sum()) else 0.0
    rest = float((taken - factor * given).pow(2).mean().sqrt())
    if factor and rest < 1e-2 * float(taken.pow(2).mean().sqrt()) and abs(factor - 1) > 1e-3:
        return f"{slot} {factor:.6g} times {source}"
    for shift in (1, -1):
        if len(given) > 1 and bool((taken == given.roll(shift, 0))[1:-1].all()):
            return f"{slot} {source} of the token {'before' if shift > 0 else 'after'}"
    for format in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        if bool((given.to(format).double() == taken).all()):
            return f"{slot} {source} rounded to {str(format).removeprefix('torch.')}"
    return f"{slot} is not {source}, as it is in the other run"


def _unmatched(structure: Structure, judged: list[_Judged]) -> list[str]:
    words = [f"{each.region.name}: {each.region.where}" for each in judged if "unmatched" in _statuses(each.region)]
    return words + [f"{name}: {slot} isn't the output of any region" for name, slot in structure.loose]


def _measure(report: Report, structure: Structure, judged: list[_Judged], a: Run, b: Run) -> None:
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
    for each in judged:
        if each.plan.kind != "link":
            each.region.share = shares.of(each.plan)
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
