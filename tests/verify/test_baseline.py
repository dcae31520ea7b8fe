"""Baselines: what a verdict found beside what is known, and a file that others edit too."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.cli.main import main
from assay.verify import Verdict
from assay.verify.baseline import (
    BaselineError,
    Finding,
    Known,
    add,
    compared,
    findings_of,
    read_baseline,
    remove,
    unseen,
)
from assay.verify.findings import Aspect, Explanation

TODAY = datetime.date(2026, 11, 28)
LATER = datetime.date(2027, 1, 31)


def verdict(outcome: str = "FAIL", spec: str = "softmax", dtype: str = "bfloat16", **aspects: Aspect) -> Verdict:
    return Verdict(outcome, "softmax", spec, dtype, "", aspects=aspects, target="my.kernels:softmax")


def broken(cause: str = "", **fields: str) -> Aspect:
    causes = (Explanation(cause, "words", 1.0),) if cause else ()
    return Aspect("broken", 1, 2.0, explanations=causes, **fields)


def known(aspect: str, cause: str = "", expires: datetime.date = LATER, **fields: str) -> Known:
    return Known("my.kernels:softmax", aspect, "#12", expires, cause=cause, **fields)


def test_what_a_verdict_found() -> None:
    """The broken and suspect aspects that are faults of their own, or the outcome where there is no verdict."""
    faulty = verdict(
        numbers=broken("masked_zero"), shapes=broken(note="by the fault of numbers"), memory=Aspect("kept")
    )
    assert [(one.aspect, one.cause) for one in findings_of(faulty)] == [("numbers", "masked_zero")]
    assert [one.aspect for one in findings_of(verdict("WARN", bias=Aspect("suspect")))] == ["bias"]
    assert [one.aspect for one in findings_of(verdict("INCONCLUSIVE"))] == ["inconclusive"]
    assert findings_of(verdict("PASS", numbers=Aspect("kept"))) == []


@pytest.mark.parametrize(
    ("entries", "accepted"),
    [
        ([], False),
        ([known("numbers")], True),
        ([known("numbers", "masked_zero")], True),
        ([known("numbers", "other_cause")], False),
        ([known("numbers", dtype="bfloat16", spec="softmax")], True),
        ([known("numbers", dtype="float16")], False),
        ([known("numbers", spec="log_softmax")], False),
        ([known("special")], False),
        ([known("numbers", expires=TODAY)], True),
        ([known("numbers", expires=TODAY - datetime.timedelta(1))], False),
        ([known("numbers", expires=TODAY - datetime.timedelta(1)), known("numbers")], True),
    ],
)
def test_a_finding_is_known_by_target_aspect_and_cause(entries: list[Known], accepted: bool) -> None:
    assert compared(verdict(numbers=broken("masked_zero")), entries, TODAY).accepts is accepted
    other = compared(verdict(numbers=broken("masked_zero"), memory=broken()), entries, TODAY)
    assert not other.accepts
    assert "memory is new" in other.words


def test_entries_that_an_examined_kernel_no_longer_shows() -> None:
    entries = [
        known("numbers"),
        known("memory"),
        known("numbers", dtype="float16"),
        Known("other:f", "bias", "#1", LATER),
    ]
    assert unseen(entries, [verdict(numbers=broken())]) == [entries[1]]
    assert unseen(entries, [verdict(numbers=broken()), verdict("PASS", dtype="float16")]) == entries[1:3]


TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=5), TEXTS.filter(str.strip), st.integers(0, 31))
def test_a_file_holds_what_was_added(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]], reason: str, chosen: int
) -> None:
    """Whatever the texts; what is removed is gone, and the rest and the comments of others are still there."""
    findings = [Finding(target, spec, "", "numbers", cause) for target, spec, cause in rows]
    path = tmp_path_factory.mktemp("baseline") / "known.toml"
    path.write_text("# ours\n", encoding="utf-8")
    assert len(add(path, findings, reason, LATER)) == len(set(findings))
    entries = read_baseline(path)
    assert [entry.as_finding() for entry in entries] == list(dict.fromkeys(findings))
    assert all(entry.reason == reason and entry.expires == LATER for entry in entries)
    assert add(path, findings, reason, LATER) == []
    gone = [entry for index, entry in enumerate(entries) if chosen >> index & 1]
    remove(path, gone)
    assert read_baseline(path) == [entry for entry in entries if entry not in gone]
    assert path.read_text(encoding="utf-8").startswith("# ours\n")


def test_an_entry_is_replaced_and_others_stay(tmp_path: Path) -> None:
    """With a new reason or a later day; a file whose tables can't be told apart isn't touched."""
    path, finding = tmp_path / "known.toml", Finding("k:f", "softmax", "", "numbers")
    other = '# a comment\n[[finding]]  # mine\ntarget = "k:g"\naspect = "bias"\nreason = "r"\nexpires = 2027-01-01\n'
    path.write_text(other, encoding="utf-8")
    add(path, [finding], "one", LATER)
    add(path, [finding], "two", LATER)
    assert path.read_text(encoding="utf-8").startswith(other)
    assert [entry.reason for entry in read_baseline(path)] == ["r", "two"]
    inline = 'finding = [{ target = "k:f", aspect = "bias", reason = "r", expires = 2027-01-01 }]\n'
    path.write_text(inline, encoding="utf-8")
    with pytest.raises(BaselineError, match=r"under a line \[\[finding\]\]"):
        add(path, [finding], "one", LATER)
    assert path.read_text(encoding="utf-8") == inline


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[finding]]\ntarget = 'k:f'\n", "missing required field `aspect`"),
        (
            "[[finding]]\ntarget = 'k:f'\naspect = 'number'\nreason = 'r'\nexpires = 2027-01-01",
            "aspect 'number'; expected",
        ),
        ("[[finding]]\ntarget = 'k:f'\naspect = 'bias'\nreason = ' '\nexpires = 2027-01-01", "reason is empty"),
        ("[[finding]]\ntarget = 'k:f'\naspect = 'bias'\nreason = 'r'\nexpires = 'soon'", "Invalid"),
        ("[[findings]]\n", "unknown field `findings`"),
        ("[[finding", "no TOML"),
    ],
)
def test_a_wrong_baseline_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "known.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BaselineError) as raised:
        read_baseline(path)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Add, list and prune; what can't be used is one line and status 2."""
    file, report = str(tmp_path / "known.toml"), tmp_path / "softmax.json"
    shown = verdict("INCONCLUSIVE")
    report.write_text(shown.to_json(), encoding="utf-8")
    assert main(["baseline", "add", file, str(report), "--reason", "#12", "--expires", "2999-01-31"]) == 0
    assert main(["baseline", "add", file, str(tmp_path), "--reason", "#12", "--expires", "2999-01-31"]) == 0
    assert "0 of 1 findings are new" in capsys.readouterr().err
    assert main(["baseline", "list", file]) == 0
    assert "2999-01-31  my.kernels:softmax  softmax  bfloat16  inconclusive" in capsys.readouterr().out
    assert main(["baseline", "prune", file, str(report)]) == 0
    assert "0 of 1 findings are removed" in capsys.readouterr().err
    report.write_text(verdict("PASS").to_json(), encoding="utf-8")
    assert main(["baseline", "prune", file, str(report)]) == 0
    assert "no longer found: my.kernels:softmax" in capsys.readouterr().out
    assert read_baseline(file) == []
    for arguments, words in (
        (["add", file, str(report), "--reason", " "], "--reason: expected why"),
        (["add", file, str(report), "--reason", "r", "--expires", "2020-01-01"], "expected a day that isn't over"),
        (["add", file, str(report), "--reason", "r", "--expires", "soon"], "expected a day as YYYY-MM-DD"),
        (["add", file, str(report), "--reason", "r", "--aspect", "bias"], "the reports have no such finding"),
        (["add", file, str(tmp_path / "none.json"), "--reason", "r"], "none.json"),
        (["add", file, file, "--reason", "r"], "is no JSON"),
        (["list", str(tmp_path / "none.toml")], "make one with assay baseline add"),
    ):
        assert main(["baseline", *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
