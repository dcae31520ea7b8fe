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
from assay.kernels.triton.layouts import can_use_tma, make_descriptor
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.tiles import size_bucket

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
    queries, keys = q.shape[2], k.shape[2]
    dq, dk, dv, dslopes, dsinks = results = _results(q, k, v, slopes, sinks)
    if lse.numel() == 0:
        for gradient in results:
            gradient.zero_()
        return results
    delta = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
    turned = None if slopes is None else torch.empty_like(delta)
    first_seen = None if first_seen is None or first_seen + queries <= 1 else first_seen  # or it binds no row
    last_seen = None if last_seen is None or last_seen >= keys - 1 else last_seen
    options = scale, softcap, first_seen, last_seen
    launch_gradients((q, k, v, out, lse, dout, dlse), (dq, dk, dv, delta, turned), slopes, options)
    if turned is not None:
        dslopes.copy_(turned.sum((0, 2)))
    if sinks is not None:  # a sink's weight is that of a key whose value is zero
        weights = torch.exp(sinks[:, None] - lse).where(lse > -torch.inf, 0.0)
        dsinks.copy_(-(weights * delta).sum((0, 2)))
    return results


def launch_gradients(
    given: tuple[Tensor, ...],
    into: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    slopes: Tensor | None,
    options: tuple[float, float | None, int | None, int | None],
    starts: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write dq, dk, dv of q, k, v, as `attention_gradients` says, from out, lse, dout and dlse; and of each row delta,
    the sum of its output times its gradient less dlse, float32[B,H,Sq] and contiguous, and the slope's share so too.

    ``options``: scale, softcap, first_seen, last_seen. ``starts``: as attention's `launch` takes them, B being one.
    """
    q, k, v, out, lse, dout, dlse = given
    dq, dk, dv, delta, turned = into
    scale, softcap, first_seen, last_seen = options
    (batch, heads, queries, width), (_, groups, keys, value_width) = q.shape, v.shape
    group = heads // groups
    sequences = 1 if starts is None else starts[0].shape[0] - 1
    seen, seeing = triton.cdiv(keys, sequences), triton.cdiv(queries, sequences)  # of one sequence, on average
    classes = size_bucket(seeing), size_bucket(seen)
    if first_seen is not None and last_seen is not None:
        seen, seeing = (min(size, last_seen - first_seen + 1) for size in (seen, seeing))
    unit = LOG2_E.value
    scales = (
        scale * unit,
        *((None, None) if softcap is None else (2.0 * unit * scale / softcap, softcap * unit)),
        scale,
    )
    blocks = [max(16, triton.next_power_of_2(size)) for size in (width, value_width)]
    vectors = slopes, *(starts or (None, None))
    strides = [0 if vector is None else vector.stride(0) for vector in vectors]
    sizes = queries, keys, sequences, group, groups

    def tiles(places: int, height: int) -> int:
        return triton.cdiv(places, height) if starts is None else places // height + sequences

    single = q.element_size() == 4  # whose rows are loaded again, by pointers
    by_descriptor = can_use_tma(k, v)
    rows_kernel[lambda meta: (tiles(queries * group, meta["BLOCK_M"]) * groups * batch,)](
        *(q, *(make_descriptor(x) if by_descriptor else x for x in (k, v)), (k, v) if single else None),
        *(out, dout, lse, dlse, *vectors, dq, delta),
        *(turned, *(x.stride() for x in (q, k, v, out, dout, lse, dlse, dq)), *strides),
        *(*sizes, classes[0], size_bucket(seen), first_seen, last_seen),
        *(*scales, by_descriptor, width, value_width, *blocks),
    )
    if keys:
        lse = lse.contiguous()
        by_descriptor = can_use_tma(q, dout)
        keys_kernel[lambda meta: (tiles(keys, meta["BLOCK_N"]) * groups * batch,)](
            *(make_descriptor(q) if by_descriptor else q, k, v, make_descriptor(dout) if by_descriptor else dout),
            *(
                (q, dout) if single else None,
                lse,
                delta,
                *vectors,
                dk,
                dv,
                *(x.stride() for x in (q, k, v, dout, dk, dv)),
                *strides,
            ),
            *(*sizes, classes[1], size_bucket(seeing)),
            *(None if bound is None else -bound for bound in (last_seen, first_seen)),
            *(*scales, by_descriptor, width, value_width, *blocks),
        )
