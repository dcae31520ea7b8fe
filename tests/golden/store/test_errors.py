"""What stands in the way is said in one line, and the store stays valid."""

import errno
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from assay.golden.errors import StoreError
from assay.golden.store import Store
from tests.golden.store.sample import golden_of, record_of

RECORD, OTHER = record_of(1), record_of(2)
AT_ONCE = {"config_kwargs": {"retries": {"max_attempts": 1}}}


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(StoreError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_unknown_protocol() -> None:
    assert refusal(lambda: Store("s4://b/x").put(RECORD)) == (
        "store s4://b/x: unknown protocol s4://; expected a path, file://, memory://, s3://, ..."
    )


def test_a_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(import_module("fsspec.registry")._registry, "s3", raising=False)  # drivers in use
    message = refusal(lambda: list(Store("s3://b/x").keys()))
    assert message.startswith("store s3://b/x: the driver for s3:// is missing")
    assert "pip install 'kernel-assay[remote]'" in message


def test_a_missing_bucket_and_a_wrong_endpoint(s3_options: dict[str, str]) -> None:
    nowhere = Store("s3://nowhere/x", s3_options)
    assert "bucket does not exist" in refusal(lambda: nowhere.put(RECORD))
    assert list(nowhere.keys()) == []
    deaf = Store("s3://goldens/x", {**s3_options, "endpoint_url": "http://127.0.0.1:9", **AT_ONCE})
    assert "Could not connect" in refusal(lambda: list(deaf.keys()))


def test_passwords_are_not_shown() -> None:
    store = Store("s4://me:secret@host/x")
    assert "secret" not in refusal(lambda: store.put(RECORD)) + repr(store)


def test_a_file_is_no_store(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("x")
    for action in (Store.exists.fget, lambda store: store.put(RECORD), lambda store: list(store.keys())):
        assert refusal(lambda action=action: action(Store(str(path)))).startswith(f"store {path}: expected a folder")


def test_a_folder_of_other_things_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    for action in (lambda: Store(str(tmp_path)).put(RECORD), lambda: list(Store(str(tmp_path)).keys())):
        assert "it holds thesis.tex, but no assay-store.json; expected a store, or a folder that is new" in refusal(
            action
        )
    assert os.listdir(tmp_path) == ["thesis.tex"]
    (tmp_path / "assay-store.json").write_text('{"format": 99}')
    assert "assay-store.json isn't one that this version can read" in refusal(lambda: list(Store(str(tmp_path)).keys()))


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a call in a forked process, whose rights and limits may change."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, args)


def put_without_rights(folder: str, parents: list[str]) -> str:
    os.chmod(folder, 0o555)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        os.chmod(path, 0o555 if os.path.isdir(path) else 0o444)
    if os.geteuid() == 0:  # root may write anywhere
        for parent in parents:
            os.chmod(parent, 0o755)
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    return refusal(lambda: Store(folder).put(OTHER))


def test_a_real_lack_of_permission(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    Store(str(folder)).put(RECORD)
    parents = [str(parent) for parent in folder.parents if parent.name.startswith(("test_", "popen-", "pytest-"))]
    assert "no permission to write records" in in_child(put_without_rights, str(folder), parents)


def fill(folder: str, limit: int) -> list[str]:
    """Put ever larger records until an error: their numbers, the error, and the state of the store."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store, lines = Store(folder), []
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for seed in range(10_000):
        try:
            store.put(record_of(seed, golden_of([float(n * n + seed) for n in range(8 * seed)])))
        except StoreError as error:
            lines.append(str(error))
            break
        lines.append(str(seed))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = [name for _, _, names in os.walk(folder) for name in names if name.startswith(".")]
    return [*lines, *map(str, store.damage()), f"keys {len(list(store.keys()))} left over {len(left)}"]


def fill_mounted(folder: Path, options: str) -> list[str]:
    """The same on a filesystem of 256 KiB, mounted at ``folder`` for a process of its own."""
    program = "import sys; from tests.golden.store.test_errors import fill; print(*fill(sys.argv[1], 0), sep='\\n')"
    script = f'mount -t tmpfs -o size=256k none "{folder}" && exec "$@"'
    command = ["unshare", *options.split(), "sh", "-c", script, "-", sys.executable, "-c", program, str(folder / "s")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def mounting() -> str | None:
    for options in ("-m", "-rm"):
        command = ["unshare", *options.split(), "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
        try:
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return options
        except OSError:
            return None
    return None


@pytest.mark.parametrize("limit", [0, 2500], ids=["a full disk", "a limit on files"])
def test_a_store_without_room_stays_whole(tmp_path: Path, limit: int) -> None:
    """Where no small disk can be mounted, the limit on the length of a file is all that can be reached."""
    mount = mounting() if not limit else None
    *made, message, state = fill_mounted(tmp_path, mount) if mount else in_child(fill, f"{tmp_path}/s", 2500)
    words = "the disk is full, cannot write records/" if mount else "cannot write records/"
    assert message.startswith(f"store {tmp_path}/s: {words}")
    assert mount or message.endswith("File too large")
    assert len(made) > 10
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

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    store = Store(str(tmp_path / "s"))
    store.put(RECORD)
    monkeypatch.setattr(f"assay.runtime.files.{call}", refuse, raising=False)
    assert f"store {tmp_path}/s: {words}" in refusal(lambda: store.put(OTHER))
    monkeypatch.undo()
    assert list(store.damage()) == []
    store.put(OTHER)
    assert set(store.keys()) == {RECORD.key, OTHER.key}
