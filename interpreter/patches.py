"""Attributes of Triton's modules that are replaced inside `faithful`, and put back afterwards."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache, partialmethod
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter as plain
from triton.runtime.jit import JITCallable, JITFunction

from assay.interpreter import kernels
from assay.interpreter.builder import TARGET
from assay.interpreter.cached_constructors import cached_constructors
from assay.interpreter.constants import constant_operators
from assay.interpreter.mapped import map_elementwise
from assay.interpreter.reductions import Reduce, Scan

_MISSING = object()
Change = tuple[Any, str, Any]


@contextlib.contextmanager
def replaced(changes: list[Change]) -> Iterator[None]:
    """Inside it, each (object, name, value) of ``changes`` holds."""
    before = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class Shared:
    """Inside it, the changes that ``find`` gives hold; may be nested, in any thread. They are looked for once."""

    def __init__(self, find: Callable[[], list[Change]]) -> None:
        self._find = cache(find)
        self._depth, self._lock = 0, threading.RLock()
        self._outermost: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._outermost = replaced(self._find())
                self._outermost.__enter__()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._outermost.__exit__(None, None, None)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside it, the changes don't hold; whoever enters meanwhile waits."""
        with self._lock:
            self._outermost.__exit__(None, None, None)
            try:
                yield
            finally:
                self._outermost = replaced(self._find())
                self._outermost.__enter__()


def _find_changes() -> list[Change]:
    """What Triton's own interpreter replaces in this version (by trying), and what it leaves to a compiler."""
    ours: list[Change] = [
        (plain, "interpreter_builder", kernels.builder),
        (plain, "interpreter_semantic", kernels.semantic),
        (plain, "TritonSemantic", lambda builder: kernels.semantic),
        (plain, "ReduceOps", Reduce),
        (plain, "ScanOps", Scan),
        (plain.InterpretedFunction, "__call__", _call),
        (JITFunction, "__call__", _call),
    ]
    scope = _Recorder()
    with replaced([*ours, (plain, "_LangPatchScope", lambda: scope)]):
        try:
            plain._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        finally:
            scope.restore()
    members: list[Change] = [
        (tl.tensor, name, partialmethod(member))
        for name, member in vars(tl.tensor).items()
        if isinstance(member, JITCallable)
    ]
    members.append((tl.tensor, "__index__", lambda self: int(self.handle.data.item())))
    if hasattr(tl, "target_info"):
        members.append((tl.target_info, "current_target", lambda: TARGET))
    loops: list[Change] = [(tl, "range", kernels.tensor_range), (tl.core, "range", kernels.tensor_range)]
    if hasattr(tl, "map_elementwise"):
        loops += [(tl, "map_elementwise", map_elementwise), (tl.core, "map_elementwise", map_elementwise)]
    changes = [*ours, *scope.changes, *members, *loops, *cached_constructors()]
    changes += [*constant_operators(), *kernels.libdevice_functions()]
    return [(owner, name, value) for (owner, name), value in {change[:2]: change[2] for change in changes}.items()]


class _Recorder:
    """Stands in for Triton's `_LangPatchScope` and keeps what it was told."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._stack = contextlib.ExitStack()

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        self.changes.append((owner, name, value))
        self._stack.enter_context(replaced([(owner, name, value)]))

    def restore(self) -> None:
        self._stack.close()


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A device function, called from a kernel."""
    return kernels.runnable(self)(*args, **kwargs)


language = Shared(_find_changes)
"""Inside it, Triton's language acts on NumPy arrays."""
