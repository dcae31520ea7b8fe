"""The common form of problems of all formats: reference, arguments, sizes, and how a solution is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from assay.runtime.errors import AssayError

Style = Literal["arguments", "data", "destination"]
Sizes = Mapping[str, Any]
"""The sizes of a problem: integers by name, and other parameters of a test."""


class ProblemError(AssayError, ValueError):
    """A problem or a solution that can't be read."""


class ProblemTimeout(AssayError):
    """The problem's own code took too long."""


@dataclass(frozen=True)
class Entry:
    """How a solution is called.

    ``name`` is a class that is constructed first and then called ("class"), or a function. ``style``: with the
    arguments by position ("arguments"), with all of them as one ("data"), or with tensors for the results behind
    them ("destination").
    """

    name: str
    kind: Literal["class", "function"] = "function"
    style: Style = "arguments"


@dataclass(frozen=True)
class Instance:
    """A problem at certain sizes.

    ``reference(*arguments)`` gives a tensor, or a tuple, list or dict of such; ``draw(seed)`` gives arguments, of which
    tensors may stand in lists, tuples and dicts. ``init`` and ``init_named`` are what a solution that is a class is
    constructed with; ``module`` is the reference's own module, whose parameters it shares. ``results`` are the names,
    shapes and dtypes of the outputs that a solution with style "destination" is handed.
    """

    sizes: Sizes
    reference: Callable[..., Any]
    draw: Callable[[int], tuple[Any, ...]]
    module: torch.nn.Module | None = None
    init: tuple[Any, ...] = ()
    init_named: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()


@dataclass(frozen=True)
class Problem:
    """A problem as it was read.

    ``given`` are the sizes that it states, each a choice for `make`, the first the one that is timed; ``changeable``
    are the whole numbers among them that may take other values, ``wanted`` what those must fulfil beside. ``source``
    is the reference's text; ``companions`` are files that a solution may import. ``names`` of the arguments.
    """

    name: str
    format: str
    path: Path
    source: str
    given: tuple[Sizes, ...]
    changeable: tuple[str, ...]
    make: Callable[[Sizes, int], Instance]
    entry: Entry
    companions: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    wanted: Callable[[Sizes], bool] = lambda sizes: True
    rewrites: bool = False


@dataclass(frozen=True)
class Answer:
    """A solution's files, by their path within its folder; ``main`` is the one that defines `Entry.name`."""

    name: str
    files: Mapping[str, str]
    main: str
    entry: Entry
    language: str = "python"

    @property
    def text(self) -> str:
        """The text of all of its Python files."""
        return "".join(text for name, text in self.files.items() if name.endswith(".py"))
