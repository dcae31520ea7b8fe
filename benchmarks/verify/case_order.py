"""The order of the fixed cases (`assay.verify.examination.run`), measured on the faulty kernels of the tests."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from assay.verify.examination.plan import make_plan
from assay.verify.examination.run import fixed_cases, kind_of
from assay.verify.settings import Settings

_FILE = Path(__file__).resolve().parents[2] / "configs" / "case_order.toml"
_TIMES = 3  # times that a quick examination should find each fault, so that similar faults are found too
_LONGEST = 30.0  # seconds that one kernel may take


@dataclass
class Kind:
    """The faults that a kind of case found, and the processor time of each of its cases."""

    detected: set[str] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)

    @property
    def cost(self) -> float:
        """Return the mean processor seconds of the kind per examination."""
        return sum(self.seconds) / max(len(self.seconds), 1)


def measure(console: Console) -> None:
    """Try every fixed case on every faulty kernel, and write the greedy order into the table."""
    from tests.zoo import FAULTY

    torch.set_num_threads(1)
    kinds: dict[str, Kind] = defaultdict(Kind)
    for entry in track(FAULTY, console=console, description="faulty"):
        plan = make_plan(entry.kernel, Settings(entry.spec, strict=True, **entry.examine))
        began, taken = time.monotonic(), defaultdict[str, float](float)
        for fixed in fixed_cases(plan):
            started = time.process_time()
            failed = plan.harness.try_case(fixed[1]).failure is not None
            taken[kind_of(fixed)] += time.process_time() - started
            if failed:
                kinds[kind_of(fixed)].detected.add(entry.name)
            if time.monotonic() - began > _LONGEST:
                break
        for kind, seconds in taken.items():
            kinds[kind].seconds.append(seconds)
    findable = set().union(*(kind.detected for kind in kinds.values()))
    order, quick = greedy(kinds, findable)
    _FILE.write_text(
        "# Written by ./dev bench order: kinds of fixed cases, those first that find the most faults a second, and\n"
        "# how many of them a quick examination tries (assay.verify.examination.run).\n"
        f"quick = {quick}\nkinds = {json.dumps(order, indent=4)}\n",
        encoding="utf-8",
    )
    whole, first = (sum(kinds[kind].cost for kind in some) for some in (order, order[:quick]))
    console.print(f"{len(findable)} of {len(FAULTY)} faults found by {len(order)} kinds, {whole:.2f} s an examination")
    console.print(f"quick: {quick} kinds, {first:.2f} s")
    for half in (0, 1):  # cross-validation: order chosen on one half of the faults, tested on the other
        known = {entry.name for entry in FAULTY[half::2]} & findable
        learnt, count = greedy(kinds, known)
        others = set().union(*(kinds[kind].detected for kind in learnt[:count])) - known
        console.print(
            f"learnt from {len(known)} faults, {count} kinds find {len(others)} of {len(findable - known)} others"
        )


def greedy(kinds: Mapping[str, Kind], faults: set[str]) -> tuple[list[str], int]:
    """Return names of kinds, each the most valuable per second of the rest, and how many of them have any value.

    A kind's value is the number of faults it finds that fewer than `_TIMES` of the kinds before it find. Kinds without
    value follow by the number of faults that they find per second.
    """
    order: list[str] = []
    left = dict.fromkeys(faults, _TIMES)
    rest = set(kinds)

    def worth(kind: str) -> tuple[float, float, str]:
        result = kinds[kind].detected & faults
        return sum(left[fault] > 0 for fault in result) / kinds[kind].cost, len(result) / kinds[kind].cost, kind

    quick = 0
    while rest:
        best = max(rest, key=worth)
        quick += worth(best)[0] > 0
        order.append(best)
        rest.discard(best)
        for fault in kinds[best].detected & faults:
            left[fault] -= 1
    return order, quick
