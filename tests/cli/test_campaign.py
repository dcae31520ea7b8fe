"""`assay verify CAMPAIGN.toml`: stopped and gone on with, nothing examined twice, nothing kept of a changed kernel."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.cli.main import main
from assay.runtime.engines import engine_named
from assay.verify import examine
from assay.verify.campaign.cache import digest, keep, kept
from assay.verify.campaign.survey import Job, Row, plan
from assay.verify.campaign.table import Entry, TableError, entries
from assay.verify.settings import Settings
from tests.runtime.test_engines import answers_to_words

ROOT = Path(__file__).resolve().parents[2]
CAMPAIGN = """
[[kernel]]
name = "mine"
target = "campaign_kernels:right"
spec = "softmax"
dtypes = ["float32"]
shapes = {{ N = [4, 8] }}
examples = 1
seeds = [0, 1]

[[kernel]]
name = "wrong"
target = "campaign_kernels:wrong"
spec = "softmax"
dtypes = ["float32"]
shapes = {{ N = [4, 8] }}
examples = {examples}
"""
KERNELS = """
import os, pathlib, signal, torch
def right(x):
    killed = pathlib.Path(os.environ.get("KILLED", __file__))
    if os.environ.get("RAY_RAYLET_PID") and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.softmax(x, -1)
def wrong(x):
    return torch.softmax(x, -1) * 1.01
"""


def job_of(target: str) -> Job:
    """An examination of a kernel as a softmax."""
    return Job(Entry("mine", target, Settings("softmax")), Settings("softmax", "float32"))


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A campaign of three examinations, and its kernels beside it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "campaign_kernels.py").write_text(KERNELS, encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(CAMPAIGN.format(examples=1), encoding="utf-8")
    return path


@pytest.mark.usefixtures("in_process")
def test_an_interrupted_run_reports_what_is_done(
    campaign: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    verdict = examine(torch.nn.Identity(), "softmax", dtype="float32", examples=0, shapes={"N": [2]}, shrinking=False)

    def run(jobs: Sequence[Job], workers: object) -> Iterator[tuple[int, Row]]:
        yield 1, Row(jobs[1].entry, "float32", verdict.outcome, verdict)
        raise KeyboardInterrupt

    monkeypatch.setattr("assay.verify.campaign.survey.run", run)
    assert main(("verify", str(campaign), "--jobs", "1")) == 130
    out, err = capfd.readouterr()
    assert out.startswith("FAIL  ")
    assert err == "assay: interrupted; 1 of 3 examinations are done\n"


@pytest.mark.usefixtures("in_process")
def test_a_campaign_goes_on_where_it_was(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each seed is an examination. Stored verdicts are not made again, a damaged one is; parts make the whole."""
    out = campaign.parent / "out"
    arguments = ("verify", str(campaign), "--out", str(out), "--json")
    for part in ("1/2", "2/2"):
        main((*arguments, "--part", part))
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.json")}
    assert len(times) == 3
    capsys.readouterr()
    assert main(arguments) == 1
    text, err = capsys.readouterr()
    assert "wrote" not in err
    first = json.loads(text)
    assert [(verdict["kernel"], verdict["seed"], verdict["outcome"]) for verdict in first] == [
        ("mine", 0, "PASS"),
        ("mine", 1, "PASS"),
        ("wrong", 0, "FAIL"),
    ]
    lost = next(path for path in out.glob("wrong*.json"))
    lost.write_text("{", encoding="utf-8")  # as an interrupted writer of another kind would leave it
    assert main(arguments) == 1
    again, err = capsys.readouterr()
    assert "2 of 3 verdicts were in" in err
    moment = {"seconds": 0, "about": {}}
    assert [verdict | moment for verdict in json.loads(again)] == [verdict | moment for verdict in first]
    changed = [path.name for path in out.glob("*.json") if path.stat().st_mtime_ns != times[path.name]]
    assert changed == [lost.name]
    assert main((*arguments, "--part", "4/2")) == 2
    assert "--part '4/2'; expected e.g. 3/10" in capsys.readouterr().err


def verdicts(folder: Path) -> dict[str, dict[str, Any]]:
    """The verdicts of a folder by file, without what hangs on the moment."""
    found = {path.name: json.loads(path.read_text()) for path in folder.rglob("*.json")}
    for content in found.values():
        content.pop("seconds")
        content["about"].pop("date")
    return found


@pytest.mark.slow
def test_a_cluster_gives_the_same_verdicts(campaign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Ray's workers verdicts are those of processes here, figure by figure, though one worker is killed; and tasks
    have the answers that a pool gives."""
    pytest.importorskip("ray")
    monkeypatch.chdir(campaign.parent)
    monkeypatch.setenv("KILLED", str(tmp_path / "killed"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))))  # for its workers
    arguments = ("verify", str(campaign), "--jobs", "2", "--out")
    with engine_named("ray", 2, preload="json", timeout=20.0) as cluster:  # which the command uses too
        assert main((*arguments, str(tmp_path / "ray"), "--engine", "ray")) == 1
        answers_to_words(cluster)
    assert main((*arguments, str(tmp_path / "local"))) == 1
    here, there = (verdicts(tmp_path / engine) for engine in ("local", "ray"))
    assert len(here) == 3
    assert (tmp_path / "killed").exists()
    assert sorted(map(str, here.values())) == sorted(map(str, there.values()))


def test_a_changed_kernel_is_another(campaign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source, examples, dtype or seed tell a job from another; how many run at once doesn't."""
    job = plan(entries(campaign))[0]
    assert digest(replace(job, threads=1)) == digest(job)
    others = [
        replace(job, settings=replace(job.settings, **change))
        for change in ({"dtype": "bfloat16"}, {"examples": 2}, {"seed": 5})
    ]
    assert len({digest(job), *map(digest, others)}) == 4
    before = digest(job)
    kernels = campaign.with_name("campaign_kernels.py")
    kernels.write_text(kernels.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "campaign_kernels", raising=False)
    assert digest(job) != before


@pytest.mark.parametrize("package", [False, True])
def test_a_changed_helper_makes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: bool) -> None:
    """A module that the kernel imports, beside it or anywhere in its package; not what only lies in the same folder.

    The folder is the current one, which the command's own process needn't search.
    """
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "campaign_package" / "deep" if package else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wanted.py").write_text("import helper\n", encoding="utf-8")
    helper = folder.parent / "helper.py" if package else folder / "helper.py"
    helper.write_text("FACTOR = 1\n", encoding="utf-8")
    job = job_of(f"{'campaign_package.deep.' if package else ''}wanted:kernel")
    before = digest(job)
    (folder / "notes.txt").write_text("no source", encoding="utf-8")
    assert digest(job) == before
    helper.write_text("FACTOR = 2\n", encoding="utf-8")
    assert digest(job) != before


@pytest.mark.parametrize(
    ("name", "other"),
    [("assay.runtime.results.own_sources", ("another", {})), ("assay.verify.examination.kept._machine", "another")],
)
def test_another_assay_or_machine_is_another(monkeypatch: pytest.MonkeyPatch, name: str, other: object) -> None:
    job = job_of("nowhere:kernel")
    before = digest(job)
    monkeypatch.setattr(name, lambda *asked: other)
    assert digest(job) != before


def test_a_verdict_comes_back_as_it_was(tmp_path: Path) -> None:
    job = job_of("nowhere:zeros")
    assert kept(tmp_path, job) is None
    for kernel in (lambda x: x * float("nan"), lambda x: x.softmax(-1)):
        verdict = examine(kernel, "softmax", dtype="float32", examples=0, shapes={"N": [4, 8]})
        keep(tmp_path, job, verdict)
        found = kept(tmp_path, job)
        assert found is not None
        assert found.to_json() == verdict.to_json()
        assert str(found) == str(verdict)


def test_the_bundled_campaign_can_be_read() -> None:
    jobs = plan(entries(ROOT / "configs" / "campaigns" / "verify" / "attention.toml"), examples=200)
    assert {job.settings.seed for job in jobs} == {0, 1, 2}
    assert {job.settings.examples for job in jobs} == {1000}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = [0, 1]", "seeds = [-1]", "seeds=[-1]; expected a list of whole numbers"),
        ("examples = 1\n", "examples = 'many'\n", "examples='many'; expected a whole number"),
        ("examples = 1\n", "exmples = 1\n", "unknown field 'exmples'; did you mean 'examples'"),
    ],
)
def test_a_mistake_names_the_file_and_the_entry(campaign: Path, old: str, new: str, message: str) -> None:
    campaign.write_text(CAMPAIGN.format(examples=1).replace(old, new, 1), encoding="utf-8")
    with pytest.raises(TableError) as error:
        entries(campaign)
    assert f"{campaign}: entry 1 (mine): " in str(error.value)
    assert message in str(error.value)


def test_a_campaign_says_what_its_kernels_implement(campaign: Path, one_line: Callable[..., None]) -> None:
    one_line(("verify", str(campaign), "--spec", "softmax"), "leave --spec out")
    one_line(("verify", str(campaign.with_name("none.toml"))), "can't be read (No such file or directory)")
