"""Solutions that cheat are seen and named; their honest twins are in test_honest_solutions.py."""

from pathlib import Path

import pytest

from assay.judge.tampering import CHEATS as NAMES

from .judged.cheats import CHEATS, WARNED, judged


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_named(name: str, tmp_path: Path) -> None:
    _, cheat, _ = CHEATS[name]
    verdict = judged(tmp_path, name, cheat)
    assert verdict.outcome == ("WARN" if name in WARNED else "FAIL"), str(verdict)
    assert name in [found.name for found in verdict.cheats], str(verdict)
    assert verdict.aspects["conduct"].status == ("suspect" if name in WARNED else "broken")


def test_every_name_has_a_cheat_and_a_twin() -> None:
    assert set(CHEATS) == set(NAMES)
