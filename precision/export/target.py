"""Export targets: what a serving stack reads of an assignment. A new one is one file in `configurations`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from assay.precision.observation.qparams import QParams
from assay.precision.observation.sites import Site
from assay.precision.schemes import Scheme

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
    tensors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The tensors of each site, where the stack has names of its own for them."""


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
    module: torch.nn.Module | None = None
    fits: QParams | None = None
    """The scales and importances that the simulation used."""


Files = Callable[[Request, Recipe], Mapping[str, str | bytes]]
"""The files by name, of a recipe that expresses something."""


@dataclass(frozen=True, slots=True)
class Target:
    """How a serving stack is told."""

    recipe: Callable[[Request], Recipe]
    files: Files
    lacks: Callable[[Scheme], str]
    """Why it has no words for a scheme, of linears or of KV caches; empty where it has."""
    fixed: Callable[[Request], Collection[str]] | None = None
    """Sites that it holds in no other format than their own; None: those that a checkpoint doesn't (`unstorable`)."""
    apart: bool = False
    """It takes a format for each linear, where engines run q, k and v as one product."""
    tables: bool = False
    """It holds tables of embeddings, for an engine that loads them."""


TARGETS: dict[str, Target] = {}
"""Every export target by the name that ``--export`` takes."""


def register(
    name: str,
    recipe: Callable[[Request], Recipe],
    files: Files,
    lacks: Callable[[Scheme], str],
    *,
    fixed: Callable[[Request], Collection[str]] | None = None,
    apart: bool = False,
    tables: bool = False,
) -> None:
    """Make an export target known."""
    TARGETS[name] = Target(recipe, files, lacks, fixed, apart, tables)


def of_linears(reason: Callable[[Scheme], str | None], caches: Collection[str] = ()) -> Callable[[Scheme], str]:
    """What a target lacks, of ``reason``, why it has no words for the scheme of a linear, and the caches it knows."""

    def lacks(scheme: Scheme) -> str:
        if "kv_cache" in scheme.site_types and scheme.weight is None:
            return "" if scheme.name in caches else f"of KV caches it holds {' and '.join(caches) or 'none'}"
        if scheme.weight is None or scheme.weight.per == "element":
            return "it holds formats of weights, and inputs of linears with them"
        return reason(scheme) or ""

    return lacks


def json_file(name: str) -> Files:
    """A target's files where it is one, the recipe's content as JSON."""
    return lambda request, recipe: {name: json.dumps(recipe.content, indent=2) + "\n"}
