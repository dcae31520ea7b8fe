"""The gate: no alarm where nothing changed, an alarm where something did, and "undecided" where nobody can know."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from assay.bench.timing.contest import Line, Record
from assay.bench.timing.gate import compared, rank, tail


def record(
    factor: float, noise: float, runs: int, chance: random.Random, *, load: float = 0.0, commit: str = "a"
) -> Record:
    """A record of a kernel of so many microseconds on a machine that is noisy, and now and then loaded."""
    times, copies = [], []
    for _ in range(runs):
        of_run = chance.gauss(0, noise)
        busy = [1 + load * chance.random() for _ in range(5)]  # slows the copy as well
        times.append([100e-6 * factor * math.exp(of_run + chance.gauss(0, noise)) * each for each in busy])
        copies.append([10e-6 * math.exp(chance.gauss(0, noise / 3)) * each for each in busy])
    line = Line("k", "softmax", "float32", "softmax: R=1", "PASS", runs=times, yardstick=copies, seconds=1e-4)
    return Record("2026-01-01T00:00:00", commit, "m", "cpu", "clock", "", "", {}, (line,))


def answers(
    factor: float, noise: float, *, runs: int = 7, tries: int = 20, load: float = 0.0, seed: int = 0
) -> list[str]:
    """What the gate says of so many pairs of records."""
    chance = random.Random(seed)
    pairs = (
        (record(1.0, noise, runs, chance, load=load), record(factor, noise, runs, chance, load=load))
        for _ in range(tries)
    )
    return [compared(before, after)[0].answer for before, after in pairs]


@pytest.mark.parametrize(("noise", "load"), [(0.002, 0.0), (0.02, 1.0), (0.1, 3.0)])
def test_two_records_of_one_version_raise_no_alarm(noise: float, load: float) -> None:
    """On a quiet machine, on a busy one, and on one where nothing can be known, nothing is called slower or faster."""
    for seed in range(5):
        found = answers(1.0, noise, load=load, tries=20, seed=seed)
        assert set(found) <= {"same", "undecided"}


def test_a_quiet_machine_sees_three_percent_and_says_same() -> None:
    """With noise of 0.2 % a slowdown of 3 % is always seen, a speed-up too, and no change is called the same."""
    assert answers(1.03, 0.002) == ["slower"] * 20
    assert answers(1 / 1.03, 0.002) == ["faster"] * 20
    assert answers(1.0, 0.002) == ["same"] * 20


def test_a_busy_machine_sees_ten_percent_or_says_undecided() -> None:
    """With noise of 2 % under a changing load a slowdown of 10 % is seen in most pairs and never denied."""
    found = answers(1.1, 0.02, load=1.0)
    assert set(found) <= {"slower", "undecided"}
    assert found.count("slower") >= 15
    assert "same" not in answers(1.1, 0.1, load=3.0)


def test_few_runs_decide_nothing() -> None:
    """Three runs each can't tell, however far they lie apart; the answer says how many would."""
    chance = random.Random(1)
    (change,) = compared(record(1.0, 0.001, 3, chance), record(2.0, 0.001, 3, chance))
    assert change.answer == "undecided"
    assert "7" in change.why


def test_what_records_of_one_version_differ_by_is_no_change() -> None:
    """A history in which one commit came out 5 % apart on two days makes a change of 4 % undecided, one of 12 % not."""
    chance = random.Random(2)
    past = [record(1.0, 0.001, 7, chance, commit="b"), record(1.05, 0.001, 7, chance, commit="b")]
    before = record(1.0, 0.001, 7, chance)
    (small,) = compared(before, record(1.04, 0.001, 7, chance), past)
    (large,) = compared(before, record(1.12, 0.001, 7, chance), past)
    assert (small.answer, large.answer) == ("undecided", "slower")
    assert small.noise == pytest.approx(0.05, abs=0.005)
    changed = [replace(one, commit="b+") for one in past]  # files that no commit holds
    assert compared(before, record(1.04, 0.001, 7, chance), changed)[0].answer == "slower"


def test_a_side_without_a_time_is_told() -> None:
    """What was wrong before, or is now, has no time to be compared."""
    chance = random.Random(3)
    before = record(1.0, 0.01, 7, chance)
    wrong = replace(before.lines[0], runs=[], yardstick=[], outcome="FAIL", why="contract")
    (change,) = compared(before, replace(before, lines=(wrong,)))
    assert change.answer == "undecided"
    assert "no time now: FAIL" in change.why


def test_the_law_of_the_rank_sum_is_exact() -> None:
    """P(U < k) is what counting every order of the values gives."""
    for n, m in ((2, 3), (4, 4), (3, 5)):
        orders = list(itertools.combinations(range(n + m), n))
        for k in range(n * m + 1):
            found = sum(sum(1 for a in first for b in set(range(n + m)) - set(first) if b < a) < k for first in orders)
            assert tail(n, m, k) == pytest.approx(found / len(orders))
    assert 2 * tail(7, 7, rank(7, 7, 0.001)) <= 0.001
    assert 2 * tail(12, 12, rank(12, 12, 0.001)) <= 0.001 < 2 * tail(12, 12, rank(12, 12, 0.001) + 1)
