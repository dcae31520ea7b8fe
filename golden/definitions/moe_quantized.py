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
from assay.golden.definitions.moe import (
    FLAT_SLOPE,
    SIZES,
    SWAPPED,
    Expert,
    PairGradients,
    infinite_pairs,
    mixture,
    of_first_choice,
    of_pairs,
    of_tokens,
)
from assay.golden.options import choice
from assay.golden.registry import Fault, Reduction, altered, define

SCALES = {"channel": ("2*F,1", "D,1"), "block": ("ceil(2*F/128),ceil(D/128)", "ceil(D/128),ceil(F/128)")}


def _tensors(options: Mapping[str, Any]) -> str:
    gate_up, down = SCALES[options["granularity"]]
    return (
        "x[T,D], w_gate_up:float8_e4m3fn[E,2*F,D], w_down:float8_e4m3fn[E,D,F], "
        f"scale_gate_up:float32[E,{gate_up}]=scale, scale_down:float32[E,{down}]=scale, "
        "weights:float32[T,k]=weight, ids:int32[T,k]=index(E)"
    )


def _of_gate(value: Any) -> Any:
    """Use the table of gate for up as well."""
    rows = value.shape[1]
    return value[:, [row % max(rows // 2, 1) for row in range(rows)]]


def _of_first(value: Any) -> Any:
    """Give every expert the table of the first."""
    return value[[0] * value.shape[0]]


@define(
    "moe_fp8",
    lambda options: f"{_tensors(options)} -> y[T,D]",
    options={"granularity": choice("channel", "block")},
    stages={"gate_up": None, "activated": None, "hidden": "input", "expert": None, "weighted": None},
    rows="T",
    work="T*k*(D+16)*F+E*(D*F+4096)",
    sequential_steps="E+ceil(T*k/16)",
    gathered=("E",),
    sizes=SIZES,
    reduction=Reduction("D+F"),
    faults=(
        Fault("expert_scales_of_gate", "the scales of gate replace those of up as well",
              altered("moe_fp8", scale_gate_up=_of_gate), "scale"),
        Fault("expert_scales_of_first", "every expert has the scales of the first",
              altered("moe_fp8", scale_gate_up=_of_first, scale_down=_of_first), "scale", needs="more than one expert"),
        Fault("expert_scales_dropped", "the scales of the second product are missing",
              altered("moe_fp8", scale_down=lambda xp, scale_down: xp.exact(xp.native.full(scale_down.shape, 1))),
              "scale"),
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


@define(
    "moe_fp8_backward",
    lambda options: f"{_tensors(options)}, dy[T,D] -> dx[T,D], dweights:float32[T,k]",
    options={"granularity": choice("channel", "block")},
    stages={
        "gate_up": None, "activated": None, "hidden": "input", "expert": None, "scaled": "input",
        "weighted_gradient": None, "hidden_gradient": None, "activated_gradient": None, "gate_up_gradient": "input",
        "share": None,
    },
    rows="T",
    work="2*(T*k*(D+16)*F+E*(D*F+4096))",
    gathered=("E",),
    sizes=SIZES,
    gradient_of="moe_fp8",
    reduction=Reduction("D+F"),
    faults=(
        Fault("fp8_experts_without_weights", "the gradient of an expert's output is not multiplied by its weight",
              altered("moe_fp8_backward", dx=lambda xp, again, ids: (
               again(weights=xp.exact(xp.native.full(ids.shape, 1))))), "routing"),
        Fault("fp8_experts_scale_dropped", "the gradient through down lacks down's scales",
              altered("moe_fp8_backward", dx=lambda xp, again, scale_down: (
               again(scale_down=xp.exact(xp.native.full(scale_down.shape, 1))))), "scale"),
        Fault("fp8_experts_scales_of_first", "every expert has the scales of the first",
              altered("moe_fp8_backward", scale_gate_up=_of_first, scale_down=_of_first), "scale",
              needs="more than one expert"),
        Fault("fp8_experts_slope_flat", "of the gate's slope only the first term is taken: sigmoid(gate)",
              lambda xp, *tensors, **options: _gradients(xp, FLAT_SLOPE, *tensors, **options)),
        Fault("fp8_experts_halves_swapped", "the gradients of gate and up are swapped",
              lambda xp, *tensors, **options: _gradients(xp, SWAPPED, *tensors, **options), "layout"),
        Fault("fp8_experts_first_choice", "dx is that of a token's first choice alone",
              altered("moe_fp8_backward", dx=of_first_choice), "routing", needs="k of two or more"),
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
    return _gradients(xp, swiglu_backward, *tensors, granularity=granularity)


def _gradients(
    xp: Arithmetic[N, Idx], slope: Any, x: N, w_gate_up: N, w_down: N, scale_gate_up: N, scale_down: N, weights: N,
    ids: Idx, dy: N, *, granularity: str,
) -> tuple[N, N]:  # fmt: skip
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


@define(
    "moe_int4",
    "x[T,D], w_gate_up:uint8[E,2*F,D/2]=bits, w_down:uint8[E,D,F/2]=bits, scale_gate_up[E,2*F,D/g]=scale, "
    "scale_down[E,D,F/g]=scale, zero_gate_up:uint8[E,2*F,D/g]=code(16), zero_down:uint8[E,D,F/g]=code(16), "
    "weights:float32[T,k]=weight, ids:int32[T,k]=index(E) -> y[T,D]",
    stages={
        "weights": "input", "gate_up": None, "activated": None, "hidden": "input", "expert": None, "weighted": None,
    },
    rows="T",
    work="T*k*(D+16)*F+E*(D*F+4096)",
    sequential_steps="E+ceil(T*k/16)",
    gathered=("E",),
    sizes={**SIZES, "g": (8, 32, 128)},
    multiples={"D": "g", "F": "g"},
    reduction=Reduction("D+F"),
    faults=(
        Fault("expert_groups_of_gate", "the scales of gate replace those of up as well",
              altered("moe_int4", scale_gate_up=_of_gate), "scale"),
        Fault("expert_zeros_of_gate", "the zero-points of gate replace those of up as well",
              altered("moe_int4", zero_gate_up=_of_gate), "scale"),
        Fault("expert_groups_of_first", "every expert has the scales and zero-points of the first",
              altered("moe_int4", scale_gate_up=_of_first, scale_down=_of_first,
               zero_gate_up=_of_first, zero_down=_of_first), "scale", needs="more than one expert"),
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
