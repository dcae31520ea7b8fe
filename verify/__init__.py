"""Verification: a kernel against the certified golden, with a tolerance derived from its contract.

``examine(kernel, op, ...)`` gives a `Verdict`; ``check`` raises `VerificationError` unless it is a pass; `Contract` is
what the kernel promises about its arithmetic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.verify.backward import BackwardVerdict, examine_backward, gradient_of
    from assay.verify.contract import Contract
    from assay.verify.errors import VerificationError
    from assay.verify.examination import check, examine
    from assay.verify.result import Failure
    from assay.verify.verdict import Explanation, Verdict

_HOME = {
    "BackwardVerdict": "backward",
    "Contract": "contract",
    "Explanation": "verdict",
    "Failure": "result",
    "Verdict": "verdict",
    "VerificationError": "errors",
    "check": "examination",
    "examine": "examination",
    "examine_backward": "backward",
    "gradient_of": "backward",
}
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
]


def __getattr__(name: str) -> Any:
    """Load a name on first use: importing this package must not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
