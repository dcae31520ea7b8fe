"""A reference with one of its operations altered: the source of fault models of kernels that have a reference.

A call site is an instruction of the reference: the same one in every iteration of a loop, at all sizes.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch

from assay.golden.lowering.choices import Choices
from assay.golden.lowering.dispatch import Lowering, is_of_reference

Change = Callable[..., Any]
"""Computes another result from an operation and its arguments; its own operations are lowered too."""


@dataclass(frozen=True)
class CallSite:
    """An operation of the reference: ``operation``, called by ``code`` at ``instruction``."""

    operation: Any
    code: Any
    instruction: int
    line: int

    def __str__(self) -> str:
        text = linecache.getline(self.code.co_filename, self.line).strip()
        return f"line {self.line}, `{text}`" if text else f"line {self.line}"


class _AtCallSites(Lowering):  # type: ignore[no-untyped-call]
    """Passes the operations that the reference calls, not those of their decompositions, to ``call``.

    ``call`` gets the lowering, the call site, the operation, and its arguments.
    """

    def __init__(
        self, call: Change, xp: Any, operand_dtype: torch.dtype | None = None, choices: Choices | None = None
    ) -> None:
        super().__init__(xp, operand_dtype, choices)
        self._call, self._nested = call, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._nested:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._nested = True
        try:
            return self._call(self, _call_site(func), func, args, kwargs or {})
        finally:
            self._nested = False


def altered(definition: Any, site: CallSite, change: Change) -> Any:
    """Return the definition of the reference's first form with ``change`` in place of one operation."""

    def call(ctx: Any, current: CallSite, func: Any, args: Any, kwargs: Any) -> Any:
        if current != site:
            return Lowering.__torch_dispatch__(ctx, func, (), args, kwargs)
        with ctx:
            return change(func, *args, **kwargs)

    return replace(definition, forms=definition.forms[:1], lowering=partial(_AtCallSites, call))


def call_sites(definition: Any, evaluate: Callable[[Any], Any]) -> dict[CallSite, tuple[Any, Any]]:
    """Return the call sites of a reference's first form and their first arguments, in ``evaluate(definition)``."""
    runs: list[dict[CallSite, tuple[Any, Any]]] = []

    def lowering(*arguments: Any) -> Lowering:
        sites: dict[CallSite, tuple[Any, Any]] = {}
        runs.append(sites)

        def call(ctx: Any, site: CallSite, func: Any, args: Any, kwargs: Any) -> Any:
            sites.setdefault(site, (args, kwargs))
            return Lowering.__torch_dispatch__(ctx, func, (), args, kwargs)

        return _AtCallSites(call, *arguments)

    evaluate(replace(definition, forms=definition.forms[:1], lowering=lowering))
    return runs[0]


def _call_site(func: Any) -> CallSite:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_of_reference(frame):
        frame = frame.f_back
    assert frame is not None
    return CallSite(func, frame.f_code, frame.f_lasti, frame.f_lineno)
