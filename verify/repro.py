"""Repro lines: one line that runs one case again, in a fresh process."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from assay.golden.errors import unknown
from assay.verify.calls import Call, target_of
from assay.verify.contract import Contract, contract_from_table
from assay.verify.errors import ReproError, TargetError
from assay.verify.frameworks import check_framework
from assay.verify.inputs.cases import Case, case_from_line
from assay.verify.interpreter import emulated_device, emulating
from assay.verify.question import check_device
from assay.verify.result import Result
from assay.verify.trial import Bench


def load_target(target: str) -> Callable[..., Any]:
    """The kernel called ``package.module:function``; modules of the current folder count. Raises `TargetError`."""
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise TargetError(f"target {target!r}; expected package.module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else module_name
        is_own = missing.partition(".")[0] == module_name.partition(".")[0]
        hint = "modules of the current folder and of PYTHONPATH count" if is_own else f"it needs {missing}"
        raise TargetError(
            f"target {target!r}: {module_name} can't be imported ({type(error).__name__}: {error}); {hint}"
        ) from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise TargetError(
                f"target {target!r}: {unknown('function', part, [n for n in dir(found) if n[0] != '_'][:20])}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"target {target!r} is a {type(found).__name__}, which can't be called")
    return found


def repro_line(bench: Bench, case: Case) -> str:
    """The command that runs ``case`` again."""
    content: dict[str, Any] = {"target": target_of(bench.call.kernel)}
    content["listed"] = list(bench.call.listed)
    if bench.contract.changed():
        content["contract"] = bench.contract.changed()
    for name, value, default in (
        ("faithful", emulated_device(), ""),
        ("framework", bench.call.framework, "torch"),
        ("device", str(bench.device), "cpu"),
        ("timeout", bench.call.timeout, 30.0),
    ):
        if value != default:
            content[name] = value
    content["case"] = json.loads(case.line())
    line = json.dumps(content, separators=(",", ":")).replace("'", "\\u0027")
    return f"assay repro '{line}'"


def parse_line(line: str) -> tuple[dict[str, Any], Case]:
    """What a repro line says, and its case. Raises `ReproError`."""
    text = line.strip().removeprefix("assay repro").strip().strip("'")
    try:
        content = json.loads(text)
        return content, case_from_line(json.dumps(content["case"]))
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ReproError):
            raise
        raise ReproError(f"repro line: expected what a report prints after 'assay repro', got {text[:60]!r}") from None


def run_line(line: str, target: str = "", before: Callable[[Case, float], None] | None = None) -> Result:
    """Run the case of a repro line; ``target`` names the kernel where the line doesn't, ``before`` is that of `Call`.

    Raises `ReproError`, and `SettingError` or `TargetError` where this machine lacks what the line needs.
    """
    content, case = parse_line(line)
    try:
        kernel_name = target or content["target"]
        listed = {name: [case.options[name]] for name in content["listed"]}
    except (KeyError, TypeError) as error:
        raise ReproError(f"repro line: {error} is missing; expected what a report prints after 'assay repro'") from None
    contract_fields = content.get("contract", {})
    if not kernel_name:
        raise ReproError("repro line: the kernel has no importable name; add --target package.module:function")
    framework, device = content.get("framework", "torch"), content.get("device", "cpu")
    check_framework(framework, device)
    check_device(device)
    contract = contract_from_table(contract_fields) if contract_fields else Contract()
    with emulating(str(content.get("faithful", ""))):
        call = Call(load_target(kernel_name), listed, framework, float(content.get("timeout", 30.0)), before)
        return Bench(call, contract, device).try_case(case)
