"""Honest kernels of ops that are composed of others pass in every dtype, and faulty ones don't.

Cross-entropy of a linear layer, dequantisers, decoding from a latent cache, attention to blocks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.verify import Contract, examine

from .usual import by_turns

Kernel = Callable[..., Tensor]
DTYPES = ("bfloat16", "float16", "float32")
LOSS = {"T": [1, 7, 20], "V": [3, 19, 40], "D": [8, 24]}
CACHE = {"B": [2], "H": [3], "D": [16], "Dr": [8], "P": [4], "page": [4], "max_pages": [3]}
BLOCKS = {"B": [2], "Hkv": [2], "H": [4], "Sq": [5, 40], "Sk": [20, 40], "D": [16], "Dv": [16]}


def linear_loss(
    x: Tensor, weight: Tensor, target: Tensor, *, reduction: str = "mean", unstored: bool = True, ignored: bool = True
) -> Tensor:
    """Chunks of eight classes, whose log-sum-exp runs; the logits are stored in the tensors' dtype, or they aren't."""
    logits = x.float() @ weight.float().T
    logits = logits if unstored else logits.to(x.dtype).float()
    level = torch.full((x.shape[0],), -torch.inf)
    for chunk in logits.split(8, 1):
        level = torch.logaddexp(level, torch.logsumexp(chunk, 1))
    counted = target != -100
    label = torch.where(counted, target, 0)
    loss = torch.where(counted, level - logits.gather(1, label[:, None])[:, 0], 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / (counted.sum() if ignored else len(target)) if reduction == "mean" else loss.sum()


def without_last_classes(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Classes beyond the last whole chunk are never seen."""
    whole = max(weight.shape[0] // 8 * 8, 1)
    return linear_loss(x, weight[:whole], torch.where(target < whole, target, 0), **options)


def fp8_weights(codes: Tensor, scale: Tensor, *, block: int = 128, turned: bool = False) -> Tensor:
    """Codes times the scale of their block."""
    rows, columns = (torch.arange(size) // block for size in codes.shape)
    places = (columns[None, :] % scale.shape[0], rows[:, None] % scale.shape[1]) if turned else (rows[:, None], columns)
    return (codes.float() * scale[places]).to(torch.bfloat16)


def int4_weights(
    qweight: Tensor, scales: Tensor, zeros: Tensor, *, packing: str = "plain",
    folded: bool = False, exchanged: bool = False, late: int = 0,
) -> Tensor:  # fmt: skip
    """Two codes a byte, the even row in its low half; the zero-point is taken from the code, or from the product."""
    halves = (qweight >> 4, qweight & 15) if exchanged else (qweight & 15, qweight >> 4)
    codes = torch.stack(halves, 1).reshape(-1, qweight.shape[1]).float()
    group = torch.arange(codes.shape[0]) // (codes.shape[0] // scales.shape[0])
    group = (group - late).clamp(min=0)
    step, zero = scales.float()[group], zeros.float()[group]
    return (codes * step - zero * step if folded else (codes - zero) * step).to(torch.bfloat16)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4_weights(codes: Tensor, scale: Tensor, *, high_first: bool = False, shifted: int = 0) -> Tensor:
    """Numbers of two nibbles a byte, times the power of two of 32 neighbours."""
    halves = (codes >> 4, codes & 15) if high_first else (codes & 15, codes >> 4)
    numbers = E2M1[torch.stack(halves, 2).reshape(codes.shape[0], -1).long()]
    return (numbers.double() * scale.double().repeat_interleave(32, 1) * 2.0**shifted).to(torch.bfloat16)


def latent_decode(
    q: Tensor, q_rope: Tensor, cache: Tensor, rope_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    *, scale: float | None = None, columns: int = 0, short: int = 0,
) -> Tensor:  # fmt: skip
    """Sequence by sequence, in float32; weights are rounded before they meet the values."""
    page, width = cache.shape[1], q.shape[2]
    factor = (columns or width + q_rope.shape[2]) ** -0.5 if scale is None else scale
    out = torch.zeros(q.shape, dtype=torch.float32)
    for b, length in enumerate(seq_lens.tolist()):
        length = max(length - short, 0)
        places = torch.arange(length)
        slots = block_table[b, places // page].long() * page + places % page
        latent, rope = cache.reshape(-1, width)[slots].float(), rope_cache.reshape(-1, q_rope.shape[2])[slots].float()
        if length:
            scores = (q[b].float() @ latent.T + q_rope[b].float() @ rope.T) * factor
            out[b] = torch.softmax(scores, -1).to(q.dtype).float() @ latent
    return out.to(q.dtype)


def block_sparse(
    q: Tensor, k: Tensor, v: Tensor, block_mask: Tensor, *, block: int = 16, causal: str = "none",
    first_head: bool = False, ignored: bool = False,
) -> Tensor:  # fmt: skip
    """Scores of all keys, of which masked ones have no weight."""
    shared, queries, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    key, value = (x.float().repeat_interleave(shared, 1) for x in (k, v))
    mask = block_mask[:1].expand_as(block_mask) if first_head else block_mask
    seen = mask[:, torch.arange(queries) // block][:, :, torch.arange(keys) // block] == 1
    seen = torch.ones_like(seen) if ignored else seen
    if causal != "none":
        seen = seen & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    scores = (q.float() @ key.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores.masked_fill(~seen.any(-1, keepdim=True), 0.0), -1)
    weights = torch.where(seen, weights, 0.0).to(q.dtype).float()
    reached = torch.where(seen.any(1)[None, :, :, None], value, 0.0)
    return (weights @ reached).to(q.dtype)


Rows = dict[str, tuple[str, Kernel, list[Kernel], dict[str, Any]]]
KERNELS: Rows = {
    "linear_cross_entropy": (
        "linear_cross_entropy", linear_loss, [without_last_classes, partial(linear_loss, ignored=False)],
        {"shapes": LOSS, "options": {"reduction": ["mean", "none"]}},
    ),
    "linear_cross_entropy, stored": (
        "linear_cross_entropy", partial(linear_loss, unstored=False), [], {"shapes": LOSS},
    ),
    "mla_decode": (
        "mla_decode", latent_decode, [partial(latent_decode, columns=16), partial(latent_decode, short=1)],
        {"shapes": CACHE, "contract": Contract(nonfinite="unspecified")},
    ),
    "block_attention": (
        "block_attention", block_sparse, [partial(block_sparse, first_head=True), partial(block_sparse, ignored=True)],
        {"shapes": BLOCKS, "options": {"block": [16], "causal": ["none", "bottom_right"]},
         "contract": Contract(nonfinite="masked")},
    ),
    "dequantize_int4": (
        "dequantize_int4", int4_weights, [partial(int4_weights, exchanged=True), partial(int4_weights, late=1)],
        {"shapes": {"K": [64, 128], "g": [32], "N": [3, 16]}, "options": {"packing": ["plain"]}},
    ),
    "dequantize_int4, folded": (
        "dequantize_int4", partial(int4_weights, folded=True), [],
        {"shapes": {"K": [64], "g": [32], "N": [3, 16]}, "options": {"packing": ["plain"]}},
    ),
}  # fmt: skip
FIXED: Rows = {
    "dequantize_fp8": (
        "dequantize_fp8", fp8_weights, [partial(fp8_weights, turned=True), partial(fp8_weights, block=129)],
        {"dtype": "float8_e4m3fn", "shapes": {"M": [130, 257], "N": [3, 140]}},
    ),
    "dequantize_mxfp4": (
        "dequantize_mxfp4", mxfp4_weights,
        [partial(mxfp4_weights, high_first=True), partial(mxfp4_weights, shifted=1)], {},
    ),
}  # fmt: skip


def outcome(kernel: Kernel, op: str, settings: dict[str, Any]) -> tuple[str, str]:
    """That of a short examination, and what it prints."""
    asked = {"effort": "quick", "examples": 1, "every_aspect": False, "shrinking": False, **settings}
    verdict = examine(kernel, op, **asked)
    return verdict.outcome, str(verdict)


@pytest.mark.parametrize(("name", "dtype"), by_turns(KERNELS, DTYPES))
def test_an_honest_kernel_passes(name: str, dtype: str) -> None:
    """In each dtype."""
    op, honest, _, settings = KERNELS[name]
    assert (found := outcome(honest, op, {"dtype": dtype, **settings}))[0] == "PASS", found[1]


@pytest.mark.parametrize("name", FIXED)
def test_an_honest_dequantiser_passes(name: str) -> None:
    """Whose dtypes are fixed."""
    op, honest, _, settings = FIXED[name]
    assert (found := outcome(honest, op, settings))[0] == "PASS", found[1]


@pytest.mark.parametrize("name", [*KERNELS, *FIXED])
def test_a_faulty_kernel_fails(name: str) -> None:
    """Each of two, in bfloat16 where there is a choice."""
    op, _, faulty, settings = (KERNELS | FIXED)[name]
    for kernel in faulty:
        assert outcome(kernel, op, {"dtype": "bfloat16", **settings})[0] == "FAIL", kernel
