"""The hooks of pytest: what is compared while a test runs is kept, and replayed when the test is over."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.outcomes import OutcomeException

from assay.mutation import places, words
from assay.mutation.comparisons import COMPARISONS, Call, Comparison, approximate_equality
from assay.mutation.ledger import Ledger, Site
from assay.mutation.page import print_table, write_page
from assay.mutation.patching import Patches

if TYPE_CHECKING:
    from assay.mutation.replay import Kept

_ROOM = 1 << 28  # bytes that the comparisons of one test may hold until it is over
_CHANNEL = "assay_audit"


class Audit:
    """The audit of one process's run."""

    def __init__(self, config: pytest.Config, folder: Path | None, own: Sequence[str] = ()) -> None:
        try:
            named = [Comparison.named(target) for target in own]
        except ValueError as error:
            raise pytest.UsageError(f"--assay-audit-function: {error}") from None
        self.ledger = Ledger()
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
        """Listen while a test and its fixtures run; replay afterwards, when its reports are made."""
        self._test = _base(item), getattr(_function(item), "__code__", None)
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
            self.ledger.tests += 1
            if not self._compared:
                self._quietly(self._silent, item)
        return report

    def pytest_sessionfinish(self) -> None:
        """Note what was asked for and never seen; a worker of xdist sends what it found home."""
        works = hasattr(self._config, "workeroutput")
        if works or self._config.getoption("dist", "no") == "no":  # not the process that only hands tests out
            missing = [item for item in self._patches.missing if item.answer == "either"]
            self.ledger.missing += [f"{item.module}:{item.name}" for item in missing]
        if works:
            vars(self._config)["workeroutput"][_CHANNEL] = json.dumps(self.ledger.as_data())

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        sent = getattr(node, "workeroutput", {}).get(_CHANNEL)
        if sent is None:
            self.ledger.errors.append(f"worker {node.gateway.id} ended without sending what it found")
        else:
            self.ledger.merge(json.loads(sent))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("assay audit")
        print_table(self.ledger, terminalreporter)
        if self._folder is not None:
            page = write_page(self.ledger, self._folder)
            terminalreporter.line(f"wrote {page} and {page.with_suffix('.json').name} beside it")

    def _wrapped(self, original: Callable[..., Any], comparison: Comparison) -> Callable[..., Any]:
        @functools.wraps(original)
        def compare(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if self._test is None or getattr(self._inside, "one", False):
                return original(*args, **kwargs)
            self._inside.one = True  # comparisons call one another
            try:
                result = original(*args, **kwargs)
                self._quietly(self._seen, Call(comparison, original, args, kwargs), result, sys._getframe(1))
            finally:
                self._inside.one = False
            return result

        return compare

    def _quietly(self, action: Callable[..., None], *args: Any) -> None:
        """Run a step of the audit; an error of its own is counted and never reaches the test."""
        try:
            action(*args)
        except (Exception, OutcomeException, SystemExit) as error:
            self.ledger.errors.append(f"{type(error).__name__}: {error}"[:300])

    def _seen(self, call: Call, result: Any, caller: FrameType) -> None:
        """Count a comparison that gave ``result``, and keep it if it is to be replayed."""
        frame, comparison = places.users_frame(caller), call.comparison
        if self._test is None or frame is None or result is NotImplemented:
            return
        if comparison.answer in ("bool", "elements"):  # a library that compares inside is no assertion
            if frame is not caller or not places.is_test_code(frame):
                return
            if comparison.answer == "elements" and not (
                getattr(result, "ndim", 0) == 0 or places.reduced_by_all(frame)
            ):
                return
        test, code = self._test
        self._compared += 1
        site = self.ledger.site(places.place(frame, self._root), comparison.title)
        look = site.wants(test)
        site.runs += 1
        site.tests[test] += 1
        if not look:
            return
        site.looked += 1
        if comparison.answer in ("bool", "elements"):
            site.unused = site.unused or places.unused(frame, code)
        from assay.mutation.replay import says_yes  # imports NumPy

        if says_yes(comparison.answer, result):
            self._keep(site, call)

    def _keep(self, site: Site, call: Call) -> None:
        """Keep a comparison that passed, unless its values say already that a replay would mean nothing."""
        from assay.mutation import values  # imports NumPy
        from assay.mutation.corruptions import largest
        from assay.mutation.replay import Kept

        slots = call.slots
        if slots is None:
            return
        approximate = call.comparison.title == "pytest.approx"
        under_test, expected = map(call.argument, slots)
        right = expected.expected if approximate else expected
        if values.same_memory(under_test, right):  # whatever the value is, it equals itself
            site.flags[words.SAME] += 1
            return
        leaf, other = values.largest_leaf(under_test), values.largest_leaf(right)
        if leaf is None or other is None:
            site.flags[words.NO_NUMBERS] += 1
            return
        if leaf.numbers.size == 1 < other.numbers.size and not approximate:  # the arguments the other way round
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
        leaf = replace(leaf, value=values.at(call.argument(slots[0]), leaf.path))  # the original may be let go
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
        self.ledger.silent.append(item.nodeid)
        if not _asserts(item):
            self.ledger.bare.append(item.nodeid)


def _function(item: pytest.Item) -> Any:
    function = inspect.unwrap(getattr(item, "obj", None) or (lambda: None))
    hypothesis = getattr(function, "hypothesis", None)
    return getattr(hypothesis, "inner_test", function)


def _base(item: pytest.Item) -> str:
    """A test's id without its parameters."""
    callspec = getattr(item, "callspec", None)
    return item.nodeid.removesuffix(f"[{callspec.id}]") if callspec is not None else item.nodeid


def _asserts(item: pytest.Item) -> bool:
    """Whether a test's own body holds an assertion of any kind, or calls something that sounds like one."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(_function(item))))
    return any(
        isinstance(node, ast.Assert | ast.Raise) or (isinstance(node, ast.Call) and places.may_fail(node))
        for node in ast.walk(tree)
    )
