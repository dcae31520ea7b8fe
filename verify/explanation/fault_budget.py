"""A budget of processor time that fault models share; a model that raises does not stop the others."""

from collections.abc import Iterator
from contextlib import contextmanager

from assay.runtime.deadline import CpuBudget
from assay.verify.explanation.fault_models.fault_model import FaultModel


class FaultBudget(CpuBudget):
    """A budget in seconds for fault models; ``failed`` holds the error of each that raised, in call order."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.failed: dict[str, str] = {}

    @contextmanager
    def trying(self, fault: FaultModel) -> Iterator[None]:
        """Record an exception that a fault model raises inside the block."""
        try:
            yield
        except Exception as error:
            self.failed.setdefault(fault.name, f"fault model {fault.name} raised {type(error).__name__}: {error}")
