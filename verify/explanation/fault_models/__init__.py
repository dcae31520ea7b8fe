"""Fault models: known faults of kernels, each a small alteration of a right definition.

They explain failures (`assay.verify.explanation.explain`), measure what an examination or a test would have caught
(`assay.verify.power`), and test the harness itself. docs/fault-models.md says how to add one.
"""

from functools import cache
from importlib import import_module

from assay.golden.registry import Fault, spec
from assay.verify.explanation.fault_models.fault_model import FaultModel, of_file

_TABLES = (
    "attention_masks", "attention", "attention_variants", "softmax", "norms", "products", "quantizers", "elementwise",
    "experts", "partial", "compositions", "common", "side_effects",
)  # fmt: skip


@cache
def fault_models() -> tuple[FaultModel, ...]:
    """Return all fault models; if several explain a failure equally well, the earlier one is the likelier."""
    tables = (import_module(f"{__name__}.{table}").FAULT_MODELS for table in _TABLES)
    return tuple(fault for table in tables for fault in table)


def fault_models_of(op: str) -> tuple[FaultModel, ...]:
    """Return the fault models of a spec: first its own, or those of a reference's operations."""
    definition = spec(op)
    own = tuple(of_file(fault, definition) for fault in definition.faults if isinstance(fault, Fault))
    if definition.needs_dtypes:  # loading references takes a fifth of a second, which ops don't need
        from assay.verify.explanation.fault_models.references import of_reference

        own = (*own, *of_reference(definition))
    return (*own, *(fault for fault in fault_models() if fault.is_of(definition)))
