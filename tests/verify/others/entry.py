"""A faulty kernel in a style of its own, and what its fault is called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Other:
    """``causes`` are the fault models that its fault is, any of which is right; none where no fault model is it.

    ``settings`` are those of an examination beside dtype and effort.
    """

    name: str
    kernel: Callable[..., Any]
    op: str
    dtype: str | None
    causes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
