"""The survey's table: kernels to examine, as ``[[kernel]]`` entries of a TOML file.

``configs/survey.toml`` comes along, its head says what an entry holds; and ``configs/others.toml``, of kernels that
other people wrote.
"""

import contextlib
import importlib.util
import pkgutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from assay import configs
from assay.golden.registry import spec
from assay.runtime.errors import AssayError, unknown
from assay.runtime.results import installed_version
from assay.verify.errors import TableError
from assay.verify.settings import OF_THE_RUN, Number, Settings, Text, Whole, fitting, names

_OF_A_JOB = {"dtype", "seed", *OF_THE_RUN} - {"pretend"}  # the settings that an entry doesn't have
_BUNDLED = ("survey", "others")

Dtypes = Annotated[tuple[Any, ...], msgspec.Meta(description="a list of dtypes")]
Devices = Annotated[tuple[str, ...], msgspec.Meta(description="a list of devices")]
Seeds = Annotated[tuple[Whole, ...], msgspec.Meta(description="a list of whole numbers of at least 0")]


@dataclass(frozen=True)
class Entry:
    """A kernel, and how to examine it.

    ``settings`` are those of all its examinations, but their dtype. ``survey_dtypes`` are those of ``dtypes`` that a
    survey, which goes for breadth, takes. ``requires`` names a module, or an attribute of one, without which the kernel
    isn't here. ``cost`` is about how long a case takes, in units of a softmax's. ``examples`` and ``seeds`` are a
    campaign's own, where it has some.

    ``package`` is the distribution that has it, and ``install`` how to get that, "pip install PACKAGE" where left out;
    ``tried`` its version, or commit, where no distribution says it. For readers: ``promised``, where the contract
    comes from, and ``cause``, why it doesn't keep it, as somebody found who read the source.
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
    examples: Annotated[Whole | None, msgspec.Meta(description="a whole number of at least 0")] = None
    seeds: Seeds = ()
    package: Text = ""
    install: Text = ""
    tried: Text = ""
    promised: Text = ""
    cause: Text = ""

    @property
    def version(self) -> str:
        """The version of its package that is installed, or else the one that the table was made with."""
        return installed_version(self.package, self.tried)

    def absence(self, device: str) -> str:
        """Why the kernel can't be examined on ``device`` of this machine, in words; empty if it can."""
        kind = device.partition(":")[0]
        if self.devices and kind not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {kind}"
        if not self.requires or _exists(self.requires):
            return ""
        way = self.install or (self.package and f"pip install {self.package}")
        return f"there is no {self.requires} in this build" + (f"; {way}" if way else "")


def entries(path: str | Path | None = None) -> tuple[Entry, ...]:
    """The entries of a table: a file, or "survey" (where left out) or "others", which come along.

    What a table says under ``[packages.NAME]`` holds for each entry of that ``package`` that says nothing else. Raises
    `TableError`.
    """
    name = str(path or _BUNDLED[0])
    bundled = name in _BUNDLED and not Path(name).exists()
    label = f"configs/{name}.toml" if bundled else name
    try:
        content = configs.table(name) if bundled else tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        hint = "" if Path(name).suffix else f"; or one that comes along: {', '.join(_BUNDLED)}"
        raise TableError(f"{label}: can't be read ({error.strerror or error}){hint}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TableError(f"{label}: is no TOML ({error})") from None
    rows, packages = content.get("kernel"), content.get("packages", {})
    if not isinstance(rows, list) or not rows:
        raise TableError(f"{label}: expected [[kernel]] entries, found none")
    results = []
    for index, row in enumerate(rows, 1):
        try:
            results.append(entry_from_table(packages.get(row.get("package"), {}) | row))
        except AssayError as error:
            raise TableError(f"{label}: entry {index} ({row.get('name', 'no name')}): {error}") from None
    return tuple(results)


def entry_from_table(row: Mapping[str, Any]) -> Entry:
    """One entry: its own fields, and beside them those of `Settings.from_table`. Raises `TableError` and as that does.

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
    spec(row["spec"], ours["target"])
    settings = Settings.from_table({name: value for name, value in row.items() if name not in own})
    for dtype in ours.get("dtypes", ()):
        replace(settings, dtype=dtype)  # which checks it
    return Entry(settings=settings, **(ours | {"dtypes": ours.get("dtypes") or (None,)}))


def _exists(dotted: str) -> bool:
    """Whether there is a module, or an attribute of one, of that name."""
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(dotted) is not None:  # without importing it
            return True
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError, ValueError):
        return False
    return True
