"""`assay survey` on a table of one's own: whatever the kernels do, the survey comes to its end and tells."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.cli.main import main
from assay.runtime.errors import AssayError
from assay.verify import examine
from assay.verify.campaign.survey import Job, Row
from assay.verify.campaign.table import Entry, entries, entry_from_table
from assay.verify.contract import Contract
from assay.verify.errors import TableError
from assay.verify.named_contracts import contract_named
from assay.verify.settings import Settings
from tests.cli.kernels_of_a_user import entry

HERE = Path(__file__).parent
TABLE = "".join(
    (
        entry("honest", "honest"),
        entry("faulty <script>", "faulty", "bfloat16"),
        entry("crashing", "crashing"),
        entry("absent", "absent", more='requires = "torch.no_such_kernel"'),
        entry("elsewhere", "honest", more='devices = ["cuda"]'),
    )
)


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A survey of the table above by the command in a process of its own, in a folder of its own."""
    folder = tmp_path_factory.mktemp("survey")
    (folder / "own.toml").write_text(TABLE, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-P", "-m", "assay.cli.main", "survey", "--table", "own.toml", "--examples", "2"]
    return folder, subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture(scope="module")
def rows(surveyed: tuple[Path, Any]) -> dict[str, Any]:
    """The rows of its JSON report, by name."""
    content = json.loads((surveyed[0] / "report" / "survey.json").read_text(encoding="utf-8"))
    return {row["name"]: row for row in content["rows"]}


def test_it_comes_to_its_end(surveyed: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, done = surveyed
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if not line.startswith("assay: examined")] == []
    heads = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert heads[:6] == ["kernel", "honest", "faulty <script>", "crashing", "absent", "elsewhere"]
    assert "1 PASS, 2 FAIL, 2 NOT HERE" in done.stdout
    assert "a kernel that prints" not in done.stdout


def test_every_kernel_has_its_outcome(rows: dict[str, Any]) -> None:
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "honest": "PASS",
        "faulty <script>": "FAIL",
        "crashing": "FAIL",
        "absent": "NOT HERE",
        "elsewhere": "NOT HERE",
    }
    assert rows["crashing"]["verdict"]["failure"]["kind"] == "crash"
    assert "SIGABRT" in rows["crashing"]["words"]
    assert rows["absent"]["reason"] == "there is no torch.no_such_kernel in this build"
    assert rows["elsewhere"]["reason"] == "runs on cuda, not on cpu"


def test_the_page_is_written_and_escaped(surveyed: tuple[Path, Any], rows: dict[str, Any]) -> None:
    assert "came nan, right " in rows["faulty <script>"]["words"]
    page = (surveyed[0] / "report" / "index.html").read_text(encoding="utf-8")
    assert "faulty &lt;script&gt;" in page
    assert "faulty <script>" not in page


@pytest.mark.usefixtures("users_kernels")
def test_a_repro_line_of_a_crash_crashes_a_fresh_process(
    rows: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(("repro", rows["crashing"]["verdict"]["repro"].removeprefix("assay repro ").strip("'"))) == 1
    out, err = capfd.readouterr()
    assert out.startswith("FAIL")
    assert "Traceback" not in err


@pytest.mark.usefixtures("users_kernels", "in_process")
@pytest.mark.parametrize(
    ("more", "status", "words"),
    [((), 1, "FAIL"), (("--target", "kernels_of_a_user:honest"), 0, "PASS  kernels_of_a_user:honest")],
)
def test_a_repro_line_is_run_on_its_kernel_or_a_mended_one(
    rows: dict[str, Any], more: tuple[str, ...], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("repro", rows["faulty <script>"]["verdict"]["repro"], *more)) == status
    assert words in capsys.readouterr().out


@pytest.fixture
def own_table(users_kernels: None, in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The table above in the current folder, one requirement fulfilled."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.toml"
    path.write_text(TABLE.replace("torch.no_such_kernel", "torch"), encoding="utf-8")
    return path


def test_what_was_not_examined_has_not_passed(own_table: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(("survey", "--table", own_table.name, "--only", "honest", "--budget", "0", "--strict")) == 1
    assert "1 NOT RUN" in capfd.readouterr().out


def test_what_is_done_is_never_lost(
    own_table: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The reports are there from the beginning, whole after each row; Ctrl-C ends with them, and status 130."""
    seen = []

    def run(jobs: Sequence[Job], workers: Any, until: float) -> Iterator[tuple[int, Row]]:
        for place, job in enumerate(jobs[:2]):
            seen.append(json.loads(Path("report/survey.json").read_text(encoding="utf-8"))["counts"])
            yield place, Row(job.entry, "float32", "NOT HERE", reason="elsewhere")
        raise KeyboardInterrupt

    monkeypatch.setattr("assay.verify.campaign.survey.run", run)
    assert main(("survey", "--table", own_table.name)) == 130
    assert seen == [{"NOT RUN": 5}, {"NOT HERE": 1, "NOT RUN": 4}]
    out, err = capfd.readouterr()
    assert "2 NOT HERE, 3 NOT RUN" in out
    words = "2 of 5 examinations are done, and stand in report/survey.json; the same command goes on from there"
    assert err == f"assay: interrupted; {words}\n"
    assert json.loads(Path("report/survey.json").read_text(encoding="utf-8"))["counts"] == {"NOT HERE": 2, "NOT RUN": 3}
    assert not list(Path("report").glob(".*"))


def test_a_stopped_survey_goes_on_where_it_was(
    own_table: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No row that was there is lost or made again, unless that is asked for; of other settings nothing is taken."""
    asked: list[list[str]] = []

    def once(jobs: Sequence[Job], workers: Any, until: float) -> Iterator[tuple[int, Row]]:
        asked.append([job.entry.name for job in jobs])
        for place, job in enumerate(jobs[:1]):
            verdict = examine(torch.nn.Identity(), "softmax", dtype="float32", shapes={"N": [2]}, examples=0)
            yield place, Row(job.entry, "float32", verdict.outcome, verdict)
        raise KeyboardInterrupt

    monkeypatch.setattr("assay.verify.campaign.survey.run", once)
    arguments = ("survey", "--table", own_table.name, "--examples", "1", "--only", "h")
    assert main(arguments) == 130
    assert main(arguments) == 130
    assert asked == [["honest", "crashing", "elsewhere"], ["crashing", "elsewhere"]]
    content = json.loads(Path("report/survey.json").read_text(encoding="utf-8"))
    assert [row["outcome"] for row in content["rows"]] == ["FAIL", "FAIL", "NOT RUN"]
    assert "1 of 3 verdicts were in report/kept" in capfd.readouterr().err
    assert main((*arguments, "--part", "2/2", "--anew")) == 0
    assert asked.pop() == ["crashing"]
    assert main((*arguments, "--anew")) == 130
    assert main((*arguments, "--seed", "1")) == 130
    assert asked[2:] == [asked[0], asked[0]]


def test_an_entry_that_is_wrong_is_no_verdict(own_table: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(("survey", "--table", own_table.name, "--only", "absent")) == 2
    out, err = capfd.readouterr()
    assert "1 ERROR" in out
    assert err.count("\n") == 1
    assert err.startswith("assay: absent float32: target 'kernels_of_a_user:absent': unknown function 'absent'")


def test_the_bundled_table_can_be_read() -> None:
    table = entries()
    assert len({row.name for row in table}) == len(table) > 20
    assert {row.requires for row in table if row.group == "assay"} == {"triton"}


def test_arrays_become_tuples_and_tables_ranges() -> None:
    made = entry_from_table(
        {
            "name": "a",
            "target": "a:b",
            "spec": "attention",
            "options": {"window": [[16, 0], [3, 5]]},
            "shapes": {
                "D": [64],
                "Sq": {"min": 3, "max": 20, "multiple_of": 4},
                "Sk": {"min": 1},
                "B": {"multiple_of": 2},
            },
            "contract": "pytorch.sdpa_masked",
        }
    )
    assert made.settings.options == {"window": ((16, 0), (3, 5))}
    shapes = made.settings.shapes
    assert shapes["D"] == (64,)
    assert (list(shapes["Sq"]), shapes["Sk"][0], shapes["B"][0]) == ([4, 8, 12, 16, 20], 1, 2)
    assert made.settings.contract == Contract(**contract_named("pytorch.sdpa_masked"))


ROW = '[[kernel]]\nname = "a"\ntarget = "a:b"\nspec = "softmax"\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected [[kernel]] entries, found none"),
        ("kernel = 3", "kernel: expected a list, got 3"),
        ("[[kernel", "is no TOML"),
        ('[[kernel]]\ntarget = "a:b"\nspec = "softmax"', "it needs a name"),
        ('[[kernel]]\nname = "a"\ntarget = "a:b"\nspec = "sofmax"', "did you mean 'softmax'?"),
        (ROW + "shape = {}", "unknown field 'shape'; did you mean 'shapes'?"),
        (ROW + 'dtypes = "float32"', "expected a list of dtypes"),
        (ROW + "options = { eps = [1] }", "unknown option 'eps'"),
        (ROW + "options = { eps = 1 }", "expected a list of the values"),
        (ROW + "shapes = { R = { least = 1 } }", "{ min, max, multiple_of }"),
        (ROW + 'contract = "none such"', "contract: unknown name"),
        (ROW + "contract = { ulps = 3 }", "expected fields of"),
        (ROW + 'contract = { rounding = "up" }', "rounding='up'"),
    ],
)
def test_a_table_that_is_wrong_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(TableError) as caught:
        entries(path)
    assert isinstance(caught.value, AssayError)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("dotted", "there"),
    [("torch", True), ("torch.nn.attention", True), ("torch.mm", True), ("torch.mn", False), ("no.such", False)],
)
def test_what_is_required_is_looked_up(dotted: str, there: bool) -> None:
    required = Entry("a", "a:b", Settings("softmax"), requires=dotted)
    assert bool(required.absence("cpu")) is not there
