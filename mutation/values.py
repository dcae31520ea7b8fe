"""Extracts numbers from compared values as float64 (or complex128) NumPy arrays, and restores them.

torch and JAX are recognised only once they are imported.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from assay.verify.comparison.corruptions import Numbers

LARGE = 1 << 20
"""Elements above which arrays are thinned before they are copied."""


@dataclass(frozen=True)
class Leaf:
    """An array in a compared value, which may be a container of several."""

    path: tuple[Any, ...]
    """Keys and positions that lead to it."""
    value: Any
    numbers: Numbers
    whole: bool
    """Its elements are integers."""


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def largest_leaf(value: Any) -> Leaf | None:
    """Return the largest array in a value, or None if it has no numbers, such as text or booleans."""
    best: Leaf | None = None
    for path, item in _leaves(value, ()):
        numbers = numbers_of(item)
        if numbers is not None and (best is None or numbers.size > best.numbers.size):
            best = Leaf(path, item, numbers, _whole(item))
    return best


def numbers_of(value: Any) -> Numbers | None:
    """Return an array as float64 or complex128; None if it has no real or complex numbers."""
    if is_tensor(value):
        torch = sys.modules["torch"]
        if value.layout != torch.strided or value.is_quantized or value.dtype == torch.bool or value.is_meta:
            return None
        wide = torch.complex128 if value.is_complex() else torch.float64
        return value.detach().to("cpu", wide).numpy().copy()
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray:  # masked arrays, matrices: rules of their own
        return None
    array = np.asarray(value)
    name = array.dtype.name
    if array.dtype.kind in "fiu" or name.startswith(("bfloat16", "float8", "float4", "float6")):
        return array.astype(np.float64)
    return array.astype(np.complex128) if array.dtype.kind == "c" else None


def rebuilt(numbers: Numbers, like: Any) -> Any:
    """Return numbers with the type, dtype and device of ``like``, rounded to nearest."""
    if is_tensor(like):
        torch = sys.modules["torch"]
        tensor = torch.from_numpy(np.array(numbers, order="C"))  # a copy: no strides that torch doesn't have
        if not (like.is_floating_point() or like.is_complex()):
            tensor = tensor.round()
        return tensor.to(like.dtype).to(like.device)
    if isinstance(like, list | tuple):
        array = rebuilt(numbers, np.asarray(like))
        return type(like)(array.tolist()) if type(like) in (list, tuple) else array
    if isinstance(like, np.ndarray | np.generic):
        values = np.rint(numbers) if like.dtype.kind in "iu" else numbers
        array = np.asarray(values).astype(like.dtype)
        return array[()] if isinstance(like, np.generic) else array
    if isinstance(like, bool | int | float | complex):
        item: Any = numbers.item()
        return type(like)(item)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(like, jax.Array):
        return jax.numpy.asarray(np.asarray(numbers).astype(like.dtype))
    return rebuilt(numbers, np.asarray(like))


def with_leaf(value: Any, path: tuple[Any, ...], leaf: Any) -> Any:
    """Return a container with another array at ``path``."""
    if not path:
        return leaf
    first, rest = path[0], path[1:]
    if isinstance(value, Mapping):
        return {**value, first: with_leaf(value[first], rest, leaf)}
    items = [with_leaf(item, rest, leaf) if index == first else item for index, item in enumerate(value)]
    return items if isinstance(value, list) else tuple(items)


def kept(value: Any) -> Any:
    """Return a copy that later writes don't reach; values without numbers are not copied."""
    if is_tensor(value):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: kept(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(kept(item) for item in value)
    return value


def size_of_copy(value: Any) -> int:
    """Return the bytes that `kept` copies."""
    if is_tensor(value):
        return int(value.numel() * value.element_size())
    if isinstance(value, np.ndarray):
        return value.nbytes
    if type(value) is dict:
        return sum(map(size_of_copy, value.values()))
    return sum(map(size_of_copy, value)) if type(value) in (list, tuple) else 0


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """Return the item of a container at ``path``."""
    for part in path:
        value = value[part]
    return value


def thinned(actual: Any, expected: Any) -> tuple[Any, Any, bool]:
    """Return every n-th entry of the longest axis of two large arrays of one shape, and whether they were thinned."""
    if not all(is_tensor(item) or type(item) is np.ndarray for item in (actual, expected)):
        return actual, expected, False
    shape = tuple(actual.shape)
    elements = int(np.prod(shape))
    if elements <= LARGE or shape != tuple(expected.shape):
        return actual, expected, False
    axis = int(np.argmax(shape))
    part = (slice(None),) * axis + (slice(None, None, -(-elements // LARGE)),)
    return actual[part], expected[part], True


def same_memory(a: Any, b: Any) -> bool:
    """Return whether two arrays are the same view of the same memory; Python numbers don't count."""
    if is_tensor(a) and is_tensor(b):
        return bool(a is b or (a.numel() and a.data_ptr() == b.data_ptr() and _view(a) == _view(b)))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a is b or bool(a.size and a.__array_interface__ == b.__array_interface__)
    return False


def _view(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _leaves(value: Any, path: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple) and not _rectangular(value):
        items = list(enumerate(value))
    else:
        return [(path, value)]
    return [leaf for key, item in items for leaf in _leaves(item, (*path, key))]


def _rectangular(value: Any) -> bool:
    """Return whether nested lists of plain numbers form an array."""
    if not isinstance(value, list | tuple):
        return isinstance(value, bool | int | float | complex)
    if not all(_rectangular(item) for item in value):
        return False
    return len({len(item) if isinstance(item, list | tuple) else -1 for item in value}) <= 1


def _whole(value: Any) -> bool:
    if is_tensor(value):
        return not (value.is_floating_point() or value.is_complex())
    return np.asarray(value).dtype.kind in "iu"
