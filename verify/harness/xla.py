"""XLA on a CPU: whether what a JAX kernel rounds on the way is rounded, and room for all that it compiles.

By default XLA may keep more digits than a program asks for: a conversion to bfloat16 and back is left out, so that a
kernel that subtracts in bfloat16 is judged as if it had subtracted in float32, and differs from what it does on a GPU
or TPU. The flag is read when JAX starts its backend, not when it is imported; afterwards only a probe tells what holds.
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
    """Have XLA round where a program says so, unless XLA_FLAGS says otherwise, or JAX has started already."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}=false".strip()


@cache
def drops_roundings() -> bool:
    """Whether a difference that is rounded to bfloat16, 1 - 2^-12, keeps its digits in this process."""
    jax = importlib.import_module("jax")
    numbers = jax.numpy
    with jax.default_device(jax.devices("cpu")[0]):
        one, little = (numbers.asarray(value, numbers.bfloat16) for value in (1.0, 2.0**-12))
        return float(jax.jit(lambda x, y: (x - y).astype(numbers.float32))(one, little)) != 1.0


def make_room() -> None:
    """Have JAX forget what it has compiled before that kills the process; looked at every few calls.

    A kernel is compiled for each size, a program takes up to a hundred maps of memory, and Linux allows a process
    65,530 (vm.max_map_count): beyond them XLA's compiler ends in a segmentation fault. A quarter of them is enough.
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
