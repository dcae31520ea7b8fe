"""Instructions on floats, packed halves among them (PTX ISA, sections 9.7.3 to 9.7.5)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from assay.formats import codes
from assay.interpreter import functions
from assay.interpreter.ptx_integers import COMPARISONS, INTEGERS, arithmetic, set_predicate
from assay.interpreter.ptx_machine import Execute, Machine
from assay.interpreter.ptx_text import Instruction, Operand, width_of
from assay.interpreter.rounded import FORMATS, MODES, operation, rounded
from assay.interpreter.small_floats import Array

LANES = {"f16x2": ("f16", 2), "bf16x2": ("bf16", 2), "f32x2": ("f32", 2)} | {
    f"{name}x2": (name, 2) for name in ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2", "ue8m0")
}
"""Packed types: their elements' format, and how many."""
_WIDTHS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "tf32": 32, "e2m1": 4}
_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "tf32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}
_MODIFIERS = {*MODES, "ftz", "sat", "relu", "approx", "full", "NaN"}
_NAN |= {"e4m3": 0x7F, "e5m2": 0x7F, "ue8m0": 0xFF}


def lanes_of(kind: str) -> tuple[str, int]:
    """The format of a type's elements, and how many it packs."""
    return LANES.get(kind, (kind, 1))


def width_in(format: str) -> int:
    """The bits of an element in a register."""
    return _WIDTHS.get(format, 8)


def decoded(bits: Array, format: str) -> Array:
    """Patterns as the numbers they stand for, in float64."""
    if format in ("f32", "tf32"):
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    if format == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if format == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    if format == "f64":
        return bits.view(np.float64)
    table: Array = _table(format)
    return table[bits & np.uint64(len(table) - 1)]


@cache
def _table(format: str) -> Array:
    width = {"e2m3": 6, "e3m2": 6}.get(format, width_in(format))
    values: Array = codes.decode(torch.arange(2**width), FORMATS[format]).numpy()
    return values


def encoded(values: Array, format: str) -> Array:
    """Numbers of a format, in float64, as patterns; NaN as the instructions write it."""
    nan = np.isnan(values)
    if format in ("f32", "tf32"):
        bits = values.astype(np.float32).view(np.uint32)
    elif format == "bf16":
        bits = values.astype(np.float32).view(np.uint32) >> np.uint32(16)
    elif format == "f16":
        bits = values.astype(np.float16).view(np.uint16)
    elif format == "f64":
        bits = np.ascontiguousarray(values).view(np.uint64)
    else:
        bits = codes.encode(torch.from_numpy(np.where(nan, 1.0, values)), FORMATS[format]).numpy()
    return np.where(nan, np.uint64(_NAN.get(format, 0)), bits.astype(np.uint64))


def unpacked(machine: Machine, operand: Operand, kind: str, instruction: Instruction) -> list[Array]:
    """The numbers of a register's elements, the lowest first."""
    format, lanes = lanes_of(kind)
    width = width_in(format)
    bits = machine.read(operand, width * lanes, instruction)
    return [decoded(bits >> np.uint64(width * lane) & np.uint64(2**width - 1), format) for lane in range(lanes)]


def write_packed(machine: Machine, operand: Operand, lanes: list[Array], kind: str) -> None:
    """Numbers of a format, the lowest first, into a register."""
    format, _ = lanes_of(kind)
    width = width_in(format)
    total = np.zeros(machine.threads, np.uint64)
    for lane, values in enumerate(lanes):
        total |= encoded(values, format) << np.uint64(width * lane)
    machine.write(operand, total, width * len(lanes))


def flushed(values: Array, format: str = "f32") -> Array:
    """Subnormals as zeros of their sign."""
    tiny = {"f16": 2.0**-14}.get(format, 2.0**-126)
    return np.where(np.abs(values) < tiny, np.copysign(0.0, values), values)


def _elementwise(compute: Callable[..., Array]) -> Execute:
    """``compute(instruction, format, *operands)`` of each lane, with what modifiers do before and after it."""

    def execute(machine: Machine, instruction: Instruction) -> None:
        *modifiers, kind = instruction.modifiers
        format, _ = lanes_of(kind)
        if format not in _NAN or not _MODIFIERS.issuperset(modifiers):
            raise instruction.refusal()
        flush = "ftz" in instruction.modifiers
        results = []
        for operands in zip(
            *(unpacked(machine, operand, kind, instruction) for operand in instruction.operands[1:]), strict=True
        ):
            given = [flushed(values, format) for values in operands] if flush else operands
            result = compute(instruction, format, *given)
            if "sat" in instruction.modifiers:
                result = np.where(np.isnan(result), 0.0, np.clip(result, 0.0, 1.0))
            if "relu" in instruction.modifiers:
                result = np.where(result <= 0, 0.0, result)
            results.append(flushed(result, format) if flush else result)
        write_packed(machine, instruction.operands[0], results, kind)

    return execute


def mode_of(instruction: Instruction, default: str = "rn") -> str:
    """The rounding mode that an instruction names."""
    return next((part for part in instruction.modifiers if part in MODES), default)


def _arithmetic(instruction: Instruction, format: str, *operands: Array) -> Array:
    return operation(instruction.name, operands, format, mode_of(instruction))


def _multiply_add(instruction: Instruction, format: str, *operands: Array) -> Array:
    return operation("fma", operands, format, mode_of(instruction))


def _extreme(instruction: Instruction, format: str, *operands: Array) -> Array:
    """min and max: NaN is passed over, unless ``.NaN``; -0 is below +0."""
    larger = instruction.name == "max"
    result = operands[0]
    for other in operands[1:]:
        chosen = (result > other) if larger else (result < other)
        zeros = (result == 0) & (other == 0) & (np.signbit(other) if larger else np.signbit(result))
        chosen |= zeros | np.isnan(other)
        result = np.where(chosen, result, other)
        if "NaN" in instruction.modifiers:
            result = np.where(np.isnan(operands[0]) | np.isnan(other), np.nan, result)
    return result


def _approximate(function: Callable[[Array], Array]) -> Execute:
    """An elementary function, right to half a unit in the last place: nearer than the instruction promises to be."""
    return _elementwise(lambda instruction, format, x: rounded(function(x), format))


def _tanh(instruction: Instruction, format: str, x: Array) -> Array:
    """Of float32 to 11 bits: PTX ISA promises a relative error of at most 2^-11, which is what that rounding loses."""
    exact = np.tanh(x)
    if format != "f32":
        return rounded(exact, format)
    step = np.ldexp(1.0, np.frexp(exact)[1] - 11)
    return rounded(np.where(np.isfinite(exact), np.rint(exact / step) * step, exact), format)


def _copysign(instruction: Instruction, format: str, sign: Array, value: Array) -> Array:
    return np.copysign(value, sign)


def _compare(machine: Machine, instruction: Instruction) -> None:
    kind = instruction.modifiers[-1]
    if kind[0] in "usb" and kind[1:].isdigit():
        INTEGERS["setp"](machine, instruction)
        return
    format, lanes = lanes_of(kind)
    name, *combine = (part for part in instruction.modifiers[:-1] if part != "ftz")
    a, b = (unpacked(machine, operand, kind, instruction) for operand in instruction.operands[1:3])
    if lanes > 1:
        raise instruction.refusal()
    x, y = (flushed(each[0], format) if "ftz" in instruction.modifiers else each[0] for each in (a, b))
    unordered = np.isnan(x) | np.isnan(y)
    if name in ("num", "nan"):
        found = unordered if name == "nan" else ~unordered
    elif name in COMPARISONS:
        found = COMPARISONS[name](x, y) & ~unordered
    elif name.endswith("u") and name[:-1] in COMPARISONS:
        found = COMPARISONS[name[:-1]](x, y) | unordered
    else:
        raise instruction.refusal()
    set_predicate(machine, instruction, found, combine)


def _of_either(floats: Execute) -> Execute:
    """An instruction that integers have too."""

    def execute(machine: Machine, instruction: Instruction) -> None:
        kind = instruction.modifiers[-1] if instruction.modifiers else ""
        (floats if "f" in kind else arithmetic)(machine, instruction)

    return execute


def _signs(machine: Machine, instruction: Instruction) -> None:
    """neg and abs of floats change the sign's bit alone."""
    kind = instruction.modifiers[-1]
    format, lanes = lanes_of(kind)
    width = width_of(format)
    sign = np.uint64(sum(1 << (width * (lane + 1) - 1) for lane in range(lanes)))
    bits = machine.read(instruction.operands[1], width * lanes, instruction)
    machine.write(instruction.operands[0], bits ^ sign if instruction.name == "neg" else bits & ~sign, width * lanes)


_ROUNDED = _elementwise(_arithmetic)
_FUNCTIONS: dict[str, Callable[[Array], Any]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "rsqrt": functions.rsqrt,
}
FLOATS: dict[str, Execute] = {
    **{name: _of_either(_ROUNDED) for name in ("add", "sub", "mul", "div")},
    **{name: _of_either(_elementwise(_extreme)) for name in ("min", "max")},
    **{name: _of_either(_signs) for name in ("neg", "abs")},
    **{name: _approximate(function) for name, function in _FUNCTIONS.items()},
    "fma": _ROUNDED,
    "mad": _of_either(_elementwise(_multiply_add)),
    "sqrt": _ROUNDED,
    "rcp": _elementwise(
        lambda instruction, format, x: operation("div", (np.ones_like(x), x), format, mode_of(instruction))
    ),
    "tanh": _elementwise(_tanh),
    "copysign": _elementwise(_copysign),
    "setp": _compare,
}
"""What is done of each instruction that floats have."""
