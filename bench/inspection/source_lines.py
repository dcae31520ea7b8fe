"""What stands in the compiler's representations of a kernel, by the line of its source that it comes from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Line = tuple[str, int]  # the file's name and the number
_NOWHERE = ("", 0)


@dataclass(frozen=True)
class Transposed:
    """An operand of a product that shared memory has to hold the other way round than memory does."""

    line: Line
    bits: int


class Locations:
    """The places that Triton's IR names ``#loc12``."""

    def __init__(self, ir: str) -> None:
        self._texts = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ir, re.MULTILINE))

    def line(self, text: str) -> Line:
        """Of an operation's whole line of the IR; within a call the place in what is called, unless it is Triton's."""
        result = re.findall(r"loc\((.*)\)\s*$", text)
        return self._resolved(result[-1]) if result else _NOWHERE

    @cache  # noqa: B019  (lives as long as one kernel is looked at)
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
    """Where products of float32 numbers are asked for in TF32."""
    indices = Locations(ttir)
    rows = (row for row in ttir.splitlines() if "tt.dot " in row and re.search(r"inputPrecision = tf32(?!x)", row))
    return _once(indices.line(row) for row in rows if re.match(r"tensor<[\dx]+xf32", row.partition(" : ")[2]))


def narrow_products(ttir: str) -> bool:
    """Whether there are products of numbers of at most 16 bits, which tensor cores take."""
    rows = (row.partition(" : ")[2] for row in ttir.splitlines() if re.search(r"tt\.dot(_scaled)? ", row))
    return any(not re.match(r"tensor<[\dx]+x(f32|f64)", kind) for kind in rows)


def transposed_operands(ttgir: str) -> list[Transposed]:
    """Where a tile goes from registers into shared memory with its axes the other way round, byte by byte."""
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
    """Tiles of which each thread loads 16 bytes or more in pieces of at most 4: bytes of a piece, and of a thread."""
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
    """The most bytes that an instruction loads from global memory at once, by line."""
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
