"""Instructions on integers, bits and predicates (PTX ISA, sections 9.7.1, 9.7.6 to 9.7.9)."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from assay.interpreter.ptx_machine import Execute, Machine, mask
from assay.interpreter.ptx_text import Instruction, width_of
from assay.interpreter.small_floats import Array

_PACKED = {"u16x2": "u16", "s16x2": "s16"}


def kind_of(instruction: Instruction) -> str:
    """The type that an instruction ends with, such as ``u32``."""
    return instruction.modifiers[-1] if instruction.modifiers else ""


def signed(bits: Array, width: int) -> Array:
    """Patterns as two's complement: int64."""
    sign = np.uint64(1 << (width - 1))
    return ((bits ^ sign) - sign).view(np.int64)


def values(machine: Machine, instruction: Instruction, place: int, kind: str) -> Array:
    """An operand as whole numbers: int64, of which no operation loses the low 64 bits; of 64 bits Python's."""
    width = width_of(kind)
    return _numbers(machine.read(instruction.operands[place], width, instruction), kind, width)


def _numbers(bits: Array, kind: str, width: int) -> Array:
    whole = signed(bits, width) if kind.startswith("s") else bits
    return whole.astype(np.int64 if width <= 32 else object)


def patterns(numbers: Array, width: int) -> Array:
    """Whole numbers as patterns of so many bits."""
    if numbers.dtype == object:
        return np.asarray(numbers & ((1 << width) - 1), dtype=object).astype(np.uint64)
    return numbers.astype(np.uint64) & mask(width)


def _bitwise(op: Callable[[Array, Array], Array]) -> Execute:
    def execute(machine: Machine, instruction: Instruction) -> None:
        width = width_of(kind_of(instruction))
        a, b = (machine.read(operand, width, instruction) for operand in instruction.operands[1:])
        machine.write(instruction.operands[0], op(a, b), width)

    return execute


def _not(machine: Machine, instruction: Instruction) -> None:
    width = width_of(kind_of(instruction))
    machine.write(instruction.operands[0], ~machine.read(instruction.operands[1], width, instruction) & mask(width), 64)


def _shift(machine: Machine, instruction: Instruction) -> None:
    """Amounts beyond the width shift everything out; to the right a signed number leaves its sign."""
    kind = kind_of(instruction)
    width = width_of(kind)
    number = values(machine, instruction, 1, kind)
    amount = np.minimum(machine.read(instruction.operands[2], 32, instruction), np.uint64(width)).astype(number.dtype)
    result = number << amount if instruction.name == "shl" else number >> amount
    machine.write(instruction.operands[0], patterns(result, width), width)


def _funnel(machine: Machine, instruction: Instruction) -> None:
    """shf.l and shf.r of the 64 bits of two registers, by at most 32 (clamp) or modulo 32 (wrap)."""
    low, high, amount = (machine.read(operand, 32, instruction) for operand in instruction.operands[1:])
    amount = amount & np.uint64(31) if "wrap" in instruction.modifiers else np.minimum(amount, np.uint64(32))
    whole = high << np.uint64(32) | low
    left = (whole << amount if "l" in instruction.modifiers else whole >> amount).astype(np.uint64)
    result = left >> np.uint64(32) if "l" in instruction.modifiers else left
    machine.write(instruction.operands[0], result & mask(32), 32)


def _lop3(machine: Machine, instruction: Instruction) -> None:
    """Any function of three bits: bit 4 a + 2 b + c of the table is the result."""
    a, b, c = (machine.read(operand, 32, instruction) for operand in instruction.operands[1:4])
    table = int(machine.read(instruction.operands[4], 8, instruction)[0])
    result = np.zeros(machine.threads, np.uint64)
    for place in range(8):
        if table >> place & 1:
            x, y, z = ((bits if place >> at & 1 else ~bits) for bits, at in ((a, 2), (b, 1), (c, 0)))
            result |= x & y & z
    machine.write(instruction.operands[0], result & mask(32), 32)


def _prmt(machine: Machine, instruction: Instruction) -> None:
    """Bytes of {b, a} chosen by the nibbles of c; the top bit of a nibble spreads the byte's sign instead."""
    if instruction.modifiers[-1] != "b32":
        raise instruction.refusal("is not interpreted (a mode of prmt)")
    a, b, selector = (machine.read(operand, 32, instruction) for operand in instruction.operands[1:])
    whole = b << np.uint64(32) | a
    result = np.zeros(machine.threads, np.uint64)
    for place in range(4):
        nibble = selector >> np.uint64(4 * place) & np.uint64(15)
        byte = whole >> (np.uint64(8) * (nibble & np.uint64(7))) & np.uint64(255)
        spread = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
        result |= np.where(nibble >> np.uint64(3), spread, byte) << np.uint64(8 * place)
    machine.write(instruction.operands[0], result, 32)


def _extract(machine: Machine, instruction: Instruction) -> None:
    """bfe: ``c`` bits of ``a`` from bit ``b`` on; of a signed type the topmost is spread."""
    kind = kind_of(instruction)
    width = width_of(kind)
    number = values(machine, instruction, 1, kind).astype(object)
    start, length = (
        (machine.read(operand, 32, instruction) & np.uint64(255)).astype(object) for operand in instruction.operands[2:]
    )
    field = (number >> start) & _ones(length)
    if kind.startswith("s"):
        top = np.maximum(np.minimum(length, width - start), 0)  # beyond the number its sign follows
        sign = _ones(length) & ~_ones(top)
        negative = np.where(top > 0, number >> np.maximum(start + top - 1, 0), number >> (width - 1)) & 1
        cut = (number >> start) & _ones(top)
        field = np.where(length > 0, np.where(negative == 1, cut | sign | ~_ones(length), cut), 0)
    machine.write(instruction.operands[0], patterns(field, width), width)


def _insert(machine: Machine, instruction: Instruction) -> None:
    """bfi: the low ``d`` bits of ``a`` in place of those of ``b`` from bit ``c`` on."""
    width = width_of(kind_of(instruction))
    a, b = (machine.read(operand, width, instruction).astype(object) for operand in instruction.operands[1:3])
    start, length = (
        (machine.read(operand, 32, instruction) & np.uint64(255)).astype(object) for operand in instruction.operands[3:]
    )
    where = _ones(length) << start
    machine.write(instruction.operands[0], patterns((b & ~where) | ((a << start) & where), width), width)


def _ones(length: Array) -> Array:
    return np.asarray((1 << length) - 1, dtype=object)


def _counting(count: Callable[[int, int], int]) -> Execute:
    def execute(machine: Machine, instruction: Instruction) -> None:
        width = width_of(kind_of(instruction))
        bits = machine.read(instruction.operands[1], width, instruction)
        result = np.array([count(int(each), width) for each in bits], dtype=np.uint64)
        machine.write(instruction.operands[0], result, width if instruction.name == "brev" else 32)

    return execute


def _quotient(a: int, b: int) -> int:
    """Toward zero; by zero it is all ones, as NVIDIA's devices have it."""
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


def arithmetic(machine: Machine, instruction: Instruction) -> None:
    """add, sub, mul, mad, div, rem, min, max, neg and abs of integers: ``.lo``, ``.hi``, ``.wide``, ``.sat``."""
    kind = kind_of(instruction)
    if not {"lo", "hi", "wide", "sat"}.issuperset(instruction.modifiers[:-1]):
        raise instruction.refusal()
    element = _PACKED.get(kind, kind)
    width, wide = width_of(element), "wide" in instruction.modifiers
    total = np.zeros(machine.threads, np.uint64)
    for lane in range(width_of(kind) // width):
        lanes = []
        for place, operand in enumerate(instruction.operands[1:]):
            own = 2 * width if wide and place == 2 else width
            bits = machine.read(operand, width_of(kind) if own == width else own, instruction)
            bits = bits >> np.uint64(width * lane) & mask(own)
            lanes.append(_numbers(bits, kind, own))
        if "hi" in instruction.modifiers:
            result = (lanes[0] * lanes[1] >> width) + (lanes[2] if len(lanes) > 2 else 0)
        else:
            result = np.asarray(_ARITHMETIC[instruction.name](*lanes))
        if "sat" in instruction.modifiers:
            result = np.clip(result, -(2 ** (width - 1)), 2 ** (width - 1) - 1)
        total |= patterns(result, 2 * width if wide else width) << np.uint64(width * lane)
    machine.write(instruction.operands[0], total, 2 * width if wide else width_of(kind))


def _mov(machine: Machine, instruction: Instruction) -> None:
    source, width = instruction.operands[1], width_of(kind_of(instruction))
    if isinstance(source, str) and source.startswith("%") and source not in machine.registers:
        if source not in _SPECIAL:
            raise instruction.refusal(f"is not interpreted ({source} is the hardware's)")
        bits = np.full(machine.threads, _SPECIAL[source](), np.uint64)
    else:
        bits = machine.read(source, width, instruction)
    machine.write(instruction.operands[0], bits, width)


def _set_predicate(machine: Machine, instruction: Instruction) -> None:
    """setp.cmp of integers; ``p|q`` has the complement in q; ``.and``, ``.or`` and ``.xor`` combine with a third."""
    kind = kind_of(instruction)
    compare, *rest = (part for part in instruction.modifiers[:-1] if part != "ftz")
    unsigned = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
    a, b = (values(machine, instruction, place, kind) for place in (1, 2))
    set_predicate(machine, instruction, COMPARISONS[unsigned.get(compare, compare)](a, b).astype(bool), rest)


def set_predicate(machine: Machine, instruction: Instruction, found: Array, combine: list[str]) -> None:
    """Write what a comparison found, combined with a third operand where the instruction says so."""
    other = machine.predicate(instruction.operands[3], instruction) if combine else None
    for target, value in zip(str(instruction.operands[0]).split("|"), (found, ~found), strict=False):
        if other is not None:
            value = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[combine[0]](value, other)
        machine.write(target, value.astype(np.uint64), 1)


def _select(machine: Machine, instruction: Instruction) -> None:
    width = width_of(kind_of(instruction))
    a, b = (machine.read(operand, width, instruction) for operand in instruction.operands[1:3])
    chosen = machine.predicate(instruction.operands[3], instruction)
    machine.write(instruction.operands[0], np.where(chosen, a, b), width)


def _nothing(machine: Machine, instruction: Instruction) -> None:
    """What orders or delays programs, one of which runs at a time here."""


COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
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
    "shf": _funnel,
    "lop3": _lop3,
    "prmt": _prmt,
    "bfe": _extract,
    "bfi": _insert,
    "brev": _counting(lambda bits, width: int(f"{bits:0{width}b}"[::-1], 2)),
    "clz": _counting(lambda bits, width: width - bits.bit_length()),
    "popc": _counting(lambda bits, width: bits.bit_count()),
    "mad": arithmetic,
    "rem": arithmetic,
    "mov": _mov,
    "setp": _set_predicate,
    "selp": _select,
    "griddepcontrol": _nothing,
    "nanosleep": _nothing,
}
"""What is done of each instruction; those that floats have too are in `assay.interpreter.ptx_floats`."""
