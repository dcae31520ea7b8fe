"""A build that is killed: the store is valid at every moment, and the next build makes what is left, once each."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from assay.golden.jobs.campaign import parse_campaign
from assay.golden.store import Store, record_key
from tests.golden.jobs.poison import FOLDER, identity

ROOT = Path(__file__).resolve().parents[3]
_TEXT = """
dtypes = ["float32"]
[[golden]]
spec = "poison"
shapes = [{ R = 1, N = 2 }]
options = { way = ["log"] }
seeds = %d
"""


_MAIN = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests were started in the background
runpy.run_module("assay.cli.main", run_name="__main__")
"""


def start(campaign: Path, store: Path, left: Path, errors: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    arguments = ["golden", "build", str(campaign), "--store", str(store), "--workers", "2"]
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, *arguments, "--import", "tests.golden.jobs.poison"],
        cwd=ROOT,
        env=os.environ | {FOLDER: str(left), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.evidence)])
def test_a_build_killed_at_random_moments_goes_on(tmp_path: Path, kills: int) -> None:
    campaign, store, left = tmp_path / "killed.toml", tmp_path / "store", tmp_path / "left"
    campaign.write_text(_TEXT % (200 * kills), encoding="ascii")
    left.mkdir()
    chance, finished, logged = random.Random(kills), dict[Path, tuple[int, int]](), 0
    tasks = list(parse_campaign(campaign.read_text(encoding="ascii"), "killed"))
    number_of = {record_key(t.recipe, t.digits): identity(t.recipe.tensors()[0]) for t in tasks}
    assert len(set(number_of.values())) == len(tasks)
    for kill in range(kills):
        build = start(campaign, store, left)
        until_it_works(build, left, logged)
        time.sleep(chance.uniform(0, 0.5))
        workers = children(build.pid)
        build.send_signal((signal.SIGKILL, signal.SIGTERM)[kill % 2])
        build.communicate()
        until_all_are_gone(workers)
        if store.exists():
            assert list(Store(str(store)).damage()) == []
        now = state(store)
        assert {file: now.get(file) for file in finished} == finished
        made = log(left)[logged:]
        assert not {number_of[file.name.partition(".")[0]] for file in finished} & set(made)
        assert len(set(made)) == len(made)
        finished, logged = now, len(log(left))
    last = start(campaign, store, left)
    output, _ = last.communicate(timeout=120)
    assert last.returncode == 0
    assert f"{len(tasks) - len(finished)} records made, {len(finished)} were there, 0 failed".encode() in output
    now = state(store)
    assert {file: now[file] for file in finished} == finished
    assert {file.name.partition(".")[0] for file in now} == set(number_of)
    assert list(Store(str(store)).damage()) == []


def until_it_works(build: subprocess.Popen[bytes], left: Path, logged: int) -> None:
    until = time.monotonic() + 60
    while len(log(left)) <= logged and build.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.01)


def children(parent: int) -> list[int]:
    known = [(entry.name, status(entry.name)) for entry in Path("/proc").glob("[0-9]*")]
    return [int(name) for name, found in known if found[1:2] == [str(parent)]]


def status(pid: int | str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []


def until_all_are_gone(workers: list[int]) -> None:
    until = time.monotonic() + 30
    assert workers or sys.platform != "linux"
    while any(status(pid)[:1] not in ([], ["Z"]) for pid in workers):
        assert time.monotonic() < until, "a worker outlived the build"
        time.sleep(0.02)


def state(store: Path) -> dict[Path, tuple[int, int]]:
    files = (file for file in store.glob("records/*/*") if not file.name.startswith("."))
    return {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


def log(left: Path) -> list[float]:
    file = left / "log"
    return [float(line) for line in file.read_text(encoding="ascii").split()] if file.exists() else []


def test_ctrl_c_ends_a_build_cleanly(tmp_path: Path) -> None:
    campaign, store, left = tmp_path / "long.toml", tmp_path / "store", tmp_path / "left"
    campaign.write_text(_TEXT % 3000, encoding="ascii")
    left.mkdir()
    build = start(campaign, store, left, errors=subprocess.PIPE)
    until_it_works(build, left, 20)
    workers = children(build.pid)
    build.send_signal(signal.SIGINT)
    _, errors = build.communicate(timeout=60)
    assert build.returncode == 130
    last = errors.decode().splitlines()[-1]
    assert re.fullmatch(r"assay: interrupted; \d+ of 3000 tasks of long are done; the same command goes on .*", last)
    until_all_are_gone(workers)
    assert list(Store(str(store)).damage()) == []
    assert len(state(store)) >= 10
