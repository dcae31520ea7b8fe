"""`tl.map_elementwise`: a function of scalars, which may branch on them, for one element after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as plain


def map_elementwise(scalar_fn: Any, *args: Any, pack: int = 1, **compiler: Any) -> Any:
    """Blocks of what ``scalar_fn`` gives for the elements of broadcast ``args``, ``pack`` neighbours in each call.

    A call gets ``pack`` elements of the first argument, then of the second, and gives its results likewise.
    """
    arrays = np.broadcast_arrays(*(arg.handle.data for arg in args))
    shape = arrays[0].shape
    columns = [array.reshape(-1) for array in arrays]
    if columns[0].size % pack:
        raise ValueError(f"map_elementwise: {columns[0].size} elements are no multiple of pack={pack}")
    calls = []
    for start in range(0, columns[0].size, pack):
        elements = [(column[place : place + 1], arg) for column, arg in zip(columns, args, strict=True)
                    for place in range(start, start + pack)]  # fmt: skip
        results = scalar_fn(*(_scalar(element, arg.dtype) for element, arg in elements))
        calls.append(results if isinstance(results, (tuple, tl.tuple)) else (results,))
    found = []
    for place in range(0, len(calls[0]), pack):
        dtype = calls[0][place].dtype
        data = np.array([[call[place + each].handle.data.item() for each in range(pack)] for call in calls])
        data = data.astype(calls[0][place].handle.data.dtype).reshape(shape)
        is_block = any(arg.type.is_block() for arg in args)
        kind = tl.block_type(dtype, list(shape)) if is_block else dtype
        found.append(tl.tensor(plain.TensorHandle(data, dtype), kind))
    return found[0] if len(found) == 1 else tuple(found)


def _scalar(element: Any, dtype: Any) -> Any:
    return tl.tensor(plain.TensorHandle(element, dtype), dtype)
