"""Is what is recommended the best at its bytes? `choice_evidence.py configs/models/stdlib-llama --sequences 8`.

For three budgets of bytes between the least and the model's own: the recommended assignment; random ones of about as
many bytes, by prediction and at random; and a greedy search that measures. All errors are measured over the same text.

- Random: a scheme for each decision unit, drawn from its menu and none; then units drawn at random take fewer bytes
  until the budget holds, then more as long as it does. Of ``--random``, the 20 of least predicted error are measured,
  and 100 drawn at random.
- Greedy: from the model as it is, the change of one unit with the least increase of the measured error per byte saved,
  until the budget holds. Each step measures the 12 changes that are predicted to be the best of these.

Units whose formats save no bytes, as caches are, stay as they are.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from assay.precision import Audit, audit
from assay.precision.amounts import in_bytes, in_error
from assay.precision.choice import Option, Unit
from assay.precision.loading import load
from assay.precision.recommendation import Planner

_SHARES = (0.25, 0.5, 0.75)
"""Where the budgets lie between the least bytes and the model's own."""
_BEST = 20
_DRAWN = 100
_CANDIDATES = 12

Schemes = dict[str, Option]
"""Unit names to the options that they take."""


@dataclass
class Search:
    """The decision units of an audit that save bytes, and errors of what they take."""

    audit: Audit
    units: tuple[Unit, ...] = ()
    fixed: float = 0.0
    """Bytes of everything else."""
    errors: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        planner = Planner(self.audit, self.audit.shape, self.audit.bits)
        self.units = tuple(u for u in planner.units if any(each.bytes < u.options[0].bytes for each in u.options))
        self.fixed = planner.cost({}).bytes - sum(unit.options[0].bytes for unit in self.units)

    def assignment(self, taken: Mapping[str, Option]) -> dict[str, str]:
        """Site names to scheme names."""
        return {site: taken[unit.name].scheme for unit in self.units if taken[unit.name].scheme for site in unit.sites}

    def bytes(self, taken: Mapping[str, Option]) -> float:
        """Of the whole model."""
        return self.fixed + sum(option.bytes for option in taken.values())

    def predicted(self, taken: Mapping[str, Option]) -> float:
        """The quadratic form, by which predictions are ordered."""
        return self.audit.squares(self.assignment(taken))

    def measured(self, taken: Mapping[str, Option]) -> float:
        """Measured once for each assignment."""
        chosen = self.assignment(taken)
        key = tuple(sorted(chosen.items()))
        if key not in self.errors:
            self.errors[key] = self.audit.measure(chosen)
        return self.errors[key]


def drawn(search: Search, budget: float, draw: random.Random) -> Schemes:
    """A random assignment within the budget that no single change to more bytes keeps."""
    taken = {unit.name: draw.choice(unit.options) for unit in search.units}
    while search.bytes(taken) > budget:
        unit = draw.choice(search.units)
        fewer = [option for option in unit.options if option.bytes < taken[unit.name].bytes]
        if fewer:
            taken[unit.name] = draw.choice(fewer)
    while True:
        left = budget - search.bytes(taken)
        more = [
            (unit.name, option)
            for unit in search.units
            for option in unit.options
            if 0 < option.bytes - taken[unit.name].bytes <= left
        ]
        if not more:
            return taken
        taken |= [draw.choice(more)]


def greedy(search: Search, budgets: list[float]) -> list[Schemes]:
    """The first assignment within each budget, from the largest, on one way down from the model as it is."""
    taken = {unit.name: unit.options[0] for unit in search.units}
    found = []
    for budget in sorted(budgets, reverse=True):
        while search.bytes(taken) > budget:
            changes = [
                {**taken, unit.name: option}
                for unit in search.units
                for option in unit.options
                if option.bytes < taken[unit.name].bytes
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a bundled model's name")
    parser.add_argument("--text", type=Path, default=Path("configs/models/held-out.txt"))
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--random", type=int, default=2000, help="random assignments for each budget")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    loaded = load(asked.model)
    batches = loaded.batches(asked.text, sequence=asked.tokens, sequences=asked.sequences, batch=asked.sequences)
    metric = "relative" if loaded.kind == "encoder" else "kl"
    found = audit(loaded.model, batches, metric, bits=loaded.stored.itemsize * 8, seed=asked.seed)
    found.calibrate()
    search = Search(found)
    least = search.fixed + sum(min(option.bytes for option in unit.options) for unit in search.units)
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
        title=f"{loaded.name}: {len(search.units)} units, {asked.sequences} sequences of {asked.tokens} tokens, "
        f"least {in_bytes(least)}, own {in_bytes(own)}; torch {torch.__version__}",
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
            table.add_row(in_bytes(budget, 4), name, in_bytes(size, 4), in_error(error), f"{ratio:.3f}")
        table.add_section()
    Console(width=140).print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
