"""Files that are written atomically: no reader ever meets half of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from assay.runtime.files import OwnFolder, append_line, locked, write_bytes_atomically, write_text_atomically


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


def test_a_line_is_appended_whole_after_one_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lines"
    append_line(path, "first")
    assert path.read_text() == "first\n"
    path.write_text("first\nsecond")
    append_line(path, "third")
    assert path.read_text() == "first\nsecond\nthird\n"


def test_folders_of_dead_processes_are_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of living ones, nor new ones, nor what others made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living = OwnFolder("assay-test-")
    (living.path / "file").touch()
    for name in ("assay-test-dead", "assay-test-new", "assay-other"):
        (tmp_path / name / "inner").mkdir(parents=True)
    for folder in (living.path, tmp_path / "assay-test-dead", tmp_path / "assay-other"):
        os.utime(folder, (0, 0))
    OwnFolder("assay-test-").close()
    assert {path.name for path in tmp_path.iterdir()} == {living.path.name, "assay-test-new", "assay-other"}
    living.close()
    assert not living.path.exists()


def test_a_lock_keeps_others_out(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\nfrom assay.runtime.files import locked\n"
        f"with locked(Path({str(tmp_path)!r})): print('in')"
    )
    with locked(tmp_path):
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(1.0)
    assert other.communicate(timeout=60)[0] == "in\n"
