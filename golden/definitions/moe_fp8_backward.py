"""The gradient of a mixture of experts whose weights are FP8.

Codes and scales have no gradient: what quantised the experts is passed straight through (Bengio, Leonard and Courville,
arXiv:1308.3432). Tokens and routing weights have that of the numbers which codes and scales make, as in FP8 training,
whose backward pass multiplies by the codes of the forward pass (DeepSeek-V3, arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.backward import swiglu_backward
from assay.golden.definitions.moe_backward import Expert, PairGradients, infinite_pairs, of_pairs, of_tokens
from assay.golden.definitions.moe_fp8 import SCALES
from assay.golden.definitions.quantized import repeat
from assay.golden.options import choice
from assay.golden.registry import Fault, Reduction, define


def _signature(options: Mapping[str, Any]) -> str:
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


def _scales_dropped(xp: Any, x: Any, w_gate_up: Any, w_down: Any, *rest: Any, **options: Any) -> Any:
    """Those of the second product, of all but the routing weights."""
    scale_gate_up, scale_down, *routing = rest
    ones = xp.exact(xp.native.full(scale_down.shape, 1))
    dx, _ = moe_fp8_backward(xp, x, w_gate_up, w_down, scale_gate_up, ones, *routing, **options)
    return dx, moe_fp8_backward(xp, x, w_gate_up, w_down, *rest, **options)[1]


def _first_scales(xp: Any, x: Any, w_gate_up: Any, w_down: Any, *rest: Any, **options: Any) -> Any:
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
    _signature,
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
        Fault("fp8_experts_scale_dropped", "what goes back through down is not multiplied by down's scales",
              _scales_dropped, "scale"),
        Fault("fp8_experts_scales_of_first", "every expert has the scales of the first", _first_scales, "scale",
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

        def gate_up_back(grown: N) -> N:
            rounded = xp.round(grown, "gate_up_gradient")
            if by_block:
                return xp.scaled_matmul(rounded, up, one, of_up)
            return xp.any_formula(
                lambda: xp.matmul(rounded, xp.round(up * of_up, "scaled")),
                lambda: xp.matmul(xp.round(grown * xp.swap(of_up), "gate_up_gradient"), up),
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
