"""`tl.inline_asm_elementwise`: elements packed into registers as Triton packs them, and run.

What each instruction does is the PTX ISA's (version 8.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from assay.interpreter.cached_constructors import np_dtype
from assay.interpreter.handles import TensorHandle
from assay.interpreter.ptx_conversions import convert
from assay.interpreter.ptx_floats import FLOATS
from assay.interpreter.ptx_integers import INTEGERS
from assay.interpreter.ptx_machine import Execute, Machine, mask
from assay.interpreter.ptx_text import parsed
from assay.interpreter.small_floats import Array

_TABLE: dict[str, Execute] = {**INTEGERS, **FLOATS, "cvt": convert}


class Results:
    """The results of inline assembly, as the compiler's operation gives them out."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def get_result(self, place: int) -> Any:
        """The handle of one of the results."""
        return self._handles[place]


def run_inline(text: str, constraints: str, operands: Sequence[Any], types: Sequence[Any], pack: int) -> Results:
    """Run ``text`` once for each ``pack`` neighbouring elements of the operands.

    Elements narrower than 32 bits share a register, as many as fit and as are packed (Triton's
    `ElementwiseInlineAsmOpConversion`). ``types`` are those of the results, blocks or scalars. Raises `NotInterpreted`
    for an instruction that isn't here.
    """
    shape = operands[0].data.shape if operands else (1,)
    elements = prod(shape)
    threads = -(-elements // pack)
    outputs = [part.strip() for part in constraints.split(",") if part.strip().startswith("=")]
    inputs = [part.strip() for part in constraints.split(",")][len(outputs) :]
    inputs = [part for part in inputs if not part.startswith("~")]
    registers: dict[str, Array] = {}
    place = len(outputs)
    for operand in operands:
        for bits in _packed(operand.data, threads, pack):
            if place - len(outputs) >= len(inputs):
                break
            registers[f"${place}"] = bits
            tied = inputs[place - len(outputs)]
            if tied.isdigit():
                registers[f"${tied}"] = bits
            place += 1
    if place - len(outputs) != len(inputs):
        given = place - len(outputs)
        raise ValueError(f"inline assembly: the constraints {constraints!r} name {len(inputs)} inputs, got {given}")
    machine = Machine(threads, registers, parsed(text).widths)
    machine.run(parsed(text), _TABLE)
    handles, place = [], 0
    for kind in types:
        dtype = np_dtype(kind)
        count = pack // _together(dtype.itemsize, pack)
        never = np.zeros(threads, np.uint64)  # what is never written may be anything
        found = [machine.registers.get(f"${place + each}", never) for each in range(count)]
        handles.append(TensorHandle(_unpacked(found, dtype, pack)[:elements].reshape(shape), kind.scalar))
        place += count
    return Results(handles)


def _together(itemsize: int, pack: int) -> int:
    """How many elements share a register."""
    return min(max(4 // itemsize, 1), pack)


def _packed(data: Array, threads: int, pack: int) -> list[Array]:
    """The registers that hold an operand, each [threads]; what is missing at the end repeats the last element."""
    flat = np.ascontiguousarray(data).reshape(-1)
    whole = np.concatenate([flat, np.repeat(flat[-1:], threads * pack - len(flat))])
    bits = whole.view(f"u{flat.itemsize}").astype(np.uint64).reshape(threads, pack)
    together = _together(flat.itemsize, pack)
    width = np.uint64(8 * flat.itemsize)
    return [
        np.bitwise_or.reduce([bits[:, first + place] << width * np.uint64(place) for place in range(together)])
        for first in range(0, pack, together)
    ]


def _unpacked(registers: Sequence[Any], dtype: Any, pack: int) -> Array:
    together = _together(dtype.itemsize, pack)
    width = 8 * dtype.itemsize
    columns = [
        (bits >> np.uint64(width * place)) & mask(width) for bits in registers for place in range(together)
    ]  # [elements of a thread][threads]
    flat = np.stack(columns, axis=1).reshape(-1)
    if dtype == np.bool_:
        return flat.astype(np.uint8).astype(np.bool_)
    return flat.astype(f"u{dtype.itemsize}").view(dtype)
