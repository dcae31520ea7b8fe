"""Building without other processes, for tests of what is built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from assay.golden.jobs.build import Job, Report, build
from assay.golden.jobs.campaign import parse_campaign
from assay.runtime.pool import Task

SMALL = """
dtypes = ["float32"]
[[golden]]
spec = "softmax"
shapes = [{ R = 2, N = [3, 5] }]
seeds = 3
[[golden]]
spec = "gemm"
shapes = [{ M = 2, N = 2, K = 4 }]
"""


class Here:
    """An engine that does one task after the other, once."""

    def run(self, task: Task, items: Iterable[Any], *, until: float = float("inf")) -> Iterator[tuple[int, Any]]:
        return ((place, task(item, lambda note="", seconds=0.0: None)) for place, item in enumerate(items))

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *exception: object) -> None:
        """There is nothing to end."""


def built(folder: Path, text: str = SMALL, name: str = "campaign", *, recheck: bool = False) -> Report:
    campaign = parse_campaign(text, name)
    return build(campaign, Job(name, text, str(folder), recheck=recheck), Here(), watch=lambda outcome: None)
