"""The numbers of one tensor: drawn by its distribution, rounded once to its dtype, the same bits on every platform.

Only integer arithmetic and IEEE basic operations are used: sums, products, `ldexp` and `floor` of float64; no functions
of a platform's mathematical library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import mul
from typing import Any

import numpy as np
import torch

from assay.formats.format import Format, format_named
from assay.formats.rounding import round_to
from assay.golden.errors import RecipeError
from assay.golden.inputs.distributions import (
    EVERY,
    MIDPOINTS,
    REAL,
    RELATIVE,
    ROLES,
    STRUCTURED,
    TILED,
    Draws,
    every_value,
    integer_values,
    label_values,
    length_values,
    midpoints,
    names_of,
    offset_values,
    pair_values,
)
from assay.golden.inputs.domains import drawn_in_domain, into_domain
from assay.golden.signature import DOMAINS, INTEGERS, TensorSpec, dimension, format_or_integer
from assay.runtime.errors import unknown

VERSION = 1  # of the inputs' numbers: raised whenever a seed gives other numbers than before

_TILE = 262_139  # a prime, so that offsets that wrap at a power of two read other numbers
_FLOAT64 = format_named("float64")


def dtype_of(tensor: TensorSpec, dtype: str | Mapping[str, str]) -> str:
    """Return the dtype's name for a tensor: given for it, fixed by the op, or the one under examination."""
    if isinstance(dtype, Mapping) and tensor.name in dtype:
        return format_or_integer(dtype[tensor.name])
    given = format_or_integer(dtype if isinstance(dtype, str) else next(iter(dtype.values())))
    if tensor.dtype == "fp8":
        return given if given.startswith("float8") else "float8_e4m3fn"
    return tensor.dtype or given


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    return dtype


def stored(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return float64 ``values`` rounded to ``dtype``, saturated, and stored in it."""
    if dtype not in INTEGERS:
        finite = torch.isfinite(values)  # infinities and NaN stay as they are
        values = torch.where(finite, round_to(torch.where(finite, values, 0.0), dtype, overflow="saturate"), values)
    target = torch_dtype(dtype)
    if target.is_floating_point and target.itemsize == 1:
        return values.to(torch.float32).to(target)
    return values.to(target)


def draw(
    tensor: TensorSpec,
    sizes: Mapping[str, int],
    dtype: str,
    kind: str,
    seed: int,
    *,
    start: Sequence[int] = (),
    tied: Sequence[int] = (),
) -> torch.Tensor:
    """Return the values of a tensor, contiguous, in its dtype, drawn from the distribution ``kind`` (the plainest if
    empty).

    ``start`` are the coordinates of the first element; elements along the axes in ``tied`` are equal. Raises
    `RecipeError` if the tensor has no such distribution.
    """
    if kind == TILED:
        return _tiled(tensor, sizes, dtype, seed)
    format = _FLOAT64 if dtype in INTEGERS else format_named(dtype)
    known = names_of(tensor)
    kind = kind or known[0]
    if kind not in (*known, EVERY):
        raise RecipeError(f"{tensor.name}: {unknown('distribution', kind, known)}")
    draws = Draws(seed, tensor.name, tensor.shape(sizes), format, start=start, tied=tied)
    own = tensor.inputs.get(kind)
    if tensor.is_integer:
        drawn = own(draws) if own else _whole_numbers(tensor, sizes, dtype, draws, kind)
        signed = torch.from_numpy(np.array(drawn))
        if tensor.role == "bits" and dtype.startswith("int"):
            signed = torch.where(signed >= 2 ** (_bits(dtype) - 1), signed - 2 ** _bits(dtype), signed)
        return signed.to(torch_dtype(dtype))
    if kind == EVERY:
        return stored(into_domain(tensor, torch.from_numpy(every_value(draws)), format), dtype)
    if tensor.role in DOMAINS and own is None:
        return stored(torch.from_numpy(np.array(drawn_in_domain(tensor, draws, kind, REAL.get(kind)))), dtype)
    if kind == MIDPOINTS:
        return stored(torch.from_numpy(midpoints(draws, int(tensor.bound))), dtype)
    values = torch.from_numpy(np.array((own or ROLES[tensor.role][kind])(draws)))
    spread = tensor.role == "real" and kind not in RELATIVE and own is None
    return stored(values * _spread(format) if spread else values, dtype)


def _tiled(tensor: TensorSpec, sizes: Mapping[str, int], dtype: str, seed: int) -> torch.Tensor:
    """Return the plainest numbers of the tensor, drawn for a prime number of elements, repeated in row-major order.

    Tensors that aren't drawn element by element (lengths, labels, an op's own inputs) are drawn completely.
    """
    shape = tensor.shape(sizes)
    count = reduce(mul, shape, 1)
    if count <= _TILE or tensor.inputs or tensor.role in (*STRUCTURED, "length", "simplex", "sorted", "spd"):
        return draw(tensor, sizes, dtype, "uniform" if tensor.role == "offsets" else "", seed)
    tile = draw(replace(tensor, dims=(str(_TILE),)), sizes, dtype, "", seed)
    return tile.repeat(-(-count // _TILE))[:count].reshape(shape)


def _whole_numbers(tensor: TensorSpec, sizes: Mapping[str, int], dtype: str, draws: Draws, kind: str) -> Any:
    if tensor.role == "length":
        unit = dimension(tensor.bound.rpartition("*")[2], sizes)
        return length_values(draws, kind, tensor.most(sizes), unit)
    if tensor.role == "offsets":
        return offset_values(draws, kind, tensor.most(sizes))
    if tensor.role == "label":
        assert tensor.none is not None
        return label_values(draws, kind, max(1, tensor.most(sizes) + 1), tensor.none)
    if tensor.role == "pair":
        return pair_values(draws, kind, tensor.most(sizes) + 1)
    if tensor.role == "bits":
        return integer_values(draws, kind, 2 ** _bits(dtype))
    return integer_values(draws, kind, max(1, tensor.most(sizes) + 1))


def _bits(dtype: str) -> int:
    """Return how many low bits of an integer dtype are drawn; of int64 half, since float64 doesn't hold all."""
    return min(8 * torch_dtype(dtype).itemsize, 32)


def _spread(format: Format) -> float:
    """Return the factor that spreads numbers of order one over a narrow format's range, with few codes near one."""
    if format.kind == "integer":
        return 24.0
    return 16.0 if format.largest < 1000 and format.largest > 100 else 1.0
