"""The pytest hooks of an audit, the wrapping of comparison functions, and the reports.

Comparisons are copied while a test runs, and replayed when it is over. Functions are wrapped when their modules are
imported, which may be never; nothing here imports any of them. A function that was imported by name
(``from torch.testing import assert_close``) before it was wrapped is found by identity in the modules that hold it, and
rebuilt the same way. Reports are a table in the terminal, an HTML page that needs no network, and JSON.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.util
import inspect
import io
import json
import math
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.outcomes import OutcomeException

from assay.mutation import locations, words
from assay.mutation.comparisons import COMPARISONS, Call, Comparison, Wrapper, approximate_equality
from assay.mutation.log import AuditLog, Site
from assay.runtime.results import installed_version
from assay.verify.report.rendering import environment

if TYPE_CHECKING:
    from assay.mutation.replay import Kept

_PIPED = 10_000  # characters of a line in a file or a pipe, so that none is wrapped
_SHOWN = 20  # lines in the terminal; the page has all


def print_table(log: AuditLog, terminal: Any) -> None:
    """Print the worst lines, the totals and remarks."""
    from rich.console import Console
    from rich.table import Table

    sites = log.ranked
    if sites:
        width = max(80, terminal._tw.fullwidth) if terminal.isatty else _PIPED
        table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
        lines = [f"{site.file}:{site.line}" for site in sites[:_SHOWN]]
        longest = max(map(len, lines))
        table.add_column("line", overflow="fold", min_width=min(width // 3, longest))
        table.add_column("grade", no_wrap=True)
        table.add_column("runs", justify="right")
        table.add_column("gain", justify="right", no_wrap=True)
        table.add_column("never noticed", min_width=24)
        for line, site in zip(lines, sites, strict=False):
            table.add_row(line, site.grade, str(site.runs), gain(site), remarks(site))
        text = io.StringIO()
        Console(file=text, width=width, highlight=False).print(table)
        for line in text.getvalue().splitlines():
            terminal.line(line.rstrip())
        if len(sites) > _SHOWN:
            terminal.line(f"... and {len(sites) - _SHOWN} more")
    for line in totals(log):
        terminal.line(line)


def totals(log: AuditLog) -> list[str]:
    """Return the summary of an audit as sentences."""
    sites = list(log.sites.values())
    grades = Counter(site.grade for site in sites)
    counted = ", ".join(f"{grades[name]} {name}" for name in words.GRADES if grades[name])
    lines = [
        f"{sum(site.runs for site in sites)} comparisons on {len(sites)} lines in {log.tests} passing tests, "
        f"{sum(site.replays for site in sites)} of them replayed{': ' + counted if counted else ''}",
        f"{len(log.silent)} passing tests made no comparison that the audit sees, "
        f"{len(log.bare)} of these hold no other assertion",
    ]
    lines += [f"{name}, named by --assay-audit-function, was never imported" for name in sorted(set(log.missing))]
    if log.errors:
        lines.append(f"{len(log.errors)} steps of the audit itself went wrong, first: {log.errors[0]}")
    return lines


def gain(site: Site) -> str:
    """Return the smallest common relative error that replays notice, from the best replay to the worst, as text."""
    if not site.gains:
        return ""
    best, worst = (
        "none" if math.isinf(value) else "1e-8" if value < 1e-8 else f"{value:{'.1e' if value < 0.01 else '.2g'}}"
        for value in site.gains
    )
    return best if best == worst or site.gains[1] < 1.5 * site.gains[0] else f"{best} to {worst}"


def remarks(site: Site) -> str:
    """Return the corruptions that a line never or not always notices, and its remarks, as text."""
    parts = [site.unused] if site.unused else []
    parts += site.never_noticed(words.ALL)
    some = site.sometimes_noticed((*words.STRUCTURE, *words.SIZE))
    parts += [f"in some runs {name}" for name in some]
    parts += [f"({flag})" for flag in site.flags if not site.replays or flag in (words.SAME, words.NANS)]
    return ", ".join(parts)


def write_page(log: AuditLog, folder: Path) -> Path:
    """Write ``audit.html`` and ``audit.json`` into a folder; return the path of the page."""
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "audit.html"
    page = environment().get_template("audit.html.j2")
    content = page.render(
        gain=gain,
        remarks=remarks,
        ledger=log,
        sites=log.ranked,
        totals=totals(log),
        counts={name: sum(site.grade == name for site in log.ranked) for name in words.GRADES},
        grades=words.GRADES,
        tones={"unused": "bad", "blind": "bad", "coarse": "doubt", "strict": "good", "unjudged": "quiet"},
        corruptions=words.ALL,
        made=made,
    )
    path.write_text(content, encoding="utf-8")
    data = {"assay": installed_version("kernel-assay"), "made": made} | log.as_data()
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return path


class Patches:
    """The wrapped functions; `start` and `stop` are called once each."""

    def __init__(self, comparisons: Iterable[Comparison], wrapper: Wrapper) -> None:
        self._waiting: dict[str, list[Comparison]] = {}
        for comparison in comparisons:
            self._waiting.setdefault(comparison.module, []).append(comparison)
        self._wrapper = wrapper
        self._finder = _Finder(self)
        self._methods: list[tuple[type, str, Any]] = []
        self._absent: list[Comparison] = []
        self._functions: dict[int, tuple[Any, Any]] = {}  # by id of the wrapper: the wrapper and its original

    def start(self) -> None:
        """Wrap functions of imported modules, and from now on of modules when they are imported."""
        for module in [name for name in self._waiting if name in sys.modules]:
            self.imported(module)
        sys.meta_path.insert(0, self._finder)

    def stop(self) -> None:
        """Restore all wrapped functions."""
        sys.meta_path.remove(self._finder)
        for owner, name, before in reversed(self._methods):
            if before is None:  # it was inherited
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        _rebind(self._functions)

    @property
    def missing(self) -> list[Comparison]:
        """Return the comparisons that were never found."""
        return [comparison for waiting in self._waiting.values() for comparison in waiting] + self._absent

    def waits_for(self, module: str) -> bool:
        """Return whether functions of ``module`` are still to be wrapped."""
        return module in self._waiting

    def imported(self, name: str) -> None:
        """Wrap the functions of a module that was just imported; functions that its version lacks are skipped."""
        module = sys.modules[name]
        replaced: dict[int, tuple[Any, Any]] = {}
        for comparison in self._waiting.pop(name, []):
            owner_name, _, attribute = comparison.name.rpartition(".")
            owner: Any = getattr(module, owner_name, None) if owner_name else module
            original = getattr(owner, attribute, None)
            if original is None:
                self._absent.append(comparison)
                continue
            wrapped = self._wrapper(original, comparison)
            if isinstance(owner, type):
                self._methods.append((owner, attribute, vars(owner).get(attribute)))
                setattr(owner, attribute, wrapped)
            else:
                replaced[id(original)] = (original, wrapped)
                self._functions[id(wrapped)] = (wrapped, original)
        if replaced:
            _rebind(replaced)


def _rebind(replaced: dict[int, tuple[Any, Any]]) -> None:
    """Replace in every module each global that is the first of a pair by the second."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(module, ModuleType) or names is None:  # lazy modules of all kinds
            continue
        for name, value in list(names.items()):
            pair = replaced.get(id(value))
            if pair is not None and pair[0] is value:
                names[name] = pair[1]


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that finds nothing itself; it has awaited modules wrapped right after they are executed."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._busy = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._busy or not self._patches.waits_for(fullname):
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._patches)
        return spec


class _Loader(importlib.abc.Loader):
    """A module's own loader, followed by the wrapping."""

    def __init__(self, loader: Any, patches: Patches) -> None:
        self._loader = loader
        self._patches = patches

    def __getattr__(self, name: str) -> Any:  # get_source, get_resource_reader and the like
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._patches.imported(module.__name__)


_ROOM = 1 << 28  # bytes of copied values of one test, until it is over
_CHANNEL = "assay_audit"


class Audit:
    """The audit of one process's run."""

    def __init__(self, config: pytest.Config, folder: Path | None, own: Sequence[str] = ()) -> None:
        try:
            named = [Comparison.named(target) for target in own]
        except ValueError as error:
            raise pytest.UsageError(f"--assay-audit-function: {error}") from None
        self.log = AuditLog()
        self._config = config
        self._folder = folder
        self._root = str(config.rootpath)
        self._patches = Patches([*COMPARISONS, *approximate_equality(), *named], self._wrapped)
        self._test: tuple[str, CodeType | None] | None = None
        self._compared = 0
        self._room = _ROOM
        self._kept: list[tuple[Site, Kept]] = []
        self._inside = threading.local()
        self._patches.start()

    def pytest_unconfigure(self) -> None:
        self._patches.stop()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record while a test and its fixtures run; replay afterwards, when its reports are made."""
        callspec = getattr(item, "callspec", None)
        base = item.nodeid.removesuffix(f"[{callspec.id}]") if callspec is not None else item.nodeid
        self._test = base, getattr(_function(item), "__code__", None)
        self._compared, self._room = 0, _ROOM
        try:
            return (yield)
        finally:
            self._test = None
            kept, self._kept = self._kept, []
            for site, one in kept:
                self._quietly(self._replay, site, one)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call" and report.passed:
            self.log.tests += 1
            if not self._compared:
                self._quietly(self._silent, item)
        return report

    def pytest_sessionfinish(self) -> None:
        """Note functions that were never imported; send the log of an xdist worker to its controller."""
        works = hasattr(self._config, "workeroutput")
        if works or self._config.getoption("dist", "no") == "no":  # not the process that only hands tests out
            missing = [item for item in self._patches.missing if item.answer == "either"]
            self.log.missing += [f"{item.module}:{item.name}" for item in missing]
        if works:
            vars(self._config)["workeroutput"][_CHANNEL] = json.dumps(self.log.as_data())

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        sent = getattr(node, "workeroutput", {}).get(_CHANNEL)
        if sent is None:
            self.log.errors.append(f"worker {node.gateway.id} ended without sending its results")
        else:
            self.log.merge(json.loads(sent))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("assay audit")
        print_table(self.log, terminalreporter)
        if self._folder is not None:
            page = write_page(self.log, self._folder)
            terminalreporter.line(f"wrote {page} and {page.with_suffix('.json').name} beside it")

    def _wrapped(self, original: Callable[..., Any], comparison: Comparison) -> Callable[..., Any]:
        @functools.wraps(original)
        def compare(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if self._test is None or getattr(self._inside, "one", False):
                return original(*args, **kwargs)
            self._inside.one = True  # comparisons call each other
            try:
                result = original(*args, **kwargs)
                self._quietly(self._seen, Call(comparison, original, args, kwargs), result, sys._getframe(1))
            finally:
                self._inside.one = False
            return result

        return compare

    def _quietly(self, action: Callable[..., None], *args: Any) -> None:
        """Run a step of the audit; its errors are counted and never reach the test."""
        try:
            action(*args)
        except (Exception, OutcomeException, SystemExit) as error:
            self.log.errors.append(f"{type(error).__name__}: {error}"[:300])

    def _seen(self, call: Call, result: Any, caller: FrameType) -> None:
        """Count a comparison that gave ``result``, and keep it if it should be replayed."""
        frame, comparison = locations.users_frame(caller), call.comparison
        if self._test is None or frame is None or result is NotImplemented:
            return
        if comparison.answer in ("bool", "elements"):  # a comparison inside a library is no assertion
            if frame is not caller or not locations.is_test_code(frame):
                return
            if comparison.answer == "elements" and not (
                getattr(result, "ndim", 0) == 0 or locations.reduced_by_all(frame)
            ):
                return
        test, code = self._test
        self._compared += 1
        site = self.log.site(locations.location(frame, self._root), comparison.title)
        look = site.wants(test)
        site.runs += 1
        site.tests[test] += 1
        if not look:
            return
        site.examined += 1
        if comparison.answer in ("bool", "elements"):
            site.unused = site.unused or locations.unused(frame, code)
        from assay.mutation.replay import says_yes  # imports NumPy

        if says_yes(comparison.answer, result):
            self._keep(site, call)

    def _keep(self, site: Site, call: Call) -> None:
        """Keep a comparison that passed, unless a replay of its values would show nothing."""
        from assay.mutation import values  # imports NumPy
        from assay.mutation.replay import Kept, largest

        slots = call.slots
        if slots is None:
            return
        approximate = call.comparison.title == "pytest.approx"
        under_test, expected = map(call.argument, slots)
        right = expected.expected if approximate else expected
        if values.same_memory(under_test, right):  # every value equals itself
            site.flags[words.SAME] += 1
            return
        leaf, other = values.largest_leaf(under_test), values.largest_leaf(right)
        if leaf is None or other is None:
            site.flags[words.NO_NUMBERS] += 1
            return
        if leaf.numbers.size == 1 < other.numbers.size and not approximate:  # the arguments are swapped
            slots, leaf, other = (slots[1], slots[0]), other, leaf
            under_test, right = right, under_test
        if not leaf.numbers.size:
            site.flags[words.EMPTY] += 1
            return
        if not largest(other.numbers):
            site.flags[words.BOTH_ZERO if not largest(leaf.numbers) else words.ZEROS] += 1
            return
        if bool((leaf.numbers != leaf.numbers).any() and (other.numbers != other.numbers).any()):
            site.flags[words.NANS] += 1
        if not approximate:
            under_test, right, part = values.thinned(under_test, right)
            if part:
                site.flags[words.THINNED] += 1
                leaf = values.largest_leaf(under_test) or leaf
                call = call.with_argument(slots[0], under_test).with_argument(slots[1], right)
        kwargs = {name: value for name, value in call.kwargs.items() if name != "msg"}
        needed = leaf.numbers.nbytes + values.size_of_copy((call.args, kwargs))
        if needed > self._room:
            site.flags[words.NO_ROOM] += 1
            return
        self._room -= needed
        call = replace(call, args=values.kept(call.args), kwargs=values.kept(kwargs))
        leaf = replace(leaf, value=values.at(call.argument(slots[0]), leaf.path))  # so that the original can be freed
        self._kept.append((site, Kept(call, slots[0], leaf)))

    def _replay(self, site: Site, kept: Kept) -> None:
        from assay.mutation.replay import replay

        start = time.thread_time()
        result = replay(kept)
        site.seconds += time.thread_time() - start
        if result is None:
            site.flags[words.NOT_AGAIN] += 1
        else:
            site.add(result.passed, result.gain)

    def _silent(self, item: pytest.Item) -> None:
        self.log.silent.append(item.nodeid)
        if not _asserts(item):
            self.log.bare.append(item.nodeid)


def _function(item: pytest.Item) -> Any:
    function = inspect.unwrap(getattr(item, "obj", None) or (lambda: None))
    hypothesis = getattr(function, "hypothesis", None)
    return getattr(hypothesis, "inner_test", function)


def _asserts(item: pytest.Item) -> bool:
    """Return whether a test's own body has an assertion, or a call whose name suggests one."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(_function(item))))
    return any(
        isinstance(node, ast.Assert | ast.Raise) or (isinstance(node, ast.Call) and locations.may_fail(node))
        for node in ast.walk(tree)
    )
