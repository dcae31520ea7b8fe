"""Selective scan of state-space models as an operator of torch, with its gradient."""

from __future__ import annotations

from torch import Tensor

from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.selective_scan_backward import check_scan, selective_scan_backward
from assay.kernels.triton.selective_scan_kernel import scan


@custom_op("assay::selective_scan", lambda u, *rest: u.new_empty(u.shape))
def _selective_scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, softplus: bool) -> Tensor:
    y = u.new_empty(u.shape)
    if y.numel():
        scan(u, delta, a, b, c, skip, softplus=softplus, y=y)
    return y


def _gradients(saved, dy):
    given = saved.u, saved.delta, saved.a, saved.b, saved.c, saved.skip
    return selective_scan_backward(*given, dy, softplus=saved.softplus)


differentiate("assay::selective_scan", _gradients, saves="u delta a b c skip")


def selective_scan(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, *, softplus: bool = False
) -> Tensor:
    """y[B,D,L]: y_t = sum_s c_st h_st + skip u_t, with h_st = exp(delta_t a_s) h_s(t-1) + delta_t b_st u_t and h zero
    before the beginning, of each channel of u, delta[B,D,L], with a[D,S], b, c[B,S,L] and skip[D].

    Computed in float32; ``softplus``: delta is softplus of what is given. a and skip are float32, the others float32,
    bfloat16 or float16, not necessarily the same; the result has u's dtype. All states of a channel are in registers
    together: S of 16 or so. Raises TypeError or ValueError, naming the argument, for another dtype, shape or device.
    """
    check_scan(u=u, delta=delta, a=a, b=b, c=c, skip=skip)
    return _selective_scan(u, delta, a, b, c, skip, softplus)
