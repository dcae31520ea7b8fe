"""The pytest plugin: the fixture ``assay``, per-test settings, reports, and a terminal summary.

Loaded by its entry point in every pytest run where the package is installed, so it imports neither torch nor
hypothesis until a test asks for the fixture.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Generator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from assay.verify.power import PowerReport
    from assay.verify.verdict import Verdict

_ROWS = pytest.StashKey[list[dict[str, Any]]]()
_PROPERTIES = ("outcome", "kernel", "spec", "dtype", "cases", "worst", "repro")
_POWER_EXAMPLES = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that every run takes."""
    group = parser.getgroup("assay", "numerical verification of kernels")
    group.addoption("--assay-examples", type=int, metavar="N", help="fuzzed cases per examination (default 200)")
    group.addoption("--assay-seed", type=int, metavar="N", help="seed of every examination (default 0)")
    group.addoption("--assay-device", metavar="DEVICE", help="device that kernels run on (default cpu)")
    group.addoption(
        "--assay-isolate",
        action="store_true",
        help="run kernels in a process of their own: a crash, an endless loop or a leak becomes a finding",
    )
    group.addoption(
        "--assay-faithful",
        action="store_true",
        help="run the Triton kernels of all tests in the faithful interpreter",
    )
    group.addoption(
        "--assay-faithful-device",
        metavar="DEVICE",
        help="so, and let their dots lose what this device's tensor cores lose, e.g. h200",
    )
    group.addoption(
        "--assay-golden",
        metavar="STORE",
        help="try the cases of this store of goldens too, and compare with what is stored (assay golden build)",
    )
    group.addoption(
        "--assay-audit", action="store_true", help="list what the comparisons of this run would have let through"
    )
    group.addoption(
        "--assay-audit-function",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="audit a comparison of your own too: it takes the value under test and the expected one",
    )
    group.addoption("--assay-audit-report", type=Path, metavar="DIR", help="write the audit as HTML and JSON too")
    group.addoption(
        "--assay-power",
        action="store_true",
        help="after each passing examination, measure which known faults it would have caught",
    )
    group.addoption("--assay-report", type=Path, metavar="DIR", help="write an HTML and a JSON report of each verdict")
    group.addoption(
        "--assay-summary",
        type=Path,
        metavar="FILE",
        default=os.environ.get("GITHUB_STEP_SUMMARY") or None,
        help="append a table of all verdicts in Markdown (default: the file that GITHUB_STEP_SUMMARY names)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The marker, the collector of verdicts, and what the options switch on."""
    config.addinivalue_line("markers", "assay(**settings): settings of examine for this test, e.g. examples=500")
    config.pluginmanager.register(_Summary(config.getoption("assay_summary")), "assay-summary")
    folder, functions = config.getoption("assay_audit_report"), config.getoption("assay_audit_function")
    if config.getoption("assay_audit") or folder is not None or functions:
        from assay.verify.audit.session import Audit

        config.pluginmanager.register(Audit(config, folder, functions), "assay-audit")
    if config.getoption("assay_faithful") or config.getoption("assay_faithful_device"):
        if importlib.util.find_spec("triton") is None:
            raise pytest.UsageError("--assay-faithful needs Triton, which is not installed: pip install triton")
        config.pluginmanager.register(_Faithful(config.getoption("assay_faithful_device")), "assay-faithful")


class Assay:
    """What the fixture gives: `examine` and `check` of `assay.verify`.

    Settings of the test's marker give way to those of the call, and these to the options of the run.
    """

    def __init__(
        self,
        marked: dict[str, Any],
        given: dict[str, Any],
        record: Callable[[Verdict, PowerReport | None], None],
        *,
        power: bool = False,
    ) -> None:
        self._marked = marked
        self._given = given
        self._record = record
        self._power = power

    def examine(self, kernel: Callable[..., Any], op: str, **settings: Any) -> Verdict:
        """`assay.verify.examine`; the verdict is listed in the terminal summary."""
        __tracebackhide__ = True
        from assay.golden.errors import StoreError
        from assay.verify import examine  # torch is imported here, by a test that needs it

        asked = self._marked | settings | self._given
        try:
            verdict = examine(kernel, op, **asked)
        except StoreError as error:  # of --assay-golden: no fault of the test's
            pytest.fail(str(error), pytrace=False)
        self._record(verdict, _measured(op, asked) if self._power and verdict.passed else None)
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
    options["isolate"] = config.getoption("assay_isolate") or None
    given = {name: value for name, value in options.items() if value is not None}
    marked: dict[str, Any] = {}
    for marker in request.node.iter_markers("assay"):  # the closest first
        if marker.args:
            raise pytest.UsageError(f"mark.assay takes settings by name, e.g. examples=500, got {marker.args[0]!r}")
        marked = marker.kwargs | marked
    directory = config.getoption("assay_report")
    count = 0

    def record(verdict: Verdict, measured: PowerReport | None) -> None:
        from assay.verify.summary import line_of

        nonlocal count
        count += 1
        row = {
            **line_of(verdict).as_dict(),
            "stored": verdict.phases.get("stored"),
            "power": f"{measured.caught} of {len(measured.trials)}" if measured else "",
            "survivors": [trial.name for trial in measured.survivors] if measured else [],
        }
        request.node.stash.setdefault(_ROWS, []).append(row)
        place = "assay" if count == 1 else f"assay.{count}"
        request.node.user_properties.extend(
            (f"{place}.{name}", str(row[name])) for name in _PROPERTIES if row[name] != ""
        )
        if directory is not None:
            slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", request.node.nodeid).strip("-")[:120]
            digest = hashlib.sha256(f"{request.node.nodeid}:{count}".encode()).hexdigest()[:8]
            name = f"{slug}-{digest}"
            verdict.to_html(directory / f"{name}.html", measured)
            verdict.to_json(directory / f"{name}.json")
            if measured is not None:
                measured.to_json(directory / f"{name}.power.json")

    return Assay(marked, given, record, power=config.getoption("assay_power"))


def _measured(op: str, asked: dict[str, Any]) -> PowerReport | None:
    """Which known faults an examination with these settings catches, in a few fuzzed cases; None: it can't be told."""
    from assay.verify.errors import SettingError
    from assay.verify.power import power

    known = ("dtype", "out_dtype", "options", "shapes", "contract", "seed", "layouts")
    settings = {name: value for name, value in asked.items() if name in known}
    try:
        return power(op, examples=min(_POWER_EXAMPLES, asked.get("examples", _POWER_EXAMPLES)), **settings)
    except SettingError as error:  # the kernel under test has passed; only the measure fails
        warnings.warn(str(error), pytest.PytestWarning, stacklevel=2)
        return None


class _Faithful:
    """Runs each test, its fixtures included, inside of `assay.verify.interpreter.faithful`."""

    def __init__(self, device: str | None) -> None:
        if device is not None:
            from assay.verify.errors import SettingError
            from assay.verify.interpreter.devices import device_named

            try:
                device_named(device)
            except SettingError as error:
                raise pytest.UsageError(f"--assay-faithful-device: {error}") from None
        self._device = device

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        from assay.verify.interpreter import faithful

        with faithful(self._device):
            return (yield)


def _stored(row: dict[str, Any]) -> str:
    """How many of a row's cases came out of a store, where one was given."""
    return "" if row["stored"] is None else f"  ({row['stored']} of them stored)"


def _power(row: dict[str, Any]) -> str:
    """How many known faults an examination would have caught, and the first that it wouldn't."""
    if not row["power"]:
        return ""
    names, more = row["survivors"][:3], "" if len(row["survivors"]) <= 3 else ", ..."
    missed = f"; not {', '.join(names)}{more}" if names else ""
    return f"  catches {row['power']} known faults{missed}"


class _Summary:
    """Collects the verdicts of all tests, those of xdist's workers too, and lists them at the end."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        if report.when == "call":
            report.assay = item.stash.get(_ROWS, [])  # an attribute travels with its report, from workers too
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.rows.extend(getattr(report, "assay", []))

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None, None, None]:
        if self.rows:
            terminalreporter.section("assay")
            width = max(len(row["kernel"]) for row in self.rows)
            for row in self.rows:
                colour = "green" if row["outcome"] == "PASS" else "red"
                terminalreporter.line(
                    f"{row['kernel']:{width}}  {row['spec']:14} {row['dtype']:20} {row['cases']:6} cases"
                    f"  worst {row['worst']:>8}  {row['outcome']}{_stored(row)}{_power(row)}",
                    **{colour: True},
                )
            self._write(terminalreporter)
        return (yield)

    def _write(self, terminalreporter: Any) -> None:
        """Append the summary in Markdown to the file that was asked for."""
        if self.path is None:
            return
        from assay.verify.summary import Line, append

        try:
            append(self.path, [Line(**{part.name: row[part.name] for part in fields(Line)}) for row in self.rows])
        except OSError as error:
            terminalreporter.line(f"the summary could not be written to {self.path}: {error.strerror}", red=True)
