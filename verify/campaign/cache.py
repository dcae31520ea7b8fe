"""Verdicts stored in a folder, so that a stopped campaign can be resumed.

The name of a verdict's file ends with its key, a digest of what it depends on: the question, the sources and versions
that answer it (`assay.runtime.results`), the sources of the kernel and of the op, and the device. A verdict of other
sources is not reused. ``docs/checks.md`` lists what the key does not cover.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from assay.runtime.files import read_text, write_text_atomically
from assay.runtime.records import from_json
from assay.runtime.results import result_key
from assay.verify.campaign.survey import Job, Row, row_of
from assay.verify.errors import ReproError
from assay.verify.settings import Settings
from assay.verify.verdict import Verdict

_ANSWERED_BY = "assay.verify.campaign.survey"


def name_of(job: Job) -> str:
    """Return the name of a job's files, without their suffix."""
    words = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{job.entry.name}-{job.settings.dtype_name}").strip("-")[:100]
    return f"{words}-{digest(job)}"


def digest(job: Job) -> str:
    """Return the key of a job's verdict, in 12 hexadecimal digits."""
    settings = job.settings if job.settings.isolate else replace(job.settings, memory=Settings.memory)
    question = [job.entry.name, job.entry.target, settings.as_table()]
    targets = job.entry.target, f"{settings.definition.definition.__module__}:"
    device = _machine(job.settings.device)
    return result_key(question, _ANSWERED_BY, targets=targets, device=device)[:12]


def keep(folder: Path, job: Job, verdict: Verdict, name: str = "") -> Path:
    """Write the verdict as JSON and HTML, each atomically; return the path of the page.

    ``name`` is the result of `name_of` before the examination, during which the sources may have changed.
    """
    base = folder / (name or name_of(job))
    page = verdict.to_html(base.with_name(f"{base.name}.html"))
    write_text_atomically(base.with_name(f"{base.name}.json"), verdict.to_json())
    return page


def kept(folder: Path, job: Job, name: str = "") -> Verdict | None:
    """Return the stored verdict of this job, if there is one; ``name`` as of `keep`."""
    with suppress(OSError, ValueError, KeyError, TypeError, ReproError):
        text = read_text(folder / f"{name or name_of(job)}.json", ValueError)
        return Verdict.from_dict(from_json(text, "", ValueError))
    return None


def known(folder: Path, jobs: Sequence[Job]) -> dict[int, Row]:
    """Return the rows of jobs whose verdicts are stored in the folder, by index."""
    verdicts = {index: kept(folder, job) for index, job in enumerate(jobs)}
    return {index: row_of(jobs[index], verdict) for index, verdict in verdicts.items() if verdict is not None}


def _machine(device: str) -> str:
    """Return the GPU's name, or the widest vector instructions of the CPU."""
    if torch.device(device).type != "cuda":
        return torch.backends.cpu.get_cpu_capability()
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
