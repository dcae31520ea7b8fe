"""The space of a search: values of a kernel's keywords, less excluded combinations, and tuners' configurations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.bench.tuning.choice import Choice
from assay.runtime.errors import unknown
from assay.runtime.files import read_text
from assay.runtime.records import from_toml, structured
from assay.verify.errors import TuneError

MOST = 512
"""Candidates that a space may have: each is compiled, examined and timed."""


@dataclass(frozen=True)
class Space:
    """``choices``: the values of each keyword; ``without``: excluded combinations of some keywords."""

    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    without: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        for name, values in self.choices.items():
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise TuneError(f"choices.{name}: expected a list of values, got {values!r}")
        for combination in self.without:
            for name in combination:
                if name not in self.choices:
                    raise TuneError(f"without: {unknown('choice', name, list(self.choices))}")
        if self.size > MOST:
            raise TuneError(f"a space of {self.size:,} candidates; at most {MOST} can be searched: list fewer values")

    @property
    def size(self) -> int:
        """Return the number of combinations, excluded ones included."""
        count = 1
        for values in self.choices.values():
            count *= len(values)
        return count

    def __iter__(self) -> Iterator[Choice]:
        for values in itertools.product(*self.choices.values()):
            results = dict(zip(self.choices, values, strict=True))
            if not any(all(results[name] == value for name, value in each.items()) for each in self.without):
                yield Choice(results)


def read_space(path: Path) -> Space:
    """Read a TOML file: a table ``choices`` of lists, and a list ``without`` of tables. Raises `TuneError`."""
    content = from_toml(read_text(path, TuneError), f"--space {path}", TuneError)
    space: Space = structured(content, Space, f"--space {path}:", TuneError)
    if not space.choices:
        raise TuneError(f"--space {path}: expected a table [choices], e.g. BLOCK_M = [64, 128]")
    return space


def combined(space: Space, configs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Choice]:
    """Return every choice of keywords with every configuration of each autotuned kernel. Raises `TuneError`."""
    results = []
    for choice in space:
        for values in itertools.product(*configs.values()):
            results.append(Choice(choice.keywords, dict(zip(configs, values, strict=True))))
            if len(results) > MOST:
                raise TuneError(f"more than {MOST} candidates; list fewer values, or tune one kernel at a time")
    return results
