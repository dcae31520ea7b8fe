"""Inline assembly: the text of PTX as instructions, the registers of many threads, and integer instructions.

Instructions behave as the PTX ISA (version 8.8) defines them: integers, bits and predicates by sections 9.7.1 and 9.7.6
to 9.7.9. `ptx_floats` has those of floats and conversions.
"""

from __future__ import annotations

import operator
import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from assay.interpreter.errors import NotInterpreted
from assay.interpreter.numerics.floats import Array

Operand = str | tuple[str, ...]
"""The text of a register, an immediate or ``$n``; a vector in braces is a tuple."""


@dataclass(frozen=True)
class Instruction:
    """``name``: the opcode up to its first dot; ``modifiers``: the rest; ``guard``: "", a predicate, or "!" and one."""

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: str = ""
    text: str = field(default="", compare=False)

    @property
    def kind(self) -> str:
        """The type that the opcode ends with, such as ``u32``."""
        return self.modifiers[-1] if self.modifiers else ""

    def refusal(self, why: str = "is not interpreted") -> NotInterpreted:
        return NotInterpreted(f"inline assembly: {self.text!r} {why}")


@dataclass(frozen=True)
class Program:
    """Instructions in order, and the widths in bits of the declared registers."""

    instructions: tuple[Instruction, ...]
    widths: dict[str, int]


@lru_cache(1024)
def parse(text: str) -> Program:
    """Parse inline assembly. Raises `NotInterpreted` for a label, a branch or a directive other than ``.reg``."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    instructions, widths = [], dict[str, int]()
    scopes: list[dict[str, str]] = [{}]
    for statement in _statements(text.replace("$$", "$")):
        if statement == "{":
            scopes.append({})
        elif statement == "}":
            scopes.pop()
        elif statement.startswith(".reg"):
            for name, width in _declared(statement):
                unique = f"{name}@{len(widths)}"
                scopes[-1][name] = unique
                widths[unique] = width
        else:
            instructions.append(_instruction(statement, scopes))
    return Program(tuple(instructions), widths)


def _statements(text: str) -> Iterator[str]:
    """Split at semicolons and at the braces of scopes; braces within a statement belong to a vector."""
    statement, inside = "", False
    for letter in text:
        if letter in "{}" and not statement.strip() and not inside:
            yield letter
            statement = ""
        elif letter == ";":
            if statement.strip():
                yield " ".join(statement.split())
            statement = ""
        else:
            inside = (inside or letter == "{") and letter != "}"
            statement += letter
    if statement.strip():
        yield " ".join(statement.split())


def _declared(statement: str) -> Iterator[tuple[str, int]]:
    """Yield the registers of ``.reg .b32 a, b<3>`` and their widths: a, b0, b1, b2."""
    match = re.fullmatch(r"\.reg\s*\.(pred|[a-z]+\d+(?:x\d)?)\s+(.*)", statement)
    if match is None:
        raise NotInterpreted(f"inline assembly: {statement!r} is not interpreted")
    width = width_of(match[1])
    for name in match[2].split(","):
        numbered = re.fullmatch(r"(.*)<(\d+)>", name.strip())
        for each in [f"{numbered[1]}{i}" for i in range(int(numbered[2]))] if numbered else [name.strip()]:
            yield each, width


def width_of(kind: str) -> int:
    """Return the bits of a type: 32 for b32 and f16x2, 1 for pred."""
    if kind == "pred":
        return 1
    parts = re.fullmatch(r"[a-z]+(\d+)(?:x(\d))?", kind)
    return int(parts[1]) * int(parts[2] or 1) if parts else 32


def _instruction(statement: str, scopes: list[dict[str, str]]) -> Instruction:
    match = re.fullmatch(r"(?:@(!?)\s*([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)", statement)
    if match is None or statement.partition(" ")[0].endswith(":"):
        raise NotInterpreted(f"inline assembly: {statement!r} is not interpreted")
    negated, guard, opcode, rest = match.groups()
    name, *modifiers = opcode.split(".")
    operands: list[Operand] = []
    for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest):
        if part.startswith("{"):
            operands.append(tuple(_resolve(each.strip(), scopes) for each in part[1:-1].split(",")))
        else:
            operands.append(_resolve(part.strip(), scopes))
    predicate = (negated or "") + _resolve(guard, scopes) if guard else ""
    return Instruction(name, tuple(modifiers), tuple(operands), predicate, statement)


def _resolve(name: str, scopes: list[dict[str, str]]) -> str:
    """Return the unique name of a register; for ``p|q`` both."""
    if "|" in name:
        return "|".join(_resolve(part.strip(), scopes) for part in name.split("|"))
    negated, name = ("!", name[1:].strip()) if name.startswith("!") else ("", name)
    return negated + next((scope[name] for scope in reversed(scopes) if name in scope), name)


class Machine:
    """The registers of all threads: bit patterns in uint64 arrays [threads]."""

    def __init__(self, threads: int, registers: dict[str, Array], widths: dict[str, int]) -> None:
        self.threads = threads
        self.registers = registers
        self.widths = widths
        self._guard: Array | None = None

    def run(self, program: Program, table: dict[str, Execute]) -> None:
        """Execute the instructions in order. Raises `NotInterpreted` for one that ``table`` lacks."""
        for instruction in program.instructions:
            execute = table.get(instruction.name)
            if execute is None:
                raise instruction.refusal()
            self._guard = self.predicate(instruction.guard, instruction) if instruction.guard else None
            execute(self, instruction)

    def read(self, operand: Operand, width: int, instruction: Instruction) -> Array:
        """Return the low ``width`` bits of a register, an immediate, or a vector (first part lowest)."""
        if isinstance(operand, tuple):
            part = width // len(operand)
            total = np.zeros(self.threads, np.uint64)
            for i, each in enumerate(operand):
                total |= self.read(each, part, instruction) << np.uint64(part * i)
            return total
        value = self.registers.get(operand)
        if value is None:
            value = np.full(self.threads, _immediate(operand, instruction), np.uint64)
        return value & mask(width)

    def write(self, operand: Operand, bits: Array, width: int) -> None:
        """Set a register, or the parts of a vector, in threads where the instruction's guard holds."""
        if isinstance(operand, tuple):
            part = width // len(operand)
            for i, each in enumerate(operand):
                self.write(each, (bits >> np.uint64(part * i)) & mask(part), part)
        elif operand != "_":
            bits = np.broadcast_to(bits, self.threads).astype(np.uint64)
            before = self.registers.get(operand)
            if self._guard is not None:
                bits = np.where(self._guard, bits, np.uint64(0) if before is None else before)
            self.registers[operand] = bits

    def predicate(self, operand: Operand, instruction: Instruction) -> Array:
        """Return a predicate register as booleans, complemented after "!"."""
        name = str(operand)
        value = self.read(name.removeprefix("!"), 1, instruction) != 0
        return ~value if name.startswith("!") else value


Execute: TypeAlias = Callable[[Machine, Instruction], None]


def mask(width: int) -> Any:
    """Return uint64 with the low ``width`` bits set."""
    return np.uint64((1 << width) - 1)


def _immediate(text: str, instruction: Instruction) -> int:
    """Return the bits of a literal: an integer, ``0f3F800000``, ``0d...``, or a decimal of the instruction's type."""
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


def signed(bits: Array, width: int) -> Array:
    """Return two's complement patterns as int64."""
    sign = np.uint64(1 << (width - 1))
    return ((bits ^ sign) - sign).view(np.int64)


def integers(machine: Machine, instruction: Instruction, position: int, kind: str) -> Array:
    """Return operand ``position`` as integers: int64, or Python's for 64 bits, so no operation loses low bits."""
    width = width_of(kind)
    return _as_integers(machine.read(instruction.operands[position], width, instruction), kind, width)


def _as_integers(bits: Array, kind: str, width: int) -> Array:
    return (signed(bits, width) if kind.startswith("s") else bits).astype(np.int64 if width <= 32 else object)


def patterns(numbers: Array, width: int) -> Array:
    """Return integers as patterns of ``width`` bits."""
    if numbers.dtype == object:
        return np.asarray(numbers & ((1 << width) - 1), dtype=object).astype(np.uint64)
    return numbers.astype(np.uint64) & mask(width)


def _bitwise(op: Callable[[Array, Array], Array]) -> Execute:
    def execute(machine: Machine, instruction: Instruction) -> None:
        width = width_of(instruction.kind)
        a, b = (machine.read(operand, width, instruction) for operand in instruction.operands[1:])
        machine.write(instruction.operands[0], op(a, b), width)

    return execute


def _not(machine: Machine, instruction: Instruction) -> None:
    width = width_of(instruction.kind)
    machine.write(instruction.operands[0], ~machine.read(instruction.operands[1], width, instruction) & mask(width), 64)


def _shift(machine: Machine, instruction: Instruction) -> None:
    """shl and shr: amounts beyond the width are clamped to it; signed right shifts are arithmetic."""
    width = width_of(instruction.kind)
    number = integers(machine, instruction, 1, instruction.kind)
    amount = np.minimum(machine.read(instruction.operands[2], 32, instruction), np.uint64(width)).astype(number.dtype)
    result = number << amount if instruction.name == "shl" else number >> amount
    machine.write(instruction.operands[0], patterns(result, width), width)


def _funnel_shift(machine: Machine, instruction: Instruction) -> None:
    """shf.l and shf.r of the 64 bits of two registers, by at most 32 (clamp) or modulo 32 (wrap)."""
    low, high, amount = (machine.read(operand, 32, instruction) for operand in instruction.operands[1:])
    amount = amount & np.uint64(31) if "wrap" in instruction.modifiers else np.minimum(amount, np.uint64(32))
    pair = high << np.uint64(32) | low
    shifted = (pair << amount if "l" in instruction.modifiers else pair >> amount).astype(np.uint64)
    result = shifted >> np.uint64(32) if "l" in instruction.modifiers else shifted
    machine.write(instruction.operands[0], result & mask(32), 32)


def _lop3(machine: Machine, instruction: Instruction) -> None:
    """Any function of three bits: the result is bit 4 a + 2 b + c of the immediate look-up table."""
    a, b, c = (machine.read(operand, 32, instruction) for operand in instruction.operands[1:4])
    table = int(machine.read(instruction.operands[4], 8, instruction)[0])
    result = np.zeros(machine.threads, np.uint64)
    for row in range(8):
        if table >> row & 1:
            x, y, z = ((bits if row >> bit & 1 else ~bits) for bits, bit in ((a, 2), (b, 1), (c, 0)))
            result |= x & y & z
    machine.write(instruction.operands[0], result & mask(32), 32)


def _prmt(machine: Machine, instruction: Instruction) -> None:
    """Bytes of {b, a} selected by the nibbles of c; a nibble's top bit replicates the byte's sign instead."""
    if instruction.kind != "b32":
        raise instruction.refusal("is not interpreted (a mode of prmt)")
    a, b, selector = (machine.read(operand, 32, instruction) for operand in instruction.operands[1:])
    machine.write(instruction.operands[0], permuted_bytes(b << np.uint64(32) | a, selector), 32)


def permuted_bytes(pair: Array, selector: Array) -> Array:
    """Return four of the eight bytes of uint64, by the nibbles of ``selector``; see `_prmt`."""
    result = np.zeros(pair.shape, np.uint64)
    for position in range(4):
        nibble = selector >> np.uint64(4 * position) & np.uint64(15)
        byte = pair >> (np.uint64(8) * (nibble & np.uint64(7))) & np.uint64(255)
        replicated = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
        result |= np.where(nibble >> np.uint64(3), replicated, byte) << np.uint64(8 * position)
    return result


def _bit_field(machine: Machine, instruction: Instruction, first: int) -> tuple[Array, Array]:
    """Return start and length of a bit field, operands ``first`` and the next: their low bytes, as Python integers."""
    operands = instruction.operands[first : first + 2]
    start, length = ((machine.read(each, 32, instruction) & np.uint64(255)).astype(object) for each in operands)
    return start, length


def _bfe(machine: Machine, instruction: Instruction) -> None:
    """Extract ``c`` bits of ``a`` from bit ``b`` on; a signed type replicates the topmost."""
    kind = instruction.kind
    width = width_of(kind)
    number = integers(machine, instruction, 1, kind).astype(object)
    start, length = _bit_field(machine, instruction, 2)
    result = (number >> start) & _ones(length)
    if kind.startswith("s"):
        inside = np.maximum(np.minimum(length, width - start), 0)  # beyond the number its sign bit repeats
        sign = _ones(length) & ~_ones(inside)
        negative = np.where(inside > 0, number >> np.maximum(start + inside - 1, 0), number >> (width - 1)) & 1
        low = (number >> start) & _ones(inside)
        result = np.where(length > 0, np.where(negative == 1, low | sign | ~_ones(length), low), 0)
    machine.write(instruction.operands[0], patterns(result, width), width)


def _bfi(machine: Machine, instruction: Instruction) -> None:
    """Insert the low ``d`` bits of ``a`` into ``b`` from bit ``c`` on."""
    width = width_of(instruction.kind)
    a, b = (machine.read(operand, width, instruction).astype(object) for operand in instruction.operands[1:3])
    start, length = _bit_field(machine, instruction, 3)
    field = _ones(length) << start
    machine.write(instruction.operands[0], patterns((b & ~field) | ((a << start) & field), width), width)


def _ones(length: Array) -> Array:
    return np.asarray((1 << length) - 1, dtype=object)


def _per_pattern(function: Callable[[int, int], int]) -> Execute:
    """``function(bits, width)`` of each thread's pattern."""

    def execute(machine: Machine, instruction: Instruction) -> None:
        width = width_of(instruction.kind)
        bits = machine.read(instruction.operands[1], width, instruction)
        result = np.array([function(int(each), width) for each in bits], dtype=np.uint64)
        machine.write(instruction.operands[0], result, width if instruction.name == "brev" else 32)

    return execute


def reverse_bits(bits: int, width: int) -> int:
    """Return the ``width`` bits in reverse order."""
    return int(f"{bits:0{width}b}"[::-1], 2)


def _quotient(a: int, b: int) -> int:
    """Divide toward zero; division by zero gives all ones, as on NVIDIA's devices."""
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "min": np.minimum,
    "max": np.maximum,
    "div": np.vectorize(_quotient, otypes=[object]),
    "rem": np.vectorize(lambda a, b: a if b == 0 else a - b * _quotient(a, b), otypes=[object]),
    "mad": lambda a, b, c: a * b + c,
    "neg": operator.neg,
    "abs": np.abs,
}
_PACKED = {"u16x2": "u16", "s16x2": "s16"}


def arithmetic(machine: Machine, instruction: Instruction) -> None:
    """Integer add, sub, mul, mad, div, rem, min, max, neg and abs: ``.lo``, ``.hi``, ``.wide``, ``.sat``."""
    kind = instruction.kind
    if not {"lo", "hi", "wide", "sat"}.issuperset(instruction.modifiers[:-1]):
        raise instruction.refusal()
    element = _PACKED.get(kind, kind)
    width, wide = width_of(element), "wide" in instruction.modifiers
    total = np.zeros(machine.threads, np.uint64)
    for lane in range(width_of(kind) // width):
        values = []
        for position, operand in enumerate(instruction.operands[1:]):
            bits_read = 2 * width if wide and position == 2 else width  # mad.wide adds a wide c
            bits = machine.read(operand, width_of(kind) if bits_read == width else bits_read, instruction)
            bits = bits >> np.uint64(width * lane) & mask(bits_read)
            values.append(_as_integers(bits, kind, bits_read))
        if "hi" in instruction.modifiers:
            result = (values[0] * values[1] >> width) + (values[2] if len(values) > 2 else 0)
        else:
            result = np.asarray(_ARITHMETIC[instruction.name](*values))
        if "sat" in instruction.modifiers:
            result = np.clip(result, -(2 ** (width - 1)), 2 ** (width - 1) - 1)
        total |= patterns(result, 2 * width if wide else width) << np.uint64(width * lane)
    machine.write(instruction.operands[0], total, 2 * width if wide else width_of(kind))


def _mov(machine: Machine, instruction: Instruction) -> None:
    source, width = instruction.operands[1], width_of(instruction.kind)
    if isinstance(source, str) and source.startswith("%") and source not in machine.registers:
        if source not in _SPECIAL:
            raise instruction.refusal(f"is not interpreted ({source} is the hardware's)")
        bits = np.full(machine.threads, _SPECIAL[source](), np.uint64)
    else:
        bits = machine.read(source, width, instruction)
    machine.write(instruction.operands[0], bits, width)


def _setp(machine: Machine, instruction: Instruction) -> None:
    """Compare integers; ``p|q`` has the complement in q; ``.and``, ``.or``, ``.xor`` combine with a third operand."""
    compare, *combine = (part for part in instruction.modifiers[:-1] if part != "ftz")
    unsigned = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
    a, b = (integers(machine, instruction, position, instruction.kind) for position in (1, 2))
    set_predicate(machine, instruction, COMPARISONS[unsigned.get(compare, compare)](a, b).astype(bool), combine)


def set_predicate(machine: Machine, instruction: Instruction, result: Array, combine: list[str]) -> None:
    """Write the ``result`` of a comparison, combined with a third operand if ``combine`` names an operation."""
    other = machine.predicate(instruction.operands[3], instruction) if combine else None
    for target, value in zip(str(instruction.operands[0]).split("|"), (result, ~result), strict=False):
        if other is not None:
            value = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[combine[0]](value, other)
        machine.write(target, value.astype(np.uint64), 1)


def _selp(machine: Machine, instruction: Instruction) -> None:
    width = width_of(instruction.kind)
    a, b = (machine.read(operand, width, instruction) for operand in instruction.operands[1:3])
    condition = machine.predicate(instruction.operands[3], instruction)
    machine.write(instruction.operands[0], np.where(condition, a, b), width)


def _no_op(machine: Machine, instruction: Instruction) -> None:
    """Orders or delays programs, which run one at a time here."""


COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_SPECIAL: dict[str, Callable[[], int]] = {
    "%globaltimer": time.perf_counter_ns,
    "%clock64": time.perf_counter_ns,
    "%clock": lambda: time.perf_counter_ns() & (2**32 - 1),
    "%smid": lambda: 0,
    "%nsmid": lambda: 1,
}
INTEGERS: dict[str, Execute] = {
    "and": _bitwise(np.bitwise_and),
    "or": _bitwise(np.bitwise_or),
    "xor": _bitwise(np.bitwise_xor),
    "not": _not,
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel_shift,
    "lop3": _lop3,
    "prmt": _prmt,
    "bfe": _bfe,
    "bfi": _bfi,
    "brev": _per_pattern(reverse_bits),
    "clz": _per_pattern(lambda bits, width: width - bits.bit_length()),
    "popc": _per_pattern(lambda bits, width: bits.bit_count()),
    "mad": arithmetic,
    "rem": arithmetic,
    "mov": _mov,
    "setp": _setp,
    "selp": _selp,
    "griddepcontrol": _no_op,
    "nanosleep": _no_op,
}
"""Integer instructions; `ptx_floats.FLOATS` has those that floats have too."""
