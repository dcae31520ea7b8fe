"""Faults planted in the source of the bundled Triton kernels, one line each: `examine` finds every one.

The faults stand in `faults/*.toml`, a file for each kernel. A usual run plants the first two of each file, which
together are in every source. One with ``missed``, the reason why no case shows it, fails here once it is found. All of
them are planted by ``./dev test -m evidence`` and ``./dev test -m slow`` together.
"""

import importlib.util
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from assay.kernels import triton
from assay.verify.campaign.table import entries
from assay.verify.examination.procedure import examination

EARLY = 2
FOLDER = Path(str(triton.__file__)).parent
TABLES = [tomllib.loads(path.read_text()) for path in sorted(Path(__file__).with_name("faults").glob("*.toml"))]
FAULTS = [
    pytest.param(
        *(table, fault),
        id=f"{table['function']}: {fault['name']}",
        marks=[
            *([pytest.mark.evidence] if index >= EARLY else []),
            *([pytest.mark.xfail(reason=fault["missed"], strict=True)] if "missed" in fault else []),
        ],
    )
    for table in TABLES
    for index, fault in enumerate(table["fault"])
]


def faulty_module(module: str, old: str, new: str, folder: Path, parts: Sequence[str] = ()) -> ModuleType:
    """The module with ``old`` replaced by ``new``, under operator names of its own; or the last of its parts, each of
    which the one before it imports."""
    if parts:
        part, *inner_parts = parts
        inner = faulty_module(part, old, new, folder, inner_parts)
        return faulty_module(module, f"from {part} import", f"from {inner.__name__} import", folder)
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert old in source, f"{module} has no line {old!r}: the fault can't be planted"
    name = f"faulty_{module.rpartition('.')[2]}_{abs(hash((old, new, folder)))}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new, 1).replace('"assay::', f'"{name}::'))
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    made = importlib.util.module_from_spec(found)
    sys.modules[name] = made
    found.loader.exec_module(made)
    return made


def parts_of(table: dict[str, Any], fault: dict[str, Any]) -> list[str]:
    """The modules on the way from a kernel's own to the one with the fault."""
    part = fault.get("part", table.get("part", []))
    return [part] if isinstance(part, str) else list(part)


@pytest.mark.slow
@pytest.mark.parametrize(("table", "fault"), FAULTS)
def test_a_planted_fault_is_found(table: dict[str, Any], fault: dict[str, Any], tmp_path: Path) -> None:
    """The faulty kernel fails under the contract that the right one keeps."""
    function = fault.get("function", table["function"])
    module = fault.get("module", table["module"])
    entry = next(entry for entry in entries() if entry.target == f"{table['module']}:{function}")
    faulty = faulty_module(module, fault["old"], fault["new"], tmp_path, parts_of(table, fault))
    changes = {name: fault[name] for name in ("dtype", "options", "shapes") if name in fault}
    changes |= {"spec": fault.get("spec", fault.get("function", table["spec"])), "strict": True, "every_aspect": False}
    changes |= {"shrinking": False}
    settings = replace(entry.settings, **changes)
    verdict = examination(getattr(faulty, function), settings)
    assert verdict.outcome == "FAIL", str(verdict)


def test_there_are_faults_of_every_kind() -> None:
    """At least 25 faults are planted, in every bundled kernel; those of a usual run in every source of one."""
    assert len(FAULTS) >= 25
    bundled = {entry.target.partition(":")[0] for entry in entries() if entry.group == "assay"}
    assert {table["module"] for table in TABLES} == bundled
    usual = {source_of(table, fault) for table in TABLES for fault in table["fault"][:EARLY]}
    assert usual >= {
        f"{triton.__name__}.{path.stem}" for path in FOLDER.glob("*.py") if "@triton.jit" in path.read_text()
    }


def test_every_fault_can_be_planted() -> None:
    """Its line is in the source that it names."""
    for table in TABLES:
        for fault in table["fault"]:
            source = FOLDER / f"{source_of(table, fault).rpartition('.')[2]}.py"
            assert fault["old"] in source.read_text(), f"{table['function']}: {fault['name']}"


def source_of(table: dict[str, Any], fault: dict[str, Any]) -> str:
    """The module that a fault is planted in."""
    *_, source = fault.get("module", table["module"]), *parts_of(table, fault)
    return source
