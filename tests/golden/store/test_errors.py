"""What stands in the way is said in one line, and the store stays valid."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.golden.errors import StoreError
from assay.golden.store import Store
from tests.golden.store.sample import record_of

RECORD = record_of(1)


def refusal(action: Callable[[], Any]) -> str:
    """The message of the `StoreError` that ``action`` raises."""
    with pytest.raises(StoreError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_unknown_protocol() -> None:
    """A protocol that fsspec doesn't know is named, with those that are likely meant."""
    assert refusal(lambda: Store("s4://b/x").put(RECORD)) == (
        "store s4://b/x: unknown protocol s4://; expected a path, file://, memory://, s3://, ..."
    )


def test_a_missing_driver() -> None:
    """A protocol whose driver isn't installed is answered with the extra that brings it."""
    program = """
import sys
from assay.golden.errors import StoreError
from assay.golden.store import Store
sys.modules["s3fs"] = None
try:
    list(Store("s3://b/x").keys())
except StoreError as error:
    print(error)
"""
    message = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert message.startswith("store s3://b/x: the driver for s3:// is missing")
    assert "pip install 'kernel-assay[remote]'" in message


def test_a_missing_bucket_and_a_wrong_endpoint(s3_options: dict[str, str]) -> None:
    """Writing where there is no bucket, or no server, says so; nothing is found in a bucket that isn't there."""
    nowhere = Store("s3://nowhere/x", s3_options)
    assert "bucket does not exist" in refusal(lambda: nowhere.put(RECORD))
    assert list(nowhere.keys()) == []
    deaf = Store("s3://goldens/x", {**s3_options, "endpoint_url": "http://127.0.0.1:9"})
    assert "Could not connect" in refusal(lambda: list(deaf.keys()))


def test_passwords_are_not_shown() -> None:
    """User and password of an address don't reach messages or reports."""
    store = Store("s4://me:secret@host/x")
    assert "secret" not in refusal(lambda: store.put(RECORD)) + repr(store)


def test_a_file_is_no_store(tmp_path: Path) -> None:
    """An address that leads to a file is refused, whatever is asked."""
    path = tmp_path / "notes.txt"
    path.write_text("x")
    for action in (Store.exists.fget, lambda store: store.put(RECORD), lambda store: list(store.keys())):
        assert refusal(lambda action=action: action(Store(str(path)))).startswith(f"store {path}: expected a folder")


def test_a_folder_of_other_things_is_no_store(tmp_path: Path) -> None:
    """A folder with files but without the mark of a store is neither written to nor taken for an empty store."""
    (tmp_path / "thesis.tex").write_text("x")
    for action in (lambda: Store(str(tmp_path)).put(RECORD), lambda: list(Store(str(tmp_path)).keys())):
        assert "it holds thesis.tex, but no assay-store.json; expected a store, or a folder that is new" in refusal(
            action
        )
    assert os.listdir(tmp_path) == ["thesis.tex"]
    (tmp_path / "assay-store.json").write_text('{"format": 99}')
    assert "assay-store.json isn't one that this version can read" in refusal(lambda: list(Store(str(tmp_path)).keys()))


def test_a_real_lack_of_permission(tmp_path: Path) -> None:
    """Another user's folder can't be written to: a child that gives up its rights gets the one line."""
    folder = tmp_path / "s"
    Store(str(folder)).put(RECORD)
    ours = [str(parent) for parent in folder.parents if parent.name.startswith(("test_", "popen-", "pytest-"))]
    program = f"""
import os
from assay.golden.store import Store
from assay.golden.errors import StoreError
from tests.golden.store.sample import record_of
record = record_of(2)
os.chmod({str(folder)!r}, 0o555)
for name in os.listdir({str(folder)!r}):
    path = os.path.join({str(folder)!r}, name)
    os.chmod(path, 0o555 if os.path.isdir(path) else 0o444)
if os.geteuid() == 0:
    for parent in {ours!r}:
        os.chmod(parent, 0o755)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    Store({str(folder)!r}).put(record)
    print("written")
except StoreError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "no permission to write records" in done.stdout, done


FULL = """
import os, resource, signal, sys
from assay.golden.errors import StoreError
from assay.golden.store import Store
from tests.golden.store.sample import golden_of, record_of

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store, limit = Store(sys.argv[1]), int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
for seed in range(10_000):
    try:
        store.put(record_of(seed, golden_of([float(n * n + seed) for n in range(8 * seed)])))
    except StoreError as error:
        print(error)
        break
    print(seed, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
left = [name for _, _, names in os.walk(sys.argv[1]) for name in names if name.startswith(".")]
print(*store.damage(), "keys", len(list(store.keys())), "left over", len(left))
"""


def filled(folder: Path, limit: int, mount: str = "") -> list[str]:
    """What the program above says that fills ``folder`` until it is full, or a file is longer than ``limit``."""
    command = [sys.executable, "-c", FULL, str(folder / "s"), str(limit)]
    if mount:
        command = [
            "unshare",
            *mount.split(),
            "sh",
            "-c",
            f'mount -t tmpfs -o size=256k none "{folder}" && exec "$@"',
            "-",
            *command,
        ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def mounting() -> str | None:
    """The options of `unshare` under which this machine lets a process mount a filesystem of its own, if any."""
    for options in ("-m", "-rm"):
        command = ["unshare", *options.split(), "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
        try:
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return options
        except OSError:
            return None
    return None


def test_a_full_disk(tmp_path: Path) -> None:
    """A small filesystem fills up: one line; all records written until then are whole, and nothing is left over.

    Where nothing can be mounted the kernel's limit on the length of a file stands in for it.
    """
    mount = mounting()
    *made, message, state = filled(tmp_path, 0 if mount else 2500, mount or "")
    assert message.startswith(
        f"store {tmp_path}/s: " + ("the disk is full, cannot write records/" if mount else "cannot write")
    )
    assert len(made) > 10
    assert state == f"keys {len(made)} left over 0"


def test_a_limit_on_files(tmp_path: Path) -> None:
    """A file that may not grow any more: one line, and the store is valid."""
    *made, message, state = filled(tmp_path, 2500)
    assert message.startswith(f"store {tmp_path}/s: cannot write records/")
    assert message.endswith("File too large")
    assert state == f"keys {len(made)} left over 0"


FULL_DISK, FORBIDDEN = "the disk is full, cannot write records/", "no permission to write records/"


@pytest.mark.parametrize("call", ["os.fsync", "tempfile.mkstemp", "Path.mkdir", "Path.replace", "open"])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        *((number, FULL_DISK) for number in (errno.ENOSPC, errno.EDQUOT)),
        *((number, FORBIDDEN) for number in (errno.EACCES, errno.EROFS, errno.EPERM)),
    ],
)
def test_a_disk_that_refuses_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, words: str
) -> None:
    """Full or forbidden wherever it says so, the store says so too, holds what it held, and goes on once it may."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    store = Store(str(tmp_path / "s"))
    store.put(RECORD)
    monkeypatch.setattr(f"assay.runtime.files.{call}", refuse, raising=False)
    assert f"store {tmp_path}/s: {words}" in refusal(lambda: store.put(record_of(2)))
    monkeypatch.undo()
    assert list(store.damage()) == []
    store.put(record_of(2))
    assert set(store.keys()) == {RECORD.key, record_of(2).key}
