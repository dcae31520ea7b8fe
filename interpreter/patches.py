"""Attributes of Triton's modules that are replaced inside `faithful`, and put back afterwards."""

from __future__ import annotations

import contextlib
import importlib
from functools import partialmethod
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
from assay.interpreter.operators import operators
from assay.interpreter.reductions import Reduce, Scan
from assay.interpreter.replacing import Change, Shared, replaced


def _find_changes() -> list[Change]:
    """What Triton's own interpreter replaces in this version (by trying), and what it leaves to a compiler."""
    importlib.import_module("triton.compiler.code_generator")  # keeps a table of the language's functions as they are
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
    language = [(owner, name, _direct(value)) for owner, name, value in scope.changes]
    by_name = {name: value for owner, name, value in language if owner is tl.tensor}
    changes = [*ours, *language, *operators(kernels.builder, by_name), *members, *loops, *cached_constructors()]
    changes += [*constant_operators(), *kernels.libdevice_functions()]
    return [(owner, name, value) for (owner, name), value in {change[:2]: change[2] for change in changes}.items()]


def _direct(value: Any) -> Any:
    """What Triton's interpreter puts in a builtin's place, without asking at each call whether it is one."""
    member = (getattr(value, "__kwdefaults__", None) or {}).get("member")
    if member is None:
        return value
    builtin = getattr(member, "__wrapped__", member)

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return builtin(*args, _semantic=kernels.semantic, **kwargs)

    return call


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


language = Shared(_find_changes, lasting=True)
"""Inside it, Triton's language acts on NumPy arrays."""
