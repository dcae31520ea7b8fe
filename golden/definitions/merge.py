"""Merging partial attention: two outputs over disjoint keys, with their log-sum-exps, into one."""

from __future__ import annotations

import math
import sys

import torch

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.registry import define

_MOST = sys.float_info.max


def _unused(o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor) -> dict[str, torch.Tensor]:
    """The outputs of empty states."""
    pairs = {"o_a": (o_a, lse_a), "o_b": (o_b, lse_b)}
    return {name: (lse == -math.inf)[..., None].expand(out.shape) for name, (out, lse) in pairs.items()}


@define(
    "merge_states",
    "o_a[T,H,D], lse_a:float32[T,H]=lse, o_b[T,H,D], lse_b:float32[T,H]=lse -> o[T,H,D], lse:float32[T,H]",
    rows="T",
    sizes={"H": (1, 2, 3, 5, 33), "D": (1, 3, 8, 16, 33, 64, 128)},
    separable=("H",),
    unused=_unused,
)
def merge_states(xp: Arithmetic[N, Idx], o_a: N, lse_a: N, o_b: N, lse_b: N) -> tuple[N, N]:
    """(e^lse_a o_a + e^lse_b o_b) / (e^lse_a + e^lse_b) and log(e^lse_a + e^lse_b).

    That is attention to two values; an empty state, whose lse is -inf, is not visible, and two of them see nothing.
    """
    tokens, heads, width = o_a.shape
    scores = xp.stack([lse_a, lse_b], -1).reshape(tokens, heads, 1, 2)
    empty = xp.above(-scores, _MOST)  # NaN is not
    out, lse = xp.merge(scores, ~empty, xp.stack([o_a, o_b], 2))
    numbers = xp.above(-scores, -math.inf)
    unknown = ~(numbers[..., :1] & numbers[..., 1:])  # of a log-sum-exp that is NaN or inf nothing is said
    out, lse = xp.unspecified(unknown, out), xp.unspecified(unknown, lse)

    def infinite() -> Idx:
        """Where a - s (a - b) takes an infinite output of a visible state from itself."""
        pairs = (o_a, empty[..., :1]), (o_b, empty[..., 1:])
        seen = [(xp.above(o, _MOST) | xp.above(-o, _MOST)) & ~none.reshape(tokens, heads, 1) for o, none in pairs]
        return (seen[0] | seen[1])[:, :, None]

    out = xp.unspecified(infinite, out)
    return out.reshape(tokens, heads, width), lse.reshape(tokens, heads)
