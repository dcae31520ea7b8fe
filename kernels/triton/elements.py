"""How kernels that work element by element divide a matrix: a program takes a tile, as wide as rows are, to a limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton

_LONGEST_BLOCK = 1024
CONFIGS = [triton.Config({"TILE": tile}, num_warps=warps) for tile, warps in ((4096, 4), (4096, 8), (8192, 8))]


def block_n(arguments: Mapping[str, Any]) -> int:
    """The columns of a tile; its rows are what TILE leaves."""
    return min(int(triton.next_power_of_2(arguments["N"])), _LONGEST_BLOCK)


def grid(arguments: Mapping[str, Any]) -> tuple[int]:
    """A program for each tile: there is nothing to be summed along a row."""
    columns = arguments["BLOCK_N"]
    down, across = triton.cdiv(arguments["R"], arguments["TILE"] // columns), triton.cdiv(arguments["N"], columns)
    return (down * across,)
