"""Tampering: a kernel has no business replacing functions of the libraries that judge it.

What is watched are the public functions of torch's and numpy's namespaces: a call that replaces one is a finding, and
the function is put back. Libraries that replace their own, as torch does when its compiler is first loaded, may.
"""

from __future__ import annotations

import operator
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

_WATCHED: tuple[Any, ...] = (torch, torch.Tensor, torch.nn.functional, torch.testing, np, np.testing, time)
_LIBRARY = Path(torch.__file__).parent


class Namespaces:
    """The watched namespaces as they are now."""

    def __init__(self) -> None:
        self._before = [dict(vars(space)) for space in _WATCHED]

    def restore(self) -> list[str]:
        """The public functions that have been replaced or deleted since; they are put back."""
        results = []
        for space, before in zip(_WATCHED, self._before, strict=True):
            now = vars(space)
            if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
                continue
            for name in [name for name in before if now.get(name) is not before[name]] + _shadows(space, before):
                is_function = callable(before.get(name)) or callable(now.get(name))
                if _is_public(name) and is_function and not _own(name, now.get(name)):
                    results.append(f"{space.__name__}.{name}")
                    _put_back(space, name, before)
        return results


def _shadows(space: Any, before: dict[str, Any]) -> list[str]:
    """Methods that have come to hide those of a base class."""
    bases = space.__mro__[1:] if isinstance(space, type) else ()
    return [name for name in vars(space) if name not in before and any(name in vars(base) for base in bases)]


def _put_back(space: Any, name: str, before: dict[str, Any]) -> None:
    if name in before:
        setattr(space, name, before[name])
    else:
        delattr(space, name)


def _is_public(name: str) -> bool:
    return name[0] != "_" or name[:2] == "__"


def _own(name: str, value: Any) -> bool:
    """Whether a function is the library's own wrapper of what had this name."""
    code = getattr(value, "__code__", None)
    is_named = getattr(value, "__name__", "") == name and str(getattr(value, "__module__", "")).startswith("torch")
    return is_named and code is not None and Path(code.co_filename).is_relative_to(_LIBRARY)
