"""Row-wise kernels: how a matrix [R,N] is divided among programs.

A program takes a tile of whole rows: many short ones, so that there are few programs, or one long row, which it reads
in blocks of columns. The division depends on N alone and never on R, so a row's bits do not depend on the batch around
it. For the same reason N is the only autotuning key, and kernels are not specialised for R.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton

CONFIGS = [  # here BLOCK_N is the size of a whole tile; HEURISTICS divides it into rows and columns
    triton.Config({"BLOCK_N": 2048}, num_warps=4),
    triton.Config({"BLOCK_N": 4096}, num_warps=4),
    triton.Config({"BLOCK_N": 8192}, num_warps=8),
    triton.Config({"BLOCK_N": 16384}, num_warps=16),
]


def _rows_per_program(arguments: Mapping[str, Any]) -> int:
    return max(1, int(arguments["BLOCK_N"]) // int(triton.next_power_of_2(max(arguments["N"], 1))))


HEURISTICS: dict[str, Callable[[Mapping[str, Any]], int | bool]] = {  # evaluated in order: each sees those before it
    "ROWS_PER_PROGRAM": _rows_per_program,
    "BLOCK_N": lambda arguments: int(arguments["BLOCK_N"]) // int(arguments["ROWS_PER_PROGRAM"]),
    "SINGLE_PASS": lambda arguments: bool(arguments["N"] <= arguments["BLOCK_N"]),  # a row fits into one block
}


def grid(arguments: Mapping[str, Any]) -> tuple[int]:
    """Return one program for each tile of rows."""
    return (triton.cdiv(arguments["R"], arguments["ROWS_PER_PROGRAM"]),)
