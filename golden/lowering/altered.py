"""A reference with one of its operations altered: what it asks PyTorch for, by place, and another in one's stead.

A place is a call in the text of the reference: the same one in every turn of a loop, at all sizes.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from assay.golden.lowering.evaluation import Evaluation, is_of_reference

Change = Callable[..., Any]
"""Of an operation and its arguments: what it gives instead; called so that operations compute with numbers."""


@dataclass(frozen=True)
class Place:
    """An operation at a place of the reference: ``function`` of ``code``, at the instruction ``at``."""

    operation: Any
    code: Any
    at: int
    line: int

    @property
    def words(self) -> str:
        """The line and its text."""
        text = linecache.getline(self.code.co_filename, self.line).strip()
        return f"line {self.line}, `{text}`" if text else f"line {self.line}"


class _Placed(Evaluation):  # type: ignore[no-untyped-call]
    """An evaluation that knows which operations the reference itself asks for, and where."""

    def __init__(self, xp: Any, operands: torch.dtype | None = None, answers: Sequence[Any] = ()) -> None:
        super().__init__(xp, operands, answers)
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._inside = True
        try:
            return self.asked_at(_place(func), func, args, kwargs or {})
        finally:
            self._inside = False

    def asked_at(self, place: Place, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation that the reference asks for."""
        return super().__torch_dispatch__(func, (), args, kwargs)


class Recorded(_Placed):  # type: ignore[no-untyped-call]
    """Notes the places, and the arguments of the first call at each."""

    def __init__(self, xp: Any, operands: torch.dtype | None = None, answers: Sequence[Any] = ()) -> None:
        super().__init__(xp, operands, answers)
        self.places: dict[Place, tuple[Any, Any]] = {}

    def asked_at(self, place: Place, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation that the reference asks for."""
        self.places.setdefault(place, (args, kwargs))
        return super().asked_at(place, func, args, kwargs)


class Altered(_Placed):  # type: ignore[no-untyped-call]
    """Computes something else at one place."""

    def __init__(
        self, place: Place, change: Change, xp: Any, operands: Any = None, answers: Sequence[Any] = ()
    ) -> None:
        super().__init__(xp, operands, answers)
        self._place, self._change = place, change

    def asked_at(self, place: Place, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation that the reference asks for."""
        if place != self._place:
            return super().asked_at(place, func, args, kwargs)
        with self:
            return self._change(func, *args, **kwargs)


def altered(definition: Any, place: Place, change: Change) -> Any:
    """The definition of the reference's first form with ``change`` in place of an operation."""

    def evaluation(xp: Any, operands: Any = None, answers: Sequence[Any] = ()) -> Altered:
        return Altered(place, change, xp, operands, answers)

    return replace(definition, forms=definition.forms[:1], evaluation=evaluation)


def places_of(definition: Any, call: Callable[[Any], Any]) -> dict[Place, tuple[Any, Any]]:
    """The places of a reference's first form and their arguments, seen while ``call(definition)`` evaluates it."""
    seen: list[Recorded] = []

    def evaluation(xp: Any, operands: Any = None, answers: Sequence[Any] = ()) -> Recorded:
        seen.append(Recorded(xp, operands, answers))
        return seen[-1]

    call(replace(definition, forms=definition.forms[:1], evaluation=evaluation))
    return seen[0].places


def _place(func: Any) -> Place:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_of_reference(frame):
        frame = frame.f_back
    assert frame is not None
    return Place(func, frame.f_code, frame.f_lasti, frame.f_lineno)
