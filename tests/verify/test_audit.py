"""`pytest --assay-audit` on planted test files: what is found, and that nothing else changes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from assay.verify.audit.words import PRECISION, SIZE, STRUCTURE

pytest_plugins = ["pytester"]

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


def run(folder: Path, tests: str, *options: str) -> tuple[list[str], str]:
    """A run of pytest in a process of its own: the outcomes of the tests, sorted, and all that it printed."""
    (folder / "test_planted.py").write_text(dedent(tests))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-P", "-m", "pytest", "-rA", "--tb=short", "-p", "no:cacheprovider", *options]
    printed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout
    outcomes = [line.split(" - ")[0] for line in printed.splitlines() if line.startswith(("PASS", "FAIL", "X", "ERR"))]
    return sorted(outcomes), printed


def audited(folder: Path, tests: str, *options: str) -> dict[str, Any]:
    """The JSON of an audit."""
    run(folder, tests, "--assay-audit-report=report", *options)
    data: dict[str, Any] = json.loads((folder / "report" / "audit.json").read_text())
    return data


def by_test(data: dict[str, Any]) -> dict[str, Any]:
    """The sites of an audit by the name of their only test."""
    return {"".join(site["tests"]).split("::")[-1]: site for site in data["sites"]}


def never_noticed(site: dict[str, Any]) -> set[str]:
    """The corruptions that all replays of a site let through."""
    return {name for name, tried in site["tried"].items() if tried == site["passed"].get(name)}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str], str, Path]:
    """One audit of the planted file: data, outcomes, what was printed, and the folder."""
    folder = tmp_path_factory.mktemp("planted")
    outcomes, printed = run(folder, PLANTED, "--assay-audit-report=report")
    return json.loads((folder / "report" / "audit.json").read_text()), outcomes, printed, folder


@pytest.fixture(scope="module")
def sites(planted: Any) -> dict[str, Any]:
    """What was found, by test."""
    return by_test(planted[0])


def test_a_loose_assertion_is_listed_with_what_it_lets_through(sites: Any) -> None:
    """An absolute tolerance larger than all values sees none but a NaN, and no gain below 4."""
    site = sites["test_loose"]
    assert site["grade"] == "blind"
    every = {*STRUCTURE, *SIZE, *PRECISION} - {"one NaN", "one element off by 1", "rounded to float32"}
    assert never_noticed(site) == every  # float32 rounds to itself
    assert site["passed"].get("one NaN") is None
    assert site["tried"]["one NaN"] == 1
    assert site["gains"] == [pytest.approx(4, rel=0.1)] * 2


@pytest.mark.parametrize("name", ["test_strict", "test_strict_array", "test_equal", "test_nested", "test_careful"])
def test_a_strict_assertion_lets_nothing_through(sites: Any, name: str) -> None:
    """The counter-claim: what the defaults of torch and NumPy, or bits, are held to is noticed."""
    site = sites[name]
    assert site["grade"] == "strict"
    assert never_noticed(site) <= {"rounded to float32"}
    assert set(site["tried"]) >= {*STRUCTURE, "times 1.01", "truncated to bfloat16"}
    assert site["gains"][0] < 3e-4


@pytest.mark.parametrize(("name", "gain"), [("test_coarse", 0.07), ("test_reduced", 0.03), ("test_many", 0.3)])
def test_the_smallest_gain_is_the_tolerance(sites: Any, name: str, gain: float) -> None:
    """A relative tolerance alone is what the smallest noticed gain comes out as; structure is noticed."""
    site = sites[name]
    assert site["gains"][0] == pytest.approx(gain, rel=0.1)
    assert ("times 1.05" in never_noticed(site)) == (gain > 0.05)
    assert not never_noticed(site) & set(STRUCTURE)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_discarded", "discarded"),
        ("test_printed", "only printed"),
        ("test_never_read", "given a name that is never read"),
        ("test_helper", "nothing in helper can fail; what it returns is discarded"),
        ("test_discarded_approx", "discarded"),
    ],
)
def test_an_answer_without_effect_is_flagged(sites: Any, name: str, reason: str) -> None:
    """Dropped, printed, given to a name, or dropped by the caller of a helper."""
    assert sites[name]["unused"] == reason
    assert sites[name]["grade"] == "unused"


@pytest.mark.parametrize("name", ["test_reduced", "test_careful", "test_or", "test_different", "test_approx"])
def test_an_answer_that_decides_is_not_flagged(sites: Any, name: str) -> None:
    """Asserted, negated, raised upon, or the left side of an ``or``."""
    assert sites[name]["unused"] is None


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
    """One array on both sides, zeros, NaN on both sides; no other comparison has these remarks."""
    assert sites[name]["flags"] == {flag: 1}
    assert [other for other, site in sites.items() if flag in site["flags"]] == [name]


def test_comparisons_with_zeros_are_not_judged(sites: Any) -> None:
    """Noise times 1.05 is no worse than noise: nothing is replayed, so nothing is said to be let through."""
    assert sites["test_zeros"]["grade"] == sites["test_both_zero"]["grade"] == "unjudged"


def test_what_is_written_over_later_is_replayed_as_it_was(sites: Any) -> None:
    """The values are copied when they are compared."""
    assert sites["test_written_over"]["gains"][0] == pytest.approx(0.5, rel=0.1)


def test_many_runs_of_a_line_are_sampled(sites: Any) -> None:
    """All are counted, some replayed."""
    site = sites["test_many"]
    assert site["runs"] == 100
    assert 4 <= site["replays"] < 20


def test_scalars_and_unittest_are_seen(sites: Any) -> None:
    """`pytest.approx` and `assertAlmostEqual` have gains too."""
    assert sites["test_approx"]["gains"][0] == pytest.approx(0.021, rel=0.1)
    assert sites["test_approx_list"]["gains"][0] == pytest.approx(1e-6, rel=0.1)
    assert sites["test_places"]["gains"][0] == pytest.approx(0.05 / math.pi, rel=0.1)
    assert sites["test_true"]["grade"] == "strict"


def test_tests_without_comparison_are_listed(planted: Any) -> None:
    """One that looks at a share is silent, one that only runs holds no assertion at all."""
    data = planted[0]
    assert [name.split("::")[-1] for name in data["silent"]] == ["test_share", "test_smoke"]
    assert [name.split("::")[-1] for name in data["bare"]] == ["test_smoke"]
    assert data["errors"] == []


def test_the_worst_come_first(planted: Any, sites: Any) -> None:
    """Unused answers, then blind, coarse and strict ones; in the terminal as in the JSON."""
    order = ["unused", "blind", "coarse", "strict", "unjudged"]
    ranks = [order.index(site["grade"]) for site in planted[0]["sites"]]
    assert ranks[: ranks.index(3)] == sorted(ranks[: ranks.index(3)])
    table = planted[2].split("assay audit")[1].splitlines()
    lines = [line.split() for line in table if line.startswith("test_planted.py:")]
    assert lines[0][1] == "unused"
    assert f"test_planted.py:{sites['test_loose']['line']}" in [line[0] for line in lines]


def test_the_page_needs_no_network_and_names_each_line(planted: Any) -> None:
    """One HTML file with all sites."""
    page = (planted[3] / "report" / "audit.html").read_text()
    assert all(f"{site['file']}:{site['line']}" in page for site in planted[0]["sites"])
    assert "http" not in page


def test_no_outcome_changes_and_workers_send_home_what_they_found(planted: Any, sites: Any, tmp_path: Path) -> None:
    """Without the audit, with it, and with it under xdist the same tests pass and fail, and the same is found."""
    plain, printed = run(tmp_path, PLANTED)
    assert planted[1] == plain
    assert len(plain) == PLANTED.count("def test_") + 99
    assert "assay audit" not in printed
    data = audited(tmp_path, PLANTED, "-n2")
    found = by_test(data)
    assert {name: site["grade"] for name, site in found.items()} == {n: site["grade"] for n, site in sites.items()}
    assert found["test_many"]["runs"] == 100
    assert data["tests"] == planted[0]["tests"]
    assert data["errors"] == []


ENDING = """
import sys
import numpy as np
import pytest

def failing(a, b):
    if not abs(a - b).max() <= 1e-3:
        pytest.fail("different")

def leaving(a, b):
    if not abs(a - b).max() <= 1e-3:
        sys.exit("different")

def skipping(a, b):
    if not abs(a - b).max() <= 1e-3:
        pytest.skip("different")

def test_failing(): failing(np.arange(4.0) + 1, np.arange(4.0) + 1)
def test_leaving(): leaving(np.arange(4.0) + 1, np.arange(4.0) + 1)
def test_skipping(): skipping(np.arange(4.0) + 1, np.arange(4.0) + 1)
def test_after(): pass
"""


def test_a_comparison_may_end_a_test_by_pytest_itself(tmp_path: Path) -> None:
    """`pytest.fail` and `sys.exit` notice what is wrong, `pytest.skip` lets it through; none of them ends the run."""
    names = [f"--assay-audit-function=test_planted:{name}" for name in ("failing", "leaving", "skipping")]
    outcomes, printed = run(tmp_path, ENDING, "--assay-audit-report=report", *names)
    assert [line.split()[0] for line in outcomes] == ["PASSED"] * 4, printed
    data = json.loads((tmp_path / "report" / "audit.json").read_text())
    assert data["errors"] == []
    sites = by_test(data)
    for name in ("test_failing", "test_leaving"):
        assert sites[name]["grade"] == "strict"
        assert sites[name]["gains"][0] == pytest.approx(1e-3 / 4, rel=0.1)
    assert sites["test_skipping"]["grade"] == "blind"


FULL = """
import numpy as np
LARGE, SMALL = np.ones(1 << 19), np.ones(4)
def test_container():
    np.testing.assert_equal([LARGE.copy() for _ in range(70)], [LARGE] * 70)
    np.testing.assert_equal(SMALL.copy(), SMALL)
"""


def test_what_a_container_holds_counts_as_room(tmp_path: Path) -> None:
    """140 arrays of 4 MiB are not kept, though the largest one would be; what fits is replayed all the same."""
    large, small = sorted(audited(tmp_path, FULL)["sites"], key=lambda site: site["line"])
    assert large["flags"] == {"not kept: too much memory in one test": 1}
    assert (large["replays"], small["replays"]) == (0, 1)


NUMPY_ONLY = """
import sys
import pytest

def own(a, b):
    if abs(a - b).max() > 0.5:
        raise AssertionError
    return 3

def test_lists():
    from numpy.testing import assert_almost_equal, assert_array_almost_equal
    assert_almost_equal([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert_array_almost_equal([[1, 2], [3, 4]], [[1, 2], [3, 4]])

def test_own():
    import numpy as np
    own(np.ones(4), np.ones(4))

def test_text():
    import numpy as np
    np.testing.assert_equal("a", "a")
    np.testing.assert_equal(np.array([True]), np.array([True]))

@pytest.fixture
def late():
    yield
    import numpy as np
    np.testing.assert_allclose(1.0, 1.0)
def test_late(late): pass

def test_no_torch():
    assert not {"torch", "hypothesis", "assay.golden"} & set(sys.modules)
"""


def test_a_run_of_numpy_alone_never_imports_torch(tmp_path: Path) -> None:
    """What is imported inside of the tests is audited too, fixtures included, and so is a function of one's own."""
    outcomes, printed = run(
        tmp_path,
        NUMPY_ONLY,
        "--assay-audit-report=report",
        "--assay-audit-function=test_planted:own",
        "--assay-audit-function=no.such:thing",
    )
    assert [line.split("::")[0] for line in outcomes] == ["PASSED test_planted.py"] * 5
    data = json.loads((tmp_path / "report" / "audit.json").read_text())
    calls = {site["text"].split("(")[0]: site for site in data["sites"]}
    assert calls["own"]["gains"] == [pytest.approx(0.5, rel=0.1)] * 2
    assert calls["assert_almost_equal"]["replays"] == 1
    assert calls["assert_array_almost_equal"]["tried"]["one element off by 1"] == 1
    assert calls["np.testing.assert_equal"]["flags"] == {"no numbers": 1}
    assert calls["np.testing.assert_allclose"]["replays"] == 1
    assert data["missing"] == ["no.such:thing"]
    assert "no.such:thing, named by --assay-audit-function, was never imported" in printed


def test_a_function_without_a_module_is_a_usage_error(pytester: pytest.Pytester) -> None:
    """One line says what was expected."""
    result = pytester.runpytest_subprocess("--assay-audit-function=own")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--assay-audit-function: expected MODULE:FUNCTION*got 'own'"])
