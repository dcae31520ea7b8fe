"""`./dev evidence`: docs/evidence.md claims what was recorded; runs go on where they were, stale ones are told."""

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import os, pytest
def test_right(): pass
def test_wrong(): assert False
def test_ends_the_process(): os._exit(9)
def test_not_here(): pytest.skip()
def test_last(): pass
"""
TABLE = """
[[claim]]
name = "toy"
says = "toys work"
sources = ["code"]
tests = ["test_toys.py"]

[[claim]]
name = "script"
says = "a script prints"
sources = ["code/a.py"]
script = ["python", "-c", "print('42 µs')"]
"""


@pytest.fixture(scope="module")
def evidence() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "benchmarks" / "evidence.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["evidence"] = importlib.util.module_from_spec(spec)  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def book(evidence: ModuleType, tmp_path: Path) -> Any:
    """Two claims about one file."""
    for name, content in (
        ("docs/evidence.toml", TABLE),
        ("docs/evidence.md", f"before\n{evidence.BEGIN}\n{evidence.END}\nafter\n"),
        ("code/a.py", "a = 1\n"),
        ("test_toys.py", TESTS),
        ("pytest.ini", "[pytest]\n"),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return evidence.Book(tmp_path)


def test_the_page_says_what_is_recorded(evidence: ModuleType) -> None:
    """The part between the marks is made of docs/evidence.json; what is stale may change with every commit."""
    book = evidence.Book()
    page = book.page_path.read_text(encoding="utf-8")
    assert book.written(page, evidence.stale_on(page)) == page
    assert set(evidence.stale_on(page)) <= set(book.claims)


def test_a_page_that_says_otherwise_is_found(evidence: ModuleType) -> None:
    """A figure that was changed by hand is not what is written."""
    book = evidence.Book()
    page = book.page_path.read_text(encoding="utf-8")
    changed = page.replace("| golden-speed: ", "| golden-speed: 5 of 5: ", 1)
    assert changed != page
    assert book.written(changed, evidence.stale_on(changed)) == page


def test_every_claim_speaks_of_what_there_is(evidence: ModuleType) -> None:
    """Each has tests or a script, and sources and files of tests that exist."""
    for claim in evidence.Book().claims.values():
        assert bool(claim.tests) != bool(claim.script), claim.name
        files = [word for word in (*claim.tests, *claim.script) if word.endswith(".py")]
        assert files, claim.name
        assert [each for each in (*claim.sources, *files) if not (ROOT / each).exists()] == [], claim.name


def test_a_run_goes_on_where_it_was(evidence: ModuleType, book: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A test whose process ends is recorded, and the next run begins behind it; what failed is named."""
    evidence.run_tests(book, "toy", time.time() + 60)
    entry = book.record()["toy"]
    assert "whole" not in entry
    assert (entry["under_way"]["done"], entry["under_way"]["of"]) == (3, 5)
    evidence.run_tests(book, "toy", time.time() + 60)
    whole = book.record()["toy"]["whole"]
    assert (whole["done"], whole["of"], whole["skipped"]) == (5, 5, 1)
    assert [each.rpartition("::")[2] for each in whole["failed"]] == ["test_wrong", "test_ends_the_process"]
    assert book.stale() == ["script"]
    capfd.readouterr()


def test_no_test_begins_when_the_time_is_up(evidence: ModuleType, book: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The one under way is ended and recorded."""
    evidence.run_tests(book, "toy", time.time() - 1)
    run = book.record()["toy"]["under_way"]
    assert (run["done"], run["of"], run["failed"]) == (1, 5, [])
    capfd.readouterr()


def test_what_is_older_than_the_code_is_told(evidence: ModuleType, book: Any) -> None:
    """A script's words stand on the page; when its source has changed the page calls it stale, and keeps them."""
    evidence.run_script(book, "script", time.time() + 60)
    book.write()
    page = book.page_path.read_text(encoding="utf-8")
    assert "42 µs" in page
    assert evidence.stale_on(page) == ["toy"]
    (book.root / "code" / "a.py").write_text("a = 2\n", encoding="utf-8")
    book.write()
    page = book.page_path.read_text(encoding="utf-8")
    assert "42 µs" in page
    assert evidence.stale_on(page) == ["toy", "script"]
    assert page.startswith("before\n")
    assert page.endswith("after\n")


def test_a_name_that_is_no_claims_is_refused(evidence: ModuleType, book: Any) -> None:
    """One line, with the names that there are; with no minutes nothing is run."""
    with pytest.raises(SystemExit, match="no claim 'toys'; there are: toy, script"):
        evidence.main(1.0, ["toys"], book)
    evidence.main(0.0, [], book)
    assert book.record() == {"toy": {}, "script": {}}


def test_the_stalest_comes_first(evidence: ModuleType, book: Any) -> None:
    """What was never run, then what was run longest ago; a script that doesn't end in time stays stale."""
    evidence.run_script(book, "script", time.time() + 60)
    assert book.stale() == ["toy"]
    book.put("toy", {"whole": {"digest": "older", "ended": "2020-01-01 00:00:00"}})
    content = json.loads(book.record_path.read_text(encoding="utf-8"))
    content["script"]["whole"] |= {"digest": "older", "ended": "2019-01-01 00:00:00"}
    book.record_path.write_text(json.dumps(content), encoding="utf-8")
    assert book.stale() == ["script", "toy"]
    evidence.run_script(book, "script", time.time() + 1e-3)
    assert book.record()["script"]["under_way"]["failed"] == ["did not end within 0 minutes"]
    assert book.stale() == ["script", "toy"]
