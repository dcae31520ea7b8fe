"""Redraws a problem's inputs: numbers of any amplitude, also mixed within a tensor, that keep the inputs' properties.

Properties that two draws show are kept: zeros (triangular tensors), symmetry, few values (labels, masks), rows that sum
to one, equality for all seeds. Other inputs are drawn from a continuum of amplitudes, so that no threshold can separate
checked inputs from others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

Tensor = torch.Tensor
SCHEMES = ("given", "scaled", "mixed", "normal")
_FEW = 16  # distinct values, up to which a tensor is labels or a mask
_ZEROS = 0.02  # share of zeros from which they are structure: random numbers have almost none
_SUM = 1e-3  # distance from 1 within which a sum of shares counts as 1


@dataclass(frozen=True)
class Kind:
    """The kind of a problem's tensor: "fixed" (must not change), "scalable" (as a whole), or "free".

    ``signed``: it has negative numbers.
    """

    name: str
    signed: bool


def kind_of(first: Tensor, second: Tensor) -> Kind:
    """Return the kind of a tensor from two draws of it."""
    if not first.dtype.is_floating_point or first.numel() == 0 or first.shape != second.shape:
        return Kind("fixed", False)
    x, signed = first.double(), bool((first < 0).any())
    finite = bool(x.isfinite().all())
    if not finite or torch.equal(first, second) or (first.numel() > _FEW and _how_many(first) <= _FEW):
        return Kind("fixed", signed)
    off = max(_SUM, torch.finfo(first.dtype).eps)  # the rounding errors of the shares add up
    if any(bool(((x.sum(axis) - 1).abs() < off).all()) for axis in range(x.ndim)) and x.shape[-1] > 1 and not signed:
        return Kind("fixed", signed)
    is_square = x.ndim >= 2 and x.shape[-1] == x.shape[-2] > 1
    zeros = float((x == 0).double().mean())
    rising = x.ndim and x.shape[-1] > 8 and bool((x.diff(dim=-1) >= 0).all())
    if (is_square and torch.equal(x, x.mT)) or zeros > _ZEROS or rising:
        return Kind("scalable", signed)
    return Kind("free", signed)


def _how_many(tensor: Tensor) -> int:
    """Return the number of distinct values, from the first elements."""
    return len(set(tensor.flatten().tolist()[: 64 * _FEW]))


def kinds(draw: Callable[[int], tuple[Any, ...]]) -> list[Kind]:
    """Return the kind of each leaf of the arguments."""
    first, second = tree_flatten(draw(101))[0], tree_flatten(draw(102))[0]
    return [
        kind_of(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else Kind("fixed", False)
        for a, b in zip(first, second, strict=True)
    ]


def redrawn(arguments: tuple[Any, ...], of: Sequence[Kind], scheme: str, seed: int, *, signs: bool) -> tuple[Any, ...]:
    """Return the arguments redrawn by a scheme; ``signs``: positive tensors may get negative numbers.

    Schemes: "given" (unchanged), "scaled" (a factor for each tensor), "mixed" (a factor for each row and each element),
    "normal" (normal numbers of a random amplitude).
    """
    leaves, structure = tree_flatten(arguments)
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    results = [
        _redrawn(leaf, kind, scheme, chance, generator, signs) if isinstance(leaf, Tensor) else leaf
        for leaf, kind in zip(leaves, of, strict=True)
    ]
    return tuple(tree_unflatten(results, structure))


def scaled(arguments: tuple[Any, ...], of: Sequence[Kind], factor: float) -> tuple[Any, ...]:
    """Return the arguments with every tensor that may change scaled by ``factor``."""
    leaves, structure = tree_flatten(arguments)
    results = [
        (leaf.double() * factor).to(leaf.dtype) if isinstance(leaf, Tensor) and kind.name != "fixed" else leaf
        for leaf, kind in zip(leaves, of, strict=True)
    ]
    return tuple(tree_unflatten(results, structure))


def may_roll(arguments: tuple[Any, ...], of: Sequence[Kind]) -> list[int]:
    """Return the indices, among the tensors, of those whose elements may be permuted."""
    leaves = [(leaf, kind) for leaf, kind in zip(tree_flatten(arguments)[0], of, strict=True) if _is_tensor(leaf)]
    return [index for index, (leaf, kind) in enumerate(leaves) if kind.name == "free" and leaf.is_contiguous()]


def may_scale(arguments: tuple[Any, ...], of: Sequence[Kind]) -> list[int]:
    """Return the indices, among the tensors, of those that `scaled` changes; none if formats of 8 bits are among them.

    Those aren't multiplied alike everywhere.
    """
    leaves = [(leaf, kind) for leaf, kind in zip(tree_flatten(arguments)[0], of, strict=True) if _is_tensor(leaf)]
    indices = [index for index, (_, kind) in enumerate(leaves) if kind.name != "fixed"]
    return indices if all(leaves[index][0].element_size() > 1 for index in indices) else []


def rolled(arguments: tuple[Any, ...], indices: Sequence[int], shift: int) -> tuple[Any, ...]:
    """Roll the tensors with these indices (as of `may_roll`) in the order of their memory."""
    leaves, structure = tree_flatten(arguments)
    tensors = [index for index, leaf in enumerate(leaves) if _is_tensor(leaf)]
    for index in (tensors[number] for number in indices):
        leaves[index] = torch.roll(leaves[index].flatten(), shift).reshape(leaves[index].shape)
    return tuple(tree_unflatten(leaves, structure))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _redrawn(
    x: Tensor, kind: Kind, scheme: str, chance: random.Random, generator: torch.Generator, signs: bool
) -> Tensor:
    # Decades in which factors are drawn: products of two inputs must stay in the dtype's range.
    span = 1.0 if x.dtype.itemsize == 1 else 1.5 if x.dtype.itemsize == 2 else 2.5
    factor = 10.0 ** chance.uniform(-span, span)
    if kind.name == "fixed" or scheme == "given":
        return x
    wide = x.double()
    if kind.name == "scalable" or scheme == "scaled":
        return _stored(wide * factor, x.dtype)
    if scheme == "normal" and (kind.signed or signs):
        return _stored(torch.randn(x.shape, generator=generator, dtype=torch.float64) * factor, x.dtype)
    rows = torch.rand((*x.shape[:-1], 1) if x.ndim else (), generator=generator, dtype=torch.float64)
    each = torch.rand(x.shape, generator=generator, dtype=torch.float64)
    made = wide * torch.exp((rows - 0.5) * 2 * span * math.log(10)) * torch.exp((each - 0.5) * math.log(10))
    if kind.signed or signs:
        made = torch.where(torch.rand(x.shape, generator=generator) < 0.5, made, -made)
    return _stored(made, x.dtype)


def _stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers clamped to a dtype's range and rounded to it."""
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)


def one_changed(arguments: tuple[Any, ...], index: int, seed: int) -> tuple[Any, ...]:
    """Change one element of the leaf ``index`` to another number of about the same size."""
    leaves, structure = tree_flatten(arguments)
    tensor = leaves[index].clone().contiguous()
    at = random.Random(seed).randrange(tensor.numel())
    flat = tensor.view(-1)
    flat[at] = -flat[at] + (1 if float(flat[at].abs()) < 0.5 else 0)
    leaves[index] = tensor
    return tuple(tree_unflatten(leaves, structure))


def half_changed(arguments: tuple[Any, ...], index: int, axis: int) -> tuple[Any, ...]:
    """Reverse the elements of the last half along an axis of one tensor, and scale them by 1.25."""
    leaves, structure = tree_flatten(arguments)
    tensor = leaves[index].clone()
    size = tensor.shape[axis]
    part = tensor.narrow(axis, size - size // 2, size // 2)
    part.copy_((part.double().flatten().flip(0).reshape(part.shape) * 1.25).to(part.dtype))
    leaves[index] = tensor
    return tuple(tree_unflatten(leaves, structure))


def all_changed(arguments: tuple[Any, ...], others: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    """Replace one tensor by that of another draw."""
    leaves, structure = tree_flatten(arguments)
    leaves[index] = tree_flatten(others)[0][index]
    return tuple(tree_unflatten(leaves, structure))
