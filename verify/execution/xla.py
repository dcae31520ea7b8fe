"""XLA on a CPU: whether what a JAX kernel rounds on the way is rounded.

By default XLA may keep more digits than a program asks for: a conversion to bfloat16 and back is left out, so that a
kernel that subtracts in bfloat16 is judged as if it had subtracted in float32, and differs from what it does on a GPU
or TPU. The flag is read when JAX starts its backend, not when it is imported; afterwards only a probe tells what holds.
"""

from __future__ import annotations

import importlib
import os
from functools import cache

_FLAG = "--xla_allow_excess_precision"
MEND = f"start JAX's backend after assay, or set XLA_FLAGS={_FLAG}=false"
"""What makes roundings stay."""


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
