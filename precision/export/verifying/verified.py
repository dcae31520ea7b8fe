"""What is asked of the reader of an export, and its answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.precision.errors import CannotExport
from assay.precision.export.manifest import record_in
from assay.runtime.errors import listed


@dataclass(frozen=True, slots=True)
class Verified:
    """A file of an export, as its reader reads it."""

    file: str
    reader: str
    """The package and its version; empty: none is installed here, so nothing was read."""
    checked: int = 0
    """Layers that were asked for, those that stay as they are too."""
    wrong: tuple[str, ...] = ()
    """A line for each that gets another scheme than it was to, or why the file can't be trusted."""

    def __str__(self) -> str:
        if not self.reader:
            return f"{self.file}: not verified, no reader of it is installed"
        if self.wrong and not self.checked:
            return f"{self.file}: not what was exported ({self.reader})"
        if self.wrong:
            return f"{self.file}: {len(self.wrong)} lines differ, of {self.checked} layers ({self.reader})"
        return f"{self.file}: {self.checked} layers get what they were to get ({self.reader})"


@dataclass(frozen=True, slots=True)
class Asked:
    """An export's record."""

    place: Path
    """The folder."""
    files: tuple[str, ...]
    assignment: Mapping[str, str]
    names: Mapping[str, Sequence[str]]
    """What sites are called in checkpoints."""
    held: Mapping[str, Mapping[str, str]]
    """What of the assignment each format expresses."""
    tensors: Mapping[str, Sequence[str]]
    """The tensors of GGUF that each site's weight is in."""
    tables: Sequence[str]
    """Sites that are tables of embeddings."""
    tied: Sequence[str]
    """Sites whose weight is another's."""
    digests: Mapping[str, str]
    """SHA-256 of the files, in hexadecimal digits."""

    @classmethod
    def of(cls, folder: str | Path) -> "Asked":
        """Of an export's folder. Raises CannotExport for another one."""
        index = Path(folder)
        record: Any = record_in(index)
        try:
            more = (record.get(key, {}) for key in ("tensors", "tables", "tied", "digests"))
            given = (tuple(record["files"]), record["assignment"], record["names"], record["held"])
            return cls(index, *given, *more)
        except (KeyError, TypeError, AttributeError):
            raise CannotExport(f"{index} has no export.json that names linears: give the folder of an export") from None


def difference(name: str, wanted: str | None, got: Any) -> str:
    """The line of a layer that gets another scheme than it was to; None: none."""
    given = "none" if got is None else listed([str(each) for each in got]) if isinstance(got, list) else str(got)
    return f"{name}: expected {wanted or 'none'}, gets {' '.join(given.split())[:160]}"
