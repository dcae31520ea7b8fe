"""Registers as arrays of bits, one element a thread, and the course of a program over them."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from assay.interpreter.ptx_text import Instruction, Operand, Program
from assay.interpreter.small_floats import Array

Execute: TypeAlias = Callable[["Machine", Instruction], None]


class Machine:
    """The registers of many threads: patterns in uint64 arrays [threads], as wide as the instruction reads them."""

    def __init__(self, threads: int, registers: dict[str, Array], widths: dict[str, int]) -> None:
        self.threads = threads
        self.registers = registers
        self.widths = widths
        self._guard: Array | None = None

    def run(self, program: Program, table: dict[str, Execute]) -> None:
        """Every instruction in turn, as ``table`` has it by name. Raises `NotInterpreted` for another."""
        for instruction in program.instructions:
            execute = table.get(instruction.name)
            if execute is None:
                raise instruction.refusal()
            self._guard = self._guarded(instruction)
            execute(self, instruction)

    def read(self, operand: Operand, width: int, instruction: Instruction) -> Array:
        """The low ``width`` bits of a register or an immediate, or of a vector, whose first part is the lowest."""
        if isinstance(operand, tuple):
            part = width // len(operand)
            total = np.zeros(self.threads, np.uint64)
            for place, each in enumerate(operand):
                total |= self.read(each, part, instruction) << np.uint64(part * place)
            return total
        value = self.registers.get(operand)
        if value is None:
            value = np.full(self.threads, _immediate(operand, instruction), np.uint64)
        return value & mask(width)

    def write(self, operand: Operand, bits: Array, width: int) -> None:
        """Set a register, or the parts of a vector, where the instruction's predicate holds."""
        if isinstance(operand, tuple):
            part = width // len(operand)
            for place, each in enumerate(operand):
                self.write(each, (bits >> np.uint64(part * place)) & mask(part), part)
        elif operand != "_":
            bits = np.broadcast_to(bits, self.threads).astype(np.uint64)
            before = self.registers.get(operand)
            if self._guard is not None:
                bits = np.where(self._guard, bits, np.uint64(0) if before is None else before)
            self.registers[operand] = bits

    def predicate(self, operand: Operand, instruction: Instruction) -> Array:
        """A predicate register as booleans; after "!" its complement."""
        name = str(operand)
        value = self.read(name.removeprefix("!"), 1, instruction) != 0
        return ~value if name.startswith("!") else value

    def _guarded(self, instruction: Instruction) -> Array | None:
        return self.predicate(instruction.guard, instruction) if instruction.guard else None


def mask(width: int) -> Any:
    """The low ``width`` bits, as uint64."""
    return np.uint64((1 << width) - 1)


def _immediate(text: str, instruction: Instruction) -> int:
    """The bits of a literal: of an integer, of ``0f3F800000``, ``0d...``, or of a decimal in the instruction's type."""
    if exact := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
        if text[1] in "fF" and "f64" in instruction.modifiers:
            return int.from_bytes(struct.pack("<d", struct.unpack("<f", bytes.fromhex(exact[1])[::-1])[0]), "little")
        return int(exact[1], 16)
    try:
        return int(text.rstrip("Uu"), 0) & (2**64 - 1)
    except ValueError:
        pass
    if re.fullmatch(r"[+-]?0[0-7]+", text):
        return int(text, 8) & (2**64 - 1)
    try:
        number = float(text)
    except ValueError:
        raise instruction.refusal(f"is not interpreted (what is {text.partition('@')[0]!r}?)") from None
    code = {"f64": "<d", "f32": "<f", "f16": "<e"}.get(instruction.modifiers[-1], "<f")
    return int.from_bytes(struct.pack(code, number), "little")
