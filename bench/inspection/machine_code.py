"""What NVIDIA's tools tell of a compiled kernel: registers, local memory, and its instructions, counted by kind."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from triton import knobs
from triton.runtime.cache import get_cache_manager

_FILE = "assay-machine-code-1.json"
_PRODUCTS = re.compile(r"(?:HGMMA|QGMMA|IGMMA|OGMMA|HMMA|IMMA|QMMA|OMMA|DMMA|BGMMA|UTC[A-Z]*MMA)\b")
_KEPT = {
    "LDG": "load", "STG": "store", "LDGSTS": "async copy", "UTMALDG": "TMA load", "UTMASTG": "TMA store",
    "UBLKCP": "TMA load", "LDL": "local load", "STL": "local store", "LDS": "shared load", "STS": "shared store",
    "FFMA": "FFMA", "FFMA2": "FFMA",
}  # fmt: skip
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@dataclass(frozen=True)
class MachineCode:
    """Of one thread: ``registers``, bytes of ``stack``, of which ``spilled`` hold what found no register.

    ``products`` counts tensor-core instructions by their full names; ``moves`` the other kinds; ``widths`` loads and
    stores of global memory, and asynchronous copies, by kind and bytes.
    """

    registers: int
    stack: int
    spilled: int
    threads: int
    products: Mapping[str, int]
    moves: Mapping[str, int]
    widths: Mapping[str, Mapping[int, int]]


def machine_code(compiled: Any) -> MachineCode:
    """Read a kernel that Triton compiled; kept beside it in Triton's cache, by the same hash.

    Raises RuntimeError where NVIDIA's tools can't read it.
    """
    manager = get_cache_manager(compiled.hash)
    path = manager.get_file(_FILE)
    if path is not None:
        return msgspec.json.decode(Path(path).read_bytes(), type=MachineCode)
    result = _read(compiled.asm)
    manager.put(msgspec.json.encode(result), _FILE)
    return result


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of one thread of a binary's only kernel, of whatever language it was.

    Raises RuntimeError where NVIDIA's tools can't read it.
    """
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        usage = _told(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary))
    counts = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return counts["REG"], counts["STACK"] + counts["LOCAL"]


def _read(asm: Mapping[str, Any]) -> MachineCode:
    registers, stack = resources(asm["cubin"])
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(asm["cubin"])
        text = _told(knobs.nvidia.nvdisasm.path, "--print-code", str(binary))
    asked = sum(map(int, re.findall(r"\.local \.align \d+ \.b8\s+__local_depot\w*\[(\d+)\]", asm["ptx"])))
    products, moves, widths = _counted(text)
    threads = re.search(r"\.(?:req|max)ntid (\d+)", asm["ptx"])
    return MachineCode(
        registers=registers,
        stack=stack,
        spilled=max(stack - -(-asked // 8) * 8, 0) if moves["local store"] else 0,
        threads=int(threads[1]) if threads else 0,
        products=dict(products),
        moves=dict(moves),
        widths={kind: dict(sorted(result.items())) for kind, result in widths.items()},
    )


def _told(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _counted(sass: str) -> tuple[Counter[str], Counter[str], dict[str, Counter[int]]]:
    products: Counter[str] = Counter()
    moves: Counter[str] = Counter()
    widths: dict[str, Counter[int]] = {}
    for name in re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_.a-z]*)", sass, re.MULTILINE):
        base, *parts = name.split(".")
        if _PRODUCTS.match(base):
            products[name] += 1
        elif base in _KEPT:
            kind = _KEPT[base]
            moves[kind] += 1
            if base in ("LDG", "STG", "LDGSTS"):
                width = next((_WIDTHS[part] for part in parts if part in _WIDTHS), 4)
                widths.setdefault(kind, Counter())[width] += 1
    return products, moves, widths


__all__ = ["MachineCode", "machine_code", "resources"]
