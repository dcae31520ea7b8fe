"""Reads problems and solutions of any format; each format has a module."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

from assay.judge.problems import flashinfer_trace, kernelbench, reference_folder, robust_kbench
from assay.judge.problems.problem import Answer, Problem, ProblemError
from assay.runtime.files import named

FORMATS: tuple[ModuleType, ...] = (robust_kbench, reference_folder, flashinfer_trace, kernelbench)
_KNOWN = (
    "a KernelBench file (Model, get_inputs, get_init_inputs), a FlashInfer Trace definition, a folder with "
    "reference.py and task.yml, or a robust-kbench folder"
)


def read(problem: str | Path, solution: str | Path) -> tuple[Problem, Answer]:
    """Return a problem and a solution of it. Raises `ProblemError`."""
    path, of = Path(problem), Path(solution)
    format = format_of(path)
    if not os.path.exists(of):
        raise ProblemError(f"{named(of)}: expected a solution there, got no such file")
    result: Problem = format.problem(path)
    answer: Answer = format.solution(of, result)
    return result, answer


def read_problem(path: str | Path) -> Problem:
    """Return a problem. Raises `ProblemError`."""
    result: Problem = format_of(Path(path)).problem(Path(path))
    return result


def format_of(path: Path) -> ModuleType:
    """Return the module that reads a problem. Raises `ProblemError`."""
    if not os.path.exists(path):
        raise ProblemError(f"{named(path)}: expected a problem there, got no such file")
    for format in FORMATS:
        if format.reads(path):
            return format
    raise ProblemError(f"{path}: expected {_KNOWN}, got none of these")
