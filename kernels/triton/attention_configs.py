"""The tiles that attention chooses among: those alone that the registers of their threads have room for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton

from assay.kernels.triton.descriptors import sets_tiles

_TILES = sets_tiles(k_ptr=(1, 1, "BLOCK_N", "BLOCK_D"), v_tiles=(1, 1, "BLOCK_N", "BLOCK_DV"))
CONFIGS = [
    triton.Config({"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=warps, num_stages=stages, pre_hook=_TILES)
    for block_m, block_n, warps, stages in (
        (128, 128, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 8, 2),  # the widest heads'
        (64, 32, 8, 2),
        (256, 32, 8, 1),  # those of one stage are float32's, whose products the tensor cores don't form
        (128, 64, 8, 1),
        (128, 32, 8, 1),
        (64, 64, 8, 1),
        (64, 32, 16, 1),
    )
]


def fitting(configs: list[triton.Config], arguments: Mapping[str, Any], **_: Any) -> list[triton.Config]:
    """Tall tiles, unless the rows are few or the heads so wide that a thread's registers would not hold its share."""
    heads, rows = arguments["BLOCK_D"] + arguments["BLOCK_DV"], arguments["Sq"] * arguments["GROUP"]
    single = arguments["q_ptr"].element_size() == 4
    tallest = 64 if heads > (128 if single else 256) else 256 if single and heads <= 64 else 128
    height = min(tallest, max(64, triton.next_power_of_2(rows)))
    plain = not arguments["MASKED"] and arguments["slopes_ptr"] is None  # masks and biases take registers too
    longest = 128 if heads <= 128 or plain else 64
    kept = [c for c in configs if c.kwargs["BLOCK_M"] == height and (c.num_stages == 1) == single]
    if height == 64 and not single:
        kept = [c for c in kept if (c.num_warps == 8) == (heads > 256)]
    return [c for c in kept if c.kwargs["BLOCK_N"] <= longest]
