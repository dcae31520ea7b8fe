"""Compilers of a device's machine code, and the faults that others have reported of them (configs/compilers.toml)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from assay.configs import table

_HOPPER = 90  # its compute capability times ten


def ptxas_version() -> str:
    """Return the version of the assembler that the installed Triton runs for Hopper.

    Raises `RuntimeError` where it can't be run.
    """
    from triton import knobs
    from triton.backends.nvidia import compiler

    tool = compiler.get_ptxas(_HOPPER) if hasattr(compiler, "get_ptxas") else knobs.nvidia.ptxas
    return str(tool.version)


def reported_faults(tool: str, version: str) -> list[str]:
    """Return what others have reported of this version of a compiler, in lines."""
    lines = []
    for fault in _faults(tool, version):
        range_ = f"{fault['from']} to {fault['before']}, exclusive"
        lines.append(f"reported of {range_}, not reproduced here: {fault['what']}")
        lines += [f"- {report}" for report in fault["reports"]]
        lines.append(f"remedy: {fault['remedy']}")
    return lines


def suspected_faults(tool: str, version: str, counts: Mapping[str, int]) -> list[str]:
    """Return in sentences the reported faults of a compiler that programs with so many instructions may meet."""
    sentences = []
    for fault in _faults(tool, version):
        if counts.get(fault["instruction"], 0) >= fault["least"]:
            reports = ", ".join(report.partition(" ")[0] for report in fault["reports"])
            sentences.append(
                f"perhaps the compiler's fault, not the kernel's: {tool} {version}, which made its machine code, is "
                f"reported for {fault['what']}: {reports}. To know, {fault['remedy']}, and examine again"
            )
    return sentences


def counted(assembly: str) -> dict[str, int]:
    """Return how often each instruction of the table is in a program's assembly."""
    return {name: assembly.count(name) for name in _instructions()}


@cache
def _instructions() -> tuple[str, ...]:
    return tuple(dict.fromkeys(fault["instruction"] for fault in table("compilers")["fault"]))


def _faults(tool: str, version: str) -> Iterator[Mapping[str, Any]]:
    for fault in table("compilers")["fault"]:
        if fault["tool"] == tool and _numbers(fault["from"]) <= _numbers(version) < _numbers(fault["before"]):
            yield fault


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
