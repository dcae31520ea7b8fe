"""Merging partial attention: outputs over disjoint keys, with their log-sum-exps, into one."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.registry import Fault, Reduction, define

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
    independent=("H",),
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


def _many_unused(o: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
    """The outputs of empty states."""
    return {"o": (lse == -math.inf)[..., None].expand(o.shape)}


def _pairwise(xp: Any, o: Any, lse: Any) -> Any:
    """The running log-sum-exp is that of the last state merged, not of all so far."""
    out, level = o[:, 0], lse[:, 0]
    for state in range(1, o.shape[1]):
        out, _ = merge_states(xp, out, level, o[:, state], lse[:, state])
        level = lse[:, state]
    return out, merge_cascade(xp, o, lse)[1]


def _last_left_out(xp: Any, o: Any, lse: Any) -> Any:
    return merge_cascade(xp, o[:, : max(o.shape[1] - 1, 1)], lse[:, : max(o.shape[1] - 1, 1)])


def _plain_mean(xp: Any, o: Any, lse: Any) -> Any:
    return xp.sum(o, axis=1)[:, 0] / max(o.shape[1], 1), merge_cascade(xp, o, lse)[1]


def _largest(xp: Any, o: Any, lse: Any) -> Any:
    """The largest log-sum-exp in place of that of all."""
    turned = xp.stack([lse[:, state] for state in range(lse.shape[1])], -1)
    return merge_cascade(xp, o, lse)[0], xp.max(turned)[..., 0]


@define(
    "merge_cascade",
    "o[T,S,H,D], lse:float32[T,S,H]=lse -> merged[T,H,D], merged_lse:float32[T,H]",
    rows="T",
    sizes={"S": (2, 3, 5, 1, 8), "H": (1, 2, 3, 5), "D": (1, 3, 8, 16, 33, 64, 128)},
    independent=("H",),
    unused=_many_unused,
    reduction=Reduction("S"),
    faults=(
        Fault("cascade_forgets_earlier", "the running log-sum-exp is that of the last state, not of all so far",
              _pairwise, "rescale", needs="three states"),
        Fault("last_state_left_out", "the last state is left out", _last_left_out, "tail", needs="two states"),
        Fault("states_averaged", "states count alike, whatever their log-sum-exps", _plain_mean, "rescale",
              needs="two states"),
        Fault("largest_for_log_sum", "the largest log-sum-exp is returned", _largest, needs="two states"),
    ),
    exempt=("tail_of_sum_dropped", "accumulated_in_bfloat16"),
)  # fmt: skip
def merge_cascade(xp: Arithmetic[N, Idx], o: N, lse: N) -> tuple[N, N]:
    """sum_s e^lse_s o_s / sum_s e^lse_s and log sum_s e^lse_s, of any number of states, at once or pair by pair.

    As `merge_states`; FlashInfer's layout (Ye et al., 2024).
    """
    tokens, states, heads, width = o.shape
    scores = xp.stack([lse[:, state] for state in range(states)], -1).reshape(tokens, heads, 1, states)
    values = xp.stack([o[:, state] for state in range(states)], 2)
    empty = xp.above(-scores, _MOST)
    out, total = xp.merge(scores, ~empty, values)
    unknown = ~xp.above(-scores, -math.inf).all(-1)[..., None]
    out, total = xp.unspecified(unknown, out), xp.unspecified(unknown, total)

    def infinite() -> Idx:
        infinity = (xp.above(values, _MOST) | xp.above(-values, _MOST)) & ~empty.reshape(tokens, heads, states, 1)
        return infinity.any(2)[:, :, None]

    out = xp.unspecified(infinite, out)
    return out.reshape(tokens, heads, width), total.reshape(tokens, heads)
