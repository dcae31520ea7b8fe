"""An exported checkpoint loaded again by its reader, and its error beside that of the simulation it was chosen by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from assay.precision.amounts import in_error
from assay.precision.export.checkpoint import load_checkpoint
from assay.precision.observation.streaming import device_of
from assay.precision.prediction.measuring import measured_of
from assay.precision.sampling import MeasuredError
from assay.runtime.errors import AssayError, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from assay.precision.auditing import Audit

READERS = ("transformers", "compressed-tensors")
"""What loads a checkpoint here: its files are those that vLLM and SGLang read too, its products are torch's."""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a checkpoint gives when it is loaded, over the sequences that an audit reports on."""

    reader: str
    """Packages and their versions."""
    error: MeasuredError | None
    """Of the loaded model; None: its reader refuses it."""
    simulated: MeasuredError
    """Of what the checkpoint holds of the assignment, KV caches aside, which its reader leaves as they are."""
    floor: float
    """The error with every site rounded to bfloat16."""
    power: float
    """1 where the error grows with the square of a change, 2 where with the change (`Metric.power`)."""
    reason: str = ""
    """Why its reader refuses it."""

    @property
    def agrees(self) -> bool:
        """Whether the two are as close as rounding to 16 bits leaves them: amplitudes, which add at most, differ by no
        more than the floor's."""
        if self.error is None or not math.isfinite(self.error) or not math.isfinite(self.simulated):
            return False
        loaded, simulated, floor = (each ** (self.power / 2) for each in (self.error, self.simulated, self.floor))
        return abs(loaded - simulated) <= floor

    @property
    def words(self) -> str:
        """Both errors in a line; a disagreement is called one."""
        if self.error is None:
            return f"{self.reader} refuses it: {self.reason}"
        both = f"loaded by {self.reader} {in_error(self.error)}, simulated {in_error(self.simulated)}"
        return both if self.agrees else f"{both}: they disagree by more than rounding to bfloat16 makes of it"


def reloaded(audit: Audit, folder: str | Path, held: Mapping[str, str]) -> Reloaded:
    """Load the checkpoint that ``folder`` holds and measure it where the audit measures what it reports.

    held: what of the assignment it expresses (`Part.held`). Raises BadAssignment for other sites than the audit's.
    """
    reader = ", ".join(f"{name} {version(name)}" for name in READERS)
    places = {str(site): site.place for site in audit.every}
    simulated = audit.measure({name: scheme for name, scheme in held.items() if places.get(name) != "kv_cache"})
    about = simulated, float(audit.noise_floor), audit.metric.power
    try:
        model = load_checkpoint(folder).to(device_of(audit.model))
        error = measured_of(model, audit.judged_on, audit.metric, audit.model, audit.observed)
    except (AssayError, OSError, ValueError, TypeError, KeyError, RuntimeError) as refused:
        return Reloaded(reader, None, *about, first_line(refused))
    return Reloaded(reader, error, *about)
