"""Building without other processes, for tests of what is built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from assay.golden.jobs.build import Report, build
from assay.golden.jobs.campaign import parse_campaign
from assay.golden.jobs.tasks import Job, Outcome, attempt
from assay.golden.store import Store

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

    def run(self, job: Job, places: Iterable[int]) -> Iterator[Outcome]:
        store = Store(job.store)
        return (attempt(job.campaign, place, store, recheck=job.recheck) for place in places)


def built(folder: Path, text: str = SMALL, name: str = "campaign", *, recheck: bool = False) -> Report:
    """A store in ``folder`` with the records of a campaign."""
    campaign = parse_campaign(text, name)
    return build(campaign, Job(name, text, str(folder), recheck=recheck), Here(), watch=lambda outcome: None)
