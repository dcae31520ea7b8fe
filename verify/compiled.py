"""`compiled`: a function as torch.compile makes it, in every case of an examination.

torch.compile gives up after eight variants of a function and runs it in eager mode from then on, and does the same
inside of a dispatch mode, such as the one that poisons memory. An examination calls a kernel with hundreds of sizes,
dtypes and layouts: of a function that is handed over as torch.compile returns it, most cases would show eager mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_UNLIMITED = 1 << 30


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """A kernel: ``torch.compile(function, **settings)``, compiled anew for each case that asks for it.

    Where the compiler breaks the graph, the pieces between are eager; ``fullgraph=True`` makes an error of that.
    Poisoned memory doesn't reach what compiled code allocates.
    """
    import torch._dynamo.config as config

    call = torch.compile(function, **settings)

    def kernel(*tensors: Any, **options: Any) -> Any:
        limits: dict[str, Any] = {"recompile_limit": _UNLIMITED, "accumulated_recompile_limit": _UNLIMITED}
        with _disable_current_modes(), config.patch(**limits, fail_on_recompile_limit_hit=True):
            return call(*tensors, **options)

    name = getattr(function, "__qualname__", None) or type(function).__name__
    kernel.__name__ = kernel.__qualname__ = f"compiled {name}"
    return kernel
