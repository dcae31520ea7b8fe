"""What the zoo's tables hold: a kernel, the spec it claims to keep, and how to examine it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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


def families(spec: str, *kernels: tuple[str, Kernel, Iterable[str]], **examine: Any) -> tuple[Entry, ...]:
    """Families of one spec that are examined alike, with what each name has behind that of the spec."""
    return tuple(entry for name, *each in kernels for entry in family(f"{spec}{name}", spec, *each, **examine))


def planter(honest: Iterable[Entry]) -> Callable[..., Faulty]:
    """A function that makes faulty entries out of twins among `honest`, examined exactly as the twin is.

    Without a kernel of its own an entry is its twin with the given arguments: the parts that a fault replaces.
    """
    twins: Mapping[str, Entry] = {entry.name: entry for entry in honest}

    def plant(
        name: str, twin: str, kernel: Kernel | None = None, kinds: tuple[str, ...] = Faulty.kinds, **parts: Any
    ) -> Faulty:
        model = twins[twin]
        dtype = model.examine.get("dtype")
        label = f"{name}-{dtype}" if isinstance(dtype, str) else name
        return Faulty(label, model.spec, kernel or partial(model.kernel, **parts), model.examine, kinds, twin)

    return plant


def planted(
    plant: Callable[..., Faulty], op: str, part: str, faults: Mapping[str, tuple[str, Any]]
) -> Iterator[Faulty]:
    """Faults of one op by name: what the twin's name has behind the op's, and what stands for one of its parts."""
    return (plant(f"{op}_{name}", f"{op}{twin}", **{part: made}) for name, (twin, made) in faults.items())
