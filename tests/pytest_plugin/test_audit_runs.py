"""`pytest --assay-audit`, run on suites of their own: comparisons that end tests, large containers, NumPy alone."""

import json
from pathlib import Path

import pytest

from tests.pytest_plugin.auditing import audited, by_test, run

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
    own = [f"--assay-audit-function={name}" for name in ("test_planted:own", "no.such:thing")]
    outcomes, printed = run(tmp_path, NUMPY_ONLY, "--assay-audit-report=report", *own)
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


def test_outside_a_terminal_no_path_is_cut(tmp_path: Path) -> None:
    folder = tmp_path / ("long_" * 30) / ("name_" * 30)
    folder.mkdir(parents=True)
    tests = "import numpy as np\n\ndef test_close():\n    np.testing.assert_allclose(np.ones(9), 1.001, rtol=0.1)\n"
    _, printed = run(folder, tests, "--assay-audit", f"--rootdir={tmp_path}")
    place = f"{folder.relative_to(tmp_path)}/test_planted.py:4 "
    assert [line for line in printed.splitlines() if line.startswith(place) and "times 1.05" in line]
