"""Kernels made by torch.compile: keep every case of an examination in compiled code.

torch.compile gives up after eight variants of a function and runs it eagerly from then on; it does the same inside a
dispatch mode, such as the one that poisons memory. An examination calls a kernel with hundreds of sizes, dtypes and
layouts, and would mostly test eager mode. So the limit is lifted for each call, and a function from torch.compile is
called outside such modes: compiled code therefore allocates memory that isn't poisoned.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_UNLIMITED = 1 << 30  # as good as no limit; torch compares it with counts
_LIMITS = {
    "recompile_limit": _UNLIMITED,
    "accumulated_recompile_limit": _UNLIMITED,
    "fail_on_recompile_limit_hit": True,
}


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Return the kernel ``torch.compile(function, **settings)`` under a name of its own.

    If the compiler breaks the graph, the pieces between run eagerly; ``fullgraph=True`` makes that an error.
    """
    kernel = torch.compile(function, **settings)
    name = getattr(function, "__qualname__", None) or type(function).__name__
    with contextlib.suppress(AttributeError):
        kernel.__name__ = kernel.__qualname__ = f"compiled {name}"
    return kernel


def is_compiled(kernel: Callable[..., Any]) -> bool:
    """Whether a function comes from torch.compile, or is a partial of one that does."""
    while isinstance(kernel, functools.partial):
        kernel = kernel.func
    inplace = isinstance(kernel, torch.nn.Module) and kernel._compiled_call_impl is not None
    return inplace or hasattr(kernel, "_torchdynamo_orig_callable")


@contextlib.contextmanager
def every_variant_compiled(kernel: Callable[..., Any]) -> Iterator[None]:
    """Lift torch.compile's limit on variants while ``kernel`` is called."""
    by_itself, dynamo = is_compiled(kernel), sys.modules.get("torch._dynamo.utils")
    if not by_itself and (dynamo is None or not dynamo.counters["frames"]["total"]):  # nothing was ever compiled
        yield
        return
    import torch._dynamo.config as config

    before = {name: getattr(config, name) for name in _LIMITS}
    for name, limit in _LIMITS.items():
        setattr(config, name, limit)
    try:
        with _disable_current_modes() if by_itself else contextlib.nullcontext():
            yield
    finally:
        for name, limit in before.items():
            setattr(config, name, limit)
