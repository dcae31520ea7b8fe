"""Writes a verdict as traces of FlashInfer Bench, one for each workload that was judged."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from assay.judge.problems.flashinfer_trace import workloads
from assay.judge.problems.problem import ProblemError
from assay.judge.verdict import SolutionVerdict, Workload
from assay.runtime.files import write_text_atomically

_WITH_CORRECTNESS = ("PASSED", "INCORRECT_NUMERICAL")


def traces(verdict: SolutionVerdict) -> list[dict[str, Any]]:
    """Return the traces of a verdict on a solution of a FlashInfer Trace definition.

    ``evaluation.correctness.extra`` has ``ratio`` (the largest |solution - golden| / radius, at most 1 where the
    contract is kept), ``radius``, the outcome, the cheats and the command that repeats it. A workload with correct
    numbers is still INCORRECT_NUMERICAL if the verdict as a whole fails. A workload that wasn't judged at its own sizes
    (``verdict.not_judged``) has no trace, because the format has no status for it. Raises `ProblemError` for problems
    of other formats.
    """
    if verdict.format != "FlashInfer Trace":
        raise ProblemError(f"{verdict.problem}: expected a FlashInfer Trace definition, got a {verdict.format} problem")
    stated = {str(part.get("uuid", "")): part for part in workloads(Path(verdict.problem), verdict.spec)}
    return [
        {
            "definition": verdict.spec,
            "workload": stated.get(result.uuid, {"uuid": result.uuid or "none", "axes": {}, "inputs": {}}),
            "solution": verdict.kernel,
            "evaluation": evaluation(verdict, result),
        }
        for result in verdict.workloads
    ]


def evaluation(verdict: SolutionVerdict, result: Workload) -> dict[str, Any]:
    """Return the ``evaluation`` object of one workload's trace."""
    status = "INCORRECT_NUMERICAL" if result.status == "PASSED" and not verdict.passed else result.status
    speed = result.speed
    if status == "PASSED" and (speed is None or speed.reference is None):
        speed = None
    why = result.message or "; ".join(map(str, verdict.cheats)) or verdict.note
    made: dict[str, Any] = {
        "status": status,
        "environment": environment(verdict),
        "timestamp": datetime.now(UTC).isoformat(),
        "log": why,
        "correctness": None,
        "performance": None,
    }
    if status in _WITH_CORRECTNESS:
        extra = {
            "ratio": _number(result.worst),
            "radius": _number(result.radius),
            "outcome": verdict.outcome,
            "cheats": [cheat.name for cheat in verdict.cheats],
            "repro": result.repro,
        }
        relative, absolute = _number(result.relative), _number(result.absolute)
        made["correctness"] = {"max_relative_error": relative, "max_absolute_error": absolute, "extra": extra}
    if status == "PASSED":  # the format requires it: zeros for a workload that wasn't timed
        reference = speed.reference.median if speed is not None and speed.reference is not None else 0.0
        own = speed.solution.median if speed is not None else 0.0
        factor = speed.factor or 0.0 if speed is not None else 0.0
        made["performance"] = {"latency_ms": own, "reference_latency_ms": reference, "speedup_factor": factor}
    return made


def environment(verdict: SolutionVerdict) -> Mapping[str, Any]:
    """Return the hardware and the versions of libraries."""
    device = verdict.speed.device if verdict.speed is not None else "cpu"
    hardware = torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or platform.machine()
    return {"hardware": hardware, "libs": {"torch": torch.__version__, "python": platform.python_version()}}


def write_traces(path: str | Path, *verdicts: SolutionVerdict) -> Path:
    """Write `traces` of each as JSON lines; return the path. Raises as `traces` does."""
    lines = [json.dumps(trace) + "\n" for verdict in verdicts for trace in traces(verdict)]
    return write_text_atomically(path, "".join(lines))


def _number(value: float) -> float | str:
    """Return a number as the format's JSON has it: NaN and infinities as text."""
    return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
