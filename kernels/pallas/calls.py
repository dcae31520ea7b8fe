"""`pl.pallas_call`, as every kernel here is called: compiled where it can be, interpreted on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl


def call(kernel: Callable[..., None], *arrays: jax.Array, **options: Any) -> Any:
    """``pl.pallas_call(kernel, **options)(*arrays)``, interpreted where the program is lowered for a CPU.

    What it is lowered for, not what is here, decides: `jax.export` for a TPU gives the compiled kernel on a CPU too.
    """
    return jax.lax.platform_dependent(
        *arrays,
        cpu=pl.pallas_call(kernel, interpret=True, **options),
        default=pl.pallas_call(kernel, **options),
    )
