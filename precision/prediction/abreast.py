"""Many assignments in one pass over a model's blocks: what some of them have in common so far is run once.

Block by block, all assignments and all batches pass before the next: the weights of a block are rounded once for all
that store them alike, and assignments that have the same values so far and take the same schemes there go through it as
one. Those that have changed nothing yet don't run; they begin where they first differ from the model by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from assay.precision.metrics import Metric
from assay.precision.observation.handlers import traced
from assay.precision.observation.observing import Observed
from assay.precision.observation.running import evaluating
from assay.precision.observation.streaming import streamed_parameters
from assay.precision.prediction.chain import Chain, State
from assay.precision.prediction.simulation import SPLITS, Simulator, output_of
from assay.runtime.memory import trim_heap

Part = frozenset[tuple[str, str]]
"""What an assignment changes at one place of a chain: (site, scheme)."""
Plan = list[Part]
"""An assignment's parts by place."""
Step = tuple[int, Part]
"""Values, by their number, and what changes next. Number 0: those that the model has by itself."""
_UNCHANGED: Step = (0, frozenset())


def run_abreast(
    chain: Chain | None,
    model: torch.nn.Module,
    batches: Sequence[object],
    metric: Metric,
    observed: Observed,
    assignments: Sequence[Mapping[str, str]],
    found: Callable[[int, int, torch.Tensor], None],
    done: Callable[[], None] = lambda: None,
) -> None:
    """Call ``found`` with each assignment's number, each batch's number, and what is compared of the outputs; ``done``
    as often as there are assignments.

    chain: of the model over these batches; None: each assignment runs by itself.
    """
    alone = list(range(len(assignments)))
    if chain is not None:
        plans = {number: _plan(chain, observed, each) for number, each in enumerate(assignments)}
        alone = []
        for group in _groups(chain, plans):
            alone += _walk(chain, metric, observed, group, found, done)
    for number in alone:
        simulator = Simulator.of(observed, assignments[number])
        for batch, given in enumerate(batches):
            found(number, batch, output_of(model, given, metric, simulator))
        done()


def passes(chain: Chain | None, observed: Observed, assignments: Sequence[Mapping[str, str]]) -> float:
    """How often these assignments run a block, over how many blocks there are: of single runs, their number."""
    if chain is None:
        return float(len(assignments))
    plans = {number: _plan(chain, observed, each) for number, each in enumerate(assignments)}
    count, of = 0, _merged(plans, dict.fromkeys(plans, 0), 0)[1]
    for place in range(1, chain.after):
        steps, of = _merged(plans, of, place)
        count += len(steps)
    return count / len(chain.blocks)


def _plan(chain: Chain, observed: Observed, assignment: Mapping[str, str]) -> Plan:
    """What an assignment changes at each place; a site of no known place is at the first."""
    parts: list[set[tuple[str, str]]] = [set() for _ in range(chain.after + 1)]
    for site, scheme in assignment.items():
        linear = next((site.removesuffix(suffix) for suffix in SPLITS if site.endswith(suffix)), site)
        names = [linear, *(name for name, owner in observed.tied.items() if owner == site)]
        for place in {place for name in names for place in chain.places.get(name, ())} or {0}:
            parts[place].add((site, scheme))
    return [frozenset(part) for part in parts]


def _merged(plans: Mapping[int, Plan], of: Mapping[int, int], place: int) -> tuple[dict[Step, int], dict[int, int]]:
    """The different steps at a place, each with the number of what it makes, and that number of each assignment."""
    steps: dict[Step, int] = {}
    made = {}
    for number, plan in plans.items():
        step = of[number], plan[place]
        made[number] = 0 if step == _UNCHANGED else steps.setdefault(step, len(steps) + 1)
    return steps, made


def _groups(chain: Chain, plans: Mapping[int, Plan]) -> Iterator[dict[int, Plan]]:
    """As many assignments as memory allows, those that begin at the same block together."""
    first = {number: next((at for at, part in enumerate(plan) if part), chain.after) for number, plan in plans.items()}
    order, size = sorted(plans, key=lambda number: first[number]), max(chain.room() // _needed(chain), 1)
    for start in range(0, len(order), size):
        yield {number: plans[number] for number in order[start : start + size]}


def _needed(chain: Chain) -> int:
    """Bytes of one assignment's values before and after a block, and of a block's rounded weights."""
    return 2 * chain.bytes_of_state() + (chain.bytes_of_block() if _keeps(chain) else 0)


def _keeps(chain: Chain) -> bool:
    """Whether a block's rounded weights are kept until all have passed it."""
    return chain.bytes_of_block() <= chain.room()


def _walk(
    chain: Chain,
    metric: Metric,
    observed: Observed,
    plans: Mapping[int, Plan],
    found: Callable[[int, int, torch.Tensor], None],
    done: Callable[[], None],
) -> list[int]:
    """Run a group; those that have to run by themselves are given back."""
    model, batches = chain.model, range(len(chain.batches))
    simulator = Simulator.of(observed, {})
    simulator.keeps_streamed = _keeps(chain)
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
        told = 0
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
            while told < len(plans) * (block + 1) // (len(chain.blocks) + 1):
                told += 1
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
                    found(number, batch, output)
        for _ in range(len(plans) - told):
            done()
    return alone
