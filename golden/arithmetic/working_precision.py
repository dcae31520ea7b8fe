"""flint's working precision, which is one for the whole process and all of its threads, made local to a computation."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def working_precision(bits: int, *, terms: int | None = None) -> Iterator[None]:
    """``bits`` of precision, and power series of that many ``terms``, for one thread at a time; then as before."""
    from flint import ctx  # loaded on first use

    with _ONE_AT_A_TIME, ctx.workprec(bits):
        kept, ctx.cap = ctx.cap, ctx.cap if terms is None else terms
        try:
            yield
        finally:
            ctx.cap = kept


def bits_of(digits: int) -> int:
    """How many bits hold that many decimal digits, as flint counts them."""
    return round((digits + 1) * math.log2(10))
