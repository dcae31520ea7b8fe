"""Golden records: `make_record` evaluates a `Record`, `record_key` names it, and a `Store` holds it."""

from typing import TYPE_CHECKING

from assay.runtime.modules import lazy

if TYPE_CHECKING:
    from assay.golden.store.record import Record, make_record, record_key
    from assay.golden.store.store import Store

__all__ = ["Record", "Store", "make_record", "record_key"]

__getattr__, __dir__ = lazy(__name__)
