"""Facts about a compiled launch: from Triton's IR and PTX by source line, from machine code, and amounts of work.

Registers, local memory and instructions come from NVIDIA's cuobjdump and nvdisasm.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from triton import knobs
from triton.runtime.cache import get_cache_manager

from assay.bench.inspection.amounts import Amounts, amounts
from assay.bench.inspection.arch import Arch
from assay.bench.inspection.recording import Launch

Line = tuple[str, int]  # the file's name and the number
_NOWHERE = ("", 0)


@dataclass(frozen=True)
class Transposed:
    """An operand of a product that is transposed on its way into shared memory."""

    line: Line
    bits: int


class Locations:
    """The source locations that Triton's IR names ``#loc12``."""

    def __init__(self, ir: str) -> None:
        self._texts = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ir, re.MULTILINE))

    def line(self, text: str) -> Line:
        """Return the source line of an operation of the IR; of inlined calls the innermost that isn't Triton's own."""
        result = re.findall(r"loc\((.*)\)\s*$", text)
        return self._resolved(result[-1]) if result else _NOWHERE

    @cache  # noqa: B019  (the object lives only as long as one kernel is read)
    def _resolved(self, text: str) -> Line:
        if text in self._texts:
            return self._resolved(self._texts[text])
        if matched := re.match(r'"(.*?)":(\d+)', text):
            return Path(matched[1]).name if "/triton/language/" not in matched[1] else "", int(matched[2])
        if matched := re.match(r"callsite\((#loc\d*) at (#loc\d*)\)", text):
            inner = self._resolved(matched[1])
            return inner if inner[0] else self._resolved(matched[2])
        if matched := re.search(r"(#loc\d*)", text):
            return self._resolved(matched[1])
        return _NOWHERE


def tf32_products(ttir: str) -> list[Line]:
    """Return the lines of float32 products that run in TF32."""
    indices = Locations(ttir)
    rows = (row for row in ttir.splitlines() if "tt.dot " in row and re.search(r"inputPrecision = tf32(?!x)", row))
    return _once(indices.line(row) for row in rows if re.match(r"tensor<[\dx]+xf32", row.partition(" : ")[2]))


def narrow_products(ttir: str) -> bool:
    """Return whether there are products of numbers of at most 16 bits, which tensor cores can compute."""
    rows = (row.partition(" : ")[2] for row in ttir.splitlines() if re.search(r"tt\.dot(_scaled)? ", row))
    return any(not re.match(r"tensor<[\dx]+x(f32|f64)", kind) for kind in rows)


def transposed_operands(ttgir: str) -> list[Transposed]:
    """Return the 8-bit operands that go from registers into shared memory transposed, byte by byte."""
    orders = dict(re.findall(r"^(#\w+) = #ttg\.blocked<.*?order = \[([\d, ]+)\]", ttgir, re.MULTILINE))
    shared = dict(re.findall(r"^(#\w+) = #ttg\.nvmma_shared<.*?transposed = (true|false)", ttgir, re.MULTILINE))
    indices, result = Locations(ttgir), []
    for row in ttgir.splitlines():
        matched = re.search(
            r"ttg\.local_(?:alloc|store) %.*?tensor<[\dx]+x([a-z]+)(\d+)\w*, (#\w+)>.*?memdesc<[^#]*(#\w+),", row
        )
        if matched and matched[3] in orders and matched[4] in shared and int(matched[2]) == 8:
            rows_first = orders[matched[3]].split(", ")[:1] != ["0"]
            if rows_first == (shared[matched[4]] == "true"):
                result.append(Transposed(indices.line(row), int(matched[2])))
    return result


def scalar_tiles(ttgir: str, ptx: str, threads: int) -> dict[Line, tuple[int, int]]:
    """Return tiles of which a thread loads 16 bytes or more in pieces of at most 4: (piece, all) in bytes by line."""
    widths, indices = load_widths(ptx), Locations(ttgir)
    results: dict[Line, tuple[int, int]] = {}
    for row in ttgir.splitlines():
        matched = re.search(
            r"(?:tt\.load|ttg\.async_copy_global_to_local) .*?: tensor<((?:\d+x)+)!tt\.ptr<[a-z]+(\d+)", row
        )
        if not matched:
            continue
        held = math.prod(map(int, matched[1].rstrip("x").split("x"))) * int(matched[2]) // 8 // max(threads, 1)
        line = indices.line(row)
        width = widths.get(line)
        if held >= 16 and width is not None and width <= 4:
            results[line] = (width, held)
    return results


def load_widths(ptx: str) -> Mapping[Line, int]:
    """Return the widest load from global memory of one instruction, in bytes, by source line."""
    results: dict[Line, int] = {}
    line = _NOWHERE
    for row in ptx.splitlines():
        if matched := re.search(r"^\s*\.loc\s.*// (\S+?):(\d+):\d+", row):
            line = matched[1], int(matched[2])
        elif matched := re.search(r"\bld\.global[\w.:]*?(?:\.v(\d+))?\.[bufs](\d+)\b", row):
            results[line] = max(results.get(line, 0), int(matched[1] or 1) * int(matched[2]) // 8)
        elif matched := re.search(r"\bcp\.async\.c[ag]\.shared\.global.*?\], (0x[0-9a-f]+|\d+)", row):
            results[line] = max(results.get(line, 0), int(matched[1], 0))
    return results


def _once(lines: Iterator[Line]) -> list[Line]:
    return list(dict.fromkeys(lines))


__all__ = [
    "Line",
    "Transposed",
    "load_widths",
    "narrow_products",
    "scalar_tiles",
    "tf32_products",
    "transposed_operands",
]


_FILE = "assay-machine-code-1.json"
_PRODUCTS = re.compile(r"(?:HGMMA|QGMMA|IGMMA|OGMMA|HMMA|IMMA|QMMA|OMMA|DMMA|BGMMA|UTC[A-Z]*MMA)\b")
_KINDS = {
    "LDG": "load", "STG": "store", "LDGSTS": "async copy", "UTMALDG": "TMA load", "UTMASTG": "TMA store",
    "UBLKCP": "TMA load", "LDL": "local load", "STL": "local store", "LDS": "shared load", "STS": "shared store",
    "FFMA": "FFMA", "FFMA2": "FFMA",
}  # fmt: skip
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@dataclass(frozen=True)
class MachineCode:
    """Machine code of a kernel. Per thread: ``registers``, bytes of ``stack``, bytes of ``spilled`` registers.

    ``products`` counts tensor-core instructions by full name, ``moves`` other instructions by kind, ``widths`` loads,
    stores and asynchronous copies of global memory by kind and bytes.
    """

    registers: int
    stack: int
    spilled: int
    threads: int
    products: Mapping[str, int]
    moves: Mapping[str, int]
    widths: Mapping[str, Mapping[int, int]]


def machine_code(compiled: Any) -> MachineCode:
    """Return the machine code of a kernel that Triton compiled, cached in Triton's cache under the same hash.

    Raises RuntimeError if NVIDIA's tools can't read it.
    """
    manager = get_cache_manager(compiled.hash)
    path = manager.get_file(_FILE)
    if path is not None:
        return msgspec.json.decode(Path(path).read_bytes(), type=MachineCode)
    result = _read(compiled.asm)
    manager.put(msgspec.json.encode(result), _FILE)
    return result


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of local memory per thread of the only kernel of a cubin.

    Raises RuntimeError if NVIDIA's tools can't read it.
    """
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        usage = _output_of(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary))
    counts = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return counts["REG"], counts["STACK"] + counts["LOCAL"]


def _read(asm: Mapping[str, Any]) -> MachineCode:
    registers, stack = resources(asm["cubin"])
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(asm["cubin"])
        text = _output_of(knobs.nvidia.nvdisasm.path, "--print-code", str(binary))
    declared = sum(map(int, re.findall(r"\.local \.align \d+ \.b8\s+__local_depot\w*\[(\d+)\]", asm["ptx"])))
    products, moves, widths = _counted(text)
    threads = re.search(r"\.(?:req|max)ntid (\d+)", asm["ptx"])
    return MachineCode(
        registers=registers,
        stack=stack,
        spilled=max(stack - -(-declared // 8) * 8, 0) if moves["local store"] else 0,
        threads=int(threads[1]) if threads else 0,
        products=dict(products),
        moves=dict(moves),
        widths={kind: dict(sorted(result.items())) for kind, result in widths.items()},
    )


def _output_of(*command: str) -> str:
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
        elif base in _KINDS:
            kind = _KINDS[base]
            moves[kind] += 1
            if base in ("LDG", "STG", "LDGSTS"):
                width = next((_WIDTHS[part] for part in parts if part in _WIDTHS), 4)
                widths.setdefault(kind, Counter())[width] += 1
    return products, moves, widths


__all__ = ["MachineCode", "machine_code", "resources"]


_UNITS = (("UTC", "tcgen05"), ("HGMMA", "wgmma"), ("QGMMA", "wgmma"), ("IGMMA", "wgmma"), ("BGMMA", "wgmma"))
_WORDS = {"E4M3": "e4m3", "E5M2": "e5m2", "BF16": "bf16", "TF32": "tf32", "S8": "int8", "U8": "int8", "F64": "fp64"}


@dataclass(frozen=True)
class Facts:
    """A compiled launch.

    ``config``: the constants that a tuner chose, or all integer constants. ``shared``, ``stack``, ``spilled``: bytes.
    ``occupancy``: the share of resident warps. ``products``: tensor-core instructions, such as "wgmma bf16", with their
    number in the code. ``widths``: by kind, bytes of an instruction with the number of such instructions. ``amounts``:
    None if they couldn't be counted. ``tf32``, ``transposed``, ``scalar``: the source lines of findings.
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
        """Return the configuration in words."""
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
    """Return the facts of a launch; ``known`` caches the ones that don't depend on its grid, by compiled code."""
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
        known[key] = _compiled_facts(own, launch, arch)
    counted = None
    with suppress(Exception):  # IR of an unknown form: the other facts stay valid
        counted = None if launch.guessed else amounts(launch.compiled.asm["ttir"], launch.grid, launch.numbers)
    return replace(known[key], grid=launch.grid, config=own.config, amounts=counted)


def _compiled_facts(own: Facts, launch: Launch, arch: Arch) -> Facts:
    """Return the facts that don't depend on the grid."""
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
    """Return a change that ends spilling, found by compiling: half of a tile's longest side, or twice the warps."""
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
