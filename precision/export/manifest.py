"""What an export wrote: its parts, and a record in its folder by which the next one replaces just that: the user's own
files stay."""

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.precision.errors import CannotExport
from assay.precision.sampling import MeasuredError
from assay.precision.units import format_error
from assay.runtime.files import write_text_atomically

RECORD = "export.json"
"""Holds the assignment that the files beside it are of, their names, and what they don't express."""
OPTIONS = "vllm-checkpoint.txt"
"""The command that serves a checkpoint with KV caches for which its configuration has no words."""


def record_in(folder: Path) -> Any:
    """What the record in a folder has; an empty one where there is none that can be read."""
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def written(folder: Path) -> tuple[str, ...]:
    """The files that an export wrote into a folder, relative to it; none without its record."""
    try:
        names = record_in(folder)["files"]
    except (KeyError, TypeError):
        return ()
    return tuple(name for name in names if not Path(name).is_absolute() and ".." not in Path(name).parts)


def check(folder: Path, names: Iterable[str], overwrite: bool) -> None:
    """Raise CannotExport where the new files would take the place of others, but for those of an earlier export."""
    earlier = written(folder)
    if earlier and not overwrite:
        raise CannotExport(
            f"{folder / RECORD} exists: give another folder, or pass overwrite=True to replace what it lists"
        )
    for name in {*names, RECORD} - {*earlier, RECORD if earlier else ""}:
        above = (folder / parent for parent in Path(name).parents)
        other = next((index for index in above if index.exists() and not index.is_dir()), folder / name)
        if other.exists():
            raise CannotExport(f"{other} exists and is of no export: move it away, or give another folder")


def digest_of(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def remove(folder: Path) -> bool:
    """Remove what an export wrote there, and folders that are empty then; whether there was anything."""
    names = written(folder)
    for name in (*names, RECORD) if names else ():
        (folder / name).unlink(missing_ok=True)
    for index in sorted({folder / parent for name in names for parent in Path(name).parents}, reverse=True):
        with suppress(OSError):
            index.rmdir()
    return bool(names)


def move(
    index: Path,
    folder: Path,
    assignment: Mapping[str, str],
    notes: Collection[str],
    overwrite: bool,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Move all files of a place into the folder, instead of those that an earlier export wrote there.

    Raises as `check` does, with everything as it was. If it is stopped on the way, nothing is left of an earlier
    export, and what there is has a record, with what ``about`` says; a checkpoint's config.json, without which nothing
    loads it, comes last.
    """
    files = sorted(str(file.relative_to(index)) for file in index.rglob("*") if file.is_file())
    check(folder, files, overwrite)
    remove(folder)
    if not files:
        return
    digests = {name: digest_of(index / name) for name in files}
    content = {
        "assignment": dict(assignment),
        "files": files,
        "notes": list(notes),
        **(about or {}),
        "digests": digests,
    }
    write_text_atomically(folder / RECORD, json.dumps(content, indent=1) + "\n")
    for name in sorted(files, key=lambda name: Path(name).name == "config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(index / name, folder / name)


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What an export gives when it is loaded, over the sequences that an audit reports on."""

    reader: str
    """Packages and their versions."""
    error: MeasuredError | None
    """Of the loaded model; None: its reader refuses it."""
    simulated: MeasuredError
    """Of what the export holds of the assignment, KV caches aside, which its reader leaves as they are."""
    floor: float
    """The error with every site rounded to bfloat16."""
    power: float
    """1 where the error grows with the square of a change, 2 where with the change (`Metric.power`)."""
    reason: str = ""
    """Why its reader refuses it."""

    @property
    def agrees(self) -> bool:
        """Whether the two are as close as rounding to 16 bits leaves them: amplitudes, which add at most, differ by no
        more than the floor's."""
        if self.error is None or not math.isfinite(self.error) or not math.isfinite(self.simulated):
            return False
        loaded, simulated, floor = (each ** (self.power / 2) for each in (self.error, self.simulated, self.floor))
        return abs(loaded - simulated) <= floor

    @property
    def words(self) -> str:
        """Both errors in a line; a disagreement is called one."""
        if self.error is None:
            return f"{self.reader} refuses it: {self.reason}"
        both = f"loaded by {self.reader} {format_error(self.error)}, simulated {format_error(self.simulated)}"
        return both if self.agrees else f"{both}: they disagree by more than rounding to bfloat16 makes of it"


@dataclass(frozen=True, slots=True)
class Part:
    """One format of an export, or its checkpoint."""

    format: str
    """Of `FORMATS`, or "checkpoint"."""
    paths: tuple[Path, ...]
    held: dict[str, str]
    """What of the assignment it expresses."""
    bytes: int | None = None
    """Of the checkpoint's tensors."""
    loaded: Reloaded | None = None
    """What it gave when it was loaded again."""
