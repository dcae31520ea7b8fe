"""XLA on a CPU: make it keep a JAX kernel's intermediate roundings, and bound the memory maps of its compiled programs.

By default XLA may keep more digits than a program asks for: it drops a conversion to bfloat16 and back, so that a
kernel that subtracts in bfloat16 is judged as if it subtracted in float32, unlike on a GPU or TPU. The flag is read
when JAX starts its backend, not at import; afterwards only a probe tells whether roundings are kept.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

_FLAG = "--xla_allow_excess_precision"
MEND = f"start JAX's backend after assay, or set XLA_FLAGS={_FLAG}=false"
"""What makes roundings stay."""
_EACH = 16
"""How many calls there are between two looks at a process's maps."""
_calls = itertools.count(1)


def keep_roundings() -> None:
    """Make XLA keep explicit roundings, unless XLA_FLAGS says otherwise or JAX has already started."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}=false".strip()


@cache
def drops_roundings() -> bool:
    """Whether 1 - 2^-12, rounded to bfloat16, keeps its digits in this process."""
    jax = importlib.import_module("jax")
    numbers = jax.numpy
    with jax.default_device(jax.devices("cpu")[0]):
        one, little = (numbers.asarray(value, numbers.bfloat16) for value in (1.0, 2.0**-12))
        return float(jax.jit(lambda x, y: (x - y).astype(numbers.float32))(one, little)) != 1.0


def make_room() -> None:
    """Clear JAX's compilation caches before they crash the process; checked every few calls.

    A kernel is compiled for each size, a program takes up to a hundred memory maps, and Linux allows a process 65,530
    (vm.max_map_count); beyond them XLA's compiler ends in a segmentation fault. The caches are cleared at a quarter of
    them.
    """
    if next(_calls) % _EACH:
        return
    with suppress(OSError):  # no Linux
        if _maps() > _most_maps() // 4:
            importlib.import_module("jax").clear_caches()
            gc.collect()


def _maps() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"\n")


@cache
def _most_maps() -> int:
    return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
