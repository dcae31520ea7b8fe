"""Files and values that no command can use: one line, exit status 2, nothing waits and nothing of others is lost."""

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as unhurried
from hypothesis import strategies as st

from assay.cli import settings
from assay.cli.audit_options import bytes_of
from assay.cli.main import main
from assay.cli.progress import console, console_table
from assay.golden.registry import spec
from assay.runtime.errors import AssayError
from assay.verify.campaign.table import entries, entry_from_table
from assay.verify.errors import TableError
from assay.verify.examination.repro import parse_line
from assay.verify.report.index import write_index
from assay.verify.report.summary import Line, markdown

SOFTMAX = "verify assay.kernels.libraries.pytorch:softmax --spec softmax --dtype bfloat16"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.toml")
    os.mkfifo("pipe.jsonl")
    Path("latin.toml").write_bytes(b'a = "caf\xe9"')
    Path("deep.toml").write_text("a = " + "[" * 20_000 + "]" * 20_000)
    Path("long.toml").write_text("a = " + "9" * 6000)
    Path("seeds.toml").write_text(f"seeds = [{2**63}]\n[[golden]]\nspec = 'softmax'\nshapes = [{{R = 1, N = 3}}]\n")
    Path("digits.toml").write_text("digits = 10000000\n[[golden]]\nspec = 'softmax'\nshapes = [{R = 1, N = 3}]\n")
    Path("empty.jsonl").touch()
    Path("notes").write_text("my notes")
    Path("folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("golden build pipe.toml --store s", "pipe.toml: can't be read (expected a file, got a pipe)"),
        ("golden build latin.toml --store s", "latin.toml: byte 8 is no UTF-8"),
        ("golden build deep.toml --store s", "deep.toml: is no TOML (more than 100 levels)"),
        ("golden build long.toml --store s", "long.toml: is no TOML (Exceeds the limit (4300 digits)"),
        ("golden build seeds.toml --store s", "seeds[0]: expected a whole number <= 9223372036854775807"),
        ("golden build digits.toml --store s", "digits: expected a whole number <= 100000, got 10000000"),
        ("golden build small --store s --workers 99999999999999999999", "--workers"),
        ("golden show ftp://", "store ftp://: cannot be opened"),
        ("survey --table pipe.toml", "expected a file, got a pipe"),
        ("survey --seed -1", "--seed"),
        ("verify ''", "target '': expected package.module:function"),
        ("verify pipe.toml", "expected a file, got a pipe"),
        ("bench --compare pipe.jsonl", "expected a file, got a pipe"),
        ("bench --out notes", "--out notes: expected a new file, or one that assay wrote"),
        ("bench --plot folder", "--plot folder: it is a folder"),
        ("inspect --out notes", "--out notes: expected a new file, or one that assay wrote"),
        ("power --spec softmax --out notes", "--out notes: expected a new file, or one that assay wrote"),
        ("tune a:b --anew --out notes", "--out notes: expected a new file, or one that assay wrote"),
        ("judge notes notes --trace notes", "--trace notes: expected a new file, or one that assay wrote"),
        ("judge --list empty.jsonl --out notes", "--out notes:1: expected a file of verdicts"),
        ("judge --list empty.jsonl --out pipe.jsonl", "--out pipe.jsonl: expected a file of verdicts"),
        ("judge --list pipe.jsonl", "expected a file, got a pipe"),
        ("judge --list empty.jsonl --seed -1", "--seed"),
        ("judge --list empty.jsonl --memory 1e300", "--memory"),
        ("judge --list empty.jsonl --jobs 99999999999999999999", "--jobs"),
        ("power --spec softmax --dtype bfloat16 --against allclose(nan,nan)", "expected allclose(1e-2,1e-2)"),
        ("power --spec softmax --dtype bfloat16 --against allclose(-1,1e400)", "expected allclose(1e-2,1e-2)"),
        (f"{SOFTMAX} --seed -1", "--seed"),
        (f"{SOFTMAX} --seed {2**63}", "--seed"),
        (f"{SOFTMAX} --timeout inf", "--timeout"),
        (f"{SOFTMAX} --memory 1e300", "--memory"),
        (f"{SOFTMAX} --examples {10**30}", "--examples"),
        (f"{SOFTMAX} --jobs {10**20}", "--jobs"),
        (f"{SOFTMAX} --refuses ''", "--refuses: expected a message"),
        (f"{SOFTMAX} --summary folder", "--summary folder: it is a folder"),
        ("audit stdlib-llama --text notes --out a --max-bytes 1e400GB", "--max-bytes '1e400GB'; expected a number"),
        ("audit stdlib-llama --text notes --out a --seed -1", "--seed"),
    ],
)
def test_it_is_one_line(command: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert (folder / "notes").read_text() == "my notes"


def test_a_removed_current_folder_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == "assay: the current folder has been removed; change to one that exists\n"
    monkeypatch.chdir(folder)


def test_a_report_that_is_ours_may_be_replaced(folder: Path) -> None:
    for content in ("", "# Speed and accuracy on this"):
        (folder / "page").write_text(content)
        settings.check_ours("--out", folder / "page", "# Speed and ")
    settings.check_ours("--out", folder / "none", "# Speed and ")


ESCAPE = "\x1b[31mred\u202e"


def test_controls_reach_no_terminal_and_no_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["verify", ESCAPE]) == 2
    assert main(["golden", "show", f"{tmp_path}/{ESCAPE}"]) == 2
    console(80).print(console_table(("name",), [(ESCAPE,)]))
    printed = capsys.readouterr()
    page = markdown([Line(ESCAPE, "softmax", "float32", "FAIL", words=ESCAPE, repro=f"assay repro '{ESCAPE}'")])
    for text in (printed.out, printed.err, page):
        assert "\\x1b[31mred\\u202e" in text.replace("\\\\", "\\").replace("\\[", "[")
        assert "\x1b" not in text
        assert "\u202e" not in text
    (tmp_path / "a.html").touch()
    row = {**Line(ESCAPE, "softmax", "float32", "FAIL").as_dict(), "test": "t", "page": "a.html"}
    assert "\x1b" not in write_index(tmp_path, [row]).read_text()


def test_an_index_has_what_the_folder_holds(tmp_path: Path) -> None:
    """Rows of other runs stay while their pages do; a run's own replace those of the same page."""

    def row(name: str, outcome: str = "PASS") -> dict[str, object]:
        (tmp_path / f"{name}.html").touch()
        return {**Line(name, "softmax", "float32", outcome).as_dict(), "test": name, "page": f"{name}.html"}

    write_index(tmp_path, [row("first"), row("second")])
    (tmp_path / "second.html").unlink()
    index = write_index(tmp_path, [row("third"), row("first", "FAIL")]).read_text()
    assert [name in index for name in (">first<", ">second<", ">third<")] == [True, False, True]
    assert "2 verdicts" in index
    for content in (b"\xff", b"3\n", b"{}\n", b'{"page": "first.html"}\n', b"[" * 10_000):
        (tmp_path / "index.jsonl").write_bytes(content)
        assert "1 verdicts" in write_index(tmp_path, [row("first")]).read_text()


WORD = st.text("aN1.:=-[ ", max_size=4)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORD, inner, max_size=3),
    max_leaves=5,
)
ROW = {"name": "a", "target": "a:b", "spec": "softmax", "dtypes": ["bfloat16"], "shapes": {"N": [3]}, "options": {}}


@unhurried(deadline=None)
@given(st.sampled_from([*ROW, "contract", "seeds", "package", "requires", "cost", "at", "other"]), ANY)
def test_any_entry_of_a_table_is_read_or_refused(name: str, value: Any) -> None:
    with suppress(AssayError):
        entry_from_table({**ROW, name: value})


@pytest.mark.parametrize("rows", ["[1]", "'a'", "[[]]", "[{}, 'a']", "[{package = []}]", "{a = 1}", "[{spec = [1]}]"])
def test_rows_that_are_no_entries_are_one_line(rows: str, tmp_path: Path) -> None:
    for text in (
        f"kernel = {rows}",
        f"packages = {rows}\n[[kernel]]\nname = 'a'",
        f"kernel = [{{}}]\npackages.a = {rows}",
    ):
        (tmp_path / "table.toml").write_text(text)
        with pytest.raises(TableError) as error:
            entries(tmp_path / "table.toml")
        assert "\n" not in str(error.value)


@given(st.text(max_size=30))
def test_any_value_of_an_option_is_read_or_refused(text: str) -> None:
    softmax = spec("softmax")
    for parse in (
        lambda: settings.shapes([text, f"N={text}"]),
        lambda: settings.options(softmax, [text, f"x={text}"]),
        lambda: settings.contract_fields([f"ulps.{text}", f"{text}={text}"]),
        lambda: settings.dtypes([text]),
        lambda: settings.literal(text),
        lambda: bytes_of("--max-bytes", text),
        lambda: parse_line(text),
        lambda: parse_line(f'{{"target": "a:b", "case": {{"spec": "softmax", "sizes": {text}}}}}'),
    ):
        try:
            parse()
        except AssayError:
            continue
