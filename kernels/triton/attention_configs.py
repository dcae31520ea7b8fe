"""The tiles that attention and its gradients choose among: those alone that their threads have registers for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton

from assay.kernels.triton.layouts import set_block_shapes

_TILES = set_block_shapes(k_ptr=(1, 1, "BLOCK_N", "BLOCK_D"), v_tiles=(1, 1, "BLOCK_N", "BLOCK_DV"))
_ROWS_TILES = set_block_shapes(k_ptr=(1, 1, "BLOCK_N", "BLOCK_D"), v_ptr=(1, 1, "BLOCK_N", "BLOCK_DV"))
_KEYS_TILES = set_block_shapes(q_ptr=(1, 1, "BLOCK_M", "BLOCK_D"), dout_ptr=(1, 1, "BLOCK_M", "BLOCK_DV"))

_MOST_REGISTERS = 255


def _configs(hook: Any, *tiles: tuple[int, int, int, int]) -> list[triton.Config]:
    """Configurations of (BLOCK_M, BLOCK_N, num_warps, num_stages); those of one stage are float32's.

    Of these a thread may have all the registers that 8 warps leave it: else ptxas spills some to run more programs at a
    time.
    """
    return [
        triton.Config(
            {"BLOCK_M": block_m, "BLOCK_N": block_n},
            num_warps=warps,
            num_stages=stages,
            maxnreg=_MOST_REGISTERS if stages == 1 else None,
            pre_hook=hook,
        )
        for block_m, block_n, warps, stages in tiles
    ]


_HALF = _configs(
    _TILES,
    *((128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)),
    *((64, 64, 8, 2), (64, 32, 8, 2)),  # the widest heads'
)
# Of float32, whose products the tensor cores don't form, by the most columns of keys and values together.
_SINGLE = {
    128: _configs(_TILES, (128, 16, 8, 1), (64, 16, 8, 1), (32, 32, 8, 1)),
    256: _configs(_TILES, (32, 32, 8, 1), (32, 16, 8, 1)),
    512: _configs(_TILES, (16, 16, 8, 1)),
}

_SUMS = 64  # of a thread in the gradients of keys and values, where sequences lie end to end

# Of gradients, by the same columns.
_ROWS = {
    128: _configs(_ROWS_TILES, (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 16, 8, 1), (32, 32, 8, 1)),
    256: _configs(_ROWS_TILES, (128, 64, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 8, 1), (32, 16, 8, 1)),
    512: _configs(_ROWS_TILES, (64, 16, 8, 2), (16, 16, 8, 1)),
}
_KEYS = {
    128: _configs(_KEYS_TILES, (64, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2), (16, 64, 8, 1), (32, 32, 8, 1)),
    256: _configs(_KEYS_TILES, (32, 64, 4, 2), (32, 64, 8, 2), (16, 64, 8, 1)),
    512: _configs(_KEYS_TILES, (16, 64, 8, 2), (16, 32, 8, 2), (16, 16, 8, 1)),
}
CONFIGS, ROWS_CONFIGS, KEYS_CONFIGS = (
    list(dict.fromkeys([*others, *(config for configs in table.values() for config in configs)]))
    for others, table in ((_HALF, _SINGLE), ([], _ROWS), ([], _KEYS))
)


def fitting(_: list[triton.Config], arguments: Mapping[str, Any], **__: Any) -> list[triton.Config]:
    """Tall tiles, unless the rows are few or the heads so wide that a thread's registers would not hold its share."""
    heads = arguments["BLOCK_D"] + arguments["BLOCK_DV"]
    if arguments["q_ptr"].element_size() == 4:
        return _up_to(heads, _SINGLE)
    rows = triton.cdiv(arguments["Sq"], arguments["SEQUENCES"]) * arguments["GROUP"]
    height = min(64 if heads > 256 else 128, max(64, triton.next_power_of_2(rows)))
    plain = not arguments["MASKED"] and arguments["slopes_ptr"] is None  # masks and biases take registers too
    longest = 128 if heads <= 128 or plain else 64
    kept = [c for c in _HALF if c.kwargs["BLOCK_M"] == height and c.kwargs["BLOCK_N"] <= longest]
    return [c for c in kept if height > 64 or (c.num_warps == 8) == (heads > 256)]


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
    own = _up_to(arguments["BLOCK_D"] + arguments["BLOCK_DV"], table)
    return [config for config in own if (config.num_stages == 1) == (arguments[gradient].element_size() == 4)]


def _up_to(heads: int, table: Mapping[int, list[triton.Config]]) -> list[triton.Config]:
    return table[min(widest for widest in table if heads <= widest)]
