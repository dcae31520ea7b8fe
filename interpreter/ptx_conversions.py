"""cvt: between integers, floats and packed floats of few bits (PTX ISA, section 9.7.9, `cvt`)."""

from __future__ import annotations

import re

import numpy as np

from assay.interpreter import functions
from assay.interpreter.ptx_floats import (
    flushed,
    lanes_of,
    mode_of,
    unpacked,
    write_packed,
)
from assay.interpreter.ptx_integers import patterns, signed, values
from assay.interpreter.ptx_machine import Machine
from assay.interpreter.ptx_text import Instruction, width_of
from assay.interpreter.rounded import FORMATS, from_integer, rounded
from assay.interpreter.small_floats import Array

_INTEGER = re.compile(r"[us](8|16|32|64)")
_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_MODIFIERS = {"rn", "rz", "rm", "rp", "rna", *_WHOLE, "ftz", "sat", "satfinite", "relu", "pack"}


def convert(machine: Machine, instruction: Instruction) -> None:
    """cvt{.rounding}{.ftz}{.sat}{.satfinite}{.relu}.to.from: of one value, of two packed floats, or of two into one."""
    *modifiers, target, source = instruction.modifiers
    known = all(kind in FORMATS or _INTEGER.fullmatch(kind) or lanes_of(kind)[1] > 1 for kind in (target, source))
    if not known or not _MODIFIERS.issuperset(modifiers) or "pack" in modifiers:
        raise instruction.refusal()
    if _INTEGER.fullmatch(source):
        _from_integer(machine, instruction, target, source)
    elif _INTEGER.fullmatch(target):
        numbers = _given(machine, instruction, source)[0]
        rounding = next((part for part in modifiers if part in _WHOLE), "")
        if not rounding:
            raise instruction.refusal("names no rounding to an integer")
        kind = np.dtype(f"{'int' if target[0] == 's' else 'uint'}{target[1:]}")
        narrow = _WHOLE[rounding](numbers).astype(np.float64 if source == "f64" else np.float32)
        if kind.itemsize == 1:  # saturated at its own range, where Triton's casts go by way of 16 bits
            limits = np.iinfo(kind)
            narrow = np.where(np.isnan(narrow), 0, np.clip(narrow, limits.min, limits.max)).astype(narrow.dtype)
        _write_integer(machine, instruction, functions.to_integer(narrow, kind), target)
    else:
        lanes = [_converted(instruction, number, target, source) for number in _given(machine, instruction, source)]
        write_packed(machine, instruction.operands[0], lanes, target)


def _given(machine: Machine, instruction: Instruction, source: str) -> list[Array]:
    """What is converted, the lowest first: of two operands the second."""
    lanes = [unpacked(machine, operand, source, instruction) for operand in instruction.operands[1:]]
    if len(lanes) > 1 and any(len(each) > 1 for each in lanes):
        raise instruction.refusal()
    numbers = lanes[0] if len(lanes) == 1 else [lanes[1][0], lanes[0][0]]
    return [flushed(each, source) for each in numbers] if "ftz" in instruction.modifiers else numbers


def _converted(instruction: Instruction, number: Array, target: str, source: str) -> Array:
    format, _ = lanes_of(target)
    modifiers = instruction.modifiers
    for name, whole in _WHOLE.items():
        if name in modifiers:
            number = np.asarray(whole(number))
    if format == "ue8m0":  # which has no sign
        number = np.abs(number)
    if format in ("e2m1", "e2m3", "e3m2"):  # which have no NaN: PTX ISA makes it the largest number
        number = np.where(np.isnan(number), np.inf, number)
    if "relu" in modifiers:
        number = np.where(number <= 0, 0.0, number)
    result = rounded(number, format, mode_of(instruction), saturate="satfinite" in modifiers)
    if "sat" in modifiers:
        result = np.where(np.isnan(result), 0.0, np.clip(result, 0.0, 1.0))
    return flushed(result, format) if "ftz" in modifiers else result


def _from_integer(machine: Machine, instruction: Instruction, target: str, source: str) -> None:
    width = width_of(source)
    if _INTEGER.fullmatch(target):
        number = values(machine, instruction, 1, source)
        if "sat" in instruction.modifiers:
            low = -(2 ** (width_of(target) - 1)) if target[0] == "s" else 0
            number = np.clip(number, low, low + 2 ** width_of(target) - 1)
        _write_integer(machine, instruction, patterns(number, width_of(target)), target)
        return
    bits = machine.read(instruction.operands[1], width, instruction)
    number = signed(bits, width) if source[0] == "s" else bits
    write_packed(
        machine, instruction.operands[0], [from_integer(number, lanes_of(target)[0], mode_of(instruction))], target
    )


def _write_integer(machine: Machine, instruction: Instruction, numbers: Array, target: str) -> None:
    """In a wider register a signed number keeps its sign."""
    bits = numbers.astype(np.uint64)
    width = width_of(target)
    if target[0] == "s":
        bits = signed(bits & np.uint64(2**width - 1), width).view(np.uint64)
    machine.write(instruction.operands[0], bits, 64)
