"""Short examinations, and what they must find."""

from collections.abc import Callable
from typing import Any

from assay.verify import Verdict, examine
from assay.verify.findings import Failure


def quick(kernel: Callable[..., Any], op: str = "softmax", dtype: Any = "float32", **settings: Any) -> Verdict:
    """The verdict of the fixed cases of a quick effort, without shrinking."""
    return examine(kernel, op, **{"dtype": dtype, "effort": "quick", "examples": 0, "shrinking": False, **settings})


def first(kernel: Callable[..., Any], op: str = "softmax", dtype: Any = "float32", **settings: Any) -> Verdict:
    """The same, which ends with the first failure."""
    return quick(kernel, op, dtype, **{"every_aspect": False, **settings})


def failure_of(verdict: Verdict) -> Failure:
    assert verdict.failure is not None, str(verdict)
    return verdict.failure


def passes(verdict: Verdict) -> Verdict:
    """The verdict, which must be PASS."""
    assert verdict.outcome == "PASS", str(verdict)
    return verdict


def fails(verdict: Verdict) -> Verdict:
    assert verdict.outcome == "FAIL", str(verdict)
    return verdict
