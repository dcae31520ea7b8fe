"""Honest gradients of attention: whole rows, and blocks of keys with what a flash kernel keeps of its forward pass."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from assay.verify import Contract

from .entry import Entry, families
from .honest_attention import kv_head_of, visible_keys, weighted_sum
from .honest_softmax import LOG2_E, shift_of
from .numerics import load, nonzero

Gradients = tuple[Tensor, Tensor, Tensor]


def sum_of_group(gradient: Tensor, groups: int) -> Tensor:
    """[B,H,S,D] to [B,Hkv,S,D]: the heads that share a key/value head added up."""
    batch, heads, keys, width = gradient.shape
    return gradient.reshape(batch, groups, heads // groups, keys, width).sum(dim=2)


def mean_product(dout: Tensor, out: Tensor) -> Tensor:
    """delta, the sum of dout times out, [B,H,Sq,1]."""
    return (dout * out).sum(dim=-1, keepdim=True)


def scaled(gradient: Tensor, scale: float) -> Tensor:
    """Scores are scaled once, and so is each gradient of theirs."""
    return gradient * scale


def dense_product(weights: Tensor, values: Tensor, see: Tensor) -> Tensor:
    """weights @ values, in which a weight of zero meets NaN as well."""
    return weights @ values


@dataclass(frozen=True)
class Parts:
    """The pieces that both kernels are made of; a fault replaces one."""

    group: Callable[[Tensor, int], Tensor] = sum_of_group
    delta: Callable[[Tensor, Tensor], Tensor] = mean_product
    scale_k: Callable[[Tensor, float], Tensor] = scaled
    accumulator: Callable[[Tensor], Tensor] = load
    over_rows: Callable[[Tensor, Tensor, Tensor], Tensor] = weighted_sum


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    round_stages: bool = False,
    block: int = 0,
    parts: Parts = Parts(),
) -> Gradients:
    """dq, dk and dv, over blocks of keys where ``block`` is given; ``round_stages``: P and dS in the input dtype."""
    dtype, groups = q.dtype, k.shape[1]
    heads = kv_head_of(q.shape[1], groups)
    queries, keys = q.shape[2], k.shape[2]
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    see = visible_keys(queries, keys, causal, None)
    rows, gradient = load(q), load(dout)
    all_k, all_v = load(k)[:, heads], load(v)[:, heads]

    def stored(values: Tensor) -> Tensor:
        return values.to(dtype).to(torch.float32) if round_stages else values

    scores = (rows @ all_k.transpose(-1, -2) * factor).masked_fill(~see, -math.inf)
    shift = shift_of(scores.amax(dim=-1, keepdim=True)) if keys else torch.zeros(*rows.shape[:3], 1)
    total = torch.exp2((scores - shift) * LOG2_E).sum(dim=-1, keepdim=True)
    lse = shift + torch.log(nonzero(total))
    weights = torch.where(see, torch.exp(scores - lse), torch.zeros_like(scores))
    out = weighted_sum(stored(weights), all_v, see)
    delta = parts.delta(gradient, out)

    dq = torch.zeros(rows.shape)
    dk, dv = torch.zeros(all_k.shape), torch.zeros(all_v.shape)
    step = block or max(keys, 1)
    for start in range(0, keys, step):
        part = slice(start, start + step)
        seen, p = see[:, part], weights[..., part]
        products = gradient @ all_v[:, :, part].transpose(-1, -2)
        slopes = torch.where(seen, p * (products - delta), torch.zeros_like(p))
        slopes = stored(slopes)
        dq = parts.accumulator(dq + weighted_sum(slopes, all_k[:, :, part], seen))
        dk[:, :, part] = parts.over_rows(slopes.transpose(-1, -2), rows, seen.T)
        dv[:, :, part] = parts.over_rows(stored(p).transpose(-1, -2), gradient, seen.T)
    dk = parts.scale_k(dk, factor)
    return (dq * factor).to(dtype), parts.group(dk, groups).to(dtype), parts.group(dv, groups).to(dtype)


def attention_backward_by_autograd(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: str = "none", scale: float | None = None
) -> Gradients:
    """PyTorch's autograd of whole rows in float32, in which NaN behind the mask meets weights of zero."""
    see = visible_keys(q.shape[2], k.shape[2], causal, None)
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    heads = kv_head_of(q.shape[1], k.shape[1])
    with torch.enable_grad():
        leaves = [load(part).requires_grad_() for part in (q, k, v)]
        scores = (leaves[0] @ leaves[1][:, heads].transpose(-1, -2) * factor).masked_fill(~see, -math.inf)
        blind = ~see.any(dim=1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(~see, 0.0)
        out = weights @ leaves[2][:, heads]
        found = torch.autograd.grad(out, leaves, load(dout))
    return found[0].to(q.dtype), found[1].to(q.dtype), found[2].to(q.dtype)


MASKS = {"causal": ["none", "bottom_right", "top_left"]}
SCALES = {"causal": ["none", "bottom_right"], "scale": [None, 0.25]}
SHAPES = {"D": [8, 16, 64], "Dv": [8, 24, 64]}
DTYPES = ("float32", "bfloat16", "float16")
FLASH = partial(attention_backward, block=32, round_stages=True)
DENSE = partial(attention_backward, parts=Parts(over_rows=dense_product))
BY_AUTOGRAD = ("_by_autograd", attention_backward_by_autograd, DTYPES[:2])
NO_NAN = Contract(nonfinite="unspecified")

ATTENTION_BACKWARD: tuple[Entry, ...] = (
    *families("attention_backward", ("", attention_backward, DTYPES), options=MASKS, shapes=SHAPES),
    *families("attention_backward", ("_flash", FLASH, DTYPES), options=SCALES, shapes=SHAPES),
    *families("attention_backward", ("_dense_over_rows", DENSE, DTYPES[:2]), options=MASKS, shapes=SHAPES),
    *families("attention_backward", BY_AUTOGRAD, options=MASKS, shapes=SHAPES, contract=NO_NAN),
)
