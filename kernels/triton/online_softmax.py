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
def online_softmax(m_i, l_i, s):
    """One step by scores s[M,N] in units of log2(e), from maximum m_i[M] and sum l_i[M].

    Returns the new maximum and sum, the weights 2^(s - maximum)[M,N], and the factor [M] of what was summed before.
    """
    m_new = tl.maximum(m_i, tl.max(s, axis=1))
    shift = finite_shift(m_new)
    p = tl.exp2(s - shift[:, None])
    rescale = tl.exp2(m_i - shift)
    return m_new, l_i * rescale + tl.sum(p, axis=1), p, rescale
