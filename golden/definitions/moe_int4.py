"""A mixture of experts whose weights are 4-bit codes in groups."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.moe import mixture
from assay.golden.definitions.quantized import nibbles, repeat
from assay.golden.registry import Fault, Reduction, define


def _of_gate(xp: Any, table: Any) -> Any:
    """What belongs to gate stands for up as well."""
    rows = table.shape[1]
    return table[:, xp.integers([row % max(rows // 2, 1) for row in range(rows)])]


def _scale_of_gate(xp: Any, x: Any, w_gate_up: Any, w_down: Any, scale_gate_up: Any, *rest: Any) -> Any:
    """The scales of gate stand for those of up as well."""
    return moe_int4(xp, x, w_gate_up, w_down, _of_gate(xp, scale_gate_up), *rest)


def _zero_of_gate(xp: Any, x: Any, w_gate_up: Any, w_down: Any, *tables: Any) -> Any:
    """The zero-points of gate stand for those of up as well."""
    scale_gate_up, scale_down, zero_gate_up, *rest = tables
    return moe_int4(xp, x, w_gate_up, w_down, scale_gate_up, scale_down, _of_gate(xp, zero_gate_up), *rest)


def _first_tables(xp: Any, x: Any, w_gate_up: Any, w_down: Any, *tables: Any) -> Any:
    """Every expert has the scales and zero-points of the first."""
    *own, weights, ids = tables
    first = xp.integers([0] * w_down.shape[0])
    return moe_int4(xp, x, w_gate_up, w_down, *(table[first] for table in own), weights, ids)


@define(
    "moe_int4",
    "x[T,D], w_gate_up:uint8[E,2*F,D/2]=bits, w_down:uint8[E,D,F/2]=bits, scale_gate_up[E,2*F,D/g]=scale, "
    "scale_down[E,D,F/g]=scale, zero_gate_up:uint8[E,2*F,D/g]=code(16), zero_down:uint8[E,D,F/g]=code(16), "
    "weights:float32[T,k]=weight, ids:int32[T,k]=index(E) -> y[T,D]",
    stages={
        "weights": "input", "gate_up": None, "activated": None, "hidden": "input", "expert": None, "weighted": None,
    },
    rows="T",
    work="T*k*D*F+E*D*F",
    sequential_steps="E+ceil(T*k/16)",
    gathered=("E",),
    sizes={"k": (1, 2, 3, 6, 8), "E": (1, 2, 3, 4, 8, 17, 64), "g": (8, 32, 128)},
    multiples={"D": "g", "F": "g"},
    reduction=Reduction("D+F"),
    faults=(
        Fault("expert_groups_of_gate", "the scales of gate stand for those of up as well", _scale_of_gate, "scale"),
        Fault("expert_zeros_of_gate", "the zero-points of gate stand for those of up as well", _zero_of_gate, "scale"),
        Fault("expert_groups_of_first", "every expert has the scales and zero-points of the first", _first_tables,
              "scale", needs="more than one expert"),
    ),
)  # fmt: skip
def moe_int4(
    xp: Arithmetic[N, Idx], x: N, w_gate_up: Idx, w_down: Idx, scale_gate_up: N, scale_down: N, zero_gate_up: Idx,
    zero_down: Idx, weights: N, ids: Idx,
) -> N:  # fmt: skip
    """`moe` of weights (code - zero) scale, a scale and a zero-point for each g codes of a row; a byte holds two codes,
    the even place in its low nibble."""

    def product(rows: N, packed: Idx, zeros: Idx, scale: N) -> N:
        codes = nibbles(xp, packed, (0, 1), axis=1)
        inner = codes.shape[1]
        group = inner // max(scale.shape[1], 1) or 1
        points = zeros[:, xp.integers(range(inner)) // group]
        scale = xp.swap(repeat(xp, scale, inner, axis=1, group=group))
        return xp.quantized_matmul(rows, codes.swapaxes(0, 1), points.swapaxes(0, 1), scale)

    return mixture(
        *(xp, x, weights, ids, w_down.shape[0]),
        lambda expert, rows: product(rows, w_gate_up[expert], zero_gate_up[expert], scale_gate_up[expert]),
        lambda expert, rows: product(rows, w_down[expert], zero_down[expert], scale_down[expert]),
    )
