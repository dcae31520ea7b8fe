"""Verdicts of a campaign stored in a folder, so that a stopped one can be resumed (`assay.verify.examination.kept`)."""

from collections.abc import Sequence
from pathlib import Path

from assay.runtime.files import write_text_atomically
from assay.verify.campaign.survey import Job, Row, row_of
from assay.verify.examination.kept import file_name, key_of, verdict_in
from assay.verify.verdict import Verdict


def name_of(job: Job) -> str:
    """Return the name of a job's files, without their suffix."""
    return file_name(job.entry.name, job.settings, digest(job))


def digest(job: Job) -> str:
    """Return the key of a job's verdict, in 12 hexadecimal digits."""
    return key_of(job.entry.name, job.entry.target, job.settings)


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
    return verdict_in(folder / f"{name or name_of(job)}.json")


def known(folder: Path, jobs: Sequence[Job]) -> dict[int, Row]:
    """Return the rows of jobs whose verdicts are stored in the folder, by index."""
    verdicts = {index: kept(folder, job) for index, job in enumerate(jobs)}
    return {index: row_of(jobs[index], verdict) for index, verdict in verdicts.items() if verdict is not None}
