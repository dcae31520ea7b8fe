"""The record of a search, from which it can be repeated and a kernel's wrapper reads its configuration."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.bench.tuning.choice import Choice
from assay.bench.tuning.space import Space
from assay.runtime.files import write_text_atomically
from assay.runtime.records import plain, read_record
from assay.verify.errors import TuneError


@dataclass(frozen=True)
class Question:
    """The question of a search: a kernel as an implementation of ``spec``, a space, and sizes, each with a winner.

    ``settings``: those of the examination, as in an entry of a table. ``most_error``: the share of what the contract
    allows that a winner's error may use.
    """

    target: str
    spec: str
    space: Space
    sizes: tuple[dict[str, int], ...]
    settings: dict[str, Any] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    arch: str = ""
    effort: str = "quick"
    most_error: float = 1.0
    seconds: float = 0.5
    rounds: int = 5


@dataclass(frozen=True)
class Candidate:
    """A choice at one case, and its result.

    ``outcome``: "PASS", or why it was dropped: "PRUNED" (by its compiled code), "FAIL" or another outcome of a verdict,
    or "SLOWER". ``seconds``: measured. ``modelled``: the least seconds of the compiled code (`pruning.modelled`), and
    ``work`` those without the last wave, which depends on the number of warps alone.
    ``worst``: the largest error over what the contract allows. ``front``: no other is both faster and more accurate.
    """

    case: str
    choice: Choice
    outcome: str
    why: str = ""
    seconds: float | None = None
    spread: float | None = None
    modelled: float | None = None
    work: float | None = None
    worst: float | None = None
    bits: float | None = None
    registers: int | None = None
    spilled: int | None = None
    shared: int | None = None
    occupancy: float | None = None
    front: bool = False

    @property
    def time(self) -> float:
        """Return the seconds that order candidates: measured, else modelled, else infinite."""
        result = self.seconds if self.seconds is not None else self.modelled
        return math.inf if result is None else result


@dataclass(frozen=True)
class Winner:
    """The choice for a bucket of sizes, each up to the next power of two; ``measured``: by time, not by a model."""

    sizes: dict[str, int]
    choice: Choice
    measured: bool


@dataclass(frozen=True)
class Record:
    """A search: its question, machine, versions, candidates and winners."""

    made: str
    question: Question
    key: str
    machine: str
    versions: Mapping[str, str]
    candidates: tuple[Candidate, ...]
    winners: tuple[Winner, ...]

    def save(self, path: Path) -> Path:
        """Write the record; return the path."""
        content = {"tune": 1, **{name: plain(value) for name, value in vars(self).items()}}
        return write_text_atomically(path, json.dumps(content, indent=1) + "\n")


def read(path: Path) -> Record:
    """Return the record of a file. Raises `TuneError`."""
    result: Record = read_record(path, "tune", Record, TuneError)
    return result


def bucket(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return each size rounded up to a power of two."""
    return {name: 1 << max(size - 1, 0).bit_length() for name, size in sizes.items()}


@functools.lru_cache
def _winners(path: Path, changed: int) -> Sequence[Winner]:
    return read(path).winners


def tuned(path: str | Path, **sizes: int) -> dict[str, Any]:
    """Return the winning keywords at these sizes, for a kernel's wrapper: ``kernel(x, **tuned("tuned.json", M=m))``.

    They are those of the sizes' bucket, or of the nearest bucket by the sum over sizes of |log2 ratio|. Configurations
    of autotuned kernels are returned as their constants with num_warps and num_stages. Raises `TuneError` if the record
    has no winner, or other sizes.
    """
    file = Path(path)
    try:
        winners = _winners(file, file.stat().st_mtime_ns)
    except OSError as error:
        raise TuneError(f"{path}: can't be read ({error.strerror or error})") from None
    if not winners:
        raise TuneError(f"{path}: has no winner; no candidate kept the contract")
    known = winners[0].sizes
    if set(sizes) - set(known):
        raise TuneError(f"{path}: expected sizes of {', '.join(known)}, got {', '.join(sizes)}")
    wanted = bucket(sizes)
    nearest = min(
        winners,
        key=lambda winner: sum(abs(math.log2(winner.sizes[name] / size)) for name, size in wanted.items()),
    )
    results = dict(nearest.choice.keywords)
    for config in nearest.choice.configs.values():
        results |= config
    return {name: tuple(value) if isinstance(value, list) else value for name, value in results.items()}
