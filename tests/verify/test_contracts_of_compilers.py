"""Contracts "triton-default" and "xla-cpu" against the installed Triton and JAX: kept, and with more rounding not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.interpreter import faithful

from .examined import fails, first, passes
from .libraries import DTYPES, ROWS, judged

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
PRODUCTS: dict[str, Any] = {"shapes": {"M": [16, 32], "N": [16], "K": [16, 48]}}


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, N, K, HALF: tl.constexpr):
    m, n, k = tl.program_id(0) * 16 + tl.arange(0, 16), tl.program_id(1) * 16 + tl.arange(0, 16), tl.arange(0, 16)
    acc = tl.zeros((16, 16), tl.float32)
    for start in range(0, K, 16):
        a = tl.load(a_ptr + m[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k)[:, None] * N + n[None, :])
        if HALF:
            a = a.to(tl.bfloat16).to(a.dtype)
        acc += tl.dot(a, b)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc.to(c_ptr.dtype.element_ty))


def product(a: Tensor, b: Tensor, half: bool = False) -> Tensor:
    """Dots where the kernel says nothing of their precision; ``half``: a is rounded to bfloat16 before."""
    a, b = a.contiguous(), b.contiguous()
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
    if c.numel():
        dot_kernel[(a.shape[0] // 16, b.shape[1] // 16)](a, b, c, b.shape[1], a.shape[1], HALF=half)
    return c


def test_dots_of_triton_keep_its_default() -> None:
    """In each dtype; of float32 not the contract without a name, and with one more rounding not this."""
    with faithful():
        for dtype in DTYPES:
            passes(judged(product, "gemm", "triton-default", dtype, PRODUCTS))
        for dtype in ("float16", "float32"):
            fails(judged(lambda a, b: product(a, b, half=True), "gemm", "triton-default", dtype, PRODUCTS))
        fails(first(product, "gemm", **PRODUCTS))


def test_programs_of_jax_keep_what_xla_does() -> None:
    """A softmax in float32, in each dtype; with its exponentials rounded on the way not."""
    jax = pytest.importorskip("jax")

    def softmax(more: bool) -> Callable[..., Any]:
        def kernel(x: Any) -> Any:
            wide = x.astype("float32")
            weights = jax.numpy.exp(wide - wide.max(-1, keepdims=True))
            weights = weights.astype("bfloat16").astype("float32") if more else weights
            return (weights / weights.sum(-1, keepdims=True)).astype(x.dtype)

        return jax.jit(kernel)

    for dtype in DTYPES:
        passes(judged(softmax(False), "softmax", "xla-cpu", dtype, {**ROWS, "framework": "jax"}))
        fails(judged(softmax(True), "softmax", "xla-cpu", dtype, {**ROWS, "framework": "jax"}))
