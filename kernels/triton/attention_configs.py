"""The tiles that attention and its gradients choose among: those alone that their threads have registers for."""

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
    heads = arguments["BLOCK_D"] + arguments["BLOCK_DV"]
    rows = triton.cdiv(arguments["Sq"], arguments["SEQUENCES"]) * arguments["GROUP"]
    single = arguments["q_ptr"].element_size() == 4
    tallest = 64 if heads > (128 if single else 256) else 256 if single and heads <= 64 else 128
    height = min(tallest, max(64, triton.next_power_of_2(rows)))
    plain = not arguments["MASKED"] and arguments["slopes_ptr"] is None  # masks and biases take registers too
    longest = 128 if heads <= 128 or plain else 64
    kept = [c for c in configs if c.kwargs["BLOCK_M"] == height and (c.num_stages == 1) == single]
    if height == 64 and not single:
        kept = [c for c in kept if (c.num_warps == 8) == (heads > 256)]
    return [c for c in kept if c.kwargs["BLOCK_N"] <= longest]


_ROWS_TILES = sets_tiles(k_ptr=(1, 1, "BLOCK_N", "BLOCK_D"), v_ptr=(1, 1, "BLOCK_N", "BLOCK_DV"))
_KEYS_TILES = sets_tiles(q_ptr=(1, 1, "BLOCK_M", "BLOCK_D"), dout_ptr=(1, 1, "BLOCK_M", "BLOCK_DV"))


def _configs(hook: Any, *tiles: tuple[int, int, int, int]) -> list[triton.Config]:
    """Configurations of (BLOCK_M, BLOCK_N, num_warps, num_stages)."""
    return [
        triton.Config({"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=warps, num_stages=stages, pre_hook=hook)
        for block_m, block_n, warps, stages in tiles
    ]


_SUMS = 64  # of a thread in the gradients of keys and values, where sequences lie end to end

# Of gradients, by the most columns of keys and values together; those of one stage are float32's.
_ROWS = {
    128: _configs(_ROWS_TILES, (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 16, 8, 1)),
    256: _configs(_ROWS_TILES, (128, 64, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2), (16, 16, 8, 1)),
    512: _configs(_ROWS_TILES, (64, 16, 8, 2), (16, 16, 16, 1)),
}
_KEYS = {
    128: _configs(_KEYS_TILES, (64, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2), (16, 32, 8, 1)),
    256: _configs(_KEYS_TILES, (32, 64, 4, 2), (32, 64, 8, 2), (16, 16, 8, 1)),
    512: _configs(_KEYS_TILES, (16, 64, 8, 2), (16, 32, 8, 2), (16, 16, 16, 1)),
}
ROWS_CONFIGS, KEYS_CONFIGS = ([config for configs in table.values() for config in configs] for table in (_ROWS, _KEYS))


def fitting_rows(_: list[triton.Config], arguments: Mapping[str, Any], **__: Any) -> list[triton.Config]:
    """Of the configurations for a gradient of queries those that the registers of their threads have room for."""
    return _of_heads(_ROWS, arguments, "dq_ptr")


def fitting_keys(_: list[triton.Config], arguments: Mapping[str, Any], **__: Any) -> list[triton.Config]:
    """As `fitting_rows`, for the gradients of keys and values.

    Where sequences lie end to end, what is known of them takes registers too: a thread has 64 sums there at most.
    """
    kept = _of_heads(_KEYS, arguments, "dk_ptr")
    packed = arguments.get("k_starts_ptr") is not None
    heads = arguments["BLOCK_D"] + arguments["BLOCK_DV"]
    return [c for c in kept if not packed or c.kwargs["BLOCK_N"] * heads <= _SUMS * 32 * c.num_warps]


def _of_heads(
    table: Mapping[int, list[triton.Config]], arguments: Mapping[str, Any], gradient: str
) -> list[triton.Config]:
    heads = arguments["BLOCK_D"] + arguments["BLOCK_DV"]
    single = arguments[gradient].element_size() == 4
    own = table[min(widest for widest in table if heads <= widest)]
    return [config for config in own if (config.num_stages == 1) == single]
