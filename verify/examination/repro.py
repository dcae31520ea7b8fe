"""Repro lines: one command that runs one case again, in a fresh process."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from assay.golden.errors import UnknownSpec
from assay.golden.registry import spec
from assay.interpreter import device_to_pretend, emulating, suspended
from assay.runtime.environment import generators_kept
from assay.runtime.errors import AssayError, unknown
from assay.runtime.modules import importable
from assay.runtime.pool import Heartbeat, Raised, run_alone
from assay.runtime.process import Lost
from assay.runtime.records import from_json
from assay.verify.cases.at_shape import PROTOCOL as AT
from assay.verify.cases.case import Case
from assay.verify.comparison.result import Result
from assay.verify.comparison.statistics import has_independent_data, judge_statistically
from assay.verify.errors import ReproError
from assay.verify.findings import ASPECTS
from assay.verify.harness.frameworks import check_device, check_framework
from assay.verify.harness.isolation import Isolation
from assay.verify.harness.runner import KernelHarness
from assay.verify.harness.target import load_target
from assay.verify.settings import Settings

if TYPE_CHECKING:
    from assay.verify.verdict import Verdict

_OF_NUMBERS = {"contract", "exact", "nonfinite", "layout", "unwritten_output"}  # the last two are found by more calls
_SECONDS = 30.0  # without a sign of life, after which the fresh process is given up
_NAMELESS = "the kernel has no importable name; add --target package.module:function"


def repro_line(settings: Settings, target: str, case: Case, aspect: str = "") -> str:
    """Return the command that runs ``case`` of the kernel ``target`` again; empty if the kernel has no importable name.

    ``aspect`` is the aspect that its failure is attributed to.
    """
    of_the_case = case.as_dict()
    of_the_case["spec"] = _importable(of_the_case["spec"])
    content = {"target": _importable(target), **settings.of_call(case.options), "case": of_the_case}
    content |= {"aspect": aspect} if aspect else {}
    line = json.dumps(content, separators=(",", ":")).replace("'", "\\u0027")
    return f"assay repro {shlex.quote(line)}"


def _importable(name: str) -> str:
    """Return ``module:name`` as a new process imports it; the name of a built-in op unchanged."""
    module, colon, own = name.partition(":")
    return f"{importable(module)}{colon}{own}" if colon else name


def parse_line(line: str, target: str = "") -> tuple[Settings, str, Case, str]:
    """Return the arguments that `repro_line` got. ``target`` overrides the line's own; its module may define the op.

    Raises `ReproError`.
    """
    text = line.strip().removeprefix("assay repro").strip().strip("'")
    try:
        content: dict[str, Any] = from_json(text, "", ValueError)
        named, given, aspect = content.pop("target"), content.pop("case"), content.pop("aspect", "")
        target = target or named
        case = Case.from_dict({**given, "spec": spec(given["spec"], target).qualified_name})
        if aspect not in ("", *ASPECTS):
            raise ReproError(f"repro line: {unknown('aspect', aspect, ASPECTS)}")
        return Settings.from_table({"spec": case.spec, **content}), target, case, aspect
    except ReproError:
        raise
    except UnknownSpec as error:
        raise ReproError(f"repro line: {error if target else _NAMELESS}") from None
    except AssayError as error:
        raise ReproError(f"repro line: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ReproError(f"repro line: expected what a report prints after 'assay repro', got {text[:60]!r}") from None


def pretending(line: str, pretend: str) -> str:
    """Return the line with another pretended device. Raises `ReproError`."""
    settings, target, case, aspect = parse_line(line)
    return repro_line(replace(settings, pretend=pretend), target, case, aspect)


def with_repeated(verdict: Verdict) -> Verdict:
    """Return the verdict with what the gravest failure's repeat line gives in a fresh process, which it takes a few
    seconds to start."""
    name, aspect = next(iter(verdict.violated.items()), ("", None))
    if aspect is None or aspect.failure is None or not verdict.target or not aspect.repro:
        return verdict
    failure = aspect.failure
    if failure.kind == "timeout" or failure.device_lost or failure.case.protocol == AT:
        why = "it is large" if failure.case.protocol == AT else "it hangs, or loses its process"
        words = f"not run again: {why}"
    else:
        (line,) = shlex.split(aspect.repro)[2:]
        answer = run_alone(_kind_of_failure, line, preload=__name__, timeout=_SECONDS)
        if isinstance(answer, Raised):
            words = f"a fresh process can't run it: {answer.message}"
        elif isinstance(answer, Lost):
            words = f"in a fresh process: {answer.message}"
        elif answer == failure.kind or {answer, failure.kind} <= _OF_NUMBERS:
            words = "(so again in a fresh process)"
        elif answer:
            words = f"in a fresh process the same case fails by another kind: {answer}"
        else:
            words = (
                "in a fresh process the same case is right: the failure depends on memory, or on the calls before it"
            )
    return replace(verdict, aspects={**verdict.aspects, name: replace(aspect, repeated=words)})


def _kind_of_failure(line: str, heartbeat: Heartbeat) -> str:
    """Return the kind of the failure of a repeat line; empty if it passes."""
    # Isolated: what this process answers is unpickled, and a kernel must not reach it.
    failure = run_line(line, heartbeat=lambda case, seconds: heartbeat("", seconds), isolated=True).failure
    return "" if failure is None else failure.kind


def run_line(
    line: str, target: str = "", heartbeat: Callable[[Case, float], None] | None = None, *, isolated: bool = False
) -> Result:
    """Run the case of a repro line, and judge it by the statistical bound too.

    ``target`` names the kernel if the line doesn't; ``heartbeat`` is the callback of `Call`; ``isolated``: the kernel
    runs in a process of its own, without a limit of memory. Raises `ReproError`, and
    `SettingError` or `TargetError` if this machine lacks what the line needs.
    """
    settings, target, case, aspect = parse_line(line, target)
    if not target:
        raise ReproError(f"repro line: {_NAMELESS}")
    check_framework(settings.framework, settings.device)
    check_device(settings.device)
    with generators_kept(), suspended(), emulating(settings.faithful, emission=settings.emission):
        with emulating("", device_to_pretend(settings.pretend, settings.faithful)):
            kernel = load_target(target)
        harness = KernelHarness.of(kernel, settings, heartbeat)
        with Isolation(harness, 0, target) if isolated else nullcontext() as isolation:
            result = replace(harness, isolation=isolation).try_case(case)
        if result.failure is None and has_independent_data(case):
            result = replace(result, failure=judge_statistically(harness.oracle, result.case, result).failure)
    if result.failure is None or result.failure.aspect:
        return result
    return replace(result, failure=replace(result.failure, aspect=aspect))
