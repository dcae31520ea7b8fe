"""Measure whether the first explanation of a failure is true, for fault models and kernels of other styles.

An examination at quick effort ends with the first failure, which is explained. "right" names the fault, "same" names
one that gives the same results on new cases (values, as far as the contract distinguishes them).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

SECONDS = 240  # of one run, less than an evidence claim may take; a sample this long has some hundred failures
SEED = 0


def samples() -> Iterator[tuple[str, str, Any]]:
    """Yield (kind, name, function that measures) of fault models and of other kernels by turns, in random order."""
    from tests.verify.explained import OTHERS, explanation_of, explanation_of_other
    from tests.verify.fault_cases import pairs

    draw = random.Random(SEED)
    models, others = list(pairs()), list(OTHERS)
    draw.shuffle(models)
    draw.shuffle(others)
    for pair, other in zip_longest(models, others):
        if pair is not None:
            yield "fault models", f"{pair[0]} {pair[1].name}", lambda pair=pair: explanation_of(*pair)
        if other is not None:
            yield "other kernels", f"{other.op} {other.name}", lambda other=other: explanation_of_other(other)


def measure(console: Console, seconds: float = SECONDS) -> None:
    """Explain failures of a random sample for ``seconds``, and print the outcomes and the wrong explanations."""
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {"fault models": Counter(), "other kernels": Counter()}
    began = time.monotonic()
    for kind, name, measured in samples():
        if time.monotonic() - began > seconds:
            break
        result = measured()
        counts[kind][result.outcome] += 1
        if result.outcome not in ("right", "same", "passes"):
            console.print(f"{name}: {result.outcome} {result.named}", highlight=False)
    table = Table("", "right", "same", "wrong", "none", "passes", title=f"the first explanation, sample of seed {SEED}")
    for kind, count in counts.items():
        table.add_row(kind, *(str(count[outcome]) for outcome in ("right", "same", "wrong", "none", "passes")))
    console.print(table)
