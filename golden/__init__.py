"""Certified goldens: for every op the exact function of the tensors as stored, with a radius that holds it.

``evaluate(op, *tensors, **options)`` gives a `Golden`, ``specs()`` the names of the ops, ``spec(name)`` one of them,
and ``admissible(op, *tensors, chosen=..., **options)`` tells which of a kernel's choices are right.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.golden.choices import admissible
    from assay.golden.evaluation import evaluate
    from assay.golden.registry import Spec, spec, specs
    from assay.golden.run import Golden

__all__ = ["Golden", "Spec", "admissible", "evaluate", "spec", "specs"]

_HOME = {
    "Golden": "run",
    "Spec": "registry",
    "admissible": "choices",
    "evaluate": "evaluation",
    "spec": "registry",
    "specs": "registry",
}


def __getattr__(name: str) -> Any:
    """Load a name on first use: importing this package must not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
