"""Many solutions: a list of problems and solutions, and a file of verdicts to which each is added once.

A line of the list is ``{"problem": PATH, "solution": PATH}``; paths are relative to the list, and what else the line
holds (an id, a model's name) is in the verdict's line too. A verdict's line has the key of what determines it: the
contents of the files, the settings, and the sources and versions that judge (`assay.runtime.results`). A run that was
stopped goes on where it was: what the file holds is not judged again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.judge.problems.problem import ProblemError
from assay.runtime.engines import Engine, run_retried
from assay.runtime.pool import Heartbeat, Raised
from assay.runtime.process import Lost
from assay.runtime.results import contents, result_key

SILENT = 1800.0
"""Seconds that one judgement may take."""


@dataclass(frozen=True)
class Item:
    """One line of a list: paths, what else it says, and how it is judged."""

    problem: str
    solution: str
    beside: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The key of the verdict in 16 hexadecimal digits: a digest of both files, the settings, and what judges."""
        return result_key([self.settings, *map(contents, (self.problem, self.solution))], __name__)[:16]


def items(path: Path, settings: Mapping[str, Any]) -> list[Item]:
    """The lines of a list. Raises `ProblemError`."""
    if not path.is_file():
        raise ProblemError(f"{path}: expected a list of problems and solutions there, got no such file")
    results = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            problem, solution = (str(path.parent / content.pop(name)) for name in ("problem", "solution"))
        except (ValueError, KeyError, TypeError, AttributeError):
            expected = '{"problem": PATH, "solution": PATH}'
            raise ProblemError(f"{path}:{number}: expected {expected}, got {line[:80]}") from None
        results.append(Item(problem, solution, content, settings))
    return results


def stored(path: Path) -> set[str]:
    """The keys of the verdicts that a file holds; a last line that isn't whole is cut off. An item whose process was
    lost has none."""
    if not path.is_file():
        return set()
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # no other part of the list is writing a line
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        file.truncate(len(whole))
    keys = set()
    for line in whole.splitlines():
        try:
            result = json.loads(line)
            keys |= set() if result.get("lost") else {str(result["key"])}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return keys


def run(list_: list[Item], engine: Engine) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Each item with its line, as they come; an item that can't be judged costs itself alone. One whose process was
    lost, as on a machine that went, is judged once more."""
    for index, answer in run_retried(engine, one, list_):
        item = list_[index]
        results: dict[str, Any]
        if isinstance(answer, Raised):
            results = {"outcome": "ERROR", "error": answer.message}
        elif isinstance(answer, Lost):
            words = f"the process that judged was lost: {answer.message}"
            results = {"outcome": "ERROR", "error": words, "lost": True}
        else:
            results = answer
        yield item, {"key": item.key, "problem": item.problem, "solution": item.solution, **item.beside, **results}


def one(item: Item, heartbeat: Heartbeat) -> dict[str, Any]:
    """The verdict on an item as plain data, in a worker. Raises what `judge` does."""
    from assay.judge.procedure import judge

    heartbeat(item.solution)
    return judge(item.problem, item.solution, **item.settings).as_dict()


def add(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line to a file, whole: it is on the disk when this comes back. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
