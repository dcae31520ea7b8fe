"""Findings: what they are called, and which come first."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

KINDS = {
    "nonfinite": 0,
    "overflow": 0,
    "no_gradient": 1,
    "router_ties": 1,
    "unseen_expert": 1,
    "static_scale": 1,
    "underflow": 2,
    "outlier_channel": 2,
    "outlier_row": 2,
    "outlier_column": 2,
    "massive_token": 2,
    "granularity": 2,
    "scales": 2,
    "bits": 2,
    "dead": 3,
    "tied": 3,
}
"""Kinds of findings and their rank: what breaks a model (0), what a prediction can't see (1), what costs (2), notes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about one site, and what to do about it."""

    kind: str
    """Of `KINDS`."""
    site: str
    words: str
    """One plain sentence."""
    numbers: dict[str, Any]
    """What the sentence says, by name: numbers, indices, names of schemes."""
    remedy: str
    """One sentence."""
    weight: float = field(default=0.0)
    """What is at stake, in the metric's unit: the predicted error at this site of the scheme that suffers."""

    def __str__(self) -> str:
        return f"{self.site}: {self.words} {self.remedy}"


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """By rank of the kind, then by weight; equal ones stay as they are."""
    return sorted(findings, key=lambda finding: (KINDS[finding.kind], -finding.weight))
