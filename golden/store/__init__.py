"""Golden records: `make_record` evaluates a `Record`, `record_key` names it, and a `Store` keeps it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.golden.store.record import Record, make_record, record_key
    from assay.golden.store.store import Store

__all__ = ["Record", "Store", "make_record", "record_key"]

_HOME = {"Record": "record", "make_record": "record", "record_key": "record", "Store": "store"}


def __getattr__(name: str) -> Any:
    """Load a name on first use: importing this package must not import torch or fsspec."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
