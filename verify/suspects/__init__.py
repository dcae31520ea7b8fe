"""Suspects: known faults of kernels, each a small alteration of a right definition.

They explain failures (`assay.verify.explain`), measure what an examination or a test would have caught
(`assay.verify.power`), and test the harness itself. docs/suspects.md says how to add one.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from assay.verify.suspects.suspect import Suspect

_TABLES = (
    "attention_masks", "attention", "attention_variants", "softmax", "norms", "products", "quantizers", "elementwise",
    "experts", "partial", "common", "numbers", "conduct",
)  # fmt: skip


@cache
def suspects() -> tuple[Suspect, ...]:
    """All suspects; of those that explain a failure equally well the earlier one is the likelier."""
    tables = (import_module(f"{__name__}.{table}").SUSPECTS for table in _TABLES)
    return tuple(suspect for table in tables for suspect in table)


@cache
def suspects_of(op: str) -> tuple[Suspect, ...]:
    """The suspects of a spec."""
    return tuple(suspect for suspect in suspects() if op in suspect.specs)
