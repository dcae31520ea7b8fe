"""Whatever is put, lost, damaged and cut short by crashes, in any order: the store is a dictionary of records."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from assay.golden.store import Store
from tests.golden.store.sample import bits, file_of, golden_of, read_file, record_of, write_file

SEEDS = st.integers(0, 3)
KEYS = [record_of(seed).key for seed in range(4)]
STEPS = ((os, "fsync"), (tempfile, "mkstemp"), *((Path, name) for name in ("mkdir", "chmod", "replace", "unlink")))


class Crash(BaseException):
    """The machine stops here; nothing that follows in the process happens any more."""


def crashing(store: Store, seed: int, steps: int, value: float = -1.0) -> None:
    done = 0

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done > steps:
                raise Crash
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in STEPS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        with contextlib.suppress(Crash):
            store.put(record_of(seed, golden_of([value])))


class Histories(RuleBasedStateMachine):
    """The store beside a dictionary: the number that each seed's record holds, and its bytes as they were written."""

    @initialize(kind=st.sampled_from(("disk", "memory")))
    def begin(self, kind: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.kind, self.store = kind, Store(f"{self.folder.name}/s" if kind == "disk" else f"memory://{uuid4().hex}")
        self.numbers: dict[int, float] = {}
        self.written: dict[int, bytes] = {}
        self.damaged: set[int] = set()

    def teardown(self) -> None:
        self.folder.cleanup()

    def stored(self, seed: int) -> bytes | None:
        return read_file(self.store, file_of(KEYS[seed])) if KEYS[seed] in self.store else None

    def wrote(self, seed: int, number: float, data: bytes) -> None:
        self.numbers[seed], self.written[seed] = number, data
        self.damaged.discard(seed)

    def missing(self, seed: int) -> bool:
        return seed not in self.numbers or seed in self.damaged

    @rule(seed=SEEDS, number=st.integers(0, 99))
    def put(self, seed: int, number: int) -> None:
        record = record_of(seed, golden_of([float(number)]))
        assert self.store.is_valid(record.key) != self.missing(seed)
        self.store.put(record)
        if self.missing(seed):
            self.wrote(seed, float(number), record.to_bytes())

    @precondition(lambda self: self.kind == "disk")
    @rule(seed=SEEDS, steps=st.integers(0, 9))
    def crash(self, seed: int, steps: int) -> None:
        before, record = self.stored(seed), record_of(seed, golden_of([-1.0 - steps]))
        crashing(self.store, seed, steps, -1.0 - steps)
        self.store = Store(self.store.url)
        if self.stored(seed) != before:
            assert self.missing(seed)
            assert self.stored(seed) == record.to_bytes()
            self.wrote(seed, -1.0 - steps, record.to_bytes())

    @rule(seed=SEEDS, place=st.integers(0, 10**6), bit=st.integers(0, 7))
    def flip(self, seed: int, place: int, bit: int) -> None:
        data = bytearray(self.stored(seed) or b"")
        if data:
            data[place % len(data)] ^= 1 << bit
            write_file(self.store, file_of(KEYS[seed]), bytes(data))
            self.damaged -= {seed}
            self.damaged |= {seed} if bytes(data) != self.written[seed] else set()

    @rule(seed=SEEDS)
    def discard(self, seed: int) -> None:
        self.store.discard(KEYS[seed])
        self.numbers.pop(seed, None)
        self.damaged.discard(seed)

    @rule()
    def sweep(self) -> None:
        self.store.sweep()

    @rule()
    def reopen(self) -> None:
        self.store = Store(self.store.url)

    @invariant()
    def it_is_a_dictionary(self) -> None:
        assert list(self.store.keys()) == sorted(KEYS[seed] for seed in self.numbers)
        assert {key for key, _ in self.store.damage()} == {KEYS[seed] for seed in self.damaged}
        for seed in set(self.numbers) - self.damaged:
            assert bits(self.store.get(KEYS[seed]).goldens[0]) == bits(golden_of([self.numbers[seed]]))


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


@pytest.mark.parametrize("step", range(9))
def test_a_crash_at_each_step(tmp_path: Path, step: int) -> None:
    store = Store(str(tmp_path / "s"))
    store.put(record_of(0))
    crashing(store, 1, step)
    assert list(store.damage()) == []
    assert {KEYS[0]} <= set(store.keys()) <= {KEYS[0], KEYS[1]}
    Store(store.url).put(record_of(1))
    assert set(store.keys()) == {KEYS[0], KEYS[1]}


def test_the_crashes_above_are_felt(tmp_path: Path) -> None:
    present = []
    for step in range(12):
        store = Store(str(tmp_path / f"{step}"))
        store.put(record_of(0))
        crashing(store, 1, step)
        present.append(KEYS[1] in store)
    assert present[0] is False
    assert present[-1] is True
    assert present == sorted(present)
    assert any(name.startswith(".") for _, _, names in os.walk(tmp_path) for name in names)


def test_a_store_that_writes_in_place_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def in_place(path: str, data: bytes, *, tidy: bool = True) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            os.fsync(file.fileno())
            file.write(data[len(data) // 2 :])

    monkeypatch.setattr("assay.golden.store.store.write_bytes_atomically", in_place)
    damaged = []
    for step in range(9):
        store = Store(str(tmp_path / f"{step}"))
        store.put(record_of(0))
        crashing(store, 1, step)
        damaged += [key for key, _ in store.damage()]
    assert set(damaged) == {KEYS[1]}
