"""Reductions and scans of Triton's interpreter, evaluated on whole arrays.

`tl.reduce` and `tl.associative_scan` take any combining function. Triton's interpreter calls it once per element;
here it is called on halves of the array, log2(n) times, in the order of a balanced tree, as a GPU's shuffles do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as plain

from assay.interpreter.emission import factors_of
from assay.interpreter.small_floats import NARROW, Array


class Reduce(plain.ReduceOps):  # type: ignore[misc]
    """`ReduceOps` by a tree; sums and extremes of float32, float64 and integers by NumPy's own."""

    def apply_impl(self, input: tuple[Any, ...]) -> Any:
        axis = 0 if self.axis is None else self.axis
        arrays = [part.handle.data for part in input]
        rank = arrays[0].ndim
        if self.axis is None:
            arrays = [array.reshape(-1) for array in arrays]
        dtypes = [part.handle.dtype.scalar for part in input]
        fused = self._fused(input, axis) if self.combine_fn is tl.standard._sum_combine else None
        ufunc = self._ufunc(dtypes)
        if fused is not None:
            arrays = [fused]
        if ufunc is not None:
            results: Sequence[Array] = [ufunc.reduce(arrays[0], axis=axis)]
        else:
            results = _tree(arrays, dtypes, axis, self.combine_fn)
        if self.keep_dims:
            shape = [1] * rank if self.axis is None else None
            results = [r.reshape(shape) if shape else np.expand_dims(r, axis) for r in results]
        return [self.to_tensor(result, dtype) for result, dtype in zip(results, dtypes, strict=True)]

    def _fused(self, input: tuple[Any, ...], axis: int) -> Array | None:
        """Of products that are summed, the sums of neighbours, each rounded once (`Emission.contraction`)."""
        handle = input[0].handle
        factors = factors_of(handle)
        if factors is None:
            return None
        parts = [part.data.reshape(-1) if self.axis is None else np.moveaxis(part.data, axis, 0)
                 for part in (handle, *factors)]  # fmt: skip
        whole, left, right = parts
        even = len(whole) // 2 * 2
        if not even:
            return None
        pairs = (plain.TensorHandle(part, handle.dtype) for part in (left[0:even:2], right[0:even:2], whole[1:even:2]))
        summed = plain.interpreter_builder.create_fma(*pairs).data
        return np.moveaxis(np.concatenate([summed, whole[even:]]), 0, axis)

    def _ufunc(self, dtypes: Sequence[Any]) -> Any:
        if len(dtypes) > 1 or dtypes[0].name in (*NARROW, "fp16"):
            return None
        floating = dtypes[0].is_floating()
        if self.combine_fn is tl.standard._sum_combine:
            return np.add
        if self.combine_fn is tl.standard._elementwise_max:
            return np.fmax if floating else np.maximum
        if self.combine_fn is tl.standard._elementwise_min:
            return np.fmin if floating else np.minimum
        return None


class Scan(plain.ScanOps):  # type: ignore[misc]
    """`ScanOps` by doubling strides (Hillis and Steele); sums and products of wide types by NumPy's own."""

    def apply_impl(self, input: tuple[Any, ...]) -> Any:
        arrays = [part.handle.data for part in input]
        dtypes = [part.handle.dtype.scalar for part in input]
        if self.reverse:
            arrays = [np.flip(array, self.axis) for array in arrays]
        if len(dtypes) == 1 and dtypes[0].name not in (*NARROW, "fp16") and self.combine_fn in _cumulative():
            arrays = [_cumulative()[self.combine_fn].accumulate(arrays[0], axis=self.axis)]
        else:
            arrays = _doubling(arrays, dtypes, self.axis, self.combine_fn)
        if self.reverse:
            arrays = [np.ascontiguousarray(np.flip(array, self.axis)) for array in arrays]
        return [self.to_tensor(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]


def _cumulative() -> dict[Any, Any]:
    return {tl.standard._sum_combine: np.add, tl.standard._prod_combine: np.multiply}


def _tree(arrays: Sequence[Array], dtypes: Sequence[Any], axis: int, combine: Any) -> list[Array]:
    """Neighbours combined until one is left along ``axis``."""
    parts = [np.moveaxis(array, axis, 0) for array in arrays]
    while len(parts[0]) > 1:
        even = len(parts[0]) // 2 * 2
        combined = _combined(combine, [p[0:even:2] for p in parts], [p[1:even:2] for p in parts], dtypes)
        parts = [np.concatenate([c, p[even:]]) for c, p in zip(combined, parts, strict=True)]
    return [part[0] for part in parts]


def _doubling(arrays: Sequence[Array], dtypes: Sequence[Any], axis: int, combine: Any) -> list[Array]:
    parts = [np.moveaxis(array, axis, 0) for array in arrays]
    stride = 1
    while stride < len(parts[0]):
        earlier = [np.concatenate([p[:stride], p[:-stride]]) for p in parts]  # a shape must stay a power of two
        combined = _combined(combine, earlier, parts, dtypes)
        parts = [np.concatenate([p[:stride], c[stride:]]) for c, p in zip(combined, parts, strict=True)]
        stride *= 2
    return [np.moveaxis(part, 0, axis) for part in parts]


def _combined(combine: Any, left: Sequence[Array], right: Sequence[Array], dtypes: Sequence[Any]) -> list[Array]:
    """What the kernel's combining function makes of two rows of arrays."""
    arguments = [_tensor(array, dtype) for row in (left, right) for array, dtype in zip(row, dtypes, strict=True)]
    results = combine(*arguments)
    results = results if isinstance(results, (tuple, tl.tuple)) else (results,)
    return [result.handle.data for result in results]


def _tensor(array: Array, dtype: Any) -> Any:
    return tl.core.tensor(plain.TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))
