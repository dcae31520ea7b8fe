"""What the zoo's tables hold: kernels of families and their faults, and kernels in styles of their own."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from .numerics import Kernel

ALL = ("float32", "bfloat16", "float16")
WRONG = ("contract", "exact", "nonfinite")


@dataclass(frozen=True)
class Entry:
    """A kernel that keeps the contract of its spec, the default one unless ``examine`` has another.

    ``examine`` holds keyword arguments for `examine`.
    """

    name: str
    spec: str
    kernel: Kernel
    examine: dict[str, Any]


@dataclass(frozen=True)
class Faulty(Entry):
    """A copy of the honest entry `twin` and one fault; `kinds` are the failure kinds that a verdict may name."""

    kinds: tuple[str, ...] = WRONG
    twin: str = ""


def honest(
    spec: str, *kernels: tuple[str, Kernel] | tuple[str, Kernel, Iterable[str]], **examine: Any
) -> tuple[Entry, ...]:
    """One entry of each kernel for each dtype (all where none are listed), named by the spec, a suffix and the dtype.

    An entry whose dtypes are fixed has none in its name.
    """
    entries = []
    for suffix, kernel, *dtypes in kernels:
        for dtype in dtypes[0] if dtypes else ALL:
            settings = {"dtype": dtype, **examine} if dtype else examine
            entries.append(Entry(f"{spec}{suffix}{f'-{dtype}' if dtype else ''}", spec, kernel, settings))
    return tuple(entries)


def planter(entries: Iterable[Entry]) -> Callable[..., Faulty]:
    """A function that makes faulty entries out of twins among `entries`, examined exactly as the twin is.

    Without a kernel of its own an entry is its twin with the given arguments: the parts that a fault replaces.
    """
    twins = {entry.name: entry for entry in entries}

    def plant(
        name: str, twin: str, kernel: Kernel | None = None, kinds: tuple[str, ...] = WRONG, **parts: Any
    ) -> Faulty:
        model = twins[twin]
        dtype = model.examine.get("dtype")
        label = f"{name}-{dtype}" if isinstance(dtype, str) else name
        return Faulty(label, model.spec, kernel or partial(model.kernel, **parts), model.examine, kinds, twin)

    return plant


Table = Mapping[str, Mapping[str, Kernel | tuple[Kernel, str]]]
"""By op and dtype kernels by name, each alone or with the fault model that its fault is."""


@dataclass(frozen=True)
class Other:
    """``causes`` are the fault models that its fault is, any of which is right; none where no fault model is it.

    ``settings`` are those of an examination beside dtype and effort.
    """

    name: str
    kernel: Kernel
    op: str
    dtype: str | None
    causes: tuple[str, ...]
    settings: Mapping[str, Any]


def in_float32(formula: Kernel) -> Kernel:
    """The kernel that takes floating tensors as float32, and stores the results in the dtype of the first."""

    @functools.wraps(formula)
    def kernel(*tensors: Tensor, **options: Any) -> Any:
        found = formula(*(x.float() if x.is_floating_point() else x for x in tensors), **options)
        dtype = tensors[0].dtype
        return tuple(y.to(dtype) for y in found) if isinstance(found, tuple) else found.to(dtype)

    return kernel


def listed(table: Table, settings: Mapping[str, Mapping[str, Any]], *, formulas: bool = False) -> Iterator[Other]:
    """The kernels of a table, those of formulas `in_float32`; settings are by name, else by op."""
    for target, rows in table.items():
        op, _, dtype = target.partition("-")
        for name, row in rows.items():
            kernel, *causes = row if isinstance(row, tuple) else (row,)
            kernel = in_float32(kernel) if formulas else kernel
            yield Other(name, kernel, op, dtype or None, tuple(causes), settings.get(name, settings.get(op, {})))
