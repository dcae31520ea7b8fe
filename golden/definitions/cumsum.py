"""Running sums along the last axis, and their gradient."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.options import flag
from assay.golden.registry import Fault, Reduction, altered, define

_BLOCK = 16


def _by_blocks(xp: Any, x: Any, before: int, options: dict[str, bool]) -> Any:
    """Sum the columns of each block of 16, and those of ``before`` blocks before it."""
    parts = [x[:, :0]]
    for first in range(0, x.shape[1], _BLOCK):
        last, reach = first + _BLOCK, before * _BLOCK
        if options["reverse"]:
            parts.append(cumsum(xp, x[:, first : last + reach], **options)[:, :_BLOCK])
        else:
            start = max(first - reach, 0)
            parts.append(cumsum(xp, x[:, start:last], **options)[:, first - start :])
    return xp.concatenate(parts, -1)


def _by_subtraction(xp: Any, x: Any, *, reverse: bool, exclusive: bool) -> Any:
    """Subtract from the inclusive sums from the front, with cancellation."""
    y = xp.cumsum(x)
    if reverse:
        y = (xp.sum(x) - y) + x
    return y - x if exclusive else y


@define(
    "cumsum",
    "x[R,N] -> y[R,N]",
    options={"reverse": flag(), "exclusive": flag()},
    rows="R",
    reduction=Reduction("N"),
    faults=(
        "saturating_store",
        Fault("cumsum_without_carry", "every block of 16 columns begins at zero: the carry is missing",
              lambda xp, x, **options: _by_blocks(xp, x, 0, options), "tail", needs="more than 16 columns"),
        Fault("cumsum_carry_of_one_block", "a block of 16 takes the sum of the block before alone",
              lambda xp, x, **options: _by_blocks(xp, x, 1, options), "tail", needs="more than 32 columns"),
        Fault("cumsum_by_subtraction", "reverse and exclusive sums are differences of inclusive ones",
              _by_subtraction, "precision", needs="numbers much smaller than those before them", emulated=True),
        Fault("cumsum_includes_itself", "an exclusive sum is inclusive, or vice versa",
              altered("cumsum", exclusive=lambda exclusive: not exclusive), "mask"),
        Fault("cumsum_direction", "the sum runs the other way", altered("cumsum", reverse=lambda reverse: not reverse),
              "mask", needs="more than one column"),
    ),
    exempt=("tail_of_sum_dropped", "computed_in_bfloat16", "computed_in_float16"),
)  # fmt: skip
def cumsum(xp: Arithmetic[N], x: N, *, reverse: bool, exclusive: bool) -> N:
    """y[r,n] = x[r,0] + ... + x[r,n]; reverse: from n to the end; exclusive: without x[r,n] itself."""
    columns = x.shape[1]
    if not columns:
        return x
    backward = xp.integers(range(columns - 1, -1, -1))
    x = x[:, backward] if reverse else x
    if exclusive:
        x = xp.concatenate([xp.exact(xp.native.zeros((x.shape[0], 1))), x[:, : columns - 1]], -1)
    y = xp.cumsum(x)
    return y[:, backward] if reverse else y


@define(
    "cumsum_backward",
    "dy[R,N] -> dx[R,N]",
    options={"reverse": flag(), "exclusive": flag()},
    rows="R",
    gradient_of="cumsum",
    reduction=Reduction("N"),
    faults=(
        Fault("cumsum_gradient_direction", "the gradient is summed in the direction of the sums",
              altered("cumsum_backward", reverse=lambda reverse: not reverse), "mask", needs="more than one column"),
        Fault("cumsum_gradient_includes_itself", "an exclusive sum is inclusive, or vice versa",
              altered("cumsum_backward", exclusive=lambda exclusive: not exclusive), "mask"),
        Fault("cumsum_gradient_is_dy", "the gradient is handed on as it is", lambda xp, dy, **options: dy * 1.0,
              needs="more than one column"),
    ),
    exempt=("tail_of_sum_dropped", "computed_in_bfloat16", "computed_in_float16"),
)  # fmt: skip
def cumsum_backward(xp: Arithmetic[N], dy: N, *, reverse: bool, exclusive: bool) -> N:
    """The running sums of dy the other way."""
    return cumsum(xp, dy, reverse=not reverse, exclusive=exclusive)
