"""A mixture of experts whose weights are FP8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.moe import mixture
from assay.golden.definitions.quantized import repeat
from assay.golden.options import choice
from assay.golden.registry import Fault, Reduction, define

SCALES = {
    "channel": ("2*F,1", "D,1"),
    "block": ("ceil(2*F/128),ceil(D/128)", "ceil(D/128),ceil(F/128)"),
}


def _signature(options: Mapping[str, Any]) -> str:
    gate_up, down = SCALES[options["granularity"]]
    return (
        "x[T,D], w_gate_up:float8_e4m3fn[E,2*F,D], w_down:float8_e4m3fn[E,D,F], "
        f"scale_gate_up:float32[E,{gate_up}]=scale, scale_down:float32[E,{down}]=scale, "
        "weights:float32[T,k]=weight, ids:int32[T,k]=index(E) -> y[T,D]"
    )


def _scale_of_gate(xp: Any, x: Any, w_gate_up: Any, w_down: Any, scale_gate_up: Any, *rest: Any, **options: Any) -> Any:
    """The scales of gate stand for those of up as well."""
    rows = scale_gate_up.shape[1]
    twice = scale_gate_up[:, [row % max(rows // 2, 1) for row in range(rows)]]
    return moe_fp8(xp, x, w_gate_up, w_down, twice, *rest, **options)


def _first_scales(xp: Any, x: Any, w_gate_up: Any, w_down: Any, *scales: Any, **options: Any) -> Any:
    """Every expert has the scales of the first."""
    scale_gate_up, scale_down, *routing = scales
    first = [0] * w_down.shape[0]
    return moe_fp8(xp, x, w_gate_up, w_down, scale_gate_up[first], scale_down[first], *routing, **options)


def _scales_dropped(xp: Any, x: Any, w_gate_up: Any, w_down: Any, *scales: Any, **options: Any) -> Any:
    """Those of the second product."""
    scale_gate_up, scale_down, *routing = scales
    ones = xp.exact(xp.native.full(scale_down.shape, 1))
    return moe_fp8(xp, x, w_gate_up, w_down, scale_gate_up, ones, *routing, **options)


@define(
    "moe_fp8",
    _signature,
    options={"granularity": choice("channel", "block")},
    stages={"gate_up": None, "activated": None, "hidden": "input", "expert": None, "weighted": None},
    rows="T",
    work="T*k*D*F+E*D*F",
    sequential_steps="E+ceil(T*k/16)",
    gathered=("E",),
    sizes={"k": (1, 2, 3, 6, 8), "E": (1, 2, 3, 4, 8, 17, 64)},
    reduction=Reduction("D+F"),
    faults=(
        Fault("expert_scales_of_gate", "the scales of gate stand for those of up as well", _scale_of_gate, "scale"),
        Fault("expert_scales_of_first", "every expert has the scales of the first", _first_scales, "scale",
              needs="more than one expert"),
        Fault("expert_scales_dropped", "the scales of the second product are left out", _scales_dropped, "scale"),
    ),
)  # fmt: skip
def moe_fp8(
    xp: Arithmetic[N, Idx], x: N, w_gate_up: N, w_down: N, scale_gate_up: N, scale_down: N, weights: N, ids: Idx,
    *, granularity: str,
) -> N:  # fmt: skip
    """`moe` of weights times their scales, one for each row of an expert, or for each block of 128 x 128."""

    def product(rows: N, codes: N, scale: N) -> N:
        (columns, inner), one = codes.shape, xp.exact(xp.native.full((1, 1), 1))
        if granularity == "block":
            scale = repeat(xp, repeat(xp, scale, columns, axis=0), inner, axis=1)
        return xp.scaled_matmul(rows, xp.swap(codes), one, xp.swap(scale))

    return mixture(
        *(xp, x, weights, ids, w_down.shape[0]),
        lambda expert, rows: product(rows, w_gate_up[expert], scale_gate_up[expert]),
        lambda expert, rows: product(rows, w_down[expert], scale_down[expert]),
    )
