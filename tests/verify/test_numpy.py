"""Kernels of numpy arrays: judged like those of tensors, bfloat16 and fp8 by way of ml_dtypes."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from assay.verify import examine
from assay.verify.cases.case import Case, build
from assay.verify.harness.call import Call, Finding

from .examined import failure_of

Array = np.ndarray[Any, np.dtype[Any]]


def softmax(x: Array) -> Array:
    """The textbook form, in float32."""
    values = x.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.exp(values - values.max(axis=1, keepdims=True))
        return (weights / weights.sum(axis=1, keepdims=True)).astype(x.dtype)


def softmax_in_input_dtype(x: Array) -> Array:
    """Every step is rounded to the input's dtype."""
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.exp(x - x.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)


def softmax_of_columns(x: Array) -> Array:
    return softmax(np.ascontiguousarray(x.T)).T


def softmax_in_place(x: Array) -> Array:
    x -= x.max(axis=1, keepdims=True)
    return softmax(x)


def softmax_strides_ignored(x: Array) -> Array:
    """The array's memory is taken for rows without gaps."""
    behind = np.lib.stride_tricks.as_strided(x, (x.shape[0] * x.shape[1],), (x.itemsize,))
    return softmax(behind.reshape(x.shape).copy())


SETTINGS: dict[str, Any] = {"framework": "numpy", "effort": "quick", "examples": 5}
FIRST: dict[str, Any] = {**SETTINGS, "every_aspect": False, "shrinking": False}
DTYPES = ("float32", "bfloat16", "float16", "float64")


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_an_honest_kernel_passes(dtype: str) -> None:
    """In bfloat16 it gets, and returns, arrays of ml_dtypes."""
    verdict = examine(softmax, "softmax", dtype=dtype, **SETTINGS)
    assert verdict.outcome == "PASS", str(verdict)


@pytest.mark.parametrize(
    ("kernel", "dtype", "kinds"),
    [
        (softmax_in_input_dtype, "bfloat16", {"contract", "exact"}),
        (softmax_in_input_dtype, "float16", {"contract", "exact"}),
        (softmax_of_columns, "float32", {"contract", "exact", "crash"}),
        (softmax_in_place, "float32", {"input_mutated"}),
        (softmax_strides_ignored, "float32", {"layout", "nonfinite"}),
        (lambda x: softmax(x)[:-1], "float32", {"shape"}),
        (lambda x: softmax(x).astype(np.float64), "float32", {"dtype"}),
        (lambda x: softmax(x).astype(np.float32), "bfloat16", {"dtype"}),
        (lambda x: softmax(x).tolist(), "float32", {"dtype", "shape"}),
        (lambda x: x @ x, "float32", {"crash", "contract", "exact"}),
    ],
    ids=["bfloat16", "float16", "columns", "in-place", "strides", "shape", "float64", "float32", "list", "crash"],
)
def test_a_faulty_kernel_fails(kernel: Any, dtype: str, kinds: set[str]) -> None:
    """Wrong numbers, a changed input, ignored strides, and results of the wrong form are found as with tensors."""
    verdict = examine(kernel, "softmax", dtype=dtype, **FIRST)
    assert failure_of(verdict).kind in kinds


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", ml_dtypes.bfloat16),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        ("float8_e5m2", ml_dtypes.float8_e5m2),
        ("float16", np.float16),
        ("float32", np.float32),
        ("float64", np.float64),
    ],
)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "strided", "expanded"])
def test_values_cross_over_bit_for_bit(dtype: str, expected: Any, layout: str) -> None:
    """A kernel sees the tensor's values, dtype and strides in the tensor's own memory; its copy comes back the same."""
    case = Case("silu", {"R": 5, "N": 7}, {"x": dtype}, values={"x": "patterns"}, layouts={"x": layout})
    inputs = build(case)
    seen: list[Array] = []

    def keep(x: Array) -> Array:
        seen.append(x)
        return x.copy()

    outputs = Call(keep, {}, framework="numpy")(replace(case, out_dtype=dtype), inputs)
    assert not isinstance(outputs, Finding)
    tensor = inputs.positional[0]
    assert seen[0].dtype == expected
    assert seen[0].ctypes.data == tensor.data_ptr()
    assert [stride // seen[0].itemsize for stride in seen[0].strides] == list(tensor.stride())
    assert outputs[0].dtype == tensor.dtype
    assert torch.equal(outputs[0].double(), tensor.double())


def test_options_and_several_results_cross_over_too() -> None:
    def add_rmsnorm(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        with np.errstate(invalid="ignore", over="ignore"):
            total = x.astype(np.float32) + residual.astype(np.float32)
            scale = 1 / np.sqrt((total * total).mean(axis=1, keepdims=True) + np.float32(eps))
            return (total * scale * weight.astype(np.float32)).astype(x.dtype), total.astype(x.dtype)

    verdict = examine(add_rmsnorm, "add_rmsnorm", dtype="bfloat16", options={"eps": [1e-6, 1e-3]}, **SETTINGS)
    assert verdict.outcome == "PASS", str(verdict)
    verdict = examine(
        lambda *inputs, eps: add_rmsnorm(*inputs, eps=1e-6),
        "add_rmsnorm",
        dtype="bfloat16",
        options={"eps": [1e-6, 1e-3]},
        **FIRST,
    )
    assert verdict.outcome == "FAIL"
