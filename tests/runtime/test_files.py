"""Files that are written atomically: no reader ever meets half of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from assay.runtime.files import (
    OwnFolder,
    append_line,
    locked,
    remove_abandoned,
    write_bytes_atomically,
    write_text_atomically,
)


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
    """At once, but not those of living ones, nor new ones that have no lock yet, nor what others made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living = OwnFolder("assay-test-")
    (living.path / "file").touch()
    dead, gone = "assay-test-deaddead", "assay-test-unlocked-goneaway"
    others = {"assay-test-unlocked-newfoldr", "assay-test-another-name", "assay-other"}
    for name in (dead, gone, *others):
        (tmp_path / name / "inner").mkdir(parents=True)
    os.utime(tmp_path / gone, (0, 0))
    OwnFolder("assay-test-").close()
    assert {path.name for path in tmp_path.iterdir()} == {living.path.name, *others}
    living.close()
    assert not living.path.exists()


_KILLED = """
import os, signal, sys
from assay.runtime import files
if sys.argv[1] == "folder":
    files.OwnFolder("assay-test-")
else:
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    files.write_bytes_atomically("file", b"half")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    """Files that were being written, and folders; not the file of a writer that lives."""
    for what in ("folder", "file"):
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", _KILLED, what], cwd=tmp_path, env=environment, check=False)
    assert len(list(tmp_path.iterdir())) == 2
    remove_abandoned("assay-test-", tmp_path)
    (left,) = tmp_path.iterdir()
    living = tmp_path / f"{left.name[:-8]}livingon"
    living.write_bytes(b"half")
    with locked(living):
        write_bytes_atomically(tmp_path / "file", b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {"file", living.name}


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
