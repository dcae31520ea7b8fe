"""Assignments simulated: weights, inputs and values replaced by what their schemes store; many assignments in one pass.

Block by block, all assignments and all batches pass before the next: the weights of a block are rounded once for all
assignments that store them in the same way, and assignments with the same values so far and the same schemes there run
as one. Assignments without a change so far don't run; they start where they first differ from the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from assay.formats.format import format_named
from assay.formats.rounding import round_float32
from assay.precision.metrics import Metric
from assay.precision.observation import groups
from assay.precision.observation.observing import Observed
from assay.precision.observation.operations import traced
from assay.precision.observation.qparams import QParams
from assay.precision.observation.running import call, evaluating, mapping
from assay.precision.observation.streaming import streamed_parameters
from assay.precision.observation.tracer import LookUp, Product, Visitor
from assay.precision.prediction.chain import Chain, State
from assay.precision.prediction.perturbations import Perturbation, perturbations_of
from assay.precision.schemes import SCHEMES, Scheme, Split
from assay.runtime.memory import trim_heap

SPLITS = (":all_reduce", ":accumulator")
"""Sites of a linear whose schemes split its sum: into those of ranks, and of each into the steps of its accumulator."""


class Simulator(Visitor):
    """A visitor that runs a model under an assignment: a dict of site names to schemes.

    Quantised weights are cached by how they are stored, for other assignments and batches.
    """

    def __init__(self, assignment: Mapping[str, Scheme], qparams: QParams, tied: Mapping[str, str]) -> None:
        self._assignment = assignment
        self._qparams = qparams
        self._tied = tied
        self._weights: dict[tuple[str, int | None, Perturbation], Tensor] = {}
        self.keeps_streamed = False  # Whether weights are kept too that are in memory only while their module runs

    @classmethod
    def of(cls, observed: Observed, assignment: Mapping[str, str]) -> Simulator:
        """Return a simulator of a checked assignment of scheme names."""
        return cls({name: SCHEMES[scheme] for name, scheme in assignment.items()}, observed.qparams, observed.tied)

    def take(self, assignment: Mapping[str, str]) -> None:
        """Simulate another assignment, of scheme names, from now on."""
        self._assignment = {name: SCHEMES[scheme] for name, scheme in assignment.items()}

    def forget(self) -> None:
        """Drop the cached weights."""
        self._weights.clear()

    def linear(self, name: str, x: Tensor, weight: Tensor, expert: int | None, product: Product) -> Tensor:
        owner = self._tied.get(name, name)
        scheme = self._assignment.get(owner)
        stored = self._weight(name, weight, expert)
        if scheme is not None and (of_input := self._qparams.input(owner, scheme, weight, expert)) is not None:
            x = of_input(x)
        names = (name + suffix for suffix in SPLITS)
        splits = [split for each in names if each in self._assignment and (split := self._assignment[each].split)]
        return split_product(x, stored, splits, product) if splits else product(x, stored)

    def embedding(self, name: str, ids: Tensor, weight: Tensor, look_up: LookUp) -> Tensor:
        return look_up(self._weight(name, weight, None))

    def values(self, name: str, x: Tensor, part: str = "") -> Tensor:
        scheme = self._assignment.get(name)
        stored = None if scheme is None else self._qparams.values(name, scheme, part)
        return x if stored is None else stored(x)

    def _weight(self, name: str, weight: Tensor, expert: int | None) -> Tensor:
        owner = self._tied.get(name, name)
        scheme = self._assignment.get(owner)
        if scheme is None or scheme.weight is None:
            return weight
        how = perturbations_of(scheme)[0]
        if (owner, expert, how) in self._weights:
            return self._weights[owner, expert, how]
        of_weight = self._qparams.weight(owner, scheme, weight, expert)
        stored = weight if of_weight is None else of_weight(weight)
        if self.keeps_streamed or self.tracer is None or self.tracer.streamed(weight) is None:
            self._weights[owner, expert, how] = stored
        return stored


def split_product(x: Tensor, weight: Tensor, splits: Sequence[Split], product: Product) -> Tensor:
    """Return x @ weight' with the sum over K in parts, each partial and each running sum rounded; the parts again in
    parts.

    The bias comes last, in full precision, as in epilogues.
    """
    several = groups.count(x, weight)
    laid = x.reshape(math.prod(x.shape[:-1]), several, weight.shape[-1]).transpose(0, 1)
    summed = _summed(laid, torch.unflatten(weight, 0, (several, -1)), splits)
    out = summed.transpose(0, 1).reshape(*x.shape[:-1], weight.shape[0])
    return out + product(torch.zeros_like(x), weight)


def _summed(x: Tensor, weight: Tensor, splits: Sequence[Split]) -> Tensor:
    if not splits:
        return x @ weight.mT
    split, *inner = splits
    columns = weight.shape[-1]
    length = split.length or -(-columns // split.parts)
    partial, total = format_named(split.partial), format_named(split.total)
    running: Tensor | None = None
    for start in range(0, columns, length):
        some = slice(start, start + length)
        part = round_float32(_summed(x[..., some], weight[..., some], inner), partial)
        running = round_float32(part if running is None else running + part, total)
    return x @ weight.mT if running is None else running  # of no columns at all


def simulated(
    model: torch.nn.Module, batch: Any, metric: Metric, observed: Observed, assignment: Mapping[str, str]
) -> Tensor:
    """Return the compared output of the model for a batch with an assignment simulated."""
    return output_of(model, batch, metric, Simulator.of(observed, assignment))


def output_of(model: torch.nn.Module, batch: Any, metric: Metric, visitor: Visitor) -> Tensor:
    """Return the compared output of the model for a batch, run with a visitor."""
    with torch.no_grad(), evaluating(model), traced(model, visitor):
        return metric.output(call(model, batch), mapping(batch))


Part = frozenset[tuple[str, str]]
"""The changes of an assignment at one position of a chain: (site, scheme)."""
Plan = list[Part]
"""An assignment's parts by position."""
Step = tuple[int, Part]
"""The index of the values before, and the next changes. Index 0: the values of the unchanged model."""
_UNCHANGED: Step = (0, frozenset())


def run_batched(
    chain: Chain | None,
    model: torch.nn.Module,
    batches: Sequence[object],
    metric: Metric,
    observed: Observed,
    assignments: Sequence[Mapping[str, str]],
    record: Callable[[int, int, Tensor], None],
    done: Callable[[], None] = lambda: None,
) -> None:
    """Call ``record`` with each assignment's index, each batch's index, and the compared output; ``done`` once for each
    assignment.

    chain: of the model over these batches; None: each assignment runs alone.
    """
    alone = list(range(len(assignments)))
    if chain is not None:
        alone = []
        plans = [_plan(chain, observed, each) for each in assignments]
        # As many run together as fit in memory, those that begin at the same block first.
        begins = [next((at for at, part in enumerate(plan) if part), chain.after) for plan in plans]
        order = sorted(range(len(plans)), key=begins.__getitem__)
        # Each has values before and after a block; all share its rounded weights.
        of_block, free = chain.bytes_of_block(), chain.free_bytes()
        needed = 2 * chain.bytes_of_state() + (of_block if of_block <= free else 0)
        size = max(free // needed, 1)
        for start in range(0, len(order), size):
            group = {number: plans[number] for number in order[start : start + size]}
            alone += _run_group(chain, metric, observed, group, record, done)
    for number in alone:
        simulator = Simulator.of(observed, assignments[number])
        for batch, given in enumerate(batches):
            record(number, batch, output_of(model, given, metric, simulator))
        done()


def forward_passes(chain: Chain | None, observed: Observed, assignments: Sequence[Mapping[str, str]]) -> float:
    """Return how many forward passes these assignments take: block runs over the number of blocks; without a chain,
    their number."""
    if chain is None:
        return float(len(assignments))
    plans = dict(enumerate(_plan(chain, observed, each) for each in assignments))
    count, of = 0, _merged(plans, dict.fromkeys(plans, 0), 0)[1]
    for position in range(1, chain.after):
        steps, of = _merged(plans, of, position)
        count += len(steps)
    return count / len(chain.blocks)


def _plan(chain: Chain, observed: Observed, assignment: Mapping[str, str]) -> Plan:
    """Return the changes of an assignment at each position; a site of unknown position is at the first."""
    parts: list[set[tuple[str, str]]] = [set() for _ in range(chain.after + 1)]
    for site, scheme in assignment.items():
        linear = next((site.removesuffix(suffix) for suffix in SPLITS if site.endswith(suffix)), site)
        names = [linear, *(name for name, owner in observed.tied.items() if owner == site)]
        for position in {position for name in names for position in chain.positions.get(name, ())} or {0}:
            parts[position].add((site, scheme))
    return [frozenset(part) for part in parts]


def _merged(plans: Mapping[int, Plan], of: Mapping[int, int], position: int) -> tuple[dict[Step, int], dict[int, int]]:
    """Return the distinct steps at a position, each with the index of its result, and that index for each
    assignment."""
    steps: dict[Step, int] = {}
    made = {}
    for number, plan in plans.items():
        step = of[number], plan[position]
        made[number] = 0 if step == _UNCHANGED else steps.setdefault(step, len(steps) + 1)
    return steps, made


def _run_group(
    chain: Chain,
    metric: Metric,
    observed: Observed,
    plans: Mapping[int, Plan],
    record: Callable[[int, int, Tensor], None],
    done: Callable[[], None],
) -> list[int]:
    """Run a group; return the assignments that have to run alone."""
    model, batches = chain.model, range(len(chain.batches))
    simulator = Simulator.of(observed, {})
    simulator.keeps_streamed = chain.bytes_of_block() <= chain.free_bytes()
    states: dict[int, list[State]] = {}

    def values(made: int, batch: int, block: int) -> State:
        return states[made][batch] if made else chain.state(batch, block)

    with torch.no_grad(), evaluating(model):
        steps, of = _merged(plans, dict.fromkeys(plans, 0), 0)
        for (_, part), made in steps.items():
            simulator.take(dict(part))
            begun = [chain.before(batch, simulator) for batch in batches]
            states[made] = [state for state in begun if state is not None]
        alone = [number for number in plans if of[number] and len(states[of[number]]) < len(batches)]
        plans = {number: plan for number, plan in plans.items() if number not in alone}
        reported = 0
        for block in range(len(chain.blocks)):
            simulator.forget()
            steps, of = _merged(plans, of, block + 1)
            after: dict[int, list[State]] = {made: [] for made in steps.values()}
            for batch in batches:
                with traced(model, simulator):
                    for (before, part), made in steps.items():
                        simulator.take(dict(part))
                        after[made].append(chain.through(batch, block, values(before, batch, block)))
            states = after
            while reported < len(plans) * (block + 1) // (len(chain.blocks) + 1):
                reported += 1
                done()
        simulator.forget()
        if streamed_parameters(model):  # what comes after the blocks may take more than they do
            trim_heap()
        steps, ends = _merged(plans, of, chain.after)
        steps |= {_UNCHANGED: 0}
        for (before, part), made in sorted(steps.items(), key=lambda step: sorted(step[0][1])):
            numbers = [number for number in plans if ends[number] == made]
            simulator.take(dict(part))
            for batch in batches if numbers else ():
                output = chain.output(batch, values(before, batch, len(chain.blocks)), metric, simulator)
                for number in numbers:
                    record(number, batch, output)
        for _ in range(len(plans) - reported):
            done()
    return alone
