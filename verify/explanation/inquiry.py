"""Asking fault models, one after the other, within a time: one that raises is noted, and the others are asked."""

from collections.abc import Iterator
from contextlib import contextmanager

from assay.runtime.deadline import CpuBudget
from assay.verify.explanation.fault_models.fault_model import FaultModel


class Inquiry(CpuBudget):
    """A budget of time for fault models; ``failed`` has the error of each that raised, in the order of their calls."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.failed: dict[str, str] = {}

    @contextmanager
    def asking(self, fault: FaultModel) -> Iterator[None]:
        """Whatever is wrong with one fault model, the others are still asked."""
        try:
            yield
        except Exception as error:
            self.failed.setdefault(fault.name, f"fault model {fault.name} raised {type(error).__name__}: {error}")
