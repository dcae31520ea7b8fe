"""Processes that share a store, and processes that are killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from assay.golden.store import Store
from assay.golden.store.claims import _machine, _process
from tests.golden.store.sample import bits, golden_of, record_of
from tests.golden.store.workers import hold, write

KILLS = 20


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    """Processes forked from one that has loaded everything: each begins within milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["assay.golden.store.store", "tests.golden.store.workers"])
    return context


def lines(log: Path) -> list[list[str]]:
    """The words of each line that the writers left."""
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.slow
def test_a_killed_writer_loses_nothing(tmp_path: Path, context: ForkServerContext) -> None:
    """Killed at 20 random moments the store is always valid; no record that was finished is lost or made twice."""
    store, log, chance = Store(str(tmp_path / "s")), tmp_path / "log", random.Random(1)
    finished: set[str] = set()
    for _ in range(KILLS):
        before = len(lines(log))
        writer = context.Process(target=write, args=(store.url, str(log), 10**6, {}))
        writer.start()
        deadline = time.monotonic() + 60
        while len(lines(log)) == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert list(store.damage()) == []
        assert finished <= set(store.keys())
        finished = set(store.keys())
        done = {record_of(int(seed)).key for word, seed, _ in lines(log)[before:] if word == "done"}
        assert done <= finished
    begun = Counter(seed for word, seed, _ in lines(log) if word == "begin")
    ended = Counter(seed for word, seed, _ in lines(log) if word == "done")
    assert len(ended) > KILLS
    assert max(ended.values()) == 1
    assert sum(begun.values()) - len(begun) <= KILLS  # a record is begun again only where a kill cut it short
    write(store.url, str(log), len(finished) + 3, {})
    assert len(set(store.keys())) == len(finished) + 3


@pytest.mark.parametrize("kind", ["disk", "s3"])
def test_writers_that_share_a_store_make_no_record_twice(
    tmp_path: Path, context: ForkServerContext, kind: str, new_store: Callable[[str], Store]
) -> None:
    """Three writers make the same records at once: each record is made by exactly one of them."""
    log, store, count = tmp_path / "log", new_store(kind), {"disk": 120, "s3": 24}[kind]
    writers = [
        context.Process(target=write, args=(store.url, str(log), count, store.options, number)) for number in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(150)
        assert writer.exitcode == 0
    made = Counter(seed for word, seed, _ in lines(log) if word == "begin")
    assert made == {str(seed): 1 for seed in range(count)}
    assert len({worker for _, _, worker in lines(log)}) > 1, "one writer did everything: nothing was shared"
    assert list(store.damage()) == []
    assert list(store._files.names("claims")) == []


def claimed(store: Store, key: str) -> bool:
    """Whether a claim would be given now."""
    with store.claim(key) as mine:
        return mine


def holder(context: ForkServerContext, store: Store, folder: Path) -> BaseProcess:
    """A process that holds a claim on the key of ones."""
    flag = folder / "held"
    process = context.Process(target=hold, args=(store.url, "1" * 64, str(flag), store.lease))
    process.start()
    deadline = time.monotonic() + 60
    while (not flag.exists() or flag.read_text() != "True") and time.monotonic() < deadline:
        time.sleep(0.01)
    return process


def test_the_claim_of_a_killed_process_is_free_at_once(tmp_path: Path, context: ForkServerContext) -> None:
    """A process of this machine that was killed holds nothing, however long its lease, even while it is a zombie."""
    store = Store(str(tmp_path / "s"), lease=1000)
    process = holder(context, store, tmp_path)
    assert not claimed(store, "1" * 64)
    process.kill()
    deadline = time.monotonic() + 10
    while not claimed(store, "1" * 64):
        assert time.monotonic() < deadline
    process.join()


@pytest.mark.slow
def test_a_claim_lives_as_long_as_its_owner(tmp_path: Path, context: ForkServerContext) -> None:
    """A claim is kept up beyond its lease; a process that stands still loses it, and doesn't end its heir's claim."""
    store = Store(str(tmp_path / "s"), lease=2.0)
    process = holder(context, store, tmp_path)
    assert process.pid is not None
    end = time.monotonic() + 5.0
    while time.monotonic() < end:
        assert not claimed(store, "1" * 64)
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2.2)
    with store.claim("1" * 64) as mine:
        assert mine
        os.kill(process.pid, signal.SIGCONT)
        process.terminate()  # which ends its block
        process.join()
        assert not claimed(Store(store.url), "1" * 64)
    assert claimed(store, "1" * 64)


@pytest.mark.parametrize("owner", ["elsewhere", "alive", "dead", "number given again"])
@pytest.mark.parametrize("left", [50.0, -1.0])
def test_whose_claims_hold(tmp_path: Path, owner: str, left: float) -> None:
    """A claim of another machine holds for its lease, one of this machine no longer than its process lives."""
    store = Store(str(tmp_path / "s"))
    store.put(record_of(0))
    machine, process = {
        "elsewhere": ("another", "1:1"),
        "alive": (_machine(), _process(os.getpid())),
        "dead": (_machine(), "999999999:1"),
        "number given again": (_machine(), f"{os.getpid()}:1"),  # to a process that began later
    }[owner]
    sign = {"until": time.time() + left, "machine": machine, "process": process}
    store._files.write(f"claims/{'1' * 64}.0", json.dumps(sign).encode())
    free = left < 0 or owner in ("dead", "number given again")
    assert claimed(store, "1" * 64) == free
    assert list(store._files.names("claims")) == ([] if free else [f"claims/{'1' * 64}.0"])


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"until": "soon"}', b"\xff", b'{"until": 9e9, "process": 1}'], ids=range(6)
)
def test_a_claim_that_was_cut_short_is_free(tmp_path: Path, content: bytes) -> None:
    """What a failure of the machine leaves of a claim holds nothing."""
    store = Store(str(tmp_path / "s"))
    store.put(record_of(0))
    store._files.write(f"claims/{'1' * 64}.0", content)
    assert claimed(store, "1" * 64)


def test_a_claim_made_anew_outlives_its_forerunners_heir(tmp_path: Path) -> None:
    """Whoever gives back a claim that it took over leaves alone one that another has made in the old one's place."""
    store = Store(str(tmp_path / "s"))
    store.put(record_of(0))
    first = f"claims/{'1' * 64}.0"
    store._files.write(first, b'{"until": 0.0, "machine": "another", "process": "1:1"}')
    with store.claim("1" * 64) as mine:
        assert mine
        living = {"until": time.time() + 50.0, "machine": "another", "process": "2:2"}
        store._files.write(first, json.dumps(living).encode())
    assert list(store._files.names("claims")) == [first]
    assert not claimed(store, "1" * 64)


def test_an_expired_claim_has_one_heir(tmp_path: Path) -> None:
    """Of many that find a claim expired at the same time exactly one gets it."""
    store = Store(str(tmp_path / "s"))
    store.put(record_of(0))
    for number in range(20):
        key = f"{number:064x}"
        store._files.write(f"claims/{key}.0", b'{"until": 0.0, "machine": "another", "process": "1:1"}')
        start, over = threading.Barrier(8), threading.Barrier(8)

        def take(key: str = key, start: threading.Barrier = start, over: threading.Barrier = over) -> bool:
            start.wait()
            with store.claim(key) as mine:
                over.wait()
            return mine

        with ThreadPoolExecutor(8) as pool:
            assert sorted(future.result() for future in [pool.submit(take) for _ in range(8)]) == [False] * 7 + [True]


def test_a_forked_process_opens_the_store_anew(tmp_path: Path) -> None:
    """A store that was in use before a fork works in the child."""
    store = Store(str(tmp_path / "s"))
    key = store.put(record_of(0))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(store.put, (record_of(1),)) == record_of(1).key
        assert bits(pool.apply(store.get, (key,)).goldens[0]) == bits(golden_of([0.0] * 3))
