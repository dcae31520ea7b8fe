"""Verification: a kernel against the certified golden, with a tolerance derived from its contract.

``examine(kernel, op, ...)`` gives a `Verdict`; ``check`` raises `VerificationError` unless it is a pass; `Contract` is
what the kernel promises about its arithmetic; ``judge`` judges a solution of a kernel benchmark's problem.
"""

from typing import TYPE_CHECKING

from assay.runtime.modules import lazy

if TYPE_CHECKING:
    from assay.judge.procedure import judge
    from assay.verify.contract import Contract
    from assay.verify.errors import VerificationError
    from assay.verify.examination.backward import BackwardVerdict, examine_backward, gradient_of
    from assay.verify.examination.procedure import check, examine
    from assay.verify.findings import Explanation, Failure
    from assay.verify.verdict import Verdict

__all__ = [
    "BackwardVerdict",
    "Contract",
    "Explanation",
    "Failure",
    "Verdict",
    "VerificationError",
    "check",
    "examine",
    "examine_backward",
    "gradient_of",
    "judge",
]

__getattr__, __dir__ = lazy(__name__)
