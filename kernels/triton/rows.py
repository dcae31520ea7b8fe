"""How kernels that work along the rows of a matrix divide it: a program takes a tile of whole rows.

Short rows come many to a tile, so that there are few programs; a row longer than a tile is read in pieces. The division
depends on the length of a row alone, never on their number: that makes a row's bits independent of the batch that it
comes in. Hence the only key of the tuning is N, and kernels are not specialised for R.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton


def _rows_of_a_tile(arguments: Mapping[str, Any]) -> int:
    return max(1, int(arguments["BLOCK_N"]) // int(triton.next_power_of_2(max(arguments["N"], 1))))


def _columns_of_a_tile(arguments: Mapping[str, Any]) -> int:
    return int(arguments["BLOCK_N"]) // int(arguments["BLOCK_R"])


def _one_block(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments["N"] <= arguments["BLOCK_N"])


CONFIGS = [  # BLOCK_N is the whole tile here; BLOCKS gives a part of it to more rows than one
    triton.Config({"BLOCK_N": 2048}, num_warps=4),
    triton.Config({"BLOCK_N": 4096}, num_warps=4),
    triton.Config({"BLOCK_N": 8192}, num_warps=8),
    triton.Config({"BLOCK_N": 16384}, num_warps=16),
]

BLOCKS: dict[str, Callable[[Mapping[str, Any]], int | bool]] = {  # in this order: each sees what those before it gave
    "BLOCK_R": _rows_of_a_tile,
    "BLOCK_N": _columns_of_a_tile,
    "ONE_BLOCK": _one_block,
}


def grid(arguments: Mapping[str, Any]) -> tuple[int]:
    """A program for each tile of rows."""
    return (triton.cdiv(arguments["R"], arguments["BLOCK_R"]),)
