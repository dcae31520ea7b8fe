"""What an examination against a reference catches, over the small references of the tests.

Run: ``python benchmarks/golden/reference_kernels.py [written]``. For each reference: its function run by PyTorch in
float32, which must not fail; and a kernel for each fault of its operations that a small case shows (`of_reference`),
which must. ``written``: for each of tests/verify/references the kernels that were written for it, at usual effort.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from assay.golden.lowering import reference_spec
from assay.runtime.errors import AssayError
from assay.verify import examine
from assay.verify.explanation.fault_models.evaluation import kernel_of
from assay.verify.explanation.fault_models.references import of_reference


def main() -> None:
    """Print a line for each reference, and the counts."""
    from tests.golden.lowering.small_references import SMALL

    torch.set_num_threads(1)
    asked: dict[str, Any] = {"dtype": "float32", "effort": "quick", "shrinking": False, "every_aspect": False}
    failed, missed, tried, refused = [], [], 0, 0
    for name, (reference, tensors, sizes) in SMALL.items():
        started = time.process_time()
        fixed = {symbol: [size] for symbol, size in sizes.items()}
        definition = reference_spec(reference, tensors)

        def eager(*given: Any, reference: Any = reference) -> Any:
            return reference(*given)

        for shapes in ({}, fixed):
            try:
                verdict = examine(eager, reference, tensors=tensors, shapes=shapes, **asked)
                break
            except AssayError:
                continue
        if verdict.outcome == "FAIL":
            failed.append(name)
        faults, lost = 0, []
        for fault in of_reference(definition):
            try:
                found = examine(
                    kernel_of(fault, definition.qualified_name), reference, tensors=tensors, shapes=shapes, **asked
                )
            except AssayError:
                refused += 1  # an altered operation whose arguments fit no more at other sizes
                continue
            faults += 1
            if found.outcome != "FAIL":
                lost.append(f"{fault.name}: {fault.description}")
        tried, missed = tried + faults, missed + lost
        print(f"{name:28} eager {verdict.outcome}, {faults - len(lost)} of {faults} faults caught", end=" ")
        print(f"({time.process_time() - started:.0f} s)", *(f"\n    missed {words}" for words in lost), flush=True)
    print(f"eager kernels that fail: {failed}; of {tried} faults {len(missed)} missed, {refused} not tried")


def written() -> None:
    """Print a line for each reference that has kernels of its own, and the counts."""
    from tests.verify.references import CASES

    torch.set_num_threads(1)
    failed, missed, honest, faulty = [], [], 0, 0
    for case in CASES:
        asked: dict[str, Any] = {"tensors": case.tensors, "dtype": case.dtype, "shrinking": False, **case.asked}
        started = time.process_time()
        flagged = [
            place
            for place, kernel in enumerate(case.honest)
            if examine(kernel, case.reference, **asked).outcome not in ("PASS", "WARN")
        ]
        passed = [
            words for words, kernel in case.faulty.items() if examine(kernel, case.reference, **asked).outcome == "PASS"
        ]
        honest, faulty = honest + len(case.honest), faulty + len(case.faulty)
        failed += [f"{case.name}, honest {place}" for place in flagged]
        missed += [f"{case.name}: {words}" for words in passed]
        print(f"{case.name:24} {time.process_time() - started:5.0f} s", *flagged, *passed, flush=True)
    print(f"{len(CASES)} references: of {honest} honest kernels fail {failed}; of {faulty} faulty ones pass {missed}")


if __name__ == "__main__":
    written() if sys.argv[1:] == ["written"] else main()
