"""Routing of a mixture of experts: the top k scores of each token, by repeated argmax in registers.

A program holds the logits of several tokens as integers that sort as the numbers do, with the expert below them: the
largest integer of a row is its best expert, and among equals the one of the lowest index. Winners are decoded from
these integers, so nothing is gathered. NaN sorts above all numbers, so that it is seen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, FLOATING, check, check_choice, check_shape
from assay.kernels.triton.moe_route_backward import BLOCKS, route_gradient
from assay.kernels.triton.operators import custom_op, differentiate

_SCORINGS = ("softmax", "sigmoid")
_TAKEN = tl.constexpr(-(2**63))  # below the key of -inf
_NAN = tl.constexpr(0x7FFFFFFF)  # above the key of +inf, and itself the bits of a NaN


@triton.jit
def _sortable(x, experts):
    """x float32 as int64 that sort by x, then by falling index; both zeros are equal."""
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


# What a row's bits depend on is chosen by E and top_k alone, never by T.
_CONFIGS = [
    triton.Config({"TILE": tile}, num_warps=warps) for tile, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8))
]


@triton.autotune(configs=_CONFIGS, key=["E", "TOP_K"])
@triton.heuristics(BLOCKS)
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
    places = tl.arange(0, BLOCK_K)
    in_rows, in_columns = tokens[:, None] < T, experts[None, :] < E
    logits_ptrs = logits_ptr + tokens[:, None] * logits_strides[0] + experts[None, :].to(tl.int64) * logits_strides[1]
    logits = tl.load(logits_ptrs, mask=in_rows & in_columns, other=-float("inf")).to(tl.float32)

    keys = _sortable(logits, experts[None, :])  # padding is behind every expert, as -inf of a higher index
    winners = tl.full([BLOCK_T, BLOCK_K], _TAKEN, tl.int64)
    for place in range(TOP_K):
        best = tl.max(keys, axis=1)[:, None]
        winners = tl.where(places[None, :] == place, best, winners)
        keys = tl.where(keys == best, _TAKEN, keys)

    chosen = places[None, :] < TOP_K
    x = tl.where(chosen, _logit(winners), -float("inf"))
    highest = _logit(tl.max(winners, axis=1))[:, None]
    if SIGMOID:
        # Normalised, all scores may be scaled alike: by exp(-highest) where no logit is positive, lest all round to 0.
        origin = tl.where(highest < 0, highest, 0.0) if RENORMALIZE else 0.0
        weights = tl.exp(tl.where(x < 0, x, 0.0) - origin) / (1.0 + tl.exp(-tl.abs(x)))
        weights = tl.where(x != x, x, weights)
    else:
        weights = tl.exp(x - highest)
        if not RENORMALIZE:  # else the sum over all experts cancels
            weights /= tl.sum(tl.exp(logits - highest), axis=1)[:, None]
    weights = tl.where(chosen, weights, 0.0)
    if RENORMALIZE:
        weights /= tl.sum(weights, axis=1)[:, None]

    to = tokens[:, None] * TOP_K + places[None, :]
    tl.store(weights_ptr + to, weights, mask=in_rows & chosen)
    tl.store(ids_ptr + to, _expert(winners), mask=in_rows & chosen)


def _results(logits: Tensor, top_k: int, *options: object) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@custom_op("assay::moe_route", _results)
def _moe_route(logits: Tensor, top_k: int, renormalize: bool, sigmoid: bool) -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    weights, ids = _results(logits, top_k)
    if tokens:
        _moe_route_kernel[lambda meta: (triton.cdiv(tokens, meta["BLOCK_T"]),)](
            *(logits, weights, ids),
            *(tokens, experts, logits.stride()),
            TOP_K=top_k,
            SIGMOID=sigmoid,
            RENORMALIZE=renormalize,
            BLOCK_K=triton.next_power_of_2(top_k),
        )
    return weights, ids


differentiate(
    "assay::moe_route",
    lambda saved, dweights, _: route_gradient(
        saved.logits, saved.result, saved.last_result, dweights, saved.renormalize, saved.sigmoid
    ),
    saves="logits result last_result",
)


def moe_route(
    logits: Tensor, *, top_k: int = 2, renormalize: bool = True, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """Weights float32[T,k] and ids int32[T,k] of the top k experts, best first, of logits[T,E] in any floating dtype.

    Scores are the softmax over all experts or the sigmoid of each logit, in float32; ``renormalize`` divides those of
    the chosen experts by their sum. Of equal logits the lower index comes first; NaN comes before all numbers. Raises
    TypeError or ValueError, naming the argument, for another dtype, shape or scoring, or unless 1 <= top_k <= E.
    """
    check(logits=(logits, FLOATING, "T E"))
    _check_routing(logits, top_k, scoring)
    found: tuple[Tensor, Tensor] = _moe_route(logits, top_k, renormalize, scoring == "sigmoid")
    return found


def moe_route_backward(
    logits: Tensor, dweights: Tensor, *, top_k: int = 2, renormalize: bool = True, scoring: str = "softmax"
) -> Tensor:
    """dlogits[T,E] of `moe_route`, in the dtype of logits[T,E], from the gradient dweights float32[T,k] of its weights.

    Experts are chosen anew; autograd takes those of the forward pass. Raises as `moe_route` does, and for ``dweights``.
    """
    check(logits=(logits, FLOATING, "T E"), dweights=(dweights, FLOAT32, "T k"))
    _check_routing(logits, top_k, scoring)
    check_shape("dweights", dweights, ("T", top_k))
    sigmoid = scoring == "sigmoid"
    dlogits: Tensor = route_gradient(
        logits, *_moe_route(logits, top_k, renormalize, sigmoid), dweights, renormalize, sigmoid
    )
    return dlogits


def _check_routing(logits: Tensor, top_k: int, scoring: str) -> None:
    check_choice("scoring", scoring, _SCORINGS)
    if type(top_k) is not int or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k: expected a whole number from 1 to the {logits.shape[1]} experts, got {top_k!r}")
