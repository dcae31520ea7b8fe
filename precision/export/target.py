"""Export targets: what a serving stack reads of an assignment. A new one is one file in `configurations`."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from assay.precision.observation.sites import Site

Names = Mapping[str, Sequence[str]]
"""What sites are called in checkpoints, where that differs from their own names."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one serving stack reads."""

    content: dict[str, Any]
    held: dict[str, str]
    """What of the assignment it expresses; empty: there is nothing that the stack would do."""
    notes: tuple[str, ...] = ()
    """One line for each kind of site that it can't express."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is exported."""

    assignment: Mapping[str, str]
    sites: Mapping[str, Site]
    dtype: torch.dtype = torch.bfloat16
    """Of what isn't quantised."""
    names: Names = field(default_factory=dict)
    model: str = "MODEL"
    """The directory or hub name that engines are given."""


Texts = Callable[[Request, Recipe], dict[str, str]]
"""The files by name, of a recipe that expresses something."""

TARGETS: dict[str, tuple[Callable[[Request], Recipe], Texts]] = {}
"""Every export target by the name that ``--export`` takes: how its recipe is made, and its files."""


def register(name: str, recipe: Callable[[Request], Recipe], texts: Texts) -> None:
    """Make an export target known."""
    TARGETS[name] = recipe, texts


def json_file(name: str) -> Texts:
    """A target's files where it is one, the recipe's content as JSON."""
    return lambda request, recipe: {name: json.dumps(recipe.content, indent=2) + "\n"}
