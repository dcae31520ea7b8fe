"""Export targets: the content that a serving stack reads for an assignment. Each is one file in `configurations`."""

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
"""Checkpoint names of sites, where they differ from the sites' own names."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The content that one serving stack reads."""

    content: dict[str, Any]
    held: dict[str, str]
    """The part of the assignment that it expresses; empty if the stack would do nothing."""
    notes: tuple[str, ...] = ()
    """One line for each kind of site that it can't express."""
    tensors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The tensors of each site, for stacks with their own tensor names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The model and assignment to export."""

    assignment: Mapping[str, str]
    sites: Mapping[str, Site]
    dtype: torch.dtype = torch.bfloat16
    """Dtype of sites that are not quantised."""
    names: Names = field(default_factory=dict)
    model: str = "MODEL"
    """The directory or hub name that engines load."""
    module: torch.nn.Module | None = None
    fits: QParams | None = None
    """The scales and importances that the simulation used."""


Files = Callable[[Request, Recipe], Mapping[str, str | bytes]]
"""Returns the files by name for a recipe that expresses something."""


@dataclass(frozen=True, slots=True)
class Target:
    """The interface of one serving stack: its recipe, its files, and its limits."""

    recipe: Callable[[Request], Recipe]
    files: Files
    lacks: Callable[[Scheme], str]
    """Returns why it can't express a scheme of linears or KV caches; empty if it can."""
    fixed: Callable[[Request], Collection[str]] | None = None
    """Returns the sites that it can hold only in their original format; None: those that a checkpoint can't
    (`unstorable`)."""
    apart: bool = False
    """It takes a format per linear even where engines fuse q, k and v."""
    tables: bool = False
    """It holds embedding tables, for an engine that loads them."""


TARGETS: dict[str, Target] = {}
"""Every export target, by its name in ``--export``."""


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
    """Register an export target."""
    TARGETS[name] = Target(recipe, files, lacks, fixed, apart, tables)


def of_linears(reason: Callable[[Scheme], str | None], caches: Collection[str] = ()) -> Callable[[Scheme], str]:
    """Return a `lacks` function; ``reason`` says why a linear's scheme is unsupported, ``caches`` are supported."""

    def lacks(scheme: Scheme) -> str:
        if "kv_cache" in scheme.site_types and scheme.weight is None:
            return "" if scheme.name in caches else f"of KV caches it holds {' and '.join(caches) or 'none'}"
        if scheme.weight is None or scheme.weight.per == "element":
            return "it holds formats of weights, and inputs of linears with them"
        return reason(scheme) or ""

    return lacks


def json_file(name: str) -> Files:
    """Return the `Files` of a target with a single file: the recipe's content as JSON."""
    return lambda request, recipe: {name: json.dumps(recipe.content, indent=2) + "\n"}
