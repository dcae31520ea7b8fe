"""The result of examining every fault model: rates by family and survivors, as data, text and JSON."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.runtime.files import write_text_atomically
from assay.verify.explanation.fault_models.fault_model import FAMILIES


@dataclass(frozen=True)
class Tried:
    """One fault model under one examination.

    ``kind`` is the kind of its failure and ``cases`` the number of cases; ``against``: the plain check caught it too.
    """

    name: str
    family: str
    description: str
    origin: str
    needs: str
    caught: bool
    kind: str = ""
    cases: int = 0
    against: bool | None = None


@dataclass(frozen=True)
class PowerReport:
    """The result for every fault model that the options and dtypes of a campaign admit."""

    spec: str
    dtype: str
    contract: str
    examples: int
    trials: tuple[Tried, ...]
    against: str = ""
    seconds: float = 0.0

    @property
    def caught(self) -> int:
        """Return how many fault models were caught."""
        return sum(trial.caught for trial in self.trials)

    @property
    def by_family(self) -> dict[str, tuple[int, int]]:
        """Return (caught, tried) by fault family, in the order of `FAMILIES`."""
        return _by_family(self.trials, lambda trial: trial.caught)

    @property
    def by_family_against(self) -> dict[str, tuple[int, int]]:
        """Return (caught, tried) by fault family for the plain check; empty without one."""
        return _by_family(self.trials, lambda trial: bool(trial.against)) if self.against else {}

    @property
    def survivors(self) -> tuple[Tried, ...]:
        """Return the fault models that were not caught."""
        return tuple(trial for trial in self.trials if not trial.caught)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data (schema: docs/fault-models.md)."""
        rates = {name: {"caught": caught, "of": of} for name, (caught, of) in self.by_family.items()}
        for name, (caught, _) in self.by_family_against.items():
            rates[name]["against"] = caught
        return vars(self) | {
            "caught": self.caught,
            "of": len(self.trials),
            "by_family": rates,
            "survivors": [trial.name for trial in self.survivors],
            "trials": [vars(trial) for trial in self.trials],
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the report as JSON; also write it to ``path`` if given."""
        text = json.dumps(self.as_dict(), indent=2)
        if path is not None:
            write_text_atomically(path, text)
        return text

    def __str__(self) -> str:
        lines = [f"power of {self.examples} examples: {self.spec} in {self.dtype}, {self.contract}"]
        header = f"  {'fault family':16} {'caught':>9}"
        lines.append(header + (f"   {self.against}" if self.against else ""))
        rows = [*self.by_family.items(), ("all", (self.caught, len(self.trials)))]
        plain = self.by_family_against
        for family, (caught, of) in rows:
            line = f"  {family:16} {caught:4} / {of:<3}{caught / max(of, 1):5.0%}"
            if self.against:
                other = plain[family][0] if family in plain else sum(bool(trial.against) for trial in self.trials)
                line += f"   {other:4} / {of:<3}{other / max(of, 1):5.0%}"
            lines.append(line)
        if self.survivors:
            lines.append("  not caught:")
        for trial in self.survivors:
            lines.append(f"    {trial.name}: {trial.description}")
            lines.append(f"      would need {trial.needs}")
        return "\n".join(lines)


def _by_family(trials: Sequence[Tried], hit: Callable[[Tried], bool]) -> dict[str, tuple[int, int]]:
    results = {}
    for family in FAMILIES:
        here = [trial for trial in trials if trial.family == family]
        if here:
            results[family] = (sum(map(hit, here)), len(here))
    return results
