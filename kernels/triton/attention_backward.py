"""The gradients of attention, without atomics: of the queries in one kernel, of keys and values in another.

Weights are computed again from the stored log-sum-exp, and delta, the sum over a row of output times its gradient, from
the stored output, as FlashAttention-2 does (T. Dao, arXiv:2307.08691, 2023, algorithm 2).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from assay.kernels.triton.attention_backward_keys import keys_kernel
from assay.kernels.triton.attention_backward_rows import rows_kernel
from assay.kernels.triton.attention_blocks import LOG2_E
from assay.kernels.triton.descriptors import describable, described
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.tiles import size_class

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _results(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None, *_: object) -> Gradients:
    vectors = [q.new_empty(0 if x is None else x.shape[0], dtype=torch.float32) for x in (slopes, sinks)]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), vectors[0], vectors[1]


@custom_op("assay::attention_backward", _results)
def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor,
    scale: float,
    softcap: float | None,
    first_seen: int | None,
    last_seen: int | None,
) -> Gradients:
    """dq, dk, dv, and those of slopes and sinks (without elements where there are none), from the results out and lse
    of `assay::attention` and their gradients; options are that operator's."""
    (batch, heads, queries, width), (_, groups, keys, value_width) = q.shape, v.shape
    dq, dk, dv, dslopes, dsinks = results = _results(q, k, v, slopes, sinks)
    if lse.numel() == 0:
        for gradient in results:
            gradient.zero_()
        return results
    group = heads // groups
    delta = torch.empty_like(lse, memory_format=torch.contiguous_format)
    turned = None if slopes is None else torch.empty_like(delta)
    first_seen = None if first_seen is None or first_seen + queries <= 1 else first_seen  # or it binds no row
    last_seen = None if last_seen is None or last_seen >= keys - 1 else last_seen
    seen, seeing = keys, queries
    if first_seen is not None and last_seen is not None:
        seen, seeing = (min(size, last_seen - first_seen + 1) for size in (keys, queries))
    unit = LOG2_E.value
    options = (
        scale * unit,
        *((None, None) if softcap is None else (2.0 * unit * scale / softcap, softcap * unit)),
        scale,
    )
    blocks = [max(16, triton.next_power_of_2(size)) for size in (width, value_width)]
    slope_stride = 0 if slopes is None else slopes.stride(0)

    single = q.element_size() == 4  # whose rows are loaded again, by pointers
    by_descriptor = describable(k, v)
    rows_kernel[lambda meta: (triton.cdiv(queries * group, meta["BLOCK_M"]) * groups * batch,)](
        *(q, *(described(x) if by_descriptor else x for x in (k, v)), (k, v) if single else None),
        *(out, dout, lse, dlse, slopes, dq, delta, turned),
        *(x.stride() for x in (q, k, v, out, dout, lse, dlse)),
        *(slope_stride, queries, keys, group, groups, size_class(queries), size_class(seen), first_seen, last_seen),
        *(*options, by_descriptor, width, value_width, *blocks),
    )
    if keys:
        lse = lse.contiguous()
        by_descriptor = describable(q, dout)
        keys_kernel[lambda meta: (triton.cdiv(keys, meta["BLOCK_N"]) * groups * batch,)](
            *(described(q) if by_descriptor else q, k, v, described(dout) if by_descriptor else dout),
            *((q, dout) if single else None, lse, delta, slopes, dk, dv),
            *(*(x.stride() for x in (q, k, v, dout)), slope_stride),
            *(queries, keys, group, groups, size_class(keys), size_class(seeing)),
            *(None if bound is None else -bound for bound in (last_seen, first_seen)),
            *(*options, by_descriptor, width, value_width, *blocks),
        )
    if turned is not None:
        dslopes.copy_(turned.sum((0, 2)))
    if sinks is not None:  # a sink's weight is that of a key whose value is zero
        weights = torch.exp(sinks[:, None] - lse).where(lse > -torch.inf, 0.0)
        dsinks.copy_(-(weights * delta).sum((0, 2)))
    return results
