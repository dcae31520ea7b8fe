"""What the zoo's tables hold: a kernel, the spec it claims to keep, and how to examine it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Kernel = Callable[..., Any]


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

    kinds: tuple[str, ...] = ("contract", "exact", "nonfinite")
    twin: str = ""


def family(name: str, spec: str, kernel: Kernel, dtypes: Iterable[str], **examine: Any) -> tuple[Entry, ...]:
    """One entry for each dtype, named `name-dtype`."""
    return tuple(Entry(f"{name}-{dtype}", spec, kernel, {"dtype": dtype, **examine}) for dtype in dtypes)


def planter(honest: Iterable[Entry]) -> Callable[..., Faulty]:
    """A function that makes faulty entries out of twins among `honest`, examined exactly as the twin is."""
    twins: Mapping[str, Entry] = {entry.name: entry for entry in honest}

    def plant(name: str, twin: str, kernel: Kernel, kinds: tuple[str, ...] | None = None) -> Faulty:
        model = twins[twin]
        dtype = model.examine.get("dtype")
        label = f"{name}-{dtype}" if isinstance(dtype, str) else name
        return Faulty(label, model.spec, kernel, model.examine, kinds or Faulty.kinds, twin)

    return plant
