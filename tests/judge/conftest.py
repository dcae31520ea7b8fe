"""Judging a solution that is a text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.judge.procedure import judge
from assay.judge.verdict import SolutionVerdict

from .judged.kernels import LINEAR

Judged = Callable[..., SolutionVerdict]


@pytest.fixture
def judged(tmp_path: Path) -> Judged:
    """Judges by a quick effort, without times unless ``timed``; the files are in ``tmp_path``."""

    def judged(solution: str, problem: str = LINEAR, *, timed: bool = False, **settings: Any) -> SolutionVerdict:
        (tmp_path / "problem.py").write_text(problem)
        (tmp_path / "solution.py").write_text(solution)
        return judge(tmp_path / "problem.py", tmp_path / "solution.py", effort="quick", timed=timed, **settings)

    return judged
