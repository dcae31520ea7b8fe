"""PyTorch's kernels that only CUDA has, or computes otherwise there, with the signatures of the specs.

Attention by backend has no masks but the top-left causal one. Operands whose layout a kernel refuses are copied.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, *, causal: str = "none") -> Tensor:
    return _sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal)


def sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor, *, causal: str = "none") -> Tensor:
    return _sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal)


def sdpa_efficient(q: Tensor, k: Tensor, v: Tensor, *, causal: str = "none") -> Tensor:
    """The kernel has no groups: heads of `k` and `v` are repeated."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return _sdpa(SDPBackend.EFFICIENT_ATTENTION, q, k, v, causal)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: str) -> Tensor:
    q, k, v = (x.contiguous() for x in (q, k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal == "top_left", enable_gqa=q.shape[1] != k.shape[1]
        )


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str = "tensor") -> Tensor:
    """Products by cuBLASLt (one scale) and CUTLASS (by row), whose partial sums are added in float32."""
    return _scaled_mm(a, b, scale_a, scale_b, fast=False)


def scaled_mm_fast(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str = "tensor") -> Tensor:
    """The same with `use_fast_accum`: tensor cores alone add."""
    return _scaled_mm(a, b, scale_a, scale_b, fast=True)


def _scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, fast: bool) -> Tensor:
    a, b = a.contiguous(), b.t().contiguous().t()
    scale_a, scale_b = (x.clone(memory_format=torch.contiguous_format) for x in (scale_a, scale_b))
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)


def mm_full_reduction(a: Tensor, b: Tensor) -> Tensor:
    """`torch.mm` without partial sums in bfloat16."""
    with _switched("allow_bf16_reduced_precision_reduction", False):
        return a @ b


def mm_tf32(a: Tensor, b: Tensor) -> Tensor:
    """`torch.mm` of float32 in TF32."""
    with _switched("allow_tf32", True):
        return a @ b


@contextmanager
def _switched(name: str, value: bool) -> Iterator[None]:
    switches = torch.backends.cuda.matmul
    before = getattr(switches, name)
    setattr(switches, name, value)
    try:
        yield
    finally:
        setattr(switches, name, before)


def compiled_softmax(x: Tensor) -> Tensor:
    return _compiled(_softmax)(x)


def compiled_rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    return _compiled(_rms_norm)(x, weight, eps)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Any]:
    return torch.compile(function)
