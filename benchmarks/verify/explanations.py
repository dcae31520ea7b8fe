"""Whether the first explanation is true: of each fault model of each op as a kernel, and of kernels of other styles.

`./dev bench explanations` goes on where it was, until all are measured; ``python benchmarks/verify/explanations.py
[MINUTES] [OP or FAULT...]`` takes so many minutes, or these ops, faults and kernels alone; ``again`` among them
measures anew what was not right. First comes each fault model once, over all ops, then the kernels of
tests/verify/others, then the rest, so that what is there by any time is a fair sample. An examination is of quick
effort and ends with the first failure, which is explained. Results stand in build/explanations.json, each with a digest
of the code that it is of.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "build" / "explanations.json"
OTHER = "style of its own"
_SOURCES = ("formats", "golden", "verify")
_RIGHT = ("right", "same")


@dataclass(frozen=True)
class Entry:
    """A faulty kernel: its op, its fault and the fault's family, and how it is measured."""

    op: str
    fault: str
    family: str
    measure: Callable[[], Any]

    @property
    def key(self) -> str:
        """What its result is kept by."""
        return f"{self.op} {self.fault}"


def entries() -> list[Entry]:
    """Each fault model first in the op that has the fewest so far, then other kernels, then the rest by turns."""
    from tests.verify.explained import told_of, told_of_other
    from tests.verify.fault_cases import pairs
    from tests.verify.others import OTHERS

    by_fault: dict[str, list[Entry]] = {}
    for op, fault in pairs():
        entry = Entry(op, fault.name, fault.family, partial(told_of, op, fault))
        by_fault.setdefault(fault.name, []).append(entry)
    taken, turn = Counter[str](), Counter[str]()
    first, rest = [], []
    for found in sorted(by_fault.values(), key=len):
        chosen = min(found, key=lambda entry: taken[entry.op])
        taken[chosen.op] += 1
        first.append(chosen)
        for entry in found:
            if entry is not chosen:
                turn[entry.op] += 1
                rest.append((turn[entry.op], entry.op, entry))
    others = [Entry(other.op, other.name, OTHER, partial(told_of_other, other)) for other in OTHERS]
    return [*first, *others, *(entry for *_, entry in sorted(rest, key=lambda found: found[:2]))]


def measure(console: Console, minutes: float = 1e9, names: Sequence[str] = ()) -> None:
    """Measure what isn't measured yet until time is over; and show what is known."""
    from assay.runtime.files import write_text_atomically

    torch.set_num_threads(1)
    RESULTS.parent.mkdir(exist_ok=True)
    code, known = _digest(), json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted, over, every = {*names} - {"again"}, time.monotonic() + 60 * minutes, entries()
    again = {key for key, told in known.items() if "again" in names and told["outcome"] not in _RIGHT}
    for entry in every:
        if wanted and not wanted & {entry.op, entry.fault}:
            continue
        if entry.key in known and entry.key not in again:
            continue
        if time.monotonic() > over:
            break
        try:
            told = asdict(entry.measure())
        except Exception as error:
            told = {"op": entry.op, "fault": entry.fault, "outcome": "raises", "named": f"{error!r}"}
        known[entry.key] = told | {"family": entry.family, "code": code}
        if told["outcome"] not in _RIGHT:
            console.print(f"{entry.key}: {told['outcome']} {told['named']}", highlight=False)
        write_text_atomically(RESULTS, json.dumps(known, indent=1))
    show(console, [known[entry.key] for entry in every if entry.key in known], len(every), code)


def show(console: Console, told: list[dict[str, Any]], of: int, code: str) -> None:
    """The table by op, and what isn't right."""
    models = [each for each in told if each["family"] != OTHER]
    table = Table("op", "explained", "right", "wrong", "none", "pass", "seconds", title="the first explanation, by op")
    rows = [(op, [each for each in models if each["op"] == op]) for op in sorted({each["op"] for each in models})]
    rows += [("fault models", models), ("other kernels", [each for each in told if each["family"] == OTHER])]
    for name, measured in rows:
        count = Counter("right" if each["outcome"] in _RIGHT else each["outcome"] for each in measured)
        explained = count["right"] + count["wrong"] + count["none"]
        spent = [each["explaining"] for each in measured if each.get("explaining")]
        cells = [str(count[outcome]) for outcome in ("right", "wrong", "none", "passes")]
        table.add_row(name, str(explained), *cells, f"{sum(spent) / max(len(spent), 1):.1f}")
    console.print(table)
    for name, measured in rows[-2:]:
        count = Counter(each["outcome"] for each in measured)
        explained = max(sum(count[outcome] for outcome in (*_RIGHT, "wrong", "none")), 1)
        console.print(
            f"{name}: {explained} failures explained: right {(count['right'] + count['same']) / explained:.1%} "
            f"({count['same']} by a fault that gives the same), wrong {count['wrong'] / explained:.1%}, none "
            f"{count['none'] / explained:.1%}; {count['passes']} pass, {count['no settings'] + count['raises']} not run"
        )
    old = sum(each["code"] != code for each in told)
    console.print(f"{len(told)} of {of} are measured, {old} of them of other code than this")
    for each in told:
        if each["outcome"] not in (*_RIGHT, "passes"):
            console.print(f"  {each['op']} {each['fault']}: {each['outcome']} {each['named']}", highlight=False)


def _digest() -> str:
    files = sorted(path for folder in _SOURCES for path in (ROOT / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def main() -> int:
    """Measure for so many minutes."""
    words = sys.argv[1:]
    minutes = float(words.pop(0)) if words and words[0].replace(".", "").isdigit() else 1e9
    measure(Console(width=120), minutes, words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
