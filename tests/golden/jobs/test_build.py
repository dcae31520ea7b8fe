"""Building: every task ends as it must, whatever some of them do to their process, and nothing is made twice."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.golden.errors import StoreError
from assay.golden.jobs.build import MADE, Job, Outcome, Part, Report, build, read_plan
from assay.golden.jobs.campaign import parse_campaign
from assay.golden.store import Store, record_key
from assay.runtime.engines import Engine, RayEngine
from assay.runtime.pool import Pool
from tests.golden.jobs.here import SMALL, Here, built
from tests.golden.jobs.poison import FOLDER

ROOT = Path(__file__).resolve().parents[3]
MODULES = ("tests.golden.jobs.poison",)
POISON = """
dtypes = ["float32"]
[[golden]]
spec = "poison"
shapes = [{ R = 1, N = 2 }]
options = { way = ["none", "raise", "mend", "memory", "exit", "raise_once", "kill_once"] }
"""
HANG = re.sub(r"way = .*", 'way = ["hang", "none"] }', POISON)


@pytest.fixture
def _poison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left").mkdir()
    monkeypatch.setenv(FOLDER, str(tmp_path / "left"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))))  # for Ray


def local(workers: int, timeout: float = 60.0) -> Pool:
    return Pool(workers, preload="assay.golden.jobs.build", timeout=timeout)


def run(engine: Engine, text: str, folder: Path, retries: int = 2) -> tuple[Report, list[Outcome]]:
    campaign, seen = parse_campaign(text, "poison"), list[Outcome]()
    job = Job("poison", text, str(folder), MODULES)
    return build(campaign, job, engine, retries=retries, watch=seen.append), seen


def holds_all_but_the_failed(folder: Path, text: str, report: Report) -> bool:
    store, campaign = Store(str(folder)), parse_campaign(text, "poison")
    expected = {record_key(task.recipe, task.digits) for task in campaign}
    failed = {failure.key for failure in report.failures}
    plan = read_plan(store, "poison")
    assert plan.finished
    assert set(plan.failed) == failed
    return set(store.keys()) == expected - failed and list(store.damage()) == []


def ways(report: Report) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for failure in report.failures:
        found.setdefault(failure.recipe.partition("way=")[2].partition(",")[0], set()).add(failure.attempts)
    return found


@pytest.mark.usefixtures("_poison")
def test_poisoned_tasks_are_retried_and_reported_and_hold_up_nobody(tmp_path: Path) -> None:
    with local(2) as engine:
        report, seen = run(engine, POISON, tmp_path / "store")
    assert ways(report) | {"mend": {1}} == {"raise": {3}, "mend": {1}, "memory": {3}, "exit": {3}}
    assert len(report.failures) == 4
    messages = {failure.message for failure in report.failures}
    assert messages == {
        "ZeroDivisionError: poison",
        "poison: mend this",
        "MemoryError:",
        "the process ended itself with status 3",
    }
    assert (report.made, report.present) == (3, 0)
    assert sorted(outcome.task for outcome in seen) == list(range(7))
    assert holds_all_but_the_failed(tmp_path / "store", POISON, report)


@pytest.mark.usefixtures("_poison")
def test_a_task_that_hangs_is_given_up(tmp_path: Path) -> None:
    with local(1, timeout=1.0) as engine:
        report, _ = run(engine, HANG, tmp_path / "store", retries=1)
    assert [failure.message for failure in report.failures] == [
        "nothing came back for 1 s, and it could not be interrupted"
    ]
    assert ways(report) == {"hang": {2}}
    assert holds_all_but_the_failed(tmp_path / "store", HANG, report)


@pytest.fixture
def _time_limit() -> Iterator[None]:

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError("more than 180 s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(180)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.usefixtures("_poison", "_time_limit")
def test_ray_survives_a_killed_worker(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    text = POISON.replace('"exit"', '"exit", "hang"')
    with RayEngine(2, timeout=2.0) as engine:
        report, seen = run(engine, text, tmp_path / "store", retries=1)
    assert ways(report) == {"raise": {2}, "mend": {1}, "memory": {2}, "exit": {2}, "hang": {2}}
    assert sorted(outcome.task for outcome in seen) == list(range(8))
    assert holds_all_but_the_failed(tmp_path / "store", text, report)


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    assert (built(folder).made, built(folder).present) == (7, 7)
    store = Store(str(folder))
    gone, bad = list(store.keys())[:2]
    path = next(folder.glob(f"records/*/{bad}*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    store.discard(gone)
    before = {file: file.stat().st_mtime_ns for file in folder.glob("records/*/*")}
    assert (built(folder).made, [key for key, _ in store.damage()]) == (1, [bad])
    assert (built(folder, recheck=True).made, list(store.damage())) == (1, [])
    after = {file: file.stat().st_mtime_ns for file in folder.glob("records/*/*")}
    assert {file for file in before if before[file] != after[file]} == {path}


def test_parts_make_up_the_whole(tmp_path: Path) -> None:
    campaign = parse_campaign(SMALL, "campaign")
    for of in range(1, campaign.count + 1):
        parts = [Part(number, of).task_numbers(campaign) for number in range(1, of + 1)]
        assert [place for part in parts for place in part] == list(range(campaign.count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_two_builds_share_a_store(tmp_path: Path) -> None:
    reports: list[Report] = []
    builders = [threading.Thread(target=lambda: reports.append(built(tmp_path))) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert sum(report.made for report in reports) >= 7
    assert [report.made + report.present for report in reports] == [7, 7]
    assert list(Store(str(tmp_path)).damage()) == []


def test_a_build_beside_another_begins_elsewhere(tmp_path: Path) -> None:
    seen: list[int] = []
    text = SMALL.replace("seeds = 3", "seeds = 100")
    campaign, store = parse_campaign(text, "campaign"), Store(str(tmp_path))
    built(tmp_path, text)
    store.write_manifest("campaign", store.manifest("campaign") | {"finished": False})
    build(campaign, Job("campaign", text, str(tmp_path)), Here(), watch=lambda outcome: seen.append(outcome.task))
    assert sorted(seen) == list(range(campaign.count)) != seen


def test_a_store_that_cannot_be_written_stops_the_build(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="ascii")
    with pytest.raises(StoreError, match="expected a folder of its own"):
        built(tmp_path / "file")


def test_a_worker_that_cannot_write_stops_the_build(tmp_path: Path) -> None:
    built(tmp_path, SMALL.replace("seeds = 3", "seeds = 1"))
    for file in (tmp_path / "records").glob("*/*"):
        file.unlink()
    for folder in (tmp_path / "records").iterdir():
        folder.rmdir()
    (tmp_path / "records").rmdir()
    (tmp_path / "records").write_text("no folder", encoding="ascii")
    with local(1) as engine, pytest.raises(StoreError, match=r"expected a folder of its own|cannot"):
        run(engine, SMALL, tmp_path)


def test_outcomes_are_told_as_they_come(tmp_path: Path) -> None:
    report, seen = run(Here(), SMALL, tmp_path)
    assert (report.made, {outcome.status for outcome in seen}) == (7, {MADE})
    assert [outcome.task for outcome in seen] == list(range(7))
