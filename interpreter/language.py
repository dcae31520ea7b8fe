"""The changes to Triton's language inside `faithful`: builder, semantics, operators, loops, reductions and scans."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as plain
from triton.runtime.jit import JITCallable, JITFunction

from assay.interpreter import kernels
from assay.interpreter.builder import TARGET
from assay.interpreter.numerics.emission import factors_of
from assay.interpreter.numerics.floats import NARROW, Array
from assay.interpreter.operators import TensorHandle, cached_constructors, constexpr_operators, operators
from assay.interpreter.replacing import Change, Shared, replaced


def _find_changes() -> list[Change]:
    """Collect what Triton's own interpreter replaces in this version (by a trial run), and what it leaves out."""
    # The code generator stores the language's functions in a table at import: load it before they are replaced.
    importlib.import_module("triton.compiler.code_generator")
    ours: list[Change] = [
        (plain, "interpreter_builder", kernels.builder),
        (plain, "interpreter_semantic", kernels.semantic),
        (plain, "TritonSemantic", lambda builder: kernels.semantic),
        (plain, "ReduceOps", Reduce),
        (plain, "ScanOps", Scan),
        (plain.InterpretedFunction, "__call__", _call_device_function),
        (JITFunction, "__call__", _call_device_function),
    ]
    scope = _RecordingScope()
    with replaced([*ours, (plain, "_LangPatchScope", lambda: scope)]):
        try:
            plain._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        finally:
            scope.restore()
    members: list[Change] = [
        (tl.tensor, name, partialmethod(member))
        for name, member in vars(tl.tensor).items()
        if isinstance(member, JITCallable)
    ]
    members.append((tl.tensor, "__index__", lambda self: int(self.handle.data.item())))
    if hasattr(tl, "target_info"):
        members.append((tl.target_info, "current_target", lambda: TARGET))
    functions: list[Change] = [(tl, "range", kernels.tensor_range), (tl.core, "range", kernels.tensor_range)]
    if hasattr(tl, "map_elementwise"):
        functions += [(tl, "map_elementwise", map_elementwise), (tl.core, "map_elementwise", map_elementwise)]
    language = [(owner, name, _direct(value)) for owner, name, value in scope.changes]
    by_name = {name: value for owner, name, value in language if owner is tl.tensor}
    changes = [*ours, *language, *operators(kernels.builder, by_name), *members, *functions, *cached_constructors()]
    changes += [*constexpr_operators(), *kernels.libdevice_functions()]
    return [(owner, name, value) for (owner, name), value in {change[:2]: change[2] for change in changes}.items()]


def _direct(value: Any) -> Any:
    """Unwrap Triton's replacement of a builtin, which checks at each call whether it is one."""
    member = (getattr(value, "__kwdefaults__", None) or {}).get("member")
    if member is None:
        return value
    builtin = getattr(member, "__wrapped__", member)

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return builtin(*args, _semantic=kernels.semantic, **kwargs)

    return call


class _RecordingScope:
    """Replaces Triton's `_LangPatchScope` and records the changes."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._stack = contextlib.ExitStack()

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        self.changes.append((owner, name, value))
        self._stack.enter_context(replaced([(owner, name, value)]))

    def restore(self) -> None:
        self._stack.close()


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    return kernels.runnable(self)(*args, **kwargs)


def map_elementwise(scalar_fn: Any, *args: Any, pack: int = 1, **compiler: Any) -> Any:
    """`tl.map_elementwise`: call ``scalar_fn``, which may branch, on ``pack`` neighbours of broadcast ``args`` each.

    A call gets ``pack`` elements of the first argument, then of the second, and returns its results likewise.
    """
    arrays = np.broadcast_arrays(*(arg.handle.data for arg in args))
    shape = arrays[0].shape
    columns = [array.reshape(-1) for array in arrays]
    if columns[0].size % pack:
        raise ValueError(f"map_elementwise: {columns[0].size} elements are no multiple of pack={pack}")
    calls = []
    for start in range(0, columns[0].size, pack):
        scalars = [
            tl.tensor(TensorHandle(column[i : i + 1], arg.dtype), arg.dtype)
            for column, arg in zip(columns, args, strict=True)
            for i in range(start, start + pack)
        ]
        results = scalar_fn(*scalars)
        calls.append(results if isinstance(results, (tuple, tl.tuple)) else (results,))
    is_block = any(arg.type.is_block() for arg in args)
    blocks = []
    for first in range(0, len(calls[0]), pack):
        dtype = calls[0][first].dtype
        data = np.array([[call[first + i].handle.data.item() for i in range(pack)] for call in calls])
        data = data.astype(calls[0][first].handle.data.dtype).reshape(shape)
        blocks.append(tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if is_block else dtype))
    return blocks[0] if len(blocks) == 1 else tuple(blocks)


class Reduce(plain.ReduceOps):  # type: ignore[misc]
    """`ReduceOps` by a balanced tree of neighbours, the order of a GPU's shuffles.

    Triton's calls the combining function once per element, this one log2(n) times on halves of the array. Sums and
    extremes of float32, float64 and integers are NumPy's.
    """

    def apply_impl(self, input: tuple[Any, ...]) -> Any:
        axis = 0 if self.axis is None else self.axis
        arrays = [part.handle.data for part in input]
        rank = arrays[0].ndim
        if self.axis is None:
            arrays = [array.reshape(-1) for array in arrays]
        dtypes = [part.handle.dtype.scalar for part in input]
        fused = self._fused_pairs(input, axis) if self.combine_fn is tl.standard._sum_combine else None
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

    def _fused_pairs(self, input: tuple[Any, ...], axis: int) -> Array | None:
        """Add neighbouring products with one fma each (`Emission.contraction`); None if there are no products."""
        handle = input[0].handle
        factors = factors_of(handle)
        if factors is None:
            return None
        product, left, right = (
            part.data.reshape(-1) if self.axis is None else np.moveaxis(part.data, axis, 0)
            for part in (handle, *factors)
        )
        even = len(product) // 2 * 2
        if not even:
            return None
        operands = (TensorHandle(x, handle.dtype) for x in (left[0:even:2], right[0:even:2], product[1:even:2]))
        sums = plain.interpreter_builder.create_fma(*operands).data
        return np.moveaxis(np.concatenate([sums, product[even:]]), 0, axis)

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
    """`ScanOps` by doubling strides (Hillis and Steele); sums and products of wide types are NumPy's."""

    def apply_impl(self, input: tuple[Any, ...]) -> Any:
        arrays = [part.handle.data for part in input]
        dtypes = [part.handle.dtype.scalar for part in input]
        if self.reverse:
            arrays = [np.flip(array, self.axis) for array in arrays]
        ufuncs: dict[Any, Any] = {tl.standard._sum_combine: np.add, tl.standard._prod_combine: np.multiply}
        if len(dtypes) == 1 and dtypes[0].name not in (*NARROW, "fp16") and self.combine_fn in ufuncs:
            arrays = [ufuncs[self.combine_fn].accumulate(arrays[0], axis=self.axis)]
        else:
            arrays = _doubling(arrays, dtypes, self.axis, self.combine_fn)
        if self.reverse:
            arrays = [np.ascontiguousarray(np.flip(array, self.axis)) for array in arrays]
        return [self.to_tensor(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]


def _tree(arrays: Sequence[Array], dtypes: Sequence[Any], axis: int, combine: Any) -> list[Array]:
    """Combine neighbours along ``axis`` until one element is left."""
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
        earlier = [np.concatenate([p[:stride], p[:-stride]]) for p in parts]  # block sizes must stay powers of two
        combined = _combined(combine, earlier, parts, dtypes)
        parts = [np.concatenate([p[:stride], c[stride:]]) for c, p in zip(combined, parts, strict=True)]
        stride *= 2
    return [np.moveaxis(part, 0, axis) for part in parts]


def _combined(combine: Any, left: Sequence[Array], right: Sequence[Array], dtypes: Sequence[Any]) -> list[Array]:
    """Apply the kernel's combining function to two rows of arrays."""
    arguments = [
        tl.core.tensor(TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))
        for row in (left, right)
        for array, dtype in zip(row, dtypes, strict=True)
    ]
    results = combine(*arguments)
    results = results if isinstance(results, (tuple, tl.tuple)) else (results,)
    return [result.handle.data for result in results]


language = Shared(_find_changes, lasting=True)
"""Inside it, Triton's language acts on NumPy arrays."""
