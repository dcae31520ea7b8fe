"""The online softmax: a running maximum and a sum that is rescaled whenever the maximum grows.

Source: M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, arXiv:1805.02867 (2018).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite_shift(m):
    """What to subtract for a maximum m: 0 where all is -inf, since exp(-inf - 0) is zero and exp(-inf + inf) NaN."""
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def online_softmax(m_i, l_i, s, unit=None, axis: tl.constexpr = 1):
    """One step by scores s, [M,N] or, where N is axis 0, [N,M], from maximum m_i[M] and sum l_i[M].

    Scores times unit, > 0, are in units of log2(e). Returns the new maximum and sum, the weights 2^(s unit - maximum)
    in the shape of s, and the factor [M] of earlier sums. The unit enters with the maximum, so that a score takes one
    instruction before its exponential.
    """
    highest = tl.max(s, axis=axis)
    if unit is not None:
        highest = highest * unit
        s = s * unit
    m_new = tl.maximum(m_i, highest)
    shift = finite_shift(m_new)
    p = tl.exp2(s - tl.expand_dims(shift, axis))
    rescale = tl.exp2(m_i - shift)
    return m_new, l_i * rescale + tl.sum(p, axis=axis), p, rescale
