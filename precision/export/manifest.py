"""The record of an export: its files and parts, so that the next export replaces only these and no file of the user."""

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
from assay.runtime.files import read_text, write_text_atomically
from assay.runtime.records import from_json

RECORD = "export.json"
"""Name of the record: the exported assignment, the names of the files, and what they don't express."""
OPTIONS = "vllm-checkpoint.txt"
"""Name of the file with the command that serves a checkpoint with KV caches which its configuration can't express."""


def record_in(folder: Path) -> Any:
    """Return the record in a folder; an empty one if there is none that can be read."""
    try:
        return from_json(read_text(folder / RECORD, ValueError), "", ValueError)
    except ValueError:
        return {}


def written(folder: Path) -> tuple[str, ...]:
    """Return the files that an export wrote into a folder, relative to it; none without a record."""
    try:
        names = record_in(folder)["files"]
    except (KeyError, TypeError):
        return ()
    return tuple(name for name in names if not Path(name).is_absolute() and ".." not in Path(name).parts)


def check(folder: Path, names: Iterable[str], overwrite: bool) -> None:
    """Raise CannotExport if new files would overwrite others than those of an earlier export."""
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
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def remove(folder: Path) -> bool:
    """Remove the files of an export and folders left empty; return whether there were any."""
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
    """Move all files of ``index`` into the folder, replacing the files of an earlier export.

    Raises as `check` does, before anything is changed. If interrupted, no file of the earlier export remains and the
    record (with the entries of ``about``) lists the files that exist; a checkpoint's config.json is moved last, because
    a checkpoint without it can't be loaded.
    """
    files = sorted(str(file.relative_to(index)) for file in index.rglob("*") if file.is_file())
    check(folder, files, overwrite)
    remove(folder)
    if not files:
        return
    content = {"assignment": dict(assignment), "files": files, "notes": list(notes), **(about or {})}
    content["digests"] = {name: digest_of(index / name) for name in files}
    write_text_atomically(folder / RECORD, json.dumps(content, indent=1) + "\n")
    for name in sorted(files, key=lambda name: Path(name).name == "config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(index / name, folder / name)


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The error of an export after loading it again, over the sequences that an audit reports on."""

    reader: str
    """Packages and their versions."""
    error: MeasuredError | None
    """Error of the loaded model; None if its reader refuses it."""
    simulated: MeasuredError
    """Error of the simulation of the exported part of the assignment, without KV caches, which readers leave
    unquantised."""
    floor: float
    """Error with every site rounded to bfloat16."""
    power: float
    """1 if the error grows with the square of a change, 2 if linearly (`Metric.power`)."""
    reason: str = ""
    """Why the reader refuses the export."""

    @property
    def agrees(self) -> bool:
        """Return whether the errors agree within 16-bit rounding: their amplitudes differ by at most the floor's."""
        if self.error is None or not math.isfinite(self.error) or not math.isfinite(self.simulated):
            return False
        loaded, simulated, floor = (each ** (self.power / 2) for each in (self.error, self.simulated, self.floor))
        return abs(loaded - simulated) <= floor

    @property
    def words(self) -> str:
        """Return both errors in a line, with a remark if they disagree."""
        if self.error is None:
            return f"{self.reader} refuses it: {self.reason}"
        both = f"loaded by {self.reader} {format_error(self.error)}, simulated {format_error(self.simulated)}"
        return both if self.agrees else f"{both}: they disagree by more than rounding to bfloat16 makes of it"


@dataclass(frozen=True, slots=True)
class Part:
    """One format of an export, or its checkpoint."""

    format: str
    """A name in `FORMATS`, or "checkpoint"."""
    paths: tuple[Path, ...]
    held: dict[str, str]
    """The part of the assignment that it expresses."""
    bytes: int | None = None
    """Bytes of the checkpoint's tensors."""
    loaded: Reloaded | None = None
    """Its error after loading it again."""
