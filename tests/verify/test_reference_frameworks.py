"""References that are written with JAX or NumPy judge kernels as those of PyTorch do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from assay.golden import evaluate
from assay.golden.lowering import reference_spec
from assay.verify import examine


def softmax(x: Any) -> Any:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_a_reference_of_numpy_judges_a_kernel_of_torch() -> None:
    asked: dict[str, Any] = {"tensors": "x[T,D] -> y[T,D]", "dtype": "float32", "effort": "quick", "shrinking": False}
    assert examine(lambda x: torch.softmax(x, -1), softmax, **asked).passed
    rounded = examine(lambda x: torch.softmax(x.bfloat16(), -1).to(x.dtype), softmax, **asked)
    assert rounded.aspects["numbers"].status == "broken"


def in_place(x: Any) -> Any:
    y = x - x.max(-1, keepdims=True)
    np.exp(y, out=y)
    y /= y.sum(-1, keepdims=True)
    return y


def test_a_reference_of_numpy_may_write_in_place() -> None:
    x = torch.randn(3, 40)
    one, other = (evaluate(reference_spec(f, "x[T,D] -> y[T,D]").qualified_name, x) for f in (softmax, in_place))
    assert not isinstance(one, tuple)
    assert not isinstance(other, tuple)
    assert bool(((one.value - other.value).abs() <= one.radius + other.radius).all())
    assert float(other.radius.max()) < 1e-14


def test_a_reference_of_jax_judges_a_kernel_of_jax() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def rms_norm(x: Any, weight: Any) -> Any:
        h = x.astype(jnp.float32)
        return (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)).astype(x.dtype) * weight

    def honest(x: Any, weight: Any) -> Any:
        h, w = x.astype(jnp.float32), weight.astype(jnp.float32)
        return (h / jnp.sqrt(jnp.mean(jnp.square(h), -1, keepdims=True) + 1e-6) * w).astype(x.dtype)

    def faulty(x: Any, weight: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight

    asked: dict[str, Any] = {"dtype": "bfloat16", "framework": "jax", "effort": "quick", "shrinking": False}
    asked |= {"tensors": "x[T,D], weight[D] -> y[T,D]", "shapes": {"T": [3], "D": [5, 33]}, "examples": 2}
    assert examine(honest, rms_norm, **asked).passed
    assert examine(faulty, rms_norm, **asked).aspects["numbers"].status == "broken"
