"""What a usual run takes of many parameters; the others are for a run that asks for evidence."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def by_turns(names: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """Every name with each of the ``others``, of which a usual run takes each name with one, these by turns."""
    return [
        pytest.param(name, other, marks=() if turn == place % len(others) else pytest.mark.evidence)
        for place, name in enumerate(names)
        for turn, other in enumerate(others)
    ]


def each_third(values: Iterable[Any]) -> list[Any]:
    """All values, of which a usual run takes each third one."""
    return [pytest.param(value, marks=pytest.mark.evidence if place % 3 else ()) for place, value in enumerate(values)]


def only(usual: Callable[[Any], bool], rows: Iterable[Any]) -> list[Any]:
    """All rows, single values or sequences of them, of which a usual run takes those of which ``usual`` is true."""
    return [
        pytest.param(
            *(row if isinstance(row, tuple | list) else (row,)), marks=() if usual(row) else pytest.mark.evidence
        )
        for row in rows
    ]
