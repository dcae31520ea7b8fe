"""Judge each region in both runs: its status, what explains it, and links that only one of the runs has."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from assay.compare import definitions
from assay.compare.explanation.causes import cause_of, suspicion_of
from assay.compare.explanation.weights import difference_of
from assay.compare.judging import Evidence, Missing, evidence_of
from assay.compare.report import Region, Side
from assay.compare.runs.run import Run, Slot
from assay.compare.structure import Parameter, Plan, Structure
from assay.runtime.errors import AssayError, one_line
from assay.verify.contract import Contract

_REFUSED = (RuntimeError, ValueError, TypeError, IndexError, AssayError)
"""What a definition raises on shapes that it hasn't."""
_MAPPED = 64  # columns of the page's map, so that a report stays small


@dataclass(frozen=True)
class Judge:
    """Judges the regions of two runs under a contract; the authority's weights count where they differ.

    ``folded``: by run, weights that differ and mean the same. ``sums``: of a slot, the region that adds it up.
    """

    structure: Structure
    a: Run
    b: Run
    authority: Run
    contract: Contract
    folded: Mapping[Run, Container[Parameter]] = field(default_factory=dict)
    sums: Mapping[Slot, Plan] = field(default_factory=dict)

    def region(self, plan: Plan) -> Region:
        """Return a region's status in both runs, and its cause in run b, or else in run a."""
        region = Region(plan.name, plan.kind)
        for run, side in ((self.b, region.b), (self.a, region.a)):
            found = self._side(plan, run, side, explained=bool(region.cause))
            region.cause = region.cause or found.cause
            region.where = region.where or found.where
        return region

    def _side(self, plan: Plan, run: Run, side: Side, *, explained: bool) -> _Found:
        """Fill in a region's status in a run, and return why and where it is beyond, or why it isn't judged.

        ``explained``: a cause is known already; another isn't looked for.
        """
        name = "a" if run is self.a else "b"
        differing = [
            difference
            for each in plan.inputs
            if type(each) is Parameter
            and each not in self.folded.get(run, ())
            and (difference := difference_of(each, self.authority, run)) is not None
            and difference.is_fault
        ]
        own = _with_own_sum(_with_own_frequencies(plan, run), run, self.sums)
        try:
            weights = self.authority if differing or not _has_weights(own, run) else run
            evidence = evidence_of(own, run, self.contract, weights)
        except Missing as missing:
            left_out = _left_out(plan, run)
            side.status = "beyond" if left_out else "unmatched"
            return _Found(left_out, f"run {name}: {missing}")
        except _REFUSED as error:
            return _Found("", f"run {name}: {plan.definition} can't be evaluated on it ({one_line(error)})")
        leaning = "" if evidence.is_beyond else suspicion_of(evidence)
        side.status = "beyond" if evidence.is_beyond or leaning else "within"
        side.error, side.times = evidence.proved, evidence.times
        side.dtype = str(evidence.given[0].dtype).removeprefix("torch.")
        side.tokens = _by_token(evidence)
        if side.status == "within":
            return _Found()
        cause = leaning or "; ".join(difference.words for difference in differing)
        if not cause and not explained:
            cause = cause_of(evidence)
        return _Found(cause, _where(evidence))

    def links(self, plan: Plan) -> Iterator[Region]:
        """Yield the links of the authority's run, from an output to the input that it is, that another run hasn't."""
        for slot in plan.inputs:
            source = self.structure.sources.get(slot) if isinstance(slot, Slot) else None
            if source is None or not isinstance(slot, Slot) or source.module == slot.module:
                continue
            region = Region(f"{source.module or 'logits'} to {slot.module}", "link")
            for run, side in ((self.a, region.a), (self.b, region.b)):
                taken, given = run.whole(slot), run.whole(source)
                if taken is None or given is None:
                    continue
                given = given[: len(taken)]
                same = torch.equal(taken.double(), given.to(_handed_on(taken, given, run)).double())
                side.status, side.error = ("within", 0.0) if same else ("beyond", math.inf)
                if not same and not region.cause:
                    region.cause = _of_link(taken.double(), given.double(), f"{source}", f"{slot}")
            if region.is_beyond:
                yield region


@dataclass(frozen=True)
class _Found:
    """Why a region is beyond in a run, and where; or why it isn't judged."""

    cause: str = ""
    where: str = ""


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


def _has_weights(plan: Plan, run: Run) -> bool:
    """Return whether a run has all parameters of a region."""
    return all(run.parameter(each.module, each.name) is not None for each in plan.inputs if type(each) is Parameter)


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


def _handed_on(taken: Tensor, given: Tensor, run: Run) -> torch.dtype:
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
