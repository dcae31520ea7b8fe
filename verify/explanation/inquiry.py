"""Asking fault models, one after the other, within a time: one that raises is noted, and the others are asked."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from assay.verify.explanation.fault_models.fault_model import FaultModel

PATIENCE = 4.0
"""How many times as long as processor time an inquiry may take on the clock."""


class Inquiry:
    """Lasts so much processor time, or `PATIENCE` times as much on the clock where a machine is busy otherwise.

    ``failed`` says of each fault model that raised what it raised, in the order in which they were asked.
    """

    def __init__(self, seconds: float) -> None:
        self.failed: dict[str, str] = {}
        self._seconds, self._processor, self._clock = seconds, time.process_time(), time.monotonic()

    def is_over(self) -> bool:
        """Whether the time is up."""
        spent = max(time.process_time() - self._processor, (time.monotonic() - self._clock) / PATIENCE)
        return spent > self._seconds

    @contextmanager
    def asking(self, fault: FaultModel) -> Iterator[None]:
        """Whatever is wrong with one fault model, the others are still asked."""
        try:
            yield
        except Exception as error:
            self.failed.setdefault(fault.name, f"fault model {fault.name} raised {type(error).__name__}: {error}")
