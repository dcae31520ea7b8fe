"""Verdicts kept in a folder, so that a campaign which was stopped goes on where it was.

A verdict is kept under a digest of what it depends on: the question, the sources of the kernel's package, of the op's
and of this one, the versions of torch, Triton and jax, and the device. Of a kernel that has changed since, nothing is
kept.
``docs/checks.md`` says what else a verdict may depend on.
"""

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from assay.runtime.files import write_text_atomically
from assay.verify.campaign.survey import Job, Row, row_of
from assay.verify.errors import ReproError
from assay.verify.settings import Settings
from assay.verify.verdict import Verdict

_PACKAGES = ("kernel-assay", "torch", "triton", "jax")
_OWN = ("configs", "formats", "golden", "interpreter", "kernels", "runtime", "verify", "bench")
_SUFFIXES = {".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".pyx", ".so"}
_MOST_READ = 1 << 24  # bytes of one package whose contents are looked at; of more, sizes and times


def name_of(job: Job) -> str:
    """The name of a job's files, without their suffix."""
    words = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{job.entry.name}-{job.settings.dtype_name}").strip("-")[:100]
    return f"{words}-{digest(job)}"


def digest(job: Job) -> str:
    """What tells this job from any other, and from itself after its kernel has changed."""
    settings = job.settings if job.settings.isolate else replace(job.settings, memory=Settings.memory)
    question = json.dumps([job.entry.name, job.entry.target, settings.as_table()], sort_keys=True)
    of_the_op = _sources(settings.definition.definition.__module__)
    sources = [_sources(job.entry.target), of_the_op, _own_sources()]
    content = [question, *sources, *map(_version, _PACKAGES), _machine(job.settings.device)]
    return hashlib.sha256("\0".join(content).encode()).hexdigest()[:12]


def keep(folder: Path, job: Job, verdict: Verdict, name: str = "") -> Path:
    """Write the verdict as JSON and HTML; the page's path. A half-written one is never found.

    ``name`` is what `name_of` gave before the examination; after it, the sources may be others.
    """
    base = folder / (name or name_of(job))
    page = verdict.to_html(base.with_name(f"{base.name}.html"))
    write_text_atomically(base.with_name(f"{base.name}.json"), verdict.to_json())
    return page


def kept(folder: Path, job: Job) -> Verdict | None:
    """The verdict that was kept of this very job, if any."""
    with suppress(OSError, ValueError, KeyError, TypeError, ReproError):
        return Verdict.from_dict(json.loads((folder / f"{name_of(job)}.json").read_text(encoding="utf-8")))
    return None


def known(folder: Path, jobs: Sequence[Job]) -> dict[int, Row]:
    """The rows of jobs whose verdicts the folder holds already, by place."""
    results = {index: kept(folder, job) for index, job in enumerate(jobs)}
    return {index: row_of(jobs[index], verdict) for index, verdict in results.items() if verdict is not None}


def _sources(target: str) -> str:
    """The digest of a target's top-level package, or of the files beside a module that is in none."""
    top = target.partition(":")[0].partition(".")[0]
    if top in ("assay", *_PACKAGES):
        return ""  # by `_own_sources`, and by versions
    with suppress(ImportError, ValueError, AttributeError):
        # A worker looks in the current folder first; the command's own process may not look there at all.
        module_spec = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) or importlib.util.find_spec(top)
        if module_spec is not None and module_spec.submodule_search_locations is not None:
            return _hashed(path for index in module_spec.submodule_search_locations for path in Path(index).rglob("*"))
        if module_spec is not None and module_spec.origin is not None:
            return _hashed(Path(module_spec.origin).parent.iterdir())
    return ""


@lru_cache(maxsize=1)
def _own_sources() -> str:
    """The digest of this package, as it was when first asked for: what is loaded doesn't change."""
    root = Path(__file__).parents[1]
    return _hashed((path for folder in _OWN for path in (root / folder).rglob("*")), {".py", ".toml"})


def _hashed(paths: Iterable[Path], suffixes: Collection[str] = _SUFFIXES) -> str:
    """The digest of files of source, by content."""
    files = sorted(path for path in paths if path.suffix in suffixes and path.is_file())
    read = sum(path.stat().st_size for path in files) <= _MOST_READ
    result = hashlib.sha256()
    for path in files:
        state = path.stat()
        part = hashlib.sha256(path.read_bytes()).hexdigest() if read else f"{state.st_size} {state.st_mtime_ns}"
        result.update(f"{path}\0{part}\0".encode())
    return result.hexdigest()


def _machine(device: str) -> str:
    """What a device is called; of a CPU, its widest vector instructions."""
    if torch.device(device).type != "cuda":
        return torch.backends.cpu.get_cpu_capability()
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
