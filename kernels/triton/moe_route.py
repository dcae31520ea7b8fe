"""Routing of a mixture of experts: the top k scores of each token, by repeated argmax in registers; and its gradient.

A program holds the logits of several tokens as int64 keys that sort as the numbers do, with the expert in the low bits:
the largest key of a row is its best expert, and of equal logits the one of the lowest index. The winners are decoded
from their keys, so nothing is gathered. NaN sorts above all numbers, so that it reaches the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, FLOATING, check, check_choice, check_shape
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.replay import replayed

_SCORINGS = ("softmax", "sigmoid")
_CHOSEN = tl.constexpr(-(2**63))  # below the key of -inf
_NAN = tl.constexpr(0x7FFFFFFF)  # above the key of +inf, and itself the bits of a NaN

# E and top_k alone select the configuration, never T: a token's bits do not depend on the batch around it.
_CONFIGS = [
    triton.Config({"TILE": tile}, num_warps=warps) for tile, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8))
]
_BACKWARD_CONFIGS = [triton.Config({"TILE": tile}, num_warps=4) for tile in (1024, 2048)]
_HEURISTICS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "BLOCK_E": lambda arguments: max(int(triton.next_power_of_2(arguments["E"])), 16),
    "BLOCK_T": lambda arguments: max(1, int(arguments["TILE"]) // int(arguments["BLOCK_E"])),
}


@triton.jit
def _sort_key(x, experts):
    """x (float32) as int64 that sort by x, then by descending index; both zeros are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # negative numbers sort backwards by their magnitude
    return (tl.where(x != x, _NAN, bits).to(tl.int64) << 32) | (0x7FFFFFFF - experts)


@triton.jit
def _logit(key):
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _expert(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.autotune(configs=_CONFIGS, key=["E", "TOP_K"])
@triton.heuristics(_HEURISTICS)
@triton.jit(do_not_specialize=["T"])
def _moe_route_kernel(
    logits_ptr,
    weights_ptr,
    ids_ptr,
    T,
    E,
    logits_strides,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t, mask_e = tokens[:, None] < T, experts[None, :] < E
    logits_ptrs = logits_ptr + tokens[:, None] * logits_strides[0] + experts[None, :].to(tl.int64) * logits_strides[1]
    logits = tl.load(logits_ptrs, mask=mask_t & mask_e, other=-float("inf")).to(tl.float32)

    keys = _sort_key(logits, experts[None, :])  # padding sorts after every expert: -inf with a higher index
    winners = tl.full([BLOCK_T, BLOCK_K], _CHOSEN, tl.int64)
    for k in range(TOP_K):
        best = tl.max(keys, axis=1)[:, None]
        winners = tl.where(offs_k[None, :] == k, best, winners)
        keys = tl.where(keys == best, _CHOSEN, keys)

    mask_k = offs_k[None, :] < TOP_K
    x = tl.where(mask_k, _logit(winners), -float("inf"))
    x_max = _logit(tl.max(winners, axis=1))[:, None]
    if SIGMOID:
        # Normalised, all scores may be scaled alike: by exp(-x_max) where no logit is positive, lest all underflow.
        shift = tl.where(x_max < 0, x_max, 0.0) if RENORMALIZE else 0.0
        weights = tl.exp(tl.where(x < 0, x, 0.0) - shift) / (1.0 + tl.exp(-tl.abs(x)))
        weights = tl.where(x != x, x, weights)
    else:
        weights = tl.exp(x - x_max)
        if not RENORMALIZE:  # else the sum over all experts cancels
            weights /= tl.sum(tl.exp(logits - x_max), axis=1)[:, None]
    weights = tl.where(mask_k, weights, 0.0)
    if RENORMALIZE:
        weights /= tl.sum(weights, axis=1)[:, None]

    offsets = tokens[:, None] * TOP_K + offs_k[None, :]
    tl.store(weights_ptr + offsets, weights, mask=mask_t & mask_k)
    tl.store(ids_ptr + offsets, _expert(winners), mask=mask_t & mask_k)


@triton.autotune(configs=_BACKWARD_CONFIGS, key=["E", "TOP_K"])
@triton.heuristics(_HEURISTICS)
@triton.jit(do_not_specialize=["T"])
def _moe_route_backward_kernel(
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
    """dlogits, from the forward pass's weights and ids: the weights are right where scores alone would underflow."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    mask_t = tokens < T
    mask = mask_t[:, None] & (experts < E)[None, :]
    logits_ptrs = logits_ptr + tokens[:, None] * logits_strides[0] + experts[None, :].to(tl.int64) * logits_strides[1]
    logits = tl.load(logits_ptrs, mask=mask, other=-float("inf")).to(tl.float32)

    weights = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)  # those of the chosen experts, zero for the others
    dweights = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    dot = tl.zeros([BLOCK_T], tl.float32)  # sum over the choices of weight times dweight
    for k in range(TOP_K):
        pairs = tokens * TOP_K + k
        chosen = experts[None, :] == tl.load(ids_ptr + pairs, mask=mask_t, other=-1)[:, None]
        weight = tl.load(weights_ptr + pairs, mask=mask_t, other=0.0)
        dweights_ptrs = dweights_ptr + tokens * dweights_strides[0] + k * dweights_strides[1]
        dweight = tl.load(dweights_ptrs, mask=mask_t, other=0.0)
        weights = tl.where(chosen, weight[:, None], weights)
        dweights = tl.where(chosen, dweight[:, None], dweights)
        dot += weight * dweight

    if RENORMALIZE:
        dlogits = weights * (dweights - dot[:, None])
    elif SIGMOID:
        dlogits = weights * dweights
    else:
        exponentials = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        dlogits = exponentials / tl.sum(exponentials, axis=1)[:, None] * (dweights - dot[:, None])
    if SIGMOID:
        small = tl.exp(-tl.abs(logits))
        dlogits *= tl.where(logits < 0, 1.0, small) / (1.0 + small)  # 1 - sigmoid, without cancellation
    dlogits_ptrs = dlogits_ptr + tokens[:, None] * E + experts[None, :]
    tl.store(dlogits_ptrs, dlogits.to(dlogits_ptr.dtype.element_ty), mask=mask)


def _empty_results(logits: Tensor, top_k: int, *options: object) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@custom_op("assay::moe_route", _empty_results)
def _moe_route(logits: Tensor, top_k: int, renormalize: bool, sigmoid: bool) -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    weights, ids = _empty_results(logits, top_k)
    if tokens:
        _moe_route_kernel[lambda meta: (triton.cdiv(tokens, meta["BLOCK_T"]),)](
            *(logits, weights, ids, tokens, experts, logits.stride()),
            TOP_K=top_k,
            SIGMOID=sigmoid,
            RENORMALIZE=renormalize,
            BLOCK_K=triton.next_power_of_2(top_k),
        )
    return weights, ids


@custom_op("assay::moe_route_backward", lambda logits, *rest: logits.new_empty(logits.shape))
def _moe_route_backward(
    logits: Tensor, weights: Tensor, ids: Tensor, dweights: Tensor, renormalize: bool, sigmoid: bool
) -> Tensor:
    tokens, experts = logits.shape
    dlogits = logits.new_empty(logits.shape)
    if tokens:
        _moe_route_backward_kernel[lambda meta: (triton.cdiv(tokens, meta["BLOCK_T"]),)](
            *(logits, weights.contiguous(), ids.contiguous(), dweights, dlogits),
            *(tokens, experts, logits.stride(), dweights.stride()),
            TOP_K=weights.shape[1],
            SIGMOID=sigmoid,
            RENORMALIZE=renormalize,
        )
    return dlogits


differentiate(
    "assay::moe_route",
    lambda saved, dweights, _: _moe_route_backward(
        saved.logits, saved.result, saved.last_result, dweights, saved.renormalize, saved.sigmoid
    ),
    saves="logits result last_result",
)


@replayed
def moe_route(
    logits: Tensor, *, top_k: int = 2, renormalize: bool = True, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """Return weights float32[T,k] and ids int32[T,k] of the top k experts, best first, of logits[T,E].

    logits are float32, bfloat16 or float16. Scores are the softmax over all experts or the sigmoid of each logit,
    computed in float32; ``renormalize`` divides those of the chosen experts by their sum. Of equal logits the lower
    index comes first; NaN comes before all numbers. Raises TypeError or ValueError, naming the argument, for another
    dtype, shape or scoring, or unless 1 <= top_k <= E.
    """
    check(logits=(logits, FLOATING, "T E"))
    _check_routing(logits, top_k, scoring)
    results: tuple[Tensor, Tensor] = _moe_route(logits, top_k, renormalize, scoring == "sigmoid")
    return results


@replayed
def moe_route_backward(
    logits: Tensor, dweights: Tensor, *, top_k: int = 2, renormalize: bool = True, scoring: str = "softmax"
) -> Tensor:
    """Return dlogits[T,E] of `moe_route`, in the dtype of logits[T,E], from the gradient dweights float32[T,k].

    It routes again; autograd uses the forward pass's results. Raises as `moe_route` does, and for ``dweights``.
    """
    check(logits=(logits, FLOATING, "T E"), dweights=(dweights, FLOAT32, "T k"))
    _check_routing(logits, top_k, scoring)
    check_shape("dweights", dweights, ("T", top_k))
    sigmoid = scoring == "sigmoid"
    return _moe_route_backward(logits, *_moe_route(logits, top_k, renormalize, sigmoid), dweights, renormalize, sigmoid)


def _check_routing(logits: Tensor, top_k: int, scoring: str) -> None:
    check_choice("scoring", scoring, _SCORINGS)
    if type(top_k) is not int or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k: expected a whole number from 1 to the {logits.shape[1]} experts, got {top_k!r}")
