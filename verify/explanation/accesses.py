"""What accounts for an access out of bounds: which element it was, and what it is not without."""

import re
from dataclasses import replace

from assay.verify.cases.case import build
from assay.verify.contract import Contract
from assay.verify.execution.runner import Bench
from assay.verify.explanation.behaviour import described
from assay.verify.explanation.fault_models import fault_models_of
from assay.verify.findings import Explanation, Failure

_LOADED = re.compile(r"loads element (-?\d+) of ")
_FAULT = "ignored_labels_loaded"


def explained_by_accesses(bench: Bench, failure: Failure) -> tuple[Explanation, ...]:
    """That an ignored token's label was loaded: one points there, and without one nothing is loaded out of bounds."""
    found, case = _LOADED.search(failure.message), failure.case
    fault = next((fault for fault in fault_models_of(case.spec) if fault.name == _FAULT), None)
    if found is None or fault is None or "target" not in {tensor.name for tensor in case.signature.tensors}:
        return ()
    target = build(case).guarded["target"].tensor
    ignored = [row for row, label in enumerate(target.tolist()) if label == case.options["ignore_index"]]
    pointed = {row * case.sizes["V"] + case.options["ignore_index"] for row in ignored}
    labelled = replace(case, edits=(*case.edits, *(("target", (row,), 0.0) for row in ignored)))
    again = bench.try_case(labelled).failure
    if int(found[1]) not in pointed or (again is not None and _LOADED.search(again.message)):
        return ()
    return (Explanation(fault.name, described(fault, Contract()), 0.0),)
