"""KernelBench files: ``Model``, ``get_inputs()`` and ``get_init_inputs()``; the solution's class is ``ModelNew``.

MultiKernelBench and others that keep these names are read too. Sizes are the whole numbers that the file sets at module
level; the solution's own constants of the same name and value follow them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from assay.judge.problems.constants import constants, rewritten
from assay.judge.problems.problem import Answer, Entry, Instance, Problem, ProblemError, Sizes
from assay.judge.problems.running import executed, explained, seeded

_NAMES = ("Model", "get_inputs", "get_init_inputs")
ENTRY = Entry("ModelNew", "class")


def reads(path: Path) -> bool:
    """Whether a file is a problem of this format."""
    return path.is_file() and path.suffix == ".py" and "class Model" in path.read_text(encoding="utf-8")


def problem(path: Path) -> Problem:
    """The problem. Raises `ProblemError`."""
    source = path.read_text(encoding="utf-8")
    try:
        known = constants(source)
    except SyntaxError as error:
        raise ProblemError(f"{path}: expected a Python file, got a syntax error ({error})") from None
    missing = [name for name in _NAMES if f"{name}(" not in source and f"{name}:" not in source]
    if missing:
        raise ProblemError(f"{path}: expected Model, get_inputs and get_init_inputs, got no {', '.join(missing)}")

    def make(sizes: Sizes, seed: int) -> Instance:
        text = rewritten(source, sizes)
        namespace = executed(text, path)
        return _instance(namespace, sizes, seed, text, path)

    return Problem(path.stem, "KernelBench", path, source, (known,), tuple(known), make, ENTRY, rewrites=True)


def _instance(namespace: Mapping[str, Any], sizes: Sizes, seed: int, source: str, path: Path) -> Instance:
    lacking = [name for name in _NAMES if not callable(namespace.get(name))]
    if lacking:
        raise ProblemError(f"{path}: expected Model, get_inputs and get_init_inputs, got no {', '.join(lacking)}")
    try:
        init, named = _constructor(seeded(namespace["get_init_inputs"], seed, source))
        module = seeded(lambda: namespace["Model"](*init, **named), seed, source)
    except ProblemError:
        raise
    except Exception as error:
        raise explained(error, path, "Model(*get_init_inputs())") from None
    if not isinstance(module, torch.nn.Module):
        raise ProblemError(f"{path}: expected Model to be a torch.nn.Module, got {type(module).__name__}")

    def draw(seed: int) -> tuple[Any, ...]:
        try:
            return tuple(seeded(namespace["get_inputs"], seed, source))
        except Exception as error:
            raise explained(error, path, "get_inputs()") from None

    return Instance(sizes, module, draw, module, init, named)


def _constructor(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the constructor: a list of them, or one list and one dict."""
    given = list(given)
    if len(given) == 2 and isinstance(given[0], list) and isinstance(given[1], dict):
        return tuple(given[0]), dict(given[1])
    return tuple(given), {}


def solution(path: Path, of: Problem) -> Answer:
    """The solution's file, which stands alone. Raises `ProblemError`."""
    if not path.is_file():
        raise ProblemError(f"{path}: expected a Python file with a class {of.entry.name}, got none")
    source = path.read_text(encoding="utf-8")
    if of.entry.name not in source:
        raise ProblemError(f"{path}: expected a class {of.entry.name}, got none")
    return Answer(path.stem, {"solution.py": source}, "solution.py", of.entry)
