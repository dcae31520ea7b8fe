"""Inline assembly of floats, packed ones included, conversions (PTX ISA, 9.7.3 to 9.7.5 and 9.7.9), and its launch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from assay.formats import codes
from assay.formats.format import format_named
from assay.interpreter.numerics import ptx
from assay.interpreter.numerics.floats import (
    FORMATS,
    MODES,
    Array,
    from_integer,
    operation,
    rounded,
    rsqrt,
    to_integer,
)
from assay.interpreter.numerics.ptx import COMPARISONS, Execute, Instruction, Machine, Operand, mask, width_of
from assay.interpreter.operators import TensorHandle, np_dtype

_PACKED = {
    f"{name}x2": (name, 2)
    for name in ("f16", "bf16", "f32", "e4m3", "e5m2", "e2m1", "e2m3", "e3m2", "ue8m0")
}  # fmt: skip
"""Packed types: the format of their elements, and their number."""
_REGISTER_WIDTHS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "tf32": 32, "e2m1": 4}
_NAN = {
    "f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "tf32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF,
    "e4m3": 0x7F, "e5m2": 0x7F, "ue8m0": 0xFF,
}  # fmt: skip
_ARITHMETIC_MODIFIERS = {*MODES, "ftz", "sat", "relu", "approx", "full", "NaN"}
_INTEGER = re.compile(r"[us](8|16|32|64)")
_TO_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_CVT_MODIFIERS = {"rn", "rz", "rm", "rp", "rna", *_TO_INTEGRAL, "ftz", "sat", "satfinite", "relu"}


def run_inline(text: str, constraints: str, operands: Sequence[Any], types: Sequence[Any], pack: int) -> InlineResults:
    """Run ``text`` once per group of ``pack`` neighbouring elements (`tl.inline_asm_elementwise`).

    Elements narrower than 32 bits share a register, as many as fit and as are packed (Triton's
    `ElementwiseInlineAsmOpConversion`). ``types`` are those of the results, blocks or scalars. Raises `NotInterpreted`
    for an unknown instruction.
    """
    shape = operands[0].data.shape if operands else (1,)
    num_elements = prod(shape)
    threads = -(-num_elements // pack)
    parts = [part.strip() for part in constraints.split(",")]
    num_outputs = sum(part.startswith("=") for part in parts)
    inputs = [part for part in parts[num_outputs:] if not part.startswith("~")]
    registers: dict[str, Array] = {}
    position = num_outputs
    for operand in operands:
        for bits in _pack(operand.data, threads, pack):
            if position - num_outputs >= len(inputs):
                break
            registers[f"${position}"] = bits
            tied = inputs[position - num_outputs]  # a number ties the input to that output's register
            if tied.isdigit():
                registers[f"${tied}"] = bits
            position += 1
    if position - num_outputs != len(inputs):
        raise ValueError(
            f"inline assembly: the constraints {constraints!r} name {len(inputs)} inputs, got {position - num_outputs}"
        )
    program = ptx.parse(text)
    machine = Machine(threads, registers, program.widths)
    machine.run(program, _TABLE)
    handles, position = [], 0
    for kind in types:
        dtype = np_dtype(kind)
        count = pack // _elements_per_register(dtype.itemsize, pack)
        unwritten = np.zeros(threads, np.uint64)  # undefined on a GPU
        outputs = [machine.registers.get(f"${position + i}", unwritten) for i in range(count)]
        handles.append(TensorHandle(_unpack(outputs, dtype, pack)[:num_elements].reshape(shape), kind.scalar))
        position += count
    return InlineResults(handles)


class InlineResults:
    """The results of inline assembly, under the interface of the compiler's operation."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def get_result(self, index: int) -> Any:
        return self._handles[index]


def _elements_per_register(itemsize: int, pack: int) -> int:
    return min(max(4 // itemsize, 1), pack)


def _pack(data: Array, threads: int, pack: int) -> list[Array]:
    """Return the registers of an operand, each [threads]; the last element repeats to fill the last group."""
    flat = np.ascontiguousarray(data).reshape(-1)
    padded = np.concatenate([flat, np.repeat(flat[-1:], threads * pack - len(flat))])
    bits = padded.view(f"u{flat.itemsize}").astype(np.uint64).reshape(threads, pack)
    per_register = _elements_per_register(flat.itemsize, pack)
    width = np.uint64(8 * flat.itemsize)
    return [
        np.bitwise_or.reduce([bits[:, first + i] << width * np.uint64(i) for i in range(per_register)])
        for first in range(0, pack, per_register)
    ]


def _unpack(registers: Sequence[Any], dtype: Any, pack: int) -> Array:
    per_register = _elements_per_register(dtype.itemsize, pack)
    width = 8 * dtype.itemsize
    columns = [(bits >> np.uint64(width * i)) & mask(width) for bits in registers for i in range(per_register)]
    flat = np.stack(columns, axis=1).reshape(-1)
    if dtype == np.bool_:
        return flat.astype(np.uint8).astype(np.bool_)
    return flat.astype(f"u{dtype.itemsize}").view(dtype)


def _lanes_of(kind: str) -> tuple[str, int]:
    """Return the format of a type's elements, and their number."""
    return _PACKED.get(kind, (kind, 1))


def _decode(bits: Array, format: str) -> Array:
    """Return the float64 values of bit patterns; a register of tf32 holds all bits of a float32."""
    target = format_named(FORMATS["f32" if format == "tf32" else format])
    values: Array = codes.decode(torch.from_numpy((bits & mask(target.bits)).view(np.int64)), target).numpy()
    return values


def _encode(values: Array, format: str) -> Array:
    """Return the patterns of float64 numbers of a format; NaN becomes the canonical NaN of the instructions."""
    nan = np.isnan(values)
    known = torch.from_numpy(np.where(nan, 1.0, values))
    bits = codes.encode(known, FORMATS["f32" if format == "tf32" else format]).numpy()
    return np.where(nan, np.uint64(_NAN.get(format, 0)), bits.astype(np.uint64))


def _read_lanes(machine: Machine, operand: Operand, kind: str, instruction: Instruction) -> list[Array]:
    """Return the numbers in a register, the lowest first."""
    format, lanes = _lanes_of(kind)
    width = _REGISTER_WIDTHS.get(format, 8)
    bits = machine.read(operand, width * lanes, instruction)
    return [_decode(bits >> np.uint64(width * lane) & np.uint64(2**width - 1), format) for lane in range(lanes)]


def _write_lanes(machine: Machine, operand: Operand, lanes: list[Array], kind: str) -> None:
    """Write numbers of a format, the lowest first, into a register."""
    format, _ = _lanes_of(kind)
    width = _REGISTER_WIDTHS.get(format, 8)
    total = np.zeros(machine.threads, np.uint64)
    for lane, values in enumerate(lanes):
        total |= _encode(values, format) << np.uint64(width * lane)
    machine.write(operand, total, width * len(lanes))


def _flush(values: Array, format: str = "f32") -> Array:
    """Replace subnormals by zeros of their sign."""
    smallest_normal = 2.0**-14 if format == "f16" else 2.0**-126
    return np.where(np.abs(values) < smallest_normal, np.copysign(0.0, values), values)


def _elementwise(compute: Callable[..., Array]) -> Execute:
    """``compute(instruction, format, *operands)`` of each lane, between the modifiers' flushing and clamping."""

    def execute(machine: Machine, instruction: Instruction) -> None:
        *modifiers, kind = instruction.modifiers
        format, _ = _lanes_of(kind)
        if format not in _NAN or not _ARITHMETIC_MODIFIERS.issuperset(modifiers):
            raise instruction.refusal()
        flush = "ftz" in modifiers
        results = []
        lanes = (_read_lanes(machine, operand, kind, instruction) for operand in instruction.operands[1:])
        for operands in zip(*lanes, strict=True):
            result = compute(instruction, format, *(_flush(x, format) if flush else x for x in operands))
            if "sat" in modifiers:
                result = np.where(np.isnan(result), 0.0, np.clip(result, 0.0, 1.0))
            if "relu" in modifiers:
                result = np.where(result <= 0, 0.0, result)
            results.append(_flush(result, format) if flush else result)
        _write_lanes(machine, instruction.operands[0], results, kind)

    return execute


def _mode_of(instruction: Instruction) -> str:
    return next((part for part in instruction.modifiers if part in MODES), "rn")


def _operation(name: str = "") -> Execute:
    """The arithmetic operation ``name``, or that of the instruction's own name."""
    return _elementwise(
        lambda instruction, format, *x: operation(name or instruction.name, x, format, _mode_of(instruction))
    )


def _extreme(instruction: Instruction, format: str, *operands: Array) -> Array:
    """min and max: a NaN operand is ignored, unless ``.NaN``; -0 is below +0."""
    is_max = instruction.name == "max"
    result = operands[0]
    for other in operands[1:]:
        keep = (result > other) if is_max else (result < other)
        zeros = (result == 0) & (other == 0) & (np.signbit(other) if is_max else np.signbit(result))
        keep |= zeros | np.isnan(other)
        result = np.where(keep, result, other)
        if "NaN" in instruction.modifiers:
            result = np.where(np.isnan(operands[0]) | np.isnan(other), np.nan, result)
    return result


def _approximate(function: Callable[[Array], Array]) -> Execute:
    """An elementary function correct to half an ulp: closer than the instruction guarantees."""
    return _elementwise(lambda instruction, format, x: rounded(function(x), format))


def _tanh(instruction: Instruction, format: str, x: Array) -> Array:
    """tanh.approx; f32 has 11 bits: the PTX ISA guarantees a relative error of 2^-11, the rounding error of 11 bits."""
    exact = np.tanh(x)
    if format != "f32":
        return rounded(exact, format)
    step = np.ldexp(1.0, np.frexp(exact)[1] - 11)
    return rounded(np.where(np.isfinite(exact), np.rint(exact / step) * step, exact), format)


def _setp(machine: Machine, instruction: Instruction) -> None:
    kind = instruction.kind
    if kind[0] in "usb" and kind[1:].isdigit():
        ptx.INTEGERS["setp"](machine, instruction)
        return
    format, lanes = _lanes_of(kind)
    name, *combine = (part for part in instruction.modifiers[:-1] if part != "ftz")
    a, b = (_read_lanes(machine, operand, kind, instruction) for operand in instruction.operands[1:3])
    if lanes > 1:
        raise instruction.refusal()
    x, y = (_flush(each[0], format) if "ftz" in instruction.modifiers else each[0] for each in (a, b))
    unordered = np.isnan(x) | np.isnan(y)
    if name in ("num", "nan"):
        result = unordered if name == "nan" else ~unordered
    elif name in COMPARISONS:
        result = COMPARISONS[name](x, y) & ~unordered
    elif name.endswith("u") and name[:-1] in COMPARISONS:
        result = COMPARISONS[name[:-1]](x, y) | unordered
    else:
        raise instruction.refusal()
    ptx.set_predicate(machine, instruction, result, combine)


def _or_integer(floats: Execute) -> Execute:
    """An instruction of floats or, by its type, of integers."""

    def execute(machine: Machine, instruction: Instruction) -> None:
        (floats if "f" in instruction.kind else ptx.arithmetic)(machine, instruction)

    return execute


def _sign(machine: Machine, instruction: Instruction) -> None:
    """neg and abs of floats change the sign bit alone."""
    format, lanes = _lanes_of(instruction.kind)
    width = width_of(format)
    sign = np.uint64(sum(1 << (width * (lane + 1) - 1) for lane in range(lanes)))
    bits = machine.read(instruction.operands[1], width * lanes, instruction)
    machine.write(instruction.operands[0], bits ^ sign if instruction.name == "neg" else bits & ~sign, width * lanes)


def _cvt(machine: Machine, instruction: Instruction) -> None:
    """cvt{.rounding}{.ftz}{.sat}{.satfinite}{.relu}.to.from of one value, a packed pair, or two values into a pair."""
    *modifiers, target, source = instruction.modifiers
    known = all(kind in FORMATS or _INTEGER.fullmatch(kind) or _lanes_of(kind)[1] > 1 for kind in (target, source))
    if not known or not _CVT_MODIFIERS.issuperset(modifiers):
        raise instruction.refusal()
    if _INTEGER.fullmatch(source):
        _convert_integer(machine, instruction, target, source)
    elif _INTEGER.fullmatch(target):
        values = _sources(machine, instruction, source)[0]
        rounding = next((part for part in modifiers if part in _TO_INTEGRAL), "")
        if not rounding:
            raise instruction.refusal("names no rounding to an integer")
        dtype = np.dtype(f"{'int' if target[0] == 's' else 'uint'}{target[1:]}")
        integral = _TO_INTEGRAL[rounding](values).astype(np.float64 if source == "f64" else np.float32)
        if dtype.itemsize == 1:  # cvt saturates to 8 bits; Triton's own casts (`to_integer`) go through 16
            limits = np.iinfo(dtype)
            integral = np.where(np.isnan(integral), 0, np.clip(integral, limits.min, limits.max)).astype(integral.dtype)
        _write_integer(machine, instruction, to_integer(integral, dtype), target)
    else:
        lanes = [_convert_float(instruction, x, target) for x in _sources(machine, instruction, source)]
        _write_lanes(machine, instruction.operands[0], lanes, target)


def _sources(machine: Machine, instruction: Instruction, source: str) -> list[Array]:
    """Return the numbers to convert, the lowest first: of two operands the second."""
    lanes = [_read_lanes(machine, operand, source, instruction) for operand in instruction.operands[1:]]
    if len(lanes) > 1 and any(len(each) > 1 for each in lanes):
        raise instruction.refusal()
    values = lanes[0] if len(lanes) == 1 else [lanes[1][0], lanes[0][0]]
    return [_flush(each, source) for each in values] if "ftz" in instruction.modifiers else values


def _convert_float(instruction: Instruction, x: Array, target: str) -> Array:
    format, _ = _lanes_of(target)
    modifiers = instruction.modifiers
    for name, to_integral in _TO_INTEGRAL.items():
        if name in modifiers:
            x = np.asarray(to_integral(x))
    if format == "ue8m0":  # has no sign
        x = np.abs(x)
    if format in ("e2m1", "e2m3", "e3m2"):  # have no NaN: the PTX ISA maps NaN to the largest number
        x = np.where(np.isnan(x), np.inf, x)
    if "relu" in modifiers:
        x = np.where(x <= 0, 0.0, x)
    result = rounded(x, format, _mode_of(instruction), saturate="satfinite" in modifiers)
    if "sat" in modifiers:
        result = np.where(np.isnan(result), 0.0, np.clip(result, 0.0, 1.0))
    return _flush(result, format) if "ftz" in modifiers else result


def _convert_integer(machine: Machine, instruction: Instruction, target: str, source: str) -> None:
    if _INTEGER.fullmatch(target):
        number = ptx.integers(machine, instruction, 1, source)
        width = width_of(target)
        if "sat" in instruction.modifiers:
            low = -(2 ** (width - 1)) if target[0] == "s" else 0
            number = np.clip(number, low, low + 2**width - 1)
        _write_integer(machine, instruction, ptx.patterns(number, width), target)
        return
    bits = machine.read(instruction.operands[1], width_of(source), instruction)
    number = ptx.signed(bits, width_of(source)) if source[0] == "s" else bits
    result = from_integer(number, _lanes_of(target)[0], _mode_of(instruction))
    _write_lanes(machine, instruction.operands[0], [result], target)


def _write_integer(machine: Machine, instruction: Instruction, values: Array, target: str) -> None:
    """Write integers; a signed one is sign-extended into a wider register."""
    bits = values.astype(np.uint64)
    width = width_of(target)
    if target[0] == "s":
        bits = ptx.signed(bits & np.uint64(2**width - 1), width).view(np.uint64)
    machine.write(instruction.operands[0], bits, 64)


FLOATS: dict[str, Execute] = {
    **{name: _or_integer(_operation()) for name in ("add", "sub", "mul", "div")},
    **{name: _or_integer(_elementwise(_extreme)) for name in ("min", "max")},
    **{name: _or_integer(_sign) for name in ("neg", "abs")},
    "fma": _operation(),
    "mad": _or_integer(_operation("fma")),
    "sqrt": _operation(),
    "rcp": _elementwise(lambda ins, format, x: operation("div", (np.ones_like(x), x), format, _mode_of(ins))),
    "ex2": _approximate(np.exp2),
    "lg2": _approximate(np.log2),
    "sin": _approximate(np.sin),
    "cos": _approximate(np.cos),
    "rsqrt": _approximate(rsqrt),
    "tanh": _elementwise(_tanh),
    "copysign": _elementwise(lambda ins, format, sign, magnitude: np.copysign(magnitude, sign)),
    "setp": _setp,
}
_TABLE: dict[str, Execute] = {**ptx.INTEGERS, **FLOATS, "cvt": _cvt}
