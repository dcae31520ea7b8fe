"""Processes that share a store, and processes that are killed."""

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from assay.golden.store import Store
from tests.golden.store.sample import bits, golden_of, record_of, write

KILLS = 8


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["assay.golden.store.store", "tests.golden.store.sample"])
    return context


def lines(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.slow
def test_a_killed_writer_loses_nothing(tmp_path: Path, context: ForkServerContext) -> None:
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
def test_writers_that_share_a_store_leave_it_whole(
    tmp_path: Path, context: ForkServerContext, kind: str, new_store: Callable[[str], Store]
) -> None:
    log, store, count = tmp_path / "log", new_store(kind), {"disk": 120, "s3": 24}[kind]
    writers = [
        context.Process(target=write, args=(store.url, str(log), count, store.options, number)) for number in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(150)
        assert writer.exitcode == 0
    assert {seed for word, seed, _ in lines(log) if word == "done"} == {str(seed) for seed in range(count)}
    assert set(store.keys()) == {record_of(seed).key for seed in range(count)}
    assert list(store.damage()) == []


def test_a_forked_process_opens_the_store_anew(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "s"))
    key = store.put(record_of(0))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(store.put, (record_of(1),)) == record_of(1).key
        assert bits(pool.apply(store.get, (key,)).goldens[0]) == bits(golden_of([0.0] * 3))
