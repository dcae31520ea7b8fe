"""The record of one launch in one configuration: what the compiler made of it, and how much it does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from assay.bench.inspection.amounts import Amounts, amounts
from assay.bench.inspection.arch import Arch
from assay.bench.inspection.machine_code import MachineCode, machine_code
from assay.bench.inspection.recording import Launch
from assay.bench.inspection.source_lines import (
    Line,
    narrow_products,
    scalar_tiles,
    tf32_products,
    transposed_operands,
)

_UNITS = (("UTC", "tcgen05"), ("HGMMA", "wgmma"), ("QGMMA", "wgmma"), ("IGMMA", "wgmma"), ("BGMMA", "wgmma"))
_WORDS = {"E4M3": "e4m3", "E5M2": "e5m2", "BF16": "bf16", "TF32": "tf32", "S8": "int8", "U8": "int8", "F64": "fp64"}


@dataclass(frozen=True)
class Facts:
    """A launch, compiled.

    ``config`` are the constants that a tuner chose, or else all whole numbers among the constants; bytes of ``shared``
    memory and of ``stack``, of which ``spilled``; ``occupancy`` is a share of the resident warps; ``products`` names
    tensor-core instructions, "wgmma bf16", with their number in the code; ``widths`` are bytes of one instruction by
    kind, with the number of such instructions; ``amounts`` is None where they couldn't be counted. The lines are those
    of findings.
    """

    kernel: str
    file: str
    line: int
    grid: tuple[int, int, int]
    config: Mapping[str, Any]
    warps: int
    stages: int | None
    tuned: bool
    pruned: bool
    error: str = ""
    threads: int = 0
    registers: int = 0
    stack: int = 0
    spilled: int = 0
    shared: int = 0
    tensor_memory: int = 0
    occupancy: float = 0.0
    products: Mapping[str, int] = field(default_factory=dict)
    moves: Mapping[str, int] = field(default_factory=dict)
    widths: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    amounts: Amounts | None = None
    tf32: tuple[Line, ...] = ()
    transposed: tuple[Line, ...] = ()
    scalar: Mapping[Line, tuple[int, int]] = field(default_factory=dict)
    narrow: bool = False
    remedy: str = ""

    @property
    def name(self) -> str:
        """The configuration in words."""
        parts = [f"{name}={value}" for name, value in self.config.items()]
        stages = f", {self.stages} stages" if self.stages is not None else ""
        return f"{' '.join(parts)}{', ' if parts else ''}{self.warps} warps{stages}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        result = asdict(replace(self, tf32=(), transposed=(), scalar={}))
        for name in ("tf32", "transposed", "scalar", "narrow"):
            del result[name]
        result["widths"] = {kind: {str(width): n for width, n in of.items()} for kind, of in self.widths.items()}
        return result


def facts(launch: Launch, arch: Arch, known: dict[str, Facts]) -> Facts:
    """Look at what a launch was compiled to; ``known`` keeps what doesn't hang on its grid, by what was compiled."""
    chosen = launch.tuned if launch.tuned is not None else tuple(launch.constants)
    given = {name: launch.constants[name] for name in chosen if name in launch.constants}
    own = Facts(
        kernel=launch.kernel,
        file=launch.file,
        line=launch.line,
        grid=launch.grid,
        config={name: value for name, value in given.items() if launch.tuned is not None or type(value) is int},
        warps=launch.warps,
        stages=launch.stages,
        tuned=launch.tuned is not None,
        pruned=launch.pruned,
        error=launch.error,
    )
    if launch.compiled is None:
        return own
    key = f"{launch.compiled.hash} {launch.pruned}"
    if key not in known:
        known[key] = _looked_at(own, launch, arch)
    counted = None
    with suppress(Exception):  # a form of the IR that nobody has met; what the compiler made of it stands all the same
        counted = None if launch.guessed else amounts(launch.compiled.asm["ttir"], launch.grid, launch.numbers)
    return replace(known[key], grid=launch.grid, config=own.config, amounts=counted)


def _looked_at(own: Facts, launch: Launch, arch: Arch) -> Facts:
    """What was compiled, whatever the grid."""
    asm, metadata = launch.compiled.asm, launch.compiled.metadata
    code = machine_code(launch.compiled)
    return replace(
        own,
        threads=code.threads,
        registers=code.registers,
        stack=code.stack,
        spilled=code.spilled,
        shared=metadata.shared,
        tensor_memory=getattr(metadata, "tmem_size", None) or 0,
        occupancy=arch.occupancy(code.threads, code.registers, metadata.shared),
        products=_products(code),
        moves=code.moves,
        widths=code.widths,
        tf32=tuple(tf32_products(asm["ttir"])),
        transposed=tuple(dict.fromkeys(result.line for result in transposed_operands(asm["ttgir"]))),
        scalar=scalar_tiles(asm["ttgir"], asm["ptx"], code.threads),
        narrow=narrow_products(asm["ttir"]),
        remedy=_remedy(launch, arch) if code.spilled and not launch.pruned else "",
    )


def _products(code: MachineCode) -> dict[str, int]:
    results: dict[str, int] = {}
    for name, count in code.products.items():
        base, *parts = name.split(".")
        unit = next((unit for start, unit in _UNITS if base.startswith(start)), "mma")
        kinds = list(dict.fromkeys(_WORDS[part] for part in parts if part in _WORDS))
        kind = "+".join(kinds) or {"UTCQ": "8-bit", "UTCH": "16-bit", "UTCI": "int8", "UTCO": "4-bit"}.get(
            base[:4], "fp16"
        )
        words = f"{unit} {kind}"
        results[words] = results.get(words, 0) + count
    return results


def _remedy(launch: Launch, arch: Arch) -> str:
    """A change that ends the spilling, tried out: twice the warps, or half of a tile's longest side."""
    sides = {
        name: value
        for name, value in launch.constants.items()
        if type(value) is int and value >= 32 and value & (value - 1) == 0 and "GROUP" not in name.upper()
    }
    halved = sorted(sides, key=lambda name: -sides[name])[:3]
    tried: list[tuple[str, dict[str, int]]] = [
        (f"{name}={sides[name] // 2}", {name: sides[name] // 2}) for name in halved
    ]
    if launch.warps < 16:
        tried.append((f"{2 * launch.warps} warps", {"num_warps": 2 * launch.warps}))
    for words, changes in tried:
        compiled = launch.again(**changes)
        if compiled is not None and compiled.metadata.shared <= arch.shared and not machine_code(compiled).spilled:
            return words
    return ""


__all__ = ["Facts", "facts"]
