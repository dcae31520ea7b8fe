"""A trial: the description of one call of a solution, and the observation of a call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from assay.judge.problems.problem import Sizes
from assay.judge.problems.sizes import Choice
from assay.judge.solution.inputs import SCHEMES
from assay.runtime.records import from_json, structured
from assay.verify.comparison.result import Result
from assay.verify.errors import ReproError

Tensor = torch.Tensor
WEIGHTS = ("constructed", "redrawn")
MEMORY = ("new", "plain", "quiet", "objects")
"""Memory of the arguments: new; the previous arguments', written by torch ("plain"), or past torch, without a change of
version counters ("quiet"), or that and in new tensor objects ("objects")."""


@dataclass(frozen=True)
class Trial:
    """One call: ``sizes`` are what differs from the given ones, ``inputs`` the scheme of `inputs.redrawn`.

    ``weights``: as the constructor made them, or with none of them constant. ``memory``: one of `MEMORY`. ``factor``
    scales all inputs. ``change``: which tensor has one element changed, -1 none. ``shift``: by how much the
    free tensors are rolled, in the order of their memory.
    """

    kind: str = "small"
    sizes: Mapping[str, int] = field(default_factory=dict)
    inputs: str = "given"
    weights: str = "constructed"
    memory: str = "new"
    seed: int = 0
    factor: float = 1.0
    change: int = -1
    shift: int = 0

    def as_line(self) -> str:
        """Return what differs from the defaults as one line of JSON."""
        usual = Trial()
        changed = {name: value for name, value in vars(self).items() if value != getattr(usual, name)}
        return json.dumps(changed, separators=(",", ":"))

    @staticmethod
    def of_line(text: str) -> Trial:
        """Return the trial of a line. Raises `ReproError`."""
        expected = ReproError(f"--trial: expected what a verdict prints behind it, got {text[:60]!r}")
        result: Trial = structured(from_json(text, "", lambda words: expected), Trial, "--trial", ReproError)
        for name, known in (("inputs", SCHEMES), ("weights", WEIGHTS), ("memory", MEMORY)):
            if getattr(result, name) not in known:
                raise ReproError(f"--trial: {name}: expected one of {', '.join(known)}, got {getattr(result, name)!r}")
        return result

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        words = [f"{self.kind} sizes ({sizes})" if sizes else f"{self.kind} sizes", f"inputs {self.inputs}"]
        words += [f"weights {self.weights}"] if self.weights != "constructed" else []
        words += [f"memory {self.memory}"] if self.memory != "new" else []
        words += [f"times {self.factor:.4g}"] if self.factor != 1.0 else []
        return ", ".join([*words, f"seed {self.seed}"])


@dataclass(frozen=True)
class Observation:
    """A trial with its call's arguments, outputs and judgement, and ``detected``, the host's observations."""

    trial: Trial
    result: Result
    arguments: tuple[Any, ...]
    outputs: list[Tensor]
    detected: Mapping[str, Any] = field(default_factory=dict)
    timed: bool = False

    @property
    def failed(self) -> bool:
        """Return whether the contract is broken."""
        return self.result.failure is not None


def sizes_of(choice: Choice, given: Sizes) -> dict[str, int]:
    """Return the integers in which a choice differs from the given sizes."""
    results = {name: value for name, value in choice.sizes.items() if type(value) is int}
    return {name: value for name, value in results.items() if value != given.get(name)}
