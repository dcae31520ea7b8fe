"""The gradient of routing: what comes back to the weights of a token's experts, spread over all its logits.

Weights and ids are those of the forward pass: they are right where scores by themselves would all round to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.operators import custom_op


def _block_e(arguments: Mapping[str, Any]) -> int:
    return max(int(triton.next_power_of_2(arguments["E"])), 16)


def _block_t(arguments: Mapping[str, Any]) -> int:
    return max(1, int(arguments["TILE"]) // int(arguments["BLOCK_E"]))


BLOCKS: dict[str, Callable[[Mapping[str, Any]], int]] = {"BLOCK_E": _block_e, "BLOCK_T": _block_t}
_CONFIGS = [triton.Config({"TILE": tile}, num_warps=warps) for tile, warps in ((1024, 4), (2048, 4))]


@triton.autotune(configs=_CONFIGS, key=["E", "TOP_K"])
@triton.heuristics(BLOCKS)
@triton.jit(do_not_specialize=["T"])
def _route_gradient_kernel(
    logits_ptr,
    weights_ptr,
    ids_ptr,
    dweights_ptr,
    dlogits_ptr,
    T,
    E,
    logits_strides,
    dweights_strides,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    in_rows = tokens < T
    inside = in_rows[:, None] & (experts < E)[None, :]
    logits_ptrs = logits_ptr + tokens[:, None] * logits_strides[0] + experts[None, :].to(tl.int64) * logits_strides[1]
    logits = tl.load(logits_ptrs, mask=inside, other=-float("inf")).to(tl.float32)

    weights = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)  # of the chosen experts, and their gradients
    dweights = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    common = tl.zeros([BLOCK_T], tl.float32)
    for place in range(TOP_K):
        own = tokens * TOP_K + place
        chosen = experts[None, :] == tl.load(ids_ptr + own, mask=in_rows, other=-1)[:, None]
        weight = tl.load(weights_ptr + own, mask=in_rows, other=0.0)
        dweights_ptrs = dweights_ptr + tokens * dweights_strides[0] + place * dweights_strides[1]
        dweight = tl.load(dweights_ptrs, mask=in_rows, other=0.0)
        weights = tl.where(chosen, weight[:, None], weights)
        dweights = tl.where(chosen, dweight[:, None], dweights)
        common += weight * dweight

    if RENORMALIZE:
        dlogits = weights * (dweights - common[:, None])
    elif SIGMOID:
        dlogits = weights * dweights
    else:
        grown = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        dlogits = grown / tl.sum(grown, axis=1)[:, None] * (dweights - common[:, None])
    if SIGMOID:
        small = tl.exp(-tl.abs(logits))
        dlogits *= tl.where(logits < 0, 1.0, small) / (1.0 + small)
    to = dlogits_ptr + tokens[:, None] * E + experts[None, :]
    tl.store(to, dlogits.to(dlogits_ptr.dtype.element_ty), mask=inside)


@custom_op("assay::moe_route_backward", lambda logits, *rest: logits.new_empty(logits.shape))
def route_gradient(
    logits: Tensor, weights: Tensor, ids: Tensor, dweights: Tensor, renormalize: bool, sigmoid: bool
) -> Tensor:
    """dlogits[T,E], from the results weights[T,k] and ids[T,k] of `assay::moe_route` and the gradient of the first."""
    tokens, experts = logits.shape
    dlogits = logits.new_empty(logits.shape)
    if tokens:
        _route_gradient_kernel[lambda meta: (triton.cdiv(tokens, meta["BLOCK_T"]),)](
            *(logits, weights.contiguous(), ids.contiguous(), dweights, dlogits),
            *(tokens, experts, logits.stride(), dweights.stride()),
            TOP_K=weights.shape[1],
            SIGMOID=sigmoid,
            RENORMALIZE=renormalize,
        )
    return dlogits
