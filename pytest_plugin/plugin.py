"""The pytest plugin: the fixture ``assay``, per-test settings, reports, and a terminal summary.

Loaded by its entry point in every pytest run where the package is installed, so it imports neither torch nor
hypothesis until a test asks for the fixture.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.util
import math
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from assay.pytest_plugin.schedule import Schedule
from assay.pytest_plugin.summary import ROWS, Summary
from assay.runtime.errors import AssayError

if TYPE_CHECKING:
    from assay.verify.baseline import Comparison
    from assay.verify.power_report import PowerReport
    from assay.verify.verdict import Verdict

_PRETENCE = pytest.StashKey[Any]()
SCHEDULE = pytest.StashKey[Schedule]()
_PROPERTIES = ("outcome", "kernel", "spec", "dtype", "cases", "worst", "repro")
_POWER_EXAMPLES = 10
_LEAST_BUDGET = 0.01  # seconds of an examination after which a test's time is over: its verdict is INCONCLUSIVE
_SWITCHES = (
    *("golden", "audit", "audit_report", "audit_function", "pretend", "device"),
    *("faithful", "faithful_device", "emission"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("assay", "numerical verification of kernels")

    def add(name: str, metavar: str, help: str, **more: Any) -> None:
        takes: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
        group.addoption(f"--assay-{name}", help=help, **takes, **more)

    add(
        "effort",
        "EFFORT",
        "how much each examination tries: quick, usual (the default) or thorough",
        choices=("quick", "usual", "thorough"),
    )
    add("examples", "N", "fuzzed cases per examination (default 12, 60 or 200, by the effort)", type=int)
    add("seed", "N", "seed of every examination (default 0)", type=int)
    add("device", "DEVICE", "device that kernels run on (default cpu)")
    at = "also run kernels at these sizes of production, where their op has such, e.g. R=8192,N=4096; may be repeated"
    add("at", "SIZES", at, action="append", default=[])
    add("isolate", "", "run kernels in a process of their own: a crash, an endless loop or a leak becomes a finding")
    add("strict", "", "NaN, infinities, signed zeros and subnormals are part of every contract: what differs fails")
    add("faithful", "", "run the Triton kernels of all tests in the faithful interpreter")
    add("faithful-device", "DEVICE", "so, and let their dots lose what this device's tensor cores lose, e.g. h200")
    emission = "so, and as a compiler has them: nvidia, or some of contraction, flush, approximate, with commas"
    add("emission", "CHOICES", emission)
    pretend = 'so, and let "cuda" (an h200), or the device that is named, answer, and be the CPU: in imports as well'
    add("pretend", "DEVICE", pretend)
    add(
        "timeout",
        "S",
        "seconds that the examinations of one test may take; what is left out then is listed",
        type=_seconds,
    )
    budget = "seconds that the run's examinations may take: divided among the tests, what is left out is listed"
    add("budget", "S", budget, type=_seconds)
    known = "findings that are known, with a reason and an expiry: only others fail a test (assay baseline add)"
    add("baseline", "FILE", known, type=Path)
    keep = "keep the verdicts of kernels that pass in this folder, and reuse those of unchanged kernels"
    add("keep", "DIR", keep, type=Path)
    stored = "try the cases of this store of goldens too, and compare with what is stored (assay golden build)"
    add("golden", "STORE", stored)
    add("audit", "", "list what the comparisons of this run would have let through")
    own = "audit a comparison of your own too: it takes the value under test and the expected one"
    add("audit-function", "MODULE:FUNCTION", own, action="append", default=[])
    add("audit-report", "DIR", "write the audit as HTML and JSON too", type=Path)
    add("power", "", "after each passing examination, measure which known faults it would have caught")
    add("report", "DIR", "write an HTML and a JSON report of each verdict, and an index of them", type=Path)
    table = "append a table of all verdicts in Markdown (default: the file that GITHUB_STEP_SUMMARY names)"
    add("summary", "FILE", table, type=Path, default=os.environ.get("GITHUB_STEP_SUMMARY") or None)


def _seconds(text: str) -> float:
    """Return a number of seconds, as argparse wants it."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text!r}")
    return seconds


@contextlib.contextmanager
def _usage_of(option: str) -> Iterator[None]:
    """Report an error of assay inside as wrong usage of ``--assay-OPTION``: pytest then doesn't start."""
    try:
        yield
    except AssayError as error:
        raise pytest.UsageError(f"--assay-{option}: {error}") from None


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Pretend the device, if requested, from here on: conftest files and tests may need it as they are loaded."""
    if name := getattr(early_config.known_args_namespace, "assay_pretend", None):
        _begin_to_pretend(early_config, name)


def _begin_to_pretend(config: pytest.Config, name: str) -> None:
    """Pretend a device until the end of the run."""
    from assay.interpreter import device_to_pretend, pretend_cuda

    if _PRETENCE not in config.stash:
        config.stash[_PRETENCE] = pretence = contextlib.ExitStack()
        config.add_cleanup(pretence.close)
        with _usage_of("pretend"):
            device = device_to_pretend(name, config.known_args_namespace.assay_faithful_device)
            pretence.enter_context(pretend_cuda(device))


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, the summary, and what the options switch on."""
    option = {name: config.getoption(f"assay_{name}") for name in _SWITCHES}
    config.addinivalue_line("markers", "assay(**settings): settings of examine for this test, e.g. examples=500")
    config.pluginmanager.register(Summary(config.getoption("assay_summary")), "assay-summary")
    schedule = Schedule(config, config.getoption("assay_budget"), config.getoption("assay_timeout"))
    config.stash[SCHEDULE] = schedule
    config.pluginmanager.register(schedule, "assay-schedule")
    if not hasattr(config, "workerinput"):
        _check_files(config)
    if option["golden"] and not hasattr(config, "workerinput"):
        from assay.golden.store import Store

        with _usage_of("golden"):
            Store(option["golden"]).require()
    folder, functions = option["audit_report"], option["audit_function"]
    if option["audit"] or folder is not None or functions:
        from assay.mutation.session import Audit

        config.pluginmanager.register(Audit(config, folder, functions), "assay-audit")
    if option["pretend"]:
        _begin_to_pretend(config, option["pretend"])
    if option["device"] and not hasattr(config, "workerinput"):
        from assay.verify.harness.frameworks import check_device

        with _usage_of("device"):
            check_device(option["device"])
    if any(option[name] for name in ("faithful", "faithful_device", "emission", "pretend")):
        if importlib.util.find_spec("triton") is None:
            raise pytest.UsageError("--assay-faithful needs Triton, which is not installed: pip install triton")
        config.pluginmanager.register(_Faithful(option["faithful_device"], option["emission"]), "assay-faithful")


def _check_files(config: pytest.Config) -> None:
    """Stop before any test if a folder can't be written, or the baseline can't be read."""
    for name in ("report", "keep"):
        folder = config.getoption(f"assay_{name}")
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
            except OSError as error:
                expected = "expected a folder that can be written"
                raise pytest.UsageError(f"--assay-{name} {folder}: {error.strerror}; {expected}") from None
    if config.getoption("assay_baseline") is not None:
        from assay.verify.baseline import read_baseline

        with _usage_of("baseline"):
            read_baseline(config.getoption("assay_baseline"))


class Assay:
    """The fixture: `examine` and `check` of `assay.verify`.

    The run's options override the settings of a call, and these the settings of the test's marker.
    """

    def __init__(self, node: pytest.Item, marked: dict[str, Any], given: dict[str, Any]) -> None:
        self._node, self._marked, self._given, self._count = node, marked, given, 0
        self._schedule = node.config.stash[SCHEDULE]
        self._end: float | None = None

    def examine(
        self, kernel: Callable[..., Any], op: str | Callable[..., Any] | Sequence[Any], **settings: Any
    ) -> Verdict:
        """`assay.verify.examine`; the verdict is listed in the terminal summary."""
        __tracebackhide__ = True
        from assay.golden.errors import StoreError
        from assay.verify import examine  # torch is imported here, by a test that needs it
        from assay.verify.errors import DeviceLost
        from assay.verify.reference import spec_name_by_example, spec_name_of

        chosen = self._marked | settings | self._given
        if "inputs" in chosen:
            kernel, question, usual = spec_name_by_example(kernel, op, chosen.pop("inputs"))
            chosen.setdefault("dtype", usual)
        else:
            question = spec_name_of(op, chosen.pop("tensors", None))
        chosen |= self._at(question)
        if (seconds := self._seconds_left()) is not None:
            if not seconds:
                self._skip(kernel, question, chosen)
            chosen["budget"] = min(seconds, chosen.get("budget") or seconds)
        refused = ""
        try:
            verdict = examine(kernel, question, progress=self._schedule.report, **chosen)
        except (StoreError, DeviceLost) as error:  # not the test's fault
            refused = str(error)
        if refused:  # outside the handler, so that the report has no traceback
            pytest.fail(refused, pytrace=False)
        if not verdict.passed:
            from assay.verify.examination.repro import with_repeated

            verdict = with_repeated(verdict)
        verdict = replace(verdict, about={"test": self._node.nodeid, **verdict.about})
        power = self._node.config.getoption("assay_power") and verdict.passed
        self._record(verdict, _measured(question, chosen) if power else None)
        return verdict

    def _at(self, op: str) -> dict[str, Any]:
        """Return the run's sizes of production whose symbols the op has."""
        texts = self._node.config.getoption("assay_at")
        if not texts:
            return {}
        from assay.golden.registry import spec
        from assay.verify.cases.at_shape import read_sizes

        symbols = {symbol for signature in spec(op).signatures for symbol in signature.symbols}
        results = [sizes for sizes in (read_sizes(text, "--assay-at") for text in texts) if symbols.issuperset(sizes)]
        return {"at": results} if results else {}

    def _seconds_left(self) -> float | None:
        """Return the seconds that the test's examinations may still take; 0: the run has none left, None: any."""
        if self._end is None:  # the first examination: what is imported before it doesn't count
            seconds = self._schedule.seconds_of_test()
            self._end = math.inf if seconds is None else time.monotonic() + seconds
            return seconds
        return None if self._end == math.inf else max(self._end - time.monotonic(), _LEAST_BUDGET)

    def _skip(self, kernel: Callable[..., Any], op: str, chosen: Mapping[str, Any]) -> NoReturn:
        """Skip the test, as the run's budget is over, and list that."""
        words = f"the {self._node.config.getoption('assay_budget'):g} s of --assay-budget were over"
        line = {"kernel": getattr(kernel, "__name__", type(kernel).__name__), "spec": op.partition("(")[0]}
        line |= {"dtype": str(chosen.get("dtype") or ""), "outcome": "NOT TRIED", "words": words}
        self._add_row(_row(line, self._node.nodeid))
        pytest.skip(f"assay: {words}")

    def check(
        self, kernel: Callable[..., Any], op: str | Callable[..., Any] | Sequence[Any], **settings: Any
    ) -> Verdict:
        """`examine`, failing the test with the report unless the kernel passes."""
        __tracebackhide__ = True
        verdict = self.examine(kernel, op, **settings)
        beside = self._beside_baseline(verdict)
        if not verdict.passed and not (beside is not None and beside.accepts):
            from assay.verify.errors import VerificationError

            known = f"\n  baseline    {beside.words}" if beside is not None and beside.words else ""
            raise VerificationError(f"{verdict}{known}")
        return verdict

    def _beside_baseline(self, verdict: Verdict) -> Comparison | None:
        """Return the verdict's findings beside the run's baseline, if it has one."""
        path = self._node.config.getoption("assay_baseline")
        if path is None:
            return None
        from assay.verify.baseline import compared, read_baseline

        return compared(verdict, read_baseline(path), datetime.date.today())

    def _record(self, verdict: Verdict, measured: PowerReport | None) -> None:
        """Store the row of the terminal's summary, and write the requested reports."""
        from assay.verify.report.summary import line_of

        self._count += 1
        beside = self._beside_baseline(verdict)
        known = beside is not None and beside.accepts
        line = line_of(verdict)
        if verdict.outcome == "WARN" and not known:
            words = f"assay: {line.kernel} as {line.spec} in {line.dtype}: {verdict.note}: {line.words}"
            warnings.warn(f"{words}; repeat: {line.repro}", stacklevel=4)
        node, directory = self._node, self._node.config.getoption("assay_report")
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", node.nodeid).strip("-")[:120]
        name = f"{slug}-{hashlib.sha256(f'{node.nodeid}:{self._count}'.encode()).hexdigest()[:8]}"
        row = _row(line.as_dict(), node.nodeid) | {
            "outcome": "KNOWN" if known else line.outcome,
            "page": f"{name}.html",
            "stored": verdict.phases.get("stored"),
            "cut": verdict.cut,
            "vacuous": verdict.vacuous,
            "kept": "kept" in verdict.about,
            "known": beside.words if beside is not None else "",
            "power": f"{measured.caught} of {len(measured.trials)}" if measured else "",
            "survivors": [trial.name for trial in measured.survivors] if measured else [],
        }
        self._add_row(row)
        index = "assay" if self._count == 1 else f"assay.{self._count}"
        node.user_properties.extend((f"{index}.{name}", str(row[name])) for name in _PROPERTIES if row[name] != "")
        if directory is not None:
            try:
                verdict.to_html(directory / f"{name}.html", measured)
                verdict.to_json(directory / f"{name}.json")
                if measured is not None:
                    measured.to_json(directory / f"{name}.power.json")
            except OSError as error:  # a full disk is not the kernel's fault
                words = f"assay: the report could not be written to {directory}: {error.strerror}"
                warnings.warn(words, pytest.PytestWarning, stacklevel=4)

    def _add_row(self, row: dict[str, Any]) -> None:
        self._node.stash.setdefault(ROWS, []).append(row)


def _row(line: Mapping[str, Any], test: str) -> dict[str, Any]:
    """Return a row of the summary; what isn't in the line of the verdict is empty."""
    from assay.verify.report.summary import Line

    more = {"test": test, "page": "", "stored": None, "cut": "", "vacuous": "", "kept": False, "known": "", "power": ""}
    return Line(**line).as_dict() | more | {"survivors": []}


@pytest.fixture
def assay(request: pytest.FixtureRequest) -> Assay:
    """Examine kernels: ``assay.check(kernel, "softmax", dtype="bfloat16")``."""
    config = request.config
    options = {
        name: config.getoption(f"assay_{name}")
        for name in ("effort", "examples", "seed", "device", "isolate", "strict")
    }
    options["goldens"] = config.getoption("assay_golden")
    options["keep"] = config.getoption("assay_keep")
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    marked: dict[str, Any] = {}
    for marker in request.node.iter_markers("assay"):  # the closest first
        if marker.args:
            raise pytest.UsageError(f"mark.assay takes settings by name, e.g. examples=500, got {marker.args[0]!r}")
        marked = marker.kwargs | marked
    return Assay(request.node, marked, given)


def _measured(op: str, chosen: dict[str, Any]) -> PowerReport | None:
    """Measure which known faults an examination with these settings catches, in a few fuzzed cases; None: unknown."""
    from assay.verify.errors import SettingError
    from assay.verify.power import measured
    from assay.verify.settings import Settings, names

    settings = Settings(op, **{name: value for name, value in chosen.items() if name in names() and value is not None})
    try:
        return measured(replace(settings, examples=min(_POWER_EXAMPLES, chosen.get("examples", _POWER_EXAMPLES))))
    except SettingError as error:  # the kernel under test has passed; only the measure fails
        warnings.warn(str(error), pytest.PytestWarning, stacklevel=2)
        return None


class _Faithful:
    """Runs each test, its fixtures included, inside of `assay.interpreter.faithful`."""

    def __init__(self, device: str | None, emission: str | None) -> None:
        from assay.interpreter import check_emulated

        with _usage_of("faithful-device"):
            check_emulated(device or "")
        with _usage_of("emission"):
            check_emulated("", "", emission or "")
        self._device, self._emission = device, emission

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        from assay.interpreter import faithful

        with faithful(self._device, emission=self._emission):
            return (yield)
