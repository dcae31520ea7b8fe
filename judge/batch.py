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

import msgspec

from assay.judge.problems.problem import ProblemError
from assay.judge.problems.running import watched
from assay.runtime.engines import Engine, run_retried
from assay.runtime.files import append_line, named, read_text
from assay.runtime.pool import Heartbeat, Raised
from assay.runtime.process import Lost
from assay.runtime.records import from_json, structured
from assay.runtime.results import contents, result_key

SILENT = 1800.0
"""Seconds that one judgement may take."""


_LONGEST = 2**30  # bytes of a list
_START = b'{"key":"'  # of a line of ours


class _Line(msgspec.Struct):
    problem: str
    solution: str


class _Stored(msgspec.Struct):
    key: str
    outcome: str
    lost: bool = False


@dataclass(frozen=True)
class Item:
    """One line of a list: paths, what else it says, and how it is judged; or the ``error`` of a malformed line."""

    problem: str
    solution: str
    beside: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def key(self) -> str:
        """The key of the verdict in 16 hexadecimal digits: a digest of both files, the settings, and what judges."""
        files = map(contents, (self.problem, self.solution)) if not self.error else [self.error]
        return result_key([self.settings, *files], __name__)[:16]


def items(path: Path, settings: Mapping[str, Any]) -> list[Item]:
    """The lines of a list; a malformed one is an item with an error. Raises `ProblemError` if there is no list."""
    hint = 'expected a list of lines {"problem": PATH, "solution": PATH}'
    results = []
    for number, line in enumerate(read_text(path, ProblemError, hint, most=_LONGEST).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{named(path)}:{number}"
        try:
            content = from_json(line, where, ProblemError)
            structured(content, _Line, f"{where}:", ProblemError)
        except ProblemError as error:
            words = f'{error}; expected {{"problem": PATH, "solution": PATH}}, got {line[:80]}'
            results.append(Item("", "", {}, settings, words))
            continue
        problem, solution = (str(path.parent / content.pop(name)) for name in ("problem", "solution"))
        results.append(Item(problem, solution, content, settings))
    return results


def stored(path: Path) -> set[str]:
    """The keys of the verdicts that a file holds, which is made if there is none. An item whose process was lost has
    none. A last line that a stopped run left half written is cut off.

    Raises `ProblemError` if the file holds anything else, and then leaves it as it is.
    """
    ours = "expected a file of verdicts, to which others are added"
    if os.path.exists(path) and not os.path.isfile(path):
        raise ProblemError(f"--out {named(path)}: {ours}, got something that is no file")
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = set()
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # no other part of the list is writing a line
        file.seek(0)
        start = 0
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    result = msgspec.json.decode(line, type=_Stored)
                    keys |= {result.key} if not result.lost else set()
                except (ValueError, RecursionError):
                    if line.endswith(b"\n") or not line.startswith(_START[: len(line)]):
                        where, words = f"--out {named(path)}:{number}", line[:60].decode(errors="replace").strip()
                        raise ProblemError(f"{where}: {ours}, got {words!r}; give another name") from None
                    file.truncate(start)
            start += len(line)
    return keys


def run(list_: list[Item], engine: Engine) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Each item with its line, as they come; an item that can't be judged costs itself alone. One whose process was
    lost, as on a machine that went, is judged once more."""
    for index, answer in run_retried(engine, one, list_, again=lambda lost: lost.kind == "crash"):
        item = list_[index]
        results: dict[str, Any]
        if isinstance(answer, Raised):
            trace = {} if answer.user_error else {"trace": answer.trace}
            results = {"outcome": "ERROR", "error": answer.message, **trace}
        elif isinstance(answer, Lost):
            results = {"outcome": "ERROR", "error": lost_words(answer), "lost": True}
        else:
            results = answer
        own = {"key": item.key, "problem": item.problem, "solution": item.solution}
        yield item, {**own, **{name: value for name, value in item.beside.items() if name not in own}, **results}


def lost_words(lost: Lost) -> str:
    """Say how a judging process was lost, and in which of the problem's own code, if it was in any."""
    if not lost.note:
        return f"the process that judged was lost: {lost.message}"
    how = "took too long" if lost.kind == "timeout" else "ended the process"
    return f"{lost.note}: the problem's code {how} ({lost.message})"


def one(item: Item, heartbeat: Heartbeat) -> dict[str, Any]:
    """The verdict on an item as plain data, in a worker. Raises what `judge` does."""
    from assay.judge.procedure import judge

    if item.error:
        raise ProblemError(item.error)
    heartbeat()
    with watched(report=heartbeat):
        return judge(item.problem, item.solution, **item.settings).as_dict()


def add(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line to a file, whole: it is on the disk when this comes back. Raises `OSError`.

    A verdict that another run has added meanwhile isn't added again.
    """
    if line["key"] not in stored(path):
        append_line(path, json.dumps(line, separators=(",", ":"), allow_nan=False))
