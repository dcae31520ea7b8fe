"""The survey's table: kernels to examine, as ``[[kernel]]`` entries of a TOML file.

The package contains ``configs/survey.toml``, whose head documents the fields of an entry, and ``configs/others.toml``,
with kernels of other projects.
"""

import contextlib
import importlib.util
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from assay import configs
from assay.golden.registry import spec
from assay.runtime.errors import AssayError, unknown
from assay.runtime.files import read_text
from assay.runtime.records import Seed, from_toml, structured
from assay.runtime.results import installed_version
from assay.verify.errors import TableError
from assay.verify.settings import OF_THE_RUN, Examples, Number, Settings, Text, fitting, names

_OF_A_JOB = {"dtype", "seed", *OF_THE_RUN} - {"pretend"}  # settings that an entry doesn't have
_BUNDLED = ("survey", "others")

Dtypes = Annotated[tuple[Any, ...], msgspec.Meta(description="a list of dtypes")]
Devices = Annotated[tuple[str, ...], msgspec.Meta(description="a list of devices")]
Seeds = Annotated[tuple[Seed, ...], msgspec.Meta(description="a list of whole numbers from 0 to 2^63 - 1")]


@dataclass(frozen=True)
class Entry:
    """A kernel, and how to examine it.

    ``settings`` apply to all its examinations, each of which has its own dtype. ``survey_dtypes`` is the subset of
    ``dtypes`` for surveys, which cover many kernels with few dtypes. ``requires`` names a module, or an attribute of
    one, without which the kernel is not available. ``cost`` is the approximate time of a case, relative to a softmax's
    case. ``examples`` and ``seeds`` override a campaign's own.

    ``package`` is the distribution that contains the kernel, ``install`` the command to install it (default: "pip
    install PACKAGE"), and ``tried`` its version or commit if the distribution has none. For readers: ``promised`` is
    the source of the contract, and ``cause`` why the kernel breaks it, according to its source code.
    """

    name: Text
    target: Text
    settings: Settings
    group: Text = ""
    dtypes: Dtypes = (None,)
    survey_dtypes: Dtypes = ()
    devices: Devices = ()
    requires: Text = ""
    cost: Number = 1.0
    examples: Annotated[Examples | None, msgspec.Meta(description="a whole number from 0 to a million")] = None
    seeds: Seeds = ()
    package: Text = ""
    install: Text = ""
    tried: Text = ""
    promised: Text = ""
    cause: Text = ""

    @property
    def version(self) -> str:
        """Return the installed version of the entry's package, or else the version with which the table was made."""
        return installed_version(self.package, self.tried)

    def absence(self, device: str) -> str:
        """Return why the kernel can't be examined on ``device`` of this machine, in words; empty if it can."""
        kind = device.partition(":")[0]
        if self.devices and kind not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {kind}"
        if not self.requires or _exists(self.requires):
            return ""
        way = self.install or (self.package and f"pip install {self.package}")
        return f"there is no {self.requires} in this build" + (f"; {way}" if way else "")


class _File(msgspec.Struct):
    kernel: list[dict[str, Any]]
    packages: dict[str, dict[str, Any]] = {}


def entries(path: str | Path | None = None) -> tuple[Entry, ...]:
    """Return the entries of a table: a file, "survey" (the default) or "others", which the package contains.

    A table's ``[packages.NAME]`` gives the defaults of every entry of that ``package``. Raises `TableError`.
    """
    name = str(path or _BUNDLED[0])
    bundled = name in _BUNDLED and not os.path.exists(name)
    label = f"configs/{name}.toml" if bundled else name
    hint = "" if Path(name).suffix else f"or one that comes along: {', '.join(_BUNDLED)}"
    content = configs.table(name) if bundled else from_toml(read_text(name, TableError, hint), label, TableError)
    if not content.get("kernel"):
        raise TableError(f"{label}: expected [[kernel]] entries, found none")
    file: _File = structured(content, _File, f"{label}:", TableError)
    results = []
    for index, row in enumerate(file.kernel, 1):
        try:
            results.append(entry_from_table(file.packages.get(str(row.get("package")), {}) | row))
        except AssayError as error:
            raise TableError(f"{label}: entry {index} ({row.get('name', 'no name')}): {error}") from None
    return tuple(results)


def entry_from_table(row: Mapping[str, Any]) -> Entry:
    """Return an entry from its own fields and those of `Settings.from_table`; raise `TableError` and that one's errors.

    Each of its ``dtypes`` and ``seeds`` is an examination.
    """
    own = [f.name for f in fields(Entry) if f.name != "settings"]
    known = [*own, *(name for name in names() if name not in _OF_A_JOB)]
    for name in row:
        if name not in known:
            raise TableError(unknown("field", name, known))
    for name in ("name", "target", "spec"):
        if not row.get(name):
            raise TableError(f"it needs a {name}")
    ours = fitting(Entry, {name: value for name, value in row.items() if name in own})
    spec(str(row["spec"]), ours["target"])
    settings = Settings.from_table({name: value for name, value in row.items() if name not in own})
    for dtype in ours.get("dtypes", ()):
        replace(settings, dtype=dtype)  # this checks the dtype
    return Entry(settings=settings, **(ours | {"dtypes": ours.get("dtypes") or (None,)}))


def _exists(dotted: str) -> bool:
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(dotted) is not None:  # without importing it
            return True
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError, ValueError):
        return False
    return True
