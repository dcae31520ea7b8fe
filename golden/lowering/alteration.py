"""A reference with one of its operations altered: the source of fault models of kernels that have a reference.

A call site is an instruction of the reference: the same one in every iteration of a loop, at all sizes.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

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


class _CallSiteLowering(Lowering):  # type: ignore[no-untyped-call]
    """A lowering that tells operations which the reference calls from their decompositions."""

    def __init__(self, xp: Any, operand_dtype: torch.dtype | None = None, answers: Sequence[Any] = ()) -> None:
        super().__init__(xp, operand_dtype, answers)
        self._nested = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._nested:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._nested = True
        try:
            return self.call(_call_site(func), func, args, kwargs or {})
        finally:
            self._nested = False

    def call(self, site: CallSite, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute one operation that the reference calls."""
        return super().__torch_dispatch__(func, (), args, kwargs)


class _Recording(_CallSiteLowering):  # type: ignore[no-untyped-call]
    """Records the call sites, and the arguments of the first call at each."""

    def __init__(self, xp: Any, operand_dtype: torch.dtype | None = None, answers: Sequence[Any] = ()) -> None:
        super().__init__(xp, operand_dtype, answers)
        self.sites: dict[CallSite, tuple[Any, Any]] = {}

    def call(self, site: CallSite, func: Any, args: Any, kwargs: Any) -> Any:
        self.sites.setdefault(site, (args, kwargs))
        return super().call(site, func, args, kwargs)


class _Altered(_CallSiteLowering):  # type: ignore[no-untyped-call]
    """Computes something else at one call site."""

    def __init__(
        self, site: CallSite, change: Change, xp: Any, operand_dtype: Any = None, answers: Sequence[Any] = ()
    ) -> None:
        super().__init__(xp, operand_dtype, answers)
        self._site, self._change = site, change

    def call(self, site: CallSite, func: Any, args: Any, kwargs: Any) -> Any:
        if site != self._site:
            return super().call(site, func, args, kwargs)
        with self:
            return self._change(func, *args, **kwargs)


def altered(definition: Any, site: CallSite, change: Change) -> Any:
    """Return the definition of the reference's first form with ``change`` in place of one operation."""

    def lowering(xp: Any, operand_dtype: Any = None, answers: Sequence[Any] = ()) -> _Altered:
        return _Altered(site, change, xp, operand_dtype, answers)

    return replace(definition, forms=definition.forms[:1], lowering=lowering)


def call_sites(definition: Any, evaluate: Callable[[Any], Any]) -> dict[CallSite, tuple[Any, Any]]:
    """Return the call sites of a reference's first form and their arguments, in ``evaluate(definition)``."""
    recordings: list[_Recording] = []

    def lowering(xp: Any, operand_dtype: Any = None, answers: Sequence[Any] = ()) -> _Recording:
        recordings.append(_Recording(xp, operand_dtype, answers))
        return recordings[-1]

    evaluate(replace(definition, forms=definition.forms[:1], lowering=lowering))
    return recordings[0].sites


def _call_site(func: Any) -> CallSite:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_of_reference(frame):
        frame = frame.f_back
    assert frame is not None
    return CallSite(func, frame.f_code, frame.f_lasti, frame.f_lineno)
