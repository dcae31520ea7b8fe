"""The sandbox: what a program in it can see and do; and messages of processes that nobody trusts."""

import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from assay.runtime.process import ForkServer, Lost, Process
from assay.runtime.sandbox import Sandbox, bare_environment, unavailable

needs_sandbox = pytest.mark.skipif(bool(unavailable()), reason=f"no sandbox: {unavailable()}")


def inside(folder: Path, text: str, **options: object) -> str:
    """Return what a program prints in a sandbox, or the last line of its error."""
    command = Sandbox(folder, **options).command([sys.executable, "-P", "-c", text], bare_environment(folder))  # type: ignore[arg-type]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout or (done.stderr.strip().splitlines() or [""])[-1]).strip()


@needs_sandbox
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("open('VICTIM', 'w')", "FileNotFoundError"),
        ("open('/usr/lib/x', 'w')", "OSError: [Errno 30] Read-only file system"),
        ("import os; print(os.path.exists('HIDDEN/victim'))", "False"),
        ("import os; print(os.environ.get('SECRET'))", "None"),
        ("import os; print(os.environ['HOME'] == os.getcwd())", "True"),
        ("import socket; socket.create_connection(('127.0.0.1', PORT), 1)", "ConnectionRefusedError"),
        ("import os; os.kill(PARENT, 9)", "ProcessLookupError"),
        ("import os; print(os.getpid() < 10, len([x for x in os.listdir('/proc') if x.isdigit()]) < 5)", "True True"),
        ("open('own', 'w').write('x'); print(open('own').read())", "x"),
        ("import assay.runtime.errors, numpy; print('here')", "here"),
    ],
    ids=["outside", "system", "hidden", "secret", "home", "network", "signal", "processes", "own", "libraries"],
)
def test_a_program_sees_and_changes_nothing_of_others(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s3cr3t")
    hidden, own = tmp_path / "problem", tmp_path / "own"
    for folder in (hidden, own):
        folder.mkdir()
    victim = hidden / "victim"
    victim.write_text("untouched")
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = text.replace("VICTIM", str(victim)).replace("HIDDEN", str(hidden))
        text = text.replace("PORT", str(server.getsockname()[1])).replace("PARENT", str(os.getpid()))
        assert words in inside(own, text, hidden=(hidden,))
    assert victim.read_text() == "untouched"


SERVE = """
import os, subprocess, time
def serve(pipe):
    while True:
        text = pipe.recv_bytes().decode()
        pipe.send_bytes(b"a" + str(eval(text)).encode())
"""


@pytest.mark.parametrize("boxed", [pytest.param(True, marks=needs_sandbox), False])
def test_what_a_forked_process_leaves_ends_with_the_judgement(boxed: bool, tmp_path: Path) -> None:
    """The process's number is the one that this process knows it by, inside a sandbox too."""
    box = Sandbox(tmp_path) if boxed else None
    server = ForkServer(SERVE, "serve", bare_environment(tmp_path), sandbox=box)
    try:
        process = server.fork()
        assert Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.submit(b"subprocess.Popen(['sleep', '61'], start_new_session=True).pid > 0", 10)
        assert process.result() == b"True"
        assert process.kill() == -9
        assert server.clean() == 1
        assert server.clean() == 0
        again = server.fork()
        again.submit(b"1 + 1", 10)
        assert again.result() == b"2"
        again.kill()
    finally:
        server.end()


HEADER = struct.Struct("!i")


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (HEADER.pack(9) + b"abc", "nothing came back for 1 s"),
        (HEADER.pack(-5), "its process sent what is no answer"),
        (HEADER.pack(1 << 30), "its process sent what is no answer"),
        (HEADER.pack(1) + b"h", "its process sent what is no answer"),
        (HEADER.pack(9) + b"h" + struct.pack("<d", float("nan")), "its process sent what is no answer"),
        (HEADER.pack(9) + b"h" + struct.pack("<d", 1e9), "its process sent what is no answer"),
        ((HEADER.pack(9) + b"h" + struct.pack("<d", 1.0)) * 1000, "its process sent what is no answer"),
        (HEADER.pack(2) + b"zz", "its process sent what is no answer"),
    ],
    ids=["half", "negative", "huge", "short", "nan", "for ever", "flood", "unknown"],
)
def test_what_is_no_message_loses_the_process_in_time(sent: bytes, words: str) -> None:
    def main(parent: object) -> None:
        os.write(parent._pipe.fileno(), sent)  # type: ignore[attr-defined]
        time.sleep(60)

    process = Process.fork(main)
    process.heartbeats, process.longest, process.largest = 100, 10.0, 1 << 20
    began = time.monotonic()
    process.submit(b"", 1.0)
    lost = process.result()
    assert isinstance(lost, Lost)
    assert words in lost.message
    assert time.monotonic() - began < 8


def test_a_fork_holds_no_file_of_its_parent(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w"):
        process = Process.fork(
            lambda parent: parent.serve(lambda message: str(sorted(map(int, os.listdir("/proc/self/fd")))).encode())
        )
        process.submit(b"", 10.0)
        held = eval(process.result())
        process.kill()
    # the three standard ones, its pipe, and the listed folder itself
    assert len(held) <= 5


def test_a_process_that_does_not_read_is_not_waited_for() -> None:
    process = Process.fork(lambda parent: time.sleep(60))
    began = time.monotonic()
    process.submit(bytes(64 << 20), 0.5)
    lost = process.result()
    assert isinstance(lost, Lost)
    assert lost.kind == "timeout"
    assert time.monotonic() - began < 8
