"""A processor-time budget for fault models, in which one that raises does not keep the others from being tried."""

from collections.abc import Iterator
from contextlib import contextmanager

from assay.runtime.deadline import CpuBudget
from assay.verify.explanation.fault_models.fault_model import FaultModel


class FaultBudget(CpuBudget):
    """A budget of seconds for fault models; ``failed`` has the error of each that raised, in call order."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.failed: dict[str, str] = {}

    @contextmanager
    def trying(self, fault: FaultModel) -> Iterator[None]:
        """Record an exception that a fault model raises inside."""
        try:
            yield
        except Exception as error:
            self.failed.setdefault(fault.name, f"fault model {fault.name} raised {type(error).__name__}: {error}")
