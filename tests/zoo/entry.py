"""What the zoo's tables hold: a kernel, the spec that it claims to keep, and how to examine it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
