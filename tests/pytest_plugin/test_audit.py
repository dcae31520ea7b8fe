"""`pytest --assay-audit` on planted test files: what is found, and that nothing else changes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from assay.mutation.words import PRECISION, SIZE, STRUCTURE
from tests.pytest_plugin.auditing import audited, by_test, never_noticed, run

PLANTED = """
import math
import unittest
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import allclose
from torch.testing import assert_close

ARRAY = np.random.default_rng(0).normal(size=(20, 32))
SMALL = torch.tensor(ARRAY / abs(ARRAY).max() * 0.05, dtype=torch.float32)

def helper(a, b):
    same = torch.isclose(a, b)
    print("all close:", bool(same.all()))
    return bool(same.all())

def careful(a, b):
    if not allclose(a, b):
        raise AssertionError("different")

def test_loose(): assert_close(SMALL.clone(), SMALL, rtol=0, atol=0.2)
def test_strict(): assert_close(SMALL.clone(), SMALL)
def test_strict_array(): np.testing.assert_allclose(ARRAY.copy(), ARRAY)
def test_equal(): assert torch.equal(SMALL.clone(), SMALL)
def test_coarse(): assert_allclose(actual=ARRAY.copy(), desired=ARRAY, rtol=0.07)
def test_reduced(): assert torch.isclose(SMALL.clone(), SMALL, rtol=0.03).all()
def test_share(): assert torch.isclose(SMALL.clone(), SMALL).float().mean() > 0.9
def test_discarded(): allclose(SMALL.clone(), SMALL)
def test_printed(): print(f"same: {SMALL.clone().allclose(SMALL)}")
def test_never_read():
    same = np.allclose(ARRAY.copy(), ARRAY)
def test_helper(): helper(SMALL.clone(), SMALL)
def test_careful(): careful(SMALL.clone(), SMALL)
def test_or(): allclose(SMALL.clone(), SMALL) or pytest.fail()
def test_different(): assert not allclose(SMALL + 1, SMALL)
def test_discarded_approx(): 1.0 == pytest.approx(1.0)
def test_approx(): assert 1.0 == pytest.approx(1.001, rel=0.02)
def test_approx_list(): assert [1.0, 2.0] == pytest.approx([1.0, 2.0])
def test_itself(): assert_allclose(ARRAY, ARRAY)
def test_zeros(): assert_allclose(np.full(4, 1e-12), 0, atol=1e-9)
def test_both_zero(): assert_close(torch.zeros(4), torch.zeros(4))
def test_nan(): assert_allclose(np.array([1.0, math.nan]), np.array([1.0, math.nan]))
def test_written_over():
    x = ARRAY.copy()
    assert_allclose(x, ARRAY, rtol=0.5)
    x[:] = 0
def test_nested(): assert_close({"a": [SMALL.clone()]}, {"a": [SMALL]})
@pytest.mark.parametrize("n", range(100))
def test_many(n): assert_allclose(ARRAY[:, n % 32].copy(), ARRAY[:, n % 32], rtol=0.3)
def test_smoke(): SMALL.sum()
def test_message(): assert_close(SMALL.clone(), SMALL, msg=lambda text: 1 / 0)
def test_fails(): assert_close(SMALL + 1, SMALL)
@pytest.mark.xfail
def test_known(): assert_allclose(ARRAY + 1, ARRAY)
class TestOld(unittest.TestCase):
    def test_places(self): self.assertAlmostEqual(3.14159, 3.14160, places=1)
    def test_true(self): self.assertTrue(np.allclose(ARRAY.copy(), ARRAY))
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str], str, Path]:
    """One audit of the planted file: data, outcomes, what was printed, and the folder."""
    folder = tmp_path_factory.mktemp("planted")
    outcomes, printed = run(folder, PLANTED, "--assay-audit-report=report")
    return json.loads((folder / "report" / "audit.json").read_text()), outcomes, printed, folder


@pytest.fixture(scope="module")
def sites(planted: Any) -> dict[str, Any]:
    return by_test(planted[0])


def test_a_loose_assertion_is_listed_with_what_it_lets_through(sites: Any) -> None:
    site = sites["test_loose"]
    assert site["grade"] == "blind"
    every = {*STRUCTURE, *SIZE, *PRECISION} - {"one NaN", "one element off by 1", "rounded to float32"}
    assert never_noticed(site) == every  # float32 rounds to itself
    assert site["passed"].get("one NaN") is None
    assert site["tried"]["one NaN"] == 1
    assert site["gains"] == [pytest.approx(4, rel=0.1)] * 2


@pytest.mark.parametrize("name", ["test_strict", "test_strict_array", "test_equal", "test_nested", "test_careful"])
def test_a_strict_assertion_lets_nothing_through(sites: Any, name: str) -> None:
    site = sites[name]
    assert site["grade"] == "strict"
    assert never_noticed(site) <= {"rounded to float32"}
    assert set(site["tried"]) >= {*STRUCTURE, "times 1.01", "truncated to bfloat16"}
    assert site["gains"][0] < 3e-4


GAINS = {"coarse": 0.07, "reduced": 0.03, "many": 0.3, "written_over": 0.5}
SCALARS = {"approx": 0.021, "approx_list": 1e-6, "places": 0.05 / math.pi}


@pytest.mark.parametrize(("name", "gain"), [*GAINS.items(), *SCALARS.items()])
def test_the_smallest_gain_is_the_tolerance(sites: Any, name: str, gain: float) -> None:
    """A relative tolerance alone is what the smallest noticed gain comes out as; structure is noticed.

    Of scalars too, and of values that were written over later, which are copied when they are compared.
    """
    site = sites[f"test_{name}"]
    assert site["gains"][0] == pytest.approx(gain, rel=0.1)
    if name in GAINS:
        assert ("times 1.05" in never_noticed(site)) == (gain > 0.05)
        assert not never_noticed(site) & set(STRUCTURE)


UNUSED = {
    "test_discarded": "discarded",
    "test_printed": "only printed",
    "test_never_read": "given a name that is never read",
    "test_helper": "nothing in helper can fail; what it returns is discarded",
    "test_discarded_approx": "discarded",
}


def test_an_answer_without_effect_is_flagged_and_one_that_decides_is_not(sites: Any) -> None:
    """What decides is asserted, negated, raised upon, or the left side of an ``or``."""
    assert {name: site["unused"] for name, site in sites.items() if site["unused"]} == UNUSED
    assert {sites[name]["grade"] for name in UNUSED} == {"unused"}
    assert {"test_reduced", "test_careful", "test_or", "test_different", "test_approx"} <= sites.keys()


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("test_itself", "compared with itself"),
        ("test_zeros", "all expected values are zero"),
        ("test_both_zero", "both sides are zero"),
        ("test_nan", "NaN on both sides"),
    ],
)
def test_values_that_prove_little_are_remarked_on(sites: Any, name: str, flag: str) -> None:
    """One array on both sides, zeros, NaN on both sides; no other comparison has these remarks.

    Noise times 1.05 is no worse than noise, and whatever it is, an array equals itself: neither is judged.
    """
    assert sites[name]["flags"] == {flag: 1}
    assert [other for other, site in sites.items() if flag in site["flags"]] == [name]
    assert sites[name]["grade"] == "unjudged" or name == "test_nan"


def test_many_runs_of_a_line_are_sampled(sites: Any) -> None:
    assert sites["test_many"]["runs"] == 100
    assert 4 <= sites["test_many"]["replays"] < 20
    assert sites["test_true"]["grade"] == "strict"


def test_tests_without_comparison_are_listed(planted: Any) -> None:
    data = planted[0]
    assert [name.split("::")[-1] for name in data["silent"]] == ["test_share", "test_smoke"]
    assert [name.split("::")[-1] for name in data["bare"]] == ["test_smoke"]
    assert data["errors"] == []


def test_the_worst_come_first(planted: Any, sites: Any) -> None:
    order = ["unused", "blind", "coarse", "strict", "unjudged"]
    ranks = [order.index(site["grade"]) for site in planted[0]["sites"]]
    assert ranks[: ranks.index(3)] == sorted(ranks[: ranks.index(3)])
    table = planted[2].split("assay audit")[1].splitlines()
    lines = [line.split() for line in table if line.startswith("test_planted.py:")]
    assert lines[0][1] == "unused"
    assert f"test_planted.py:{sites['test_loose']['line']}" in [line[0] for line in lines]


def test_the_page_needs_no_network_and_names_each_line(planted: Any) -> None:
    page = (planted[3] / "report" / "audit.html").read_text()
    assert all(f"{site['file']}:{site['line']}" in page for site in planted[0]["sites"])
    assert "http" not in page


def test_no_outcome_changes_and_workers_send_home_what_they_found(planted: Any, sites: Any, tmp_path: Path) -> None:
    """The tests pass and fail as without the audit, and under xdist the same is found."""
    others = [line for line in planted[1] if not line.startswith("PASSED")]
    assert others == ["FAILED test_planted.py::test_fails", "XFAIL test_planted.py::test_known"]
    assert len(planted[1]) == PLANTED.count("def test_") + 99
    data = audited(tmp_path, PLANTED, "-n2")
    found = by_test(data)
    assert {name: site["grade"] for name, site in found.items()} == {n: site["grade"] for n, site in sites.items()}
    assert found["test_many"]["runs"] == 100
    assert data["tests"] == planted[0]["tests"]
    assert data["errors"] == []
