"""Named contracts: the promises of published code, as tables of fields in ``configs/contracts``.

"triton.softmax" is the table ``[softmax]`` of ``triton.toml``. A file with a table ``[any]`` is a contract by its own
name, such as "transformers": its fields are those of ``[any]``, overridden by those of the op's table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from assay import configs
from assay.runtime.errors import unknown
from assay.verify.errors import ContractError

FOR_READERS = ("source", "reason", "title")
_ANY, _SOURCES = "any", "sources"


@cache
def _files() -> dict[str, dict[str, Any]]:
    names = [name for name in configs.names() if name.startswith("contracts/")]
    return {name.removeprefix("contracts/"): configs.table(name) for name in names}


@cache
def bases() -> tuple[str, ...]:
    """Return the contracts with a name of their own, which apply to any op."""
    return tuple(name for name, tables in _files().items() if _ANY in tables)


def fields_of_base(name: str, op: str) -> dict[str, Any]:
    """Return the fields of such a contract for an op; raise `ContractError`."""
    if name not in bases():
        raise ContractError(f"contract: base: {unknown('name', name, bases())}")
    tables = _files()[name]
    return _fields({**tables[_ANY], **tables.get(op, {})})


def contract_named(name: str) -> dict[str, Any]:
    """Return the fields of a contract: those of its table, or its name as the ``base``.

    Raises `ContractError`.
    """
    if name in bases():
        return {"base": name}
    tables = {
        f"{file}.{title}": row
        for file, tables in _files().items()
        if file not in bases()
        for title, row in tables.items()
    }
    if name not in tables:
        raise ContractError(f"contract: {unknown('name', name, (*bases(), *tables))}")
    return _fields(tables[name])


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in FOR_READERS}
