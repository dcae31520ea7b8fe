"""Folders with ``reference.py`` (``ref_kernel``, ``generate_input``) and ``task.yml``; the answer is ``custom_kernel``.

The format of GPU MODE's competitions. ``tests:`` and ``benchmarks:`` of ``task.yml`` state sizes and seeds; all whole
numbers but the seed are sizes. A solution can import ``task.py`` and ``utils.py``, but not ``reference.py``.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
from pathlib import Path
from typing import Any

from assay.judge.problems.problem import Answer, Entry, Instance, Problem, ProblemError, Sizes
from assay.judge.problems.running import beside, cuda_if, executed, explaining, needs_cuda, seeded
from assay.runtime.files import read_text

ENTRY = Entry("custom_kernel", "function", "data")
_COMPANIONS = ("task.py", "utils.py")
_ITEM = re.compile(r"^\s*-\s*(\{.*\})\s*(#.*)?$")
_SECTION = re.compile(r"^(\w+):")
_WORDS = {"true": "True", "false": "False", "null": "None", "~": "None"}


def reads(path: Path) -> bool:
    """Return whether a folder, or its reference.py, is a problem of this format."""
    file = path / "reference.py" if path.is_dir() else path
    return file.name == "reference.py" and os.path.isfile(file) and "ref_kernel" in read_text(file, ProblemError)


def problem(path: Path) -> Problem:
    """Return the problem. Raises `ProblemError`."""
    folder = path if path.is_dir() else path.parent
    source = read_text(folder / "reference.py", ProblemError)
    where = folder / "reference.py"
    tests = stated(folder / "task.yml")
    namespace = executed(source, where)
    for name in ("ref_kernel", "generate_input"):
        if not callable(namespace.get(name)):
            raise ProblemError(f"{where}: expected a function {name}, got none")
    known = [name for name in inspect.signature(namespace["generate_input"]).parameters if name != "seed"]
    if not tests:
        raise ProblemError(f"{folder / 'task.yml'}: expected tests or benchmarks, a list of {{name: value}}, got none")
    given = tuple({name: value for name, value in test.items() if name != "seed"} for test in tests)
    changeable = tuple(name for name in known if all(type(sizes.get(name)) is int for sizes in given))
    takes_seed = "seed" in inspect.signature(namespace["generate_input"]).parameters

    def make(sizes: Sizes, seed: int) -> Instance:
        def draw(seed: int) -> tuple[Any, ...]:
            named = {**sizes, "seed": seed} if takes_seed else dict(sizes)
            with explaining(where, f"generate_input({dict(sizes)})"), beside(folder):
                return (seeded(namespace["generate_input"], seed, source, named),)

        def reference(data: Any) -> Any:
            with cuda_if(needs_cuda(source)):
                return namespace["ref_kernel"](data)

        return Instance(sizes, reference, draw)

    files = {name: file for name in _COMPANIONS if (file := _companion(folder, name)) is not None}
    companions = {name: read_text(file, ProblemError) for name, file in files.items()}
    return Problem(folder.name, "reference.py", folder, source, given, changeable, make, ENTRY, companions)


def _companion(folder: Path, name: str) -> Path | None:
    """Return a file that a task takes from its folder or the folder above, or None."""
    return next((index / name for index in (folder, folder.parent) if (index / name).is_file()), None)


def stated(path: Path) -> list[dict[str, Any]]:
    """Return the tests of a task.yml, the benchmarks first, because these are timed. Raises `ProblemError`."""
    if not path.is_file():
        raise ProblemError(f"{path}: expected the sizes of tests and benchmarks there, got no such file")
    results: dict[str, list[dict[str, Any]]] = {"benchmarks": [], "tests": []}
    section = ""
    for line in read_text(path, ProblemError).split("\n"):
        if (header := _SECTION.match(line)) is not None:
            section = header[1]
        elif section in results and (item := _ITEM.match(line)) is not None:
            results[section].append(_item(item[1], path))
    return results["benchmarks"][::-1] + results["tests"]


def _item(text: str, path: Path) -> dict[str, Any]:
    """Parse a YAML mapping in one line: names with or without quotes, numbers, words, strings, lists."""
    text = re.sub(r"([{,]\s*)([A-Za-z_]\w*)\s*:", r'\1"\2":', text)
    text = re.sub(r"(?<=[:,\[ ])(true|false|null|~)(?=[\s,}\]])", lambda word: _WORDS[word[1]], text)
    bare = re.sub(r":\s*([A-Za-z_][\w.-]*)(?=\s*[,}])", _quoted, text)
    for words in (text, bare):
        with contextlib.suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            value = ast.literal_eval(words)
            if isinstance(value, dict) and all(isinstance(name, str) for name in value):
                return value
    raise ProblemError(f"{path}: expected {{name: value, ...}}, got {text[:80]}")


def _quoted(word: re.Match[str]) -> str:
    return f": {word[1]}" if word[1] in ("True", "False", "None") else f': "{word[1]}"'


def solution(path: Path, of: Problem) -> Answer:
    """Return the solution with the files that a task provides. Raises `ProblemError`."""
    file = path / "submission.py" if path.is_dir() else path
    if not file.is_file():
        raise ProblemError(f"{file}: expected a Python file with a function {of.entry.name}, got none")
    source = read_text(file, ProblemError)
    if of.entry.name not in source:
        raise ProblemError(f"{file}: expected a function {of.entry.name}, got none")
    name = path.name if path.is_dir() else path.stem
    return Answer(name, {**of.companions, "submission.py": source}, "submission.py", of.entry)
