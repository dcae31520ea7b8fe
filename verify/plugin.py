"""The pytest plugin: the fixture ``assay``, per-test settings, reports, and a terminal summary.

Loaded by its entry point in every pytest run where the package is installed, so it imports neither torch nor
hypothesis until a test asks for the fixture.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from assay.verify.verdict import Verdict

_PROPERTY = "assay"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that every run takes."""
    group = parser.getgroup("assay", "numerical verification of kernels")
    group.addoption("--assay-examples", type=int, metavar="N", help="fuzzed cases per examination (default 200)")
    group.addoption("--assay-seed", type=int, metavar="N", help="seed of every examination (default 0)")
    group.addoption("--assay-device", metavar="DEVICE", help="device that kernels run on (default cpu)")
    group.addoption(
        "--assay-faithful",
        action="store_true",
        help="run the Triton kernels of all tests in the faithful interpreter",
    )
    group.addoption(
        "--assay-golden",
        metavar="STORE",
        help="try the cases of this store of goldens too, and compare with what is stored (assay golden build)",
    )
    group.addoption("--assay-report", type=Path, metavar="DIR", help="write an HTML and a JSON report of each verdict")


def pytest_configure(config: pytest.Config) -> None:
    """The marker, the collector of verdicts, and what the options switch on."""
    config.addinivalue_line("markers", "assay(**settings): settings of examine for this test, e.g. examples=500")
    config.pluginmanager.register(_Summary(), "assay-summary")
    if config.getoption("assay_faithful"):
        if importlib.util.find_spec("triton") is None:
            raise pytest.UsageError("--assay-faithful needs Triton, which is not installed: pip install triton")
        config.pluginmanager.register(_Faithful(), "assay-faithful")


class Assay:
    """What the fixture gives: `examine` and `check` of `assay.verify`.

    Settings of the test's marker give way to those of the call, and these to the options of the run.
    """

    def __init__(self, marked: dict[str, Any], given: dict[str, Any], record: Callable[[Verdict], None]) -> None:
        self._marked = marked
        self._given = given
        self._record = record

    def examine(self, kernel: Callable[..., Any], op: str, **settings: Any) -> Verdict:
        """`assay.verify.examine`; the verdict is listed in the terminal summary."""
        __tracebackhide__ = True
        from assay.golden.errors import StoreError
        from assay.verify import examine  # torch is imported here, by a test that needs it

        try:
            verdict = examine(kernel, op, **(self._marked | settings | self._given))
        except StoreError as error:  # of --assay-golden: no fault of the test's
            pytest.fail(str(error), pytrace=False)
        self._record(verdict)
        return verdict

    def check(self, kernel: Callable[..., Any], op: str, **settings: Any) -> Verdict:
        """`examine`, failing the test with the report unless the kernel passes."""
        __tracebackhide__ = True
        verdict = self.examine(kernel, op, **settings)
        if not verdict.passed:
            from assay.verify.errors import VerificationError

            raise VerificationError(str(verdict))
        return verdict


@pytest.fixture
def assay(request: pytest.FixtureRequest) -> Assay:
    """Examine kernels: ``assay.check(kernel, "softmax", dtype="bfloat16")``."""
    config = request.config
    options = {name: config.getoption(f"assay_{name}") for name in ("examples", "seed", "device")}
    options["goldens"] = config.getoption("assay_golden")
    given = {name: value for name, value in options.items() if value is not None}
    marked: dict[str, Any] = {}
    for marker in request.node.iter_markers("assay"):  # the closest first
        if marker.args:
            raise pytest.UsageError(f"mark.assay takes settings by name, e.g. examples=500, got {marker.args[0]!r}")
        marked = marker.kwargs | marked
    directory = config.getoption("assay_report")
    count = 0

    def record(verdict: Verdict) -> None:
        nonlocal count
        count += 1
        row = {
            "kernel": verdict.kernel,
            "spec": verdict.spec,
            "dtype": verdict.dtype,
            "cases": verdict.cases,
            "stored": verdict.phases.get("stored"),
            "worst": f"{verdict.worst:.3g}",
            "outcome": verdict.outcome,
        }
        request.node.user_properties.append((_PROPERTY, row))
        if directory is not None:
            slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", request.node.nodeid).strip("-")[:120]
            digest = hashlib.sha256(f"{request.node.nodeid}:{count}".encode()).hexdigest()[:8]
            name = f"{slug}-{digest}"
            verdict.to_html(directory / f"{name}.html")
            verdict.to_json(directory / f"{name}.json")

    return Assay(marked, given, record)


class _Faithful:
    """Runs each test, its fixtures included, inside of `assay.verify.interpreter.faithful`."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        from assay.verify.interpreter import faithful

        with faithful():
            return (yield)


def _stored(row: dict[str, Any]) -> str:
    """How many of a row's cases came out of a store, where one was given."""
    return "" if row["stored"] is None else f"  ({row['stored']} of them stored)"


class _Summary:
    """Collects the verdicts of all tests, those of xdist's workers too, and lists them at the end."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.rows.extend(row for name, row in report.user_properties if name == _PROPERTY and isinstance(row, dict))

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None, None, None]:
        if self.rows:
            terminalreporter.section("assay")
            width = max(len(row["kernel"]) for row in self.rows)
            for row in self.rows:
                colour = "green" if row["outcome"] == "PASS" else "red"
                terminalreporter.line(
                    f"{row['kernel']:{width}}  {row['spec']:14} {row['dtype']:20} {row['cases']:6} cases"
                    f"  worst {row['worst']:>8}  {row['outcome']}{_stored(row)}",
                    **{colour: True},
                )
        return (yield)
