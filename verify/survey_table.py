"""The survey's table: kernels to examine, as ``[[kernel]]`` entries of a TOML file.

``configs/survey.toml`` is the one that comes along; its head says what an entry holds.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay import configs
from assay.golden.errors import unknown
from assay.golden.registry import spec, specs
from assay.precision.errors import AssayError
from assay.verify.contract import contract_from_table
from assay.verify.errors import ContractError, TableError

_LARGEST_SIZE = 1025  # where a range of sizes has no "max"
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {  # what a field of an entry must be, and in words
    "name": (str, "text"),
    "target": (str, "text, module:attribute"),
    "spec": (str, "text"),
    "group": (str, "text"),
    "dtypes": (list, "a list of dtypes"),
    "survey_dtypes": (list, "a list of dtypes"),
    "out_dtype": (str, "the name of a dtype"),
    "options": (dict, "a table of lists"),
    "shapes": (dict, "a table of sizes"),
    "layouts": (list, "a list of layouts"),
    "contract": ((str, dict), "the name of a contract, or a table of its fields"),
    "devices": (list, "a list of devices"),
    "framework": (str, "text"),
    "requires": (str, "text, a dotted name"),
    "effort": ((int, float), "a number"),
    "examples": (int, "a whole number"),
    "seeds": (list, "a list of whole numbers"),
}


@dataclass(frozen=True)
class Entry:
    """A kernel and how to examine it; the fields are those of `examine`, where they aren't the table's.

    ``survey_dtypes`` are those of ``dtypes`` that a survey, which goes for breadth, takes. ``examples`` and ``seeds``
    are a campaign's own, where it has some.
    """

    name: str
    target: str
    spec: str
    group: str = ""
    dtypes: tuple[Any, ...] = (None,)
    survey_dtypes: tuple[Any, ...] = ()
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    contract: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    requires: str = ""
    effort: float = 1.0
    examples: int | None = None
    seeds: tuple[int, ...] = ()

    def absence(self, device: str) -> str:
        """Why the kernel can't be examined on ``device`` of this machine, in words; empty if it can."""
        kind = device.partition(":")[0]
        if self.devices and kind not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {kind}"
        return "" if not self.requires or _exists(self.requires) else f"there is no {self.requires} in this build"


def entries(path: str | Path | None = None) -> tuple[Entry, ...]:
    """The entries of a table, the one that comes along where left out. Raises `TableError`."""
    label = str(path or "configs/survey.toml")
    try:
        content = configs.table("survey") if path is None else tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TableError(f"{label}: can't be read ({error.strerror or error})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TableError(f"{label}: is no TOML ({error})") from None
    rows = content.get("kernel")
    if not isinstance(rows, list) or not rows:
        raise TableError(f"{label}: expected [[kernel]] entries, found none")
    found = []
    for place, row in enumerate(rows, 1):
        try:
            found.append(entry_from_table(row))
        except AssayError as error:
            raise TableError(f"{label}: entry {place} ({row.get('name', 'no name')}): {error}") from None
    return tuple(found)


def entry_from_table(row: Mapping[str, Any]) -> Entry:
    """One entry; an array in ``options`` is a tuple, ``{min, max, multiple_of}`` in ``shapes`` a range of sizes."""
    for name, value in row.items():
        if name not in _KINDS:
            raise TableError(unknown("field", name, _KINDS))
        kind, words = _KINDS[name]
        if not isinstance(value, kind):
            raise TableError(f"{name}={value!r}; expected {words}")
    for name in ("name", "target", "spec"):
        if not row.get(name):
            raise TableError(f"it needs a {name}")
    if row["spec"] not in specs():
        raise TableError(unknown("spec", row["spec"], specs()))
    contract = row.get("contract", {})
    contract = contract_named(contract) if isinstance(contract, str) else contract
    try:
        contract_from_table(contract)
    except (AttributeError, TypeError):
        raise TableError(f"contract={contract!r}; expected fields of assay.verify.Contract") from None
    options = {name: _options(row["spec"], name, values) for name, values in row.get("options", {}).items()}
    settings = {name: row[name] for name in ("out_dtype", "layouts", "framework") if name in row}
    settings["shapes"] = {symbol: _sizes(symbol, sizes) for symbol, sizes in row.get("shapes", {}).items()}
    plain_fields = {
        name: row[name] for name in ("name", "target", "spec", "group", "requires", "effort") if name in row
    }
    return Entry(
        **plain_fields,
        dtypes=tuple(row.get("dtypes", ())) or (None,),
        survey_dtypes=tuple(row.get("survey_dtypes", ())),
        options=options,
        settings=settings,
        contract=contract,
        devices=tuple(row.get("devices", ())),
        examples=row.get("examples"),
        seeds=tuple(_seeds(row.get("seeds", []))),
    )


def _seeds(seeds: list[Any]) -> list[int]:
    if not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise TableError(f"seeds={seeds!r}; expected a list of whole numbers of at least 0")
    return seeds


def contract_named(name: str) -> dict[str, Any]:
    """The fields of a contract: "triton.softmax" is ``[softmax]`` of ``configs/contracts/triton.toml``.

    Raises `ContractError`.
    """
    files = [file for file in configs.names() if file.startswith("contracts/")]
    known = {
        f"{file.removeprefix('contracts/')}.{title}": fields
        for file in files
        for title, fields in configs.table(file).items()
    }
    if name not in known:
        raise ContractError(f"contract: {unknown('name', name, known)}")
    return {key: value for key, value in known[name].items() if key not in ("source", "reason", "title")}


def _exists(dotted: str) -> bool:
    """Whether there is a module, or an attribute of one, of that name."""
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(dotted) is not None:  # without importing it
            return True
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        try:
            for part in parts[length:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


def _options(op: str, name: str, values: Any) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise TableError(f"options: {name}={values!r}; expected a list of the values to vary over")
    values = [tuple(value) if isinstance(value, list) else value for value in values]
    for value in values:
        spec(op).complete({name: value})
    return values


def _sizes(symbol: str, sizes: Any) -> Sequence[int]:
    if isinstance(sizes, list):
        return sizes
    known = {"min", "max", "multiple_of"}
    if not isinstance(sizes, dict) or not set(sizes) <= known or not all(type(size) is int for size in sizes.values()):
        raise TableError(f"shapes: {symbol}={sizes!r}; expected a list of sizes, or {{ min, max, multiple_of }}")
    step = max(sizes.get("multiple_of", 1), 1)
    first = -(-sizes.get("min", step) // step) * step
    return range(first, sizes.get("max", max(_LARGEST_SIZE, first)) + 1, step)
