"""A process is asked, watched and ended, whatever it does, and so is what it has started."""

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from assay.runtime.deadline import descendants
from assay.runtime.process import GIB, Lost, Parent, Process, limit_memory
from assay.runtime.sandbox import has_namespaces
from tests.runtime.isolated_tasks import answer_by_echo, hang, leave_a_child, lose_the_first_thread

ROOT = Path(__file__).resolve().parents[2]
namespaces = pytest.mark.skipif(not has_namespaces(), reason="no namespaces of processes")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own means of Linux")


def state_of(pid: int) -> tuple[str, int]:
    """The state of a process's first thread by Linux, and how many threads it has."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return fields[0], int(fields[17])


def is_gone(pid: int) -> bool:
    """Whether a process ends within ten seconds; one that only its parent has to take note of counts as ended."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if state_of(pid) == ("Z", 1):
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("start", [lambda: Process.fork(answer_by_echo), lambda: Process.start(answer_by_echo)])
def test_a_process_answers_one_message_after_the_other(start: Callable[[], Process]) -> None:
    process = start()
    for message in (b"one", b"x" * 2**20):
        process.submit(message, 60.0)
        assert process.result() == message + b"[]"
    assert os.getpgid(process.pid) == process.pid
    process.kill()
    assert not process.alive


def test_a_new_process_has_arguments_and_last_words() -> None:
    """They are pickled; what a quiet process prints is in how it was lost, and nowhere else."""
    process = Process.start(answer_by_echo, "a", "b")
    process.submit(b"", 60.0)
    assert process.result() == b'["a", "b"]'
    process.kill()
    broken = Process.start(answer_by_echo, "a", object, quiet=True)
    broken.submit(b"", 60.0)
    lost = broken.result()
    assert isinstance(lost, Lost)
    assert lost.message == (
        "the process ended itself with status 1 (TypeError: Object of type type is not JSON serializable)"
    )


def test_silence_is_a_time_out_and_a_heartbeat_restates_it() -> None:
    def asks_for_little(parent: Parent) -> None:
        parent.heartbeat("long", 30.0)
        parent.heartbeat("little", 0.2)
        hang(parent)

    heard: list[float] = []
    process = Process.fork(asks_for_little)
    process.on_heartbeat = heard.append
    process.submit(b"", 60.0)
    assert process.result() == Lost("timeout", "nothing came back for 0.2 s, and it could not be interrupted", "little")
    assert heard == [30.0, 0.2]


@linux
def test_what_needs_more_memory_than_allowed_is_refused() -> None:
    def takes_as_told(parent: Parent) -> None:
        limit_memory(GIB // 4)

        def answer(message: bytes) -> bytes:
            try:
                return str(len(bytearray(int(message)))).encode()
            except MemoryError:
                return b"refused"

        parent.serve(answer)

    process = Process.fork(takes_as_told)
    answers = []
    for size in (2**27, 2**28 + 2**26, 2**40, 2**27):
        process.submit(str(size).encode(), 60.0)
        answers.append(process.result())
    process.kill()
    assert answers == [str(2**27).encode(), b"refused", b"refused", str(2**27).encode()]


@linux
def test_where_no_limit_can_be_set_memory_is_watched() -> None:
    def takes_more_and_more(parent: Parent) -> None:
        parent.heartbeat()
        held = []
        while True:
            held.append(b"x" * 2**20)

    process = Process.fork(takes_more_and_more)
    process.memory = GIB // 4
    process.submit(b"", 60.0)
    assert process.result() == Lost("crash", "it held more than 0.25 GiB of memory", broke="memory")


@linux
@pytest.mark.parametrize("children", [0, 4])
def test_memory_that_is_shared_or_of_several_children_is_watched(children: int) -> None:
    """No limit of a single process's own data counts either."""

    def takes(parent: Parent) -> None:
        parent.heartbeat()
        for _ in range(children):
            if os.fork() == 0:
                held = bytearray(GIB // 8)
                held[::4096] = b"x" * len(held[::4096])
                time.sleep(600)
        mapped = mmap.mmap(-1, 1 if children else GIB // 2)
        for start in range(0, len(mapped), 4096):
            mapped[start] = 1
        time.sleep(600)

    process = Process.fork(takes)
    process.memory = GIB // 4
    process.submit(b"", 60.0)
    assert process.result() == Lost("crash", "it held more than 0.25 GiB of memory", broke="memory")


@linux
def test_what_a_process_has_started_ends_with_it(tmp_path: Path) -> None:
    process = Process.start(leave_a_child, str(tmp_path))
    process.submit(b"", 60.0)
    assert process.result() == b""
    both = [int(number) for number in (tmp_path / "pids").read_text(encoding="ascii").split()]
    process.kill()
    assert all(map(is_gone, both))


@linux
def test_one_that_starts_too_many_ends_with_all_of_them(tmp_path: Path) -> None:
    """Those in sessions of their own, and whose parent has ended, too."""

    def starts_many(parent: Parent) -> None:
        for number in range(12):
            if os.fork() == 0:
                os.setsid()
                if number % 2 and os.fork():
                    os._exit(0)
                (tmp_path / str(os.getpid())).touch()
                time.sleep(600)
        time.sleep(600)

    process = Process.fork(starts_many)
    process.processes = 8
    process.submit(b"", 60.0)
    assert process.result() == Lost("crash", "it had started more than 8 processes", broke="processes")
    started = [int(file.name) for file in tmp_path.iterdir()]
    assert len(started) >= 8
    assert all(map(is_gone, started))


@linux
def test_a_process_without_its_first_thread_is_seen_and_ended() -> None:
    """The system calls it a zombie, though its other threads run."""
    process = Process.start(lose_the_first_thread, str(GIB // 3))  # a fork of this process may not end a thread
    process.memory = GIB
    process.limit_from_now()
    process.submit(b"which", 60.0)
    child = process.result()
    assert isinstance(child, bytes)
    process.memory = GIB // 4
    process.submit(b"", 60.0)
    assert process.result() == Lost("crash", "it held more than 0.25 GiB of memory", broke="memory")
    assert is_gone(int(child))


def test_a_copy_that_comes_back_does_not_answer() -> None:
    def answers_twice(parent: Parent) -> None:
        parent.serve(lambda message: message if os.fork() == 0 else time.sleep(600) or b"")

    process = Process.fork(answers_twice)
    process.submit(b"", 60.0)
    words = "a copy of its process, which it had forked, came back from the call"
    assert process.result() == Lost("crash", words)


@linux
def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    body = f"from tests.runtime.isolated_tasks import start_both_kinds; start_both_kinds({str(tmp_path)!r})"
    parent = subprocess.Popen([sys.executable, "-c", body], cwd=ROOT)
    pids, until = tmp_path / "pids", time.monotonic() + 60
    while not pids.exists() and time.monotonic() < until:
        time.sleep(0.01)
    both = [int(number) for number in pids.read_text(encoding="ascii").split()]
    time.sleep(0.5)  # the new interpreter has begun
    parent.kill()
    parent.wait()
    assert len(both) == 2
    assert all(map(is_gone, both))


@namespaces
@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (lambda: os._exit(7), "the process ended itself with status 7"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "the process was ended by SIGSEGV"),
        (os.abort, "the process was ended by SIGABRT"),
    ],
    ids=["exit", "signal", "abort"],
)
def test_a_fork_in_a_namespace_ends_as_any_other(ending: Callable[[], None], words: str) -> None:
    process = Process.fork(lambda parent: ending(), own_namespace=True)
    process.submit(b"", 60.0)
    assert process.result() == Lost("crash", words)


@namespaces
def test_a_fork_in_a_namespace_has_no_number_of_others() -> None:
    """It can't signal, trace or read them; nor end the first process of its namespace."""
    outer = os.getpid()

    def tries(message: bytes) -> bytes:
        ended = []
        for pid in (outer, os.getppid(), -1):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                ended.append(pid)
        seen = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
        return f"{ended} {os.getpid()} {seen}".encode()

    process = Process.fork(lambda parent: parent.serve(tries), own_namespace=True)
    assert process.pid in descendants(outer)
    process.submit(b"", 60.0)
    assert process.result() == b"[1] 2 [1, 2]"  # which the system ignores
    assert process.kill() == -signal.SIGKILL


@namespaces
def test_all_below_a_fork_in_a_namespace_ends_when_its_parent_is_killed() -> None:
    def starts(parent: Parent) -> None:
        for _ in range(3):
            between = os.fork()
            if between == 0:
                os.setsid()
                if os.fork():
                    os._exit(0)
                time.sleep(600)
            os.waitpid(between, 0)
        parent.serve(lambda message: message)

    def forks(parent: Parent) -> None:
        below = Process.fork(starts, own_namespace=True)
        below.submit(b"", 60.0)
        parent.serve(lambda message: repr(below.result()).encode())

    process = Process.fork(forks)
    process.submit(b"", 60.0)
    assert process.result() == repr(b"").encode()
    all_of_them = descendants(process.pid)
    assert len(all_of_them) >= 7  # itself, three of the namespace, three detached ones
    os.kill(process.pid, signal.SIGKILL)
    assert all(map(is_gone, all_of_them))
    process.kill()


@namespaces
def test_a_fork_in_a_namespace_ends_though_its_namespaces_first_process_is_held() -> None:
    def holds(message: bytes) -> bytes:
        ready, done = os.pipe()
        if os.fork() == 0:
            os.setsid()
            held = ctypes.CDLL(None).ptrace(16, 1, None, None) == 0  # it stops
            os.write(done, b"1" if held else b"0")
            time.sleep(600)
        return os.read(ready, 1)

    before = set(descendants(os.getpid()))  # other tests leave a server of forks
    process = Process.fork(lambda parent: parent.serve(holds), own_namespace=True)
    process.submit(b"", 60.0)
    assert process.result() in (b"0", b"1")  # only root may hold its parent everywhere
    below, begun = set(descendants(os.getpid())) - before, time.monotonic()
    process.kill()
    assert below
    assert time.monotonic() - begun < 20
    assert all(map(is_gone, below))


def test_one_that_leaves_its_pipe_is_not_waited_for() -> None:
    def leaves(parent: Parent) -> None:
        ours, other = socket.socketpair()
        os.dup2(ours.fileno(), parent._pipe.fileno())
        other.recv(1)

    process = Process.fork(leaves)
    begun = time.monotonic()
    process.submit(b"", 60.0)
    assert process.result() == Lost(
        "crash", "it closed the pipe to the process that judges it, and went on", broke="pipe"
    )
    assert time.monotonic() - begun < 20
