"""Kernels of the survey's table at one set of sizes, and with a fault in their source."""

import ast
import importlib
import math
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assay.golden.inputs.values import names_of
from assay.golden.registry import spec
from assay.verify.campaign.table import Entry
from assay.verify.cases.case import Case
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness


def public_functions(folder: Path) -> set[str]:
    """What takes arguments of users in a folder of kernels, by the survey's names."""
    return {
        f"assay.kernels.{folder.name}.{path.stem}:{node.name}"
        for path in folder.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(("_", "check"))
        if "check" in ast.dump(node)
    }


def kernel_of(entry: Entry) -> Any:
    """The function that an entry names, as it stands in `sys.modules`."""
    module, _, name = entry.target.partition(":")
    return getattr(importlib.import_module(module), name)


def planted(entry: Entry, fault: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The entry's function, with the fault in the file that has it; the function's own file imports that, or the files
    between them ("by")."""
    module, _, name = entry.target.partition(":")
    package, _, own = module.rpartition(".")
    folder = Path(str(importlib.import_module(package).__file__)).parent
    found = None
    for file in dict.fromkeys((fault["file"], *fault.get("by", ()), own)):
        source = (folder / f"{file}.py").read_text(encoding="utf-8")
        if file == fault["file"]:
            assert fault["old"] in source
            source = source.replace(fault["old"], fault["new"])
        found = types.ModuleType(f"{package}.{file}")
        monkeypatch.setitem(sys.modules, found.__name__, found)
        exec(compile(source, f"faulty {file}", "exec"), vars(found))
    return getattr(found, name)


def first_failure(kernel: Any, entry: Entry, sizes: dict[str, int], dtype: Any, options: dict[str, Any]) -> str:
    """What is wrong at these sizes, if anything: among ordinary numbers, whole ones, and with an infinity."""
    op, framework = entry.settings.spec, entry.settings.framework
    definition = spec(op)
    harness = KernelHarness(
        Call(kernel, {name: [value] for name, value in options.items()}, framework), entry.settings.contract
    )
    complete = definition.complete(options)
    tensors = definition.signature(complete).tensors
    real = [tensor for tensor in tensors if tensor.role == "real"]
    given = dtype if isinstance(dtype, dict) else dict.fromkeys([tensor.name for tensor in tensors], dtype)
    dtypes = {t.name: given[t.name] if t.dtype in (None, "fp8") else str(t.dtype) for t in tensors}
    plain = Case(op, sizes, dtypes, complete)
    cases = [plain, replace(plain, values={t.name: "integers" for t in real if "integers" in names_of(t)}, seed=1)]
    if "float" in dtypes[real[-1].name]:
        last = tuple(size - 1 for size in plain.shape(real[-1]))
        cases.append(replace(plain, edits=((real[-1].name, last, math.inf),), seed=2))
    for case in cases:
        failure = harness.try_case(case).failure
        if failure is not None:
            return f"{failure.kind}: {failure.message}"
    return ""
