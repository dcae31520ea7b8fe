"""`./dev evidence`: the page shows what was recorded; a claim whose sources changed is stale."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = """
[[claim]]
name = "right"
says = "a script prints"
command = "python -c \\"print('42 µs')\\""
sources = ["code"]

[[claim]]
name = "wrong"
says = "a script fails"
command = "python -c \\"raise SystemExit(3)\\""
sources = ["code/a.py"]
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "benchmarks" / "evidence.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["evidence"] = importlib.util.module_from_spec(spec)  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def evidence(script: ModuleType, tmp_path: Path) -> Any:
    """Two claims about one file, in a folder of their own."""
    for name, content in (
        ("docs/evidence.toml", TABLE),
        ("docs/results/evidence.json", "{}"),
        ("code/a.py", "a = 1\n"),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(content, encoding="utf-8")
    return script.Evidence(tmp_path)


def test_the_page_shows_the_record(script: ModuleType) -> None:
    evidence = script.Evidence()
    assert evidence.page() == evidence.page_path.read_text(encoding="utf-8")


def test_claims_are_few_and_their_sources_exist(script: ModuleType) -> None:
    claims = script.Evidence().claims.values()
    assert len(claims) <= 15
    for claim in claims:
        files = [word for word in claim.command.split() if word.startswith(("tests/", "benchmarks/"))]
        assert [each for each in (*claim.sources, *files) if not (ROOT / each).exists()] == [], claim.name


def test_a_claim_is_stale_when_its_sources_change(evidence: Any, script: ModuleType) -> None:
    assert evidence.stale() == ["right", "wrong"]
    assert script.main([], evidence) == 1
    assert evidence.stale() == []
    assert script.main(["--check"], evidence) == 0
    record = evidence.record()
    assert (record["right"]["result"], record["right"]["output"]) == ("passed", "42 µs")
    assert record["wrong"]["result"] == "failed with exit status 3"
    (evidence.root / "code" / "a.py").write_text("a = 2\n", encoding="utf-8")
    assert evidence.stale() == ["right", "wrong"]
    assert script.main(["--check"], evidence) == 1
    assert "42 µs" in evidence.page()


def test_a_command_without_end_is_stopped(evidence: Any, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "LIMIT", 1e-3)
    assert script.main(["right"], evidence) == 1
    assert evidence.record()["right"]["result"] == "did not end within 0.001 s"


def test_an_unknown_claim_is_refused(evidence: Any, script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no claim 'toys'; there are: right, wrong"):
        script.main(["toys"], evidence)
