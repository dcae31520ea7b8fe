"""Mixture of experts with FP8 or 4-bit weights.

Codes and scales have no gradient: gradients pass straight through the quantisation (Bengio, Leonard and Courville,
arXiv:1308.3432). Tokens and routing weights have the gradient for the dequantised weights, as in FP8 training, whose
backward pass multiplies by the codes of the forward pass (DeepSeek-V3, arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.activations import swiglu_backward
from assay.golden.definitions.gemm import nibbles, repeat
from assay.golden.definitions.moe import Expert, PairGradients, infinite_pairs, mixture, of_pairs, of_tokens
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
    """The scales of gate replace those of up as well."""
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
        Fault("expert_scales_of_gate", "the scales of gate replace those of up as well", _scale_of_gate, "scale"),
        Fault("expert_scales_of_first", "every expert has the scales of the first", _first_scales, "scale",
              needs="more than one expert"),
        Fault("expert_scales_dropped", "the scales of the second product are missing", _scales_dropped, "scale"),
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


def _backward_signature(options: Mapping[str, Any]) -> str:
    gate_up, down = SCALES[options["granularity"]]
    return (
        "x[T,D], w_gate_up:float8_e4m3fn[E,2*F,D], w_down:float8_e4m3fn[E,D,F], "
        f"scale_gate_up:float32[E,{gate_up}]=scale, scale_down:float32[E,{down}]=scale, "
        "weights:float32[T,k]=weight, ids:int32[T,k]=index(E), dy[T,D] -> dx[T,D], dweights:float32[T,k]"
    )


def _weights_left_out(xp: Any, *tensors: Any, **options: Any) -> Any:
    """Of dx."""
    *experts, weights, ids, dy = tensors
    dx, _ = moe_fp8_backward(xp, *experts, xp.exact(xp.native.full(ids.shape, 1)), ids, dy, **options)
    return dx, moe_fp8_backward(xp, *experts, weights, ids, dy, **options)[1]


def _scales_dropped_dy(xp: Any, x: Any, w_gate_up: Any, w_down: Any, *rest: Any, **options: Any) -> Any:
    """Those of the second product, of all but the routing weights."""
    scale_gate_up, scale_down, *routing = rest
    ones = xp.exact(xp.native.full(scale_down.shape, 1))
    dx, _ = moe_fp8_backward(xp, x, w_gate_up, w_down, scale_gate_up, ones, *routing, **options)
    return dx, moe_fp8_backward(xp, x, w_gate_up, w_down, *rest, **options)[1]


def _first_scales_dy(xp: Any, x: Any, w_gate_up: Any, w_down: Any, *rest: Any, **options: Any) -> Any:
    scale_gate_up, scale_down, *routing = rest
    first = [0] * w_down.shape[0]
    return moe_fp8_backward(xp, x, w_gate_up, w_down, scale_gate_up[first], scale_down[first], *routing, **options)


def _first_choice(xp: Any, *tensors: Any, **options: Any) -> Any:
    """dx is that of a token's first choice alone."""
    *experts, weights, ids, dy = tensors
    dx, _ = moe_fp8_backward(xp, *experts, weights[:, :1], ids[:, :1], dy, **options)
    return dx, moe_fp8_backward(xp, *tensors, **options)[1]


def _slope_flat(xp: Any, *tensors: Any, granularity: str) -> Any:
    """dgate is dhidden up sigmoid(gate)."""

    def slope(gate: Any, up: Any, dhidden: Any) -> Any:
        return xp.product(dhidden, up, xp.sigmoid(gate)), swiglu_backward(xp, gate, up, dhidden)[1]

    return _gradients(xp, slope, *tensors, granularity=granularity)


def _halves_swapped(xp: Any, *tensors: Any, granularity: str) -> Any:
    return _gradients(xp, lambda *each: swiglu_backward(xp, *each)[::-1], *tensors, granularity=granularity)


@define(
    "moe_fp8_backward",
    _backward_signature,
    options={"granularity": choice("channel", "block")},
    stages={
        "gate_up": None, "activated": None, "hidden": "input", "expert": None, "scaled": "input",
        "weighted_gradient": None, "hidden_gradient": None, "activated_gradient": None, "gate_up_gradient": "input",
        "share": None,
    },
    rows="T",
    work="2*(T*k*D*F+E*D*F)",
    gathered=("E",),
    sizes={"k": (1, 2, 3, 6, 8), "E": (1, 2, 3, 4, 8, 17, 64)},
    gradient_of="moe_fp8",
    reduction=Reduction("D+F"),
    faults=(
        Fault("fp8_experts_without_weights", "the gradient of an expert's output is not multiplied by its weight",
              _weights_left_out, "routing"),
        Fault("fp8_experts_scale_dropped", "the gradient through down lacks down's scales",
              _scales_dropped_dy, "scale"),
        Fault("fp8_experts_scales_of_first", "every expert has the scales of the first", _first_scales_dy, "scale",
              needs="more than one expert"),
        Fault("fp8_experts_slope_flat", "of the gate's slope only the first term is taken: sigmoid(gate)", _slope_flat),
        Fault("fp8_experts_halves_swapped", "the gradients of gate and up are swapped", _halves_swapped, "layout"),
        Fault("fp8_experts_first_choice", "dx is that of a token's first choice alone", _first_choice, "routing",
              needs="k of two or more"),
    ),
)  # fmt: skip
def moe_fp8_backward(
    xp: Arithmetic[N, Idx], x: N, w_gate_up: N, w_down: N, scale_gate_up: N, scale_down: N, weights: N, ids: Idx, dy: N,
    *, granularity: str,
) -> tuple[N, N]:  # fmt: skip
    """dx and dweights of `moe_backward`, of weights that are codes times their scales.

    Scales by blocks are constant over 128 terms of every sum, which they may multiply. One for each row changes from
    term to term of the products back, where it must multiply an operand: weights or dy, then rounded as the stage
    "scaled", or the gradients of gate and up. The other stages are those of `moe_backward`.
    """
    tensors = x, w_gate_up, w_down, scale_gate_up, scale_down, weights, ids, dy
    return _gradients(xp, lambda *each: swiglu_backward(xp, *each), *tensors, granularity=granularity)


def _gradients(
    xp: Arithmetic[N, Idx], slope: Any, x: N, w_gate_up: N, w_down: N, scale_gate_up: N, scale_down: N, weights: N,
    ids: Idx, dy: N, *, granularity: str,
) -> tuple[N, N]:  # fmt: skip
    """``slope``: dgate and dup of gate, up and the gradient of silu(gate) * up."""
    by_block = granularity == "block"
    one = xp.exact(xp.native.full((1, 1), 1))

    def of_expert(expert: int, x: N, weight: N, dy: N) -> PairGradients[N]:
        up, down = w_gate_up[expert], w_down[expert]
        of_up, of_down = scale_gate_up[expert], scale_down[expert]
        if by_block:
            of_up, of_down = (
                repeat(xp, repeat(xp, scale, codes.shape[0], axis=0), codes.shape[1], axis=1)
                for scale, codes in ((of_up, up), (of_down, down))
            )

        def down_back(rows: N) -> N:
            if by_block:
                return xp.scaled_matmul(rows, down, one, of_down)
            return xp.any_formula(
                lambda: xp.matmul(rows, xp.round(down * of_down, "scaled")),
                lambda: xp.matmul(xp.round(rows * xp.swap(of_down), "scaled"), down),
            )

        def gate_up_back(dgate_up: N) -> N:
            rounded = xp.round(dgate_up, "gate_up_gradient")
            if by_block:
                return xp.scaled_matmul(rounded, up, one, of_up)
            return xp.any_formula(
                lambda: xp.matmul(rounded, xp.round(up * of_up, "scaled")),
                lambda: xp.matmul(xp.round(dgate_up * xp.swap(of_up), "gate_up_gradient"), up),
            )

        def forward(rows: N, codes: N, scale: N) -> N:
            return xp.scaled_matmul(rows, xp.swap(codes), one, xp.swap(scale))

        products = Expert(
            lambda rows: forward(rows, up, of_up), lambda rows: forward(rows, down, of_down), gate_up_back, down_back
        )
        return of_pairs(xp, slope, x, weight, dy, products)

    dx, dweights = of_tokens(xp, of_expert, x, weights, ids, dy, w_down.shape[0])

    def touched() -> Idx:
        return infinite_pairs(xp, x, weights, ids, dy, scale_gate_up, scale_down)

    dx = xp.unspecified(lambda: touched().any(-1)[:, None], dx)
    return dx, xp.unspecified(touched, dweights)


def _of_gate(xp: Any, table: Any) -> Any:
    """Use the table of gate for up as well."""
    rows = table.shape[1]
    return table[:, xp.integers([row % max(rows // 2, 1) for row in range(rows)])]


def _int4_gate_scale(xp: Any, x: Any, w_gate_up: Any, w_down: Any, scale_gate_up: Any, *rest: Any) -> Any:
    """The scales of gate replace those of up as well."""
    return moe_int4(xp, x, w_gate_up, w_down, _of_gate(xp, scale_gate_up), *rest)


def _zero_of_gate(xp: Any, x: Any, w_gate_up: Any, w_down: Any, *tables: Any) -> Any:
    """The zero-points of gate replace those of up as well."""
    scale_gate_up, scale_down, zero_gate_up, *rest = tables
    return moe_int4(xp, x, w_gate_up, w_down, scale_gate_up, scale_down, _of_gate(xp, zero_gate_up), *rest)


def _first_tables(xp: Any, x: Any, w_gate_up: Any, w_down: Any, *tables: Any) -> Any:
    """Every expert has the scales and zero-points of the first."""
    *per_expert, weights, ids = tables
    first = xp.integers([0] * w_down.shape[0])
    return moe_int4(xp, x, w_gate_up, w_down, *(table[first] for table in per_expert), weights, ids)


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
        Fault("expert_groups_of_gate", "the scales of gate replace those of up as well", _int4_gate_scale, "scale"),
        Fault("expert_zeros_of_gate", "the zero-points of gate replace those of up as well", _zero_of_gate, "scale"),
        Fault("expert_groups_of_first", "every expert has the scales and zero-points of the first", _first_tables,
              "scale", needs="more than one expert"),
    ),
)  # fmt: skip
def moe_int4(
    xp: Arithmetic[N, Idx], x: N, w_gate_up: Idx, w_down: Idx, scale_gate_up: N, scale_down: N, zero_gate_up: Idx,
    zero_down: Idx, weights: N, ids: Idx,
) -> N:  # fmt: skip
    """`moe` of weights (code - zero) scale, a scale and a zero-point for each g codes of a row; a byte holds two codes,
    the even position in its low nibble."""

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
