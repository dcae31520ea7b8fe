"""The arguments of attention and of its gradient, checked."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from assay.kernels.triton.arguments import (
    FLOAT32,
    FLOATING,
    check,
    check_choice,
    check_heads,
    check_positive,
    check_sm_scale,
)

WIDEST = 256  # columns of a head
Options = tuple[Tensor | None, Tensor | None, float, float | None, int | None, int | None]


def attention_options(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi: bool,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> Options:
    """What attention's operator takes behind q, k and v: slopes, sinks, scale, softcap, and the bounds of what is seen.

    Query i sees the keys from i + first to i + last, each bound None where there is none. Raises TypeError or
    ValueError, naming the argument, unless all is as `attention` says.
    """
    if alibi and slopes is None:
        raise ValueError("slopes: expected a tensor float32[H], as alibi=True, got None")
    slopes = slopes if alibi else None
    _check(q, k, v, slopes, sinks)
    check_choice("causal", causal, ("none", "bottom_right", "top_left"))
    check_positive("softcap", softcap)
    if window is not None and not (_is_pair(window) and min(window) >= 0):
        raise ValueError(f"window: expected None or (left, right), whole numbers of at least 0, got {window!r}")
    scale = check_sm_scale(scale, q.shape[3])
    farthest = q.shape[2] + k.shape[2]  # a bound beyond this binds no row
    offset = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
    first = None if window is None else offset - min(window[0], farthest)
    last = offset if causal != "none" else None if window is None else offset + min(window[1], farthest)
    return slopes, sinks, scale, softcap, first, last


def _is_pair(window: object) -> bool:
    return isinstance(window, Sequence) and [isinstance(end, int) for end in window] == [True, True]


def _check(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None) -> None:
    given = {"slopes": slopes, "sinks": sinks}
    vectors = {name: (vector, FLOAT32, "H") for name, vector in given.items() if vector is not None}
    check(q=(q, FLOATING, "B H Sq D"), k=(k, ("q",), "B Hkv Sk D"), v=(v, ("q",), "B Hkv Sk Dv"), **vectors)
    check_heads(q.shape[1], "k", k.shape[1], WIDEST, q=q.shape[3], v=v.shape[3])
