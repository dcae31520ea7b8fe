"""The online softmax: a running maximum m_i, and a running sum l_i that is rescaled when the maximum grows.

Source: M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, arXiv:1805.02867 (2018).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite_shift(m):
    """Return m, or 0 where the maximum m is -inf: exp(-inf - 0) is zero, but exp(-inf + inf) is NaN."""
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def online_softmax(m_i, l_i, qk, scale=None, axis: tl.constexpr = 1):
    """Update m_i[M] and l_i[M] by scores qk: [M,N] or, with axis 0, [N,M].

    qk times scale, > 0, is in units of log2(e). Returns the new m_i and l_i, p = 2^(qk scale - m_i) in the shape of qk,
    and alpha [M], the factor of earlier sums.
    """
    m_block = tl.max(qk, axis=axis)
    if scale is not None:  # after the maximum: scaling and shifting a score is then one FMA
        m_block = m_block * scale
        qk = qk * scale
    m_new = tl.maximum(m_i, m_block)
    shift = finite_shift(m_new)
    p = tl.exp2(qk - tl.expand_dims(shift, axis))
    alpha = tl.exp2(m_i - shift)
    return m_new, l_i * alpha + tl.sum(p, axis=axis), p, alpha
