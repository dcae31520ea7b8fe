"""Files that are written atomically: no reader ever meets half of one."""

import os
from pathlib import Path

import pytest

from assay.runtime.files import write_bytes_atomically, write_text_atomically


def test_a_file_is_replaced_and_its_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "some" / "folder" / "file.txt"
    for text in ("before", "nach Maß"):
        assert write_text_atomically(path, text) == path
        assert path.read_text(encoding="utf-8") == text
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_former_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    write_bytes_atomically(tmp_path / "a", b"before")
    monkeypatch.setattr(os, "fsync", is_full)
    with pytest.raises(OSError, match="No space"):
        write_bytes_atomically(tmp_path / "a", b"after")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a", b"before")]
