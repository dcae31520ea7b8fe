"""Runs a problem's own file as a module, with CUDA emulated on a machine without a GPU."""

from __future__ import annotations

import contextlib
import dis
import io
import linecache
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from assay.interpreter import pretend_cuda
from assay.judge.problems.problem import ProblemError, ProblemTimeout
from assay.runtime.environment import generators_kept, seed_generators
from assay.runtime.errors import one_line
from assay.runtime.modules import asks_for_cuda
from assay.runtime.pool import Heartbeat
from assay.verify.harness.time_limit import KernelTimeout, time_limit

READING = 4.0
"""Times the limit of a call for running a problem's text: it may compile."""
_LOST = 2.0  # times a limit, after which a process that can't be interrupted is given up


def executed(source: str, where: Path, name: str = "problem") -> dict[str, Any]:
    """Run a text as a module that can import files of its folder; return its namespace. Raises `ProblemError`."""
    module = ModuleType(name)
    module.__file__ = str(where)
    title = f"<{where}>"
    linecache.cache[title] = (len(source), None, list(io.StringIO(source, newline="")), title)
    with (
        explaining(where, "the problem's own text", READING),
        beside(where.parent),
        generators_kept(),
        _module(name, module),
        cuda_if(needs_cuda(source)),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd numbers and escapes
            code = compile(source, title, "exec")
        exec(code, vars(module))
    return vars(module)


def needs_cuda(source: str) -> bool:
    """Return whether a text uses CUDA on a machine without it."""
    return "cuda" in source and not torch.cuda.is_available()


@contextlib.contextmanager
def cuda_if(wanted: bool) -> Iterator[None]:
    """Emulate CUDA on the CPU inside, if it is ``wanted``."""
    with pretend_cuda() if wanted else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _module(name: str, module: ModuleType) -> Iterator[None]:
    """Register a module under its name while it is executed, as dataclasses need it."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


@contextlib.contextmanager
def beside(folder: Path) -> Iterator[None]:
    """Import modules from a folder first, inside; afterwards forget them, so that another folder's are found."""
    before, known = list(sys.path), set(sys.modules)
    own = {file.stem for file in folder.glob("*.py")} | {file.stem for file in folder.parent.glob("*.py")}
    kept = {name: sys.modules.pop(name) for name in own & known if _is_outside_packages(sys.modules[name])}
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        yield
    finally:
        sys.path[:] = before
        for name in own & set(sys.modules):
            if name not in known:
                del sys.modules[name]
        sys.modules.update(kept)


def _is_outside_packages(module: ModuleType) -> bool:
    """Return whether a module is neither installed nor part of Python."""
    file = getattr(module, "__file__", None)
    return file is not None and "site-packages" not in file and f"python{sys.version_info[0]}" not in file


def seeded(function: Any, seed: int, source: str, named: Mapping[str, Any] | None = None) -> Any:
    """Call a function of the problem with seeded random generators, and restore them afterwards."""
    with generators_kept(), cuda_if(needs_cuda(source)):
        seed_generators(seed)
        return function(**(named or {}))


def _is_raised(error: BaseException) -> bool:
    """Return whether an error comes from a ``raise`` in Python code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


@dataclass(frozen=True)
class _Watch:
    """The seconds for a call of the problem's own code, and what is called before and after one."""

    seconds: float = math.inf
    report: Heartbeat = lambda note="", seconds=0.0: None


_UNWATCHED = _Watch()
_watch = ContextVar("watch", default=_UNWATCHED)


@contextlib.contextmanager
def watched(**changes: Any) -> Iterator[None]:
    """Watch calls of the problem's own code inside: ``seconds`` that each may take, and a worker's ``report``.

    ``report`` gets a note of what is called, and the seconds after which the process may be taken for lost, since code
    that doesn't come back to Python can't be interrupted.
    """
    before = _watch.set(replace(_watch.get(), **changes))
    try:
        yield
    finally:
        _watch.reset(before)


@contextlib.contextmanager
def limited(where: str | Path, what: str, times: float = 1.0) -> Iterator[None]:
    """Raise `ProblemTimeout` where the problem's own code inside takes more than ``times`` the seconds of `watched`."""
    watch = _watch.get()
    seconds = times * watch.seconds
    if seconds == math.inf:
        yield
        return

    def report() -> None:
        watch.report(f"{where}: {what}", _LOST * seconds)

    report()
    try:
        with time_limit(seconds, report):
            yield
    except KernelTimeout:
        words = (
            f"the problem's code took longer than {seconds:g} s ({what}); make it faster, or raise the limit, timeout"
        )
        raise ProblemTimeout(f"{where}: {words}") from None
    finally:
        watch.report()


@contextlib.contextmanager
def explaining(where: str | Path, what: str, times: float = 1.0) -> Iterator[None]:
    """Raise `ProblemError` of one line for whatever the problem's own code raises inside, an exit included.

    It is `limited`.
    """
    try:
        with limited(where, what, times):
            yield
    except (ProblemError, ProblemTimeout):
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not _is_raised(error):  # Ctrl-C
            raise
        hint = "; it asks for CUDA" if isinstance(error, Exception) and asks_for_cuda(error) else ""
        raise ProblemError(f"{where}: {what} failed ({type(error).__name__}: {one_line(error)}){hint}") from None
