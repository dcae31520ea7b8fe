"""Several verdicts as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from assay.verify.verdict import Verdict

_Name = TypeVar("_Name", str, int)


def joined(verdicts: Mapping[_Name, Verdict]) -> tuple[str, tuple[_Name, ...]]:
    """The outcome of all, and the names of those that did not pass.

    The outcome is FAIL where one is, else the first that is no PASS.
    """
    failed = tuple(name for name, verdict in verdicts.items() if not verdict.passed)
    outcomes = [verdicts[name].outcome for name in failed]
    return "FAIL" if "FAIL" in outcomes else next(iter(outcomes), "PASS"), failed
