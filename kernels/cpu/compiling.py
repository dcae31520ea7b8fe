"""torch.compile for functions that are called with many sizes, dtypes and options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch._dynamo.config as dynamo
import torch.fx.experimental._config as shapes
from torch import Tensor

# Of one function torch.compile makes 8 variants, and runs it eagerly from then on; sizes that are equal in one call, it
# takes for equal. Each class is a context manager, which `patch` would make anew in each call.
_Limit: Any = type(dynamo.patch(recompile_limit=1 << 16))
_Sizes: Any = type(shapes.patch(use_duck_shape=False))  # type: ignore[attr-defined]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the function of tensors and then options, compiled for sizes of any number, and anew for those of one.

    Its tensors are made contiguous, and without elements are left to torch's own operations.
    """
    kernel = torch.compile(function, dynamic=True, fullgraph=True)

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        plain = [_plain(x) if isinstance(x, Tensor) else x for x in arguments]
        if any(isinstance(x, Tensor) and not x.numel() for x in plain):
            return function(*plain)
        with _Limit(), _Sizes():
            return kernel(*plain)

    return run


def composed(function: _Function) -> _Function:
    """Decorator: marks a function whose parts are `compiled` as torch.compile marks what it returns.

    So whoever runs other code inside of a dispatch mode, where torch.compile does nothing, knows what it is.
    """
    function._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
    return function


def _plain(x: Tensor) -> Tensor:
    """Contiguous, with the strides of a new tensor along dimensions of one too: other strides are compiled anew."""
    return x.contiguous().view(-1).view(x.shape)
