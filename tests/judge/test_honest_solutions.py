"""Solutions that look like cheats and are none pass; the cheats are in test_solutions_that_cheat.py."""

from pathlib import Path

import pytest

from .judged.cheats import CHEATS, judged


@pytest.mark.parametrize("name", CHEATS)
def test_an_honest_twin_passes(name: str, tmp_path: Path) -> None:
    _, _, honest = CHEATS[name]
    verdict = judged(tmp_path, name, honest)
    assert verdict.outcome == "PASS", str(verdict)
    assert verdict.cheats == ()
