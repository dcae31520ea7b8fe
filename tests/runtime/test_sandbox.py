"""The sandbox: what a program in it can see and do; and messages of processes that nobody trusts."""

import errno
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from assay.runtime.process import ForkServer, Lost, Process
from assay.runtime.sandbox import QUEUES, Sandbox, bare_environment, call_filter, unavailable

needs_sandbox = pytest.mark.skipif(bool(unavailable()), reason=f"no sandbox: {unavailable()}")


SYSTEM = {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "nix", "gnu", "opt", "proc", "sbin", "sys", "tmp"}


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
        ("import os; print(os.path.exists('OTHER'), os.path.exists('/etc/shadow'))", "False False"),
        ("import os; print(sorted(set(os.listdir('/')) - set(SEEN)))", "[]"),
        ("open('/own', 'w')", "OSError: [Errno 30] Read-only file system"),
        ("import os; print(os.environ.get('SECRET'))", "None"),
        ("import os; print(os.environ['HOME'] == os.getcwd())", "True"),
        ("import socket; socket.create_connection(('127.0.0.1', PORT), 1)", "ConnectionRefusedError"),
        ("import os; os.kill(PARENT, 9)", "ProcessLookupError"),
        ("import os; print(os.getpid() < 10, len([x for x in os.listdir('/proc') if x.isdigit()]) < 5)", "True True"),
        ("open('own', 'w').write('x'); print(open('own').read())", "x"),
        ("import assay.runtime.errors, numpy; print('here')", "here"),
    ],
    ids=[
        "outside",
        "system",
        "hidden",
        "other",
        "root",
        "root is read-only",
        "secret",
        "home",
        "network",
        "signal",
        "processes",
        "own",
        "libraries",
    ],
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
        text = text.replace("VICTIM", str(victim)).replace("HIDDEN", str(hidden)).replace("OTHER", str(Path(__file__)))
        seen = SYSTEM | {"usr", "var"} | {Path(path).parts[1] for path in (sys.prefix, sys.base_prefix, own)}
        text = text.replace("SEEN", repr(seen))
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


HEADLESS = """
import ctypes, threading
def go_on_without_the_first_thread():
    child = os.fork()
    if child == 0:
        os.setsid()
        threading.Thread(target=time.sleep, args=(61,)).start()
        ctypes.CDLL(None).pthread_exit(None)
    while open(f"/proc/{child}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    return True
"""


@pytest.mark.parametrize("boxed", [pytest.param(True, marks=needs_sandbox), False])
@pytest.mark.parametrize(
    "text",
    ["subprocess.Popen(['sleep', '61'], start_new_session=True).pid > 0", "go_on_without_the_first_thread()"],
    ids=["session", "headless"],
)
def test_what_a_forked_process_leaves_ends_with_the_judgement(text: str, boxed: bool, tmp_path: Path) -> None:
    """The process's number is the one that this process knows it by, inside a sandbox too."""
    box = Sandbox(tmp_path) if boxed else None
    server = ForkServer(SERVE + HEADLESS, "serve", bare_environment(tmp_path), sandbox=box)
    try:
        process = server.fork()
        assert Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.submit(text.encode(), 10)
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


SYSTEM_V = """
import ctypes
libc = ctypes.CDLL(None)
def make():
    return (libc.semget(7, 1, 0o1666), libc.msgget(7, 0o1666), libc.mq_open(b"/left", 0o101, 0o666, None))
def left():
    return (libc.semget(7, 1, 0o666), libc.msgget(7, 0o666), libc.mq_open(b"/left", 0o1, 0o666, None))
"""


@needs_sandbox
def test_nothing_in_memory_is_left_to_the_next_judgement(tmp_path: Path) -> None:
    server = ForkServer(SYSTEM_V + SERVE, "serve", bare_environment(tmp_path), sandbox=Sandbox(tmp_path))
    try:
        for _ in range(2):
            made, again = (asked(server, text) for text in ("min(make()) >= 0", "min(left()) >= 0"))
            assert (made, again) == (b"True", b"True")
            server.clean([QUEUES])
            assert asked(server, "max(left())") == b"-1"
    finally:
        server.end()


@needs_sandbox
@pytest.mark.skipif(not call_filter()[1], reason="no numbers of this machine's calls")
@pytest.mark.parametrize(
    "call",
    ["memfd_create(b'x', 0)", "shmget(0, 4096, 0o1600)", "ptrace(16, 1, None, None)", "unshare(0x10000000)",
     "setns(0, 0)", "mount(b'x', b'/tmp', b'tmpfs', 0, None)"],
)  # fmt: skip
def test_calls_that_hide_memory_or_make_namespaces_are_unknown_there(call: str, tmp_path: Path) -> None:
    """Memory that no process maps would be counted nowhere."""
    text = f"import ctypes, errno; libc = ctypes.CDLL(None, use_errno=True); print(libc.{call}, ctypes.get_errno())"
    server = ForkServer(SERVE, "serve", bare_environment(tmp_path), sandbox=Sandbox(tmp_path))
    try:
        program = f"subprocess.run([{sys.executable!r}, '-S', '-c', {text!r}], capture_output=True).stdout.decode()"
        assert asked(server, program) == f"-1 {errno.ENOSYS}\n".encode()
    finally:
        server.end()


@needs_sandbox
def test_what_a_detached_process_holds_counts(tmp_path: Path) -> None:
    program = f"{sys.executable} -S -c 'held = bytearray(400 << 20); __import__(\\\"time\\\").sleep(60)'"
    server = ForkServer(SERVE, "serve", bare_environment(tmp_path), sandbox=Sandbox(tmp_path))
    try:
        process = server.fork()
        process.memory = 100 << 20
        process.limit_from_now()
        process.submit(f'os.system("setsid -f {program}"), time.sleep(30)'.encode(), 60)
        lost = process.result()
        assert isinstance(lost, Lost)
        assert "it held more than 0.0977 GiB" in lost.message
    finally:
        server.end()


def asked(server: ForkServer, text: str) -> bytes | Lost:
    """Return the answer of a new process."""
    process = server.fork()
    process.submit(text.encode(), 10)
    try:
        return process.result()
    finally:
        process.kill()


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
