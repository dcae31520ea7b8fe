"""Is what is recommended the best at its bytes? `choice.py configs/models/stdlib-llama --sequences 8`.

For three budgets of bytes between the least and the model's own: the recommended assignment; random ones of about as
many bytes, by prediction and at random; and a greedy search that measures. All errors are measured over the same text.

- Random: a scheme for each fusion group, drawn from its menu and none; then groups drawn at random take fewer bytes
  until the budget holds, then more as long as it does. Of ``--random``, the 20 of least predicted error are measured,
  and 100 drawn at random.
- Greedy: from the model as it is, the change of one group with the least increase of the measured error per byte saved,
  until the budget holds. Each step measures the 12 changes that are predicted to be the best of these.

Groups whose formats save no bytes, as caches are, stay as they are.
"""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from furniture import audited, options
from rich.console import Console
from rich.table import Table

from assay.precision import Audit
from assay.precision.choice.problem import Group, Option
from assay.precision.choice.recommendation import groups_of
from assay.precision.units import format_bytes, format_error

_SHARES = (0.25, 0.5, 0.75)
"""Where the budgets lie between the least bytes and the model's own."""
_BEST = 20
_DRAWN = 100
_CANDIDATES = 12

Schemes = dict[str, Option]
"""Group names to the options that they take."""


@dataclass
class Search:
    """The fusion groups of an audit that save bytes, and errors of what they take."""

    audit: Audit
    groups: tuple[Group, ...] = ()
    fixed: float = 0.0
    """Bytes of everything else."""
    errors: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        every = groups_of(self.audit.predictor, self.audit.roofline)
        self.groups = tuple(u for u in every if any(each.bytes < u.options[0].bytes for each in u.options))
        self.fixed = self.audit.cost({}).bytes - sum(group.options[0].bytes for group in self.groups)

    def assignment(self, taken: Mapping[str, Option]) -> dict[str, str]:
        """Site names to scheme names."""
        return {
            site: taken[group.name].scheme for group in self.groups if taken[group.name].scheme for site in group.sites
        }

    def bytes(self, taken: Mapping[str, Option]) -> float:
        """Of the whole model."""
        return self.fixed + sum(option.bytes for option in taken.values())

    def predicted(self, taken: Mapping[str, Option]) -> float:
        """The quadratic form, by which predictions are ordered."""
        return self.audit.predictor.squares(self.assignment(taken))

    def measured(self, taken: Mapping[str, Option]) -> float:
        """Measured once for each assignment."""
        chosen = self.assignment(taken)
        key = tuple(sorted(chosen.items()))
        if key not in self.errors:
            self.errors[key] = self.audit.measure(chosen)
        return self.errors[key]


def drawn(search: Search, budget: float, draw: random.Random) -> Schemes:
    """A random assignment within the budget that no single change to more bytes keeps."""
    taken = {group.name: draw.choice(group.options) for group in search.groups}
    while search.bytes(taken) > budget:
        group = draw.choice(search.groups)
        fewer = [option for option in group.options if option.bytes < taken[group.name].bytes]
        if fewer:
            taken[group.name] = draw.choice(fewer)
    while True:
        left = budget - search.bytes(taken)
        more = [
            (group.name, option)
            for group in search.groups
            for option in group.options
            if 0 < option.bytes - taken[group.name].bytes <= left
        ]
        if not more:
            return taken
        taken |= [draw.choice(more)]


def greedy(search: Search, budgets: list[float]) -> list[Schemes]:
    """The first assignment within each budget, from the largest, on one way down from the model as it is."""
    taken = {group.name: group.options[0] for group in search.groups}
    found = []
    for budget in sorted(budgets, reverse=True):
        while search.bytes(taken) > budget:
            changes = [
                {**taken, group.name: option}
                for group in search.groups
                for option in group.options
                if option.bytes < taken[group.name].bytes
            ]
            for error in (search.predicted, search.measured):
                here, size = error(taken), search.bytes(taken)
                worth = [(error(each) - here) / (size - search.bytes(each)) for each in changes]
                changes = [changes[place] for place in sorted(range(len(changes)), key=worth.__getitem__)[:_CANDIDATES]]
            taken = changes[0]
        found.append(taken)
    return found[::-1]


def main() -> None:
    """Audit, choose, search, and print one table."""
    parser = options(__doc__, sequences=16, batch=16, seed=0)
    parser.add_argument("--random", type=int, default=2000, help="random assignments for each budget")
    asked = parser.parse_args()
    loaded, found, _ = audited(asked, asked.seed)
    search = Search(found)
    least = search.fixed + sum(min(option.bytes for option in group.options) for group in search.groups)
    own = found.cost({}).bytes
    budgets = [least + share * (own - least) for share in _SHARES]
    began = time.monotonic()
    ways = greedy(search, budgets)
    spent = time.monotonic() - began
    table = Table(
        "budget",
        "way",
        "bytes",
        f"measured, {found.metric.unit}",
        "to recommended",
        title=f"{loaded.name}: {len(search.groups)} groups, {asked.sequences} sequences of {asked.tokens} tokens, "
        f"least {format_bytes(least)}, own {format_bytes(own)}; torch {torch.__version__}",
    )
    for budget, way in zip(budgets, ways, strict=True):
        began = time.monotonic()
        chosen = found.recommend(max_bytes=budget)
        seconds = time.monotonic() - began
        draw = random.Random(asked.seed)
        randoms = sorted((drawn(search, budget, draw) for _ in range(asked.random)), key=search.predicted)
        rows = [
            (f"recommended ({seconds:.0f} s)", chosen.cost.bytes, chosen.measured),
            (f"greedy, measured ({spent:.0f} s)", search.bytes(way), search.measured(way)),
        ]
        some = {
            f"best of the {_BEST} of {asked.random} by prediction": randoms[:_BEST],
            f"best of {_DRAWN} random": draw.sample(randoms, min(_DRAWN, len(randoms))),
        }
        for name, taken in some.items():
            best = min(taken, key=search.measured)
            rows.append((name, search.bytes(best), search.measured(best)))
        for name, size, error in rows:
            ratio = error / chosen.measured if chosen.measured > 0 else float("nan")
            table.add_row(format_bytes(budget, 4), name, format_bytes(size, 4), format_error(error), f"{ratio:.3f}")
        table.add_section()
    Console(width=140).print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
