"""A process that may crash, hang or exhaust memory: started, queried, limited, and ended with its own children.

It is a fork, so that any callable can run there, or a new interpreter, since after a fork a thread pool hangs and a
device's context is invalid. It leads its own process group, which ends with it. If its parent is killed, it ends too:
at once on Linux, elsewhere at its next read from its pipe or write to it.

Messages are bytes; the caller decides how to decode an answer and whether to trust it. Between a question and its
answer a process may send heartbeats (`Parent.heartbeat`): with a note, which survives the process, and the number of
seconds until the next one, which a busy machine doesn't shorten (`runtime.deadline`).
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe, reduction, spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from assay.runtime.deadline import SHARED_WORKERS, CpuLimit, descendants, process_clock, queue_clock, spent_below
from assay.runtime.sandbox import Sandbox, call_filter, close_all_but, enter_namespace

GIB = 2**30
MOST_PROCESSES = 1024
"""Most processes of code that nobody trusts: compilers start several for each core."""
_ANSWER, _HEARTBEAT, _COPY = b"a", b"h", b"c"
_NOTE_BYTES = 1 << 16  # longer notes are cut
_NO_MESSAGE = "its process sent what is no answer"
_MOST_HOLDING = 64  # processes whose memory is counted: of more it takes too long, while they start others
_TICK = 1.0  # seconds between two checks of a silent process
_MEMORY_TICK, _PAUSES = 0.05, 20  # the same with a memory limit, and at least how many times as long as a look takes
_START = 300.0  # seconds that a new interpreter may take for its imports
_PASSES = 1000  # over a tree of processes that go on to start others
_GRACE = 3.0  # seconds that a process has to end after it has closed its pipe
_FAILED = 70  # exit status of a fork whose main function raised
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's <linux/prctl.h>
_LARGEST = 1 << 34  # bytes of an answer
_READ = 1 << 20  # bytes that are read at once
_READS = 256  # that one look at a pipe makes: a process that sends on and on doesn't keep the others waiting
_START_TEXT = """
import ctypes, os
pipe = {pipe}
if {dies}: ctypes.CDLL(None).prctl(1, 9)
if {parent} and os.getppid() != {parent}: os._exit(1)
"""
_WORKER = """
import pickle
from multiprocessing import connection, current_process, spawn
pipe = connection.Connection(pipe)
current_process()._inheriting = True  # so that a script which starts processes when it is imported is told so
spawn.prepare(pickle.loads(pipe.recv_bytes()))
del current_process()._inheriting
main, arguments = pickle.loads(pipe.recv_bytes())
from assay.runtime.process import Parent
main(Parent(pipe), *arguments)
"""


@dataclass(frozen=True)
class Lost:
    """A process that did not return: "crash" or "timeout", how it ended, its last note, and what it broke: the limit of
    its "memory" or "processes", or its "pipe", or none of them."""

    kind: str
    message: str
    note: str = ""
    broke: str = ""


class Process:
    """A process, by its number, and the pipe to it.

    ``on_heartbeat`` is called with the seconds until the process's next sign of life. ``memory``: the bytes that it and
    its children, in a sandbox detached ones too, may hold beyond those at its first message, or at `limit_from_now`;
    polled every 50 ms, for platforms and devices where `limit_memory` can't be used. ``processes``: how many these may
    be, itself included; 0 for any number.

    For a process that nobody trusts: ``heartbeats``, how many may come before an answer; ``longest``, the seconds that
    one may ask for; ``largest``, the bytes of an answer. What is no message loses the process, and no part of one is
    waited for beyond the limit of time.
    """

    def __init__(self, pid: int, pipe: Connection, *, log: IO[bytes] | None = None, ready: bool = False) -> None:
        self.pid, self.pipe = pid, pipe
        self._outer = self._holder = pid
        self.on_heartbeat: Callable[[float], None] | None = None
        self.memory, self.processes, self.largest = 0, 0, _LARGEST
        self.heartbeats, self.longest = float("inf"), float("inf")
        self._beats, self._received, self._unsolicited = 0, bytearray(), False
        self._socket = socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
        self._log, self._ready = log, ready
        if log is not None:
            weakref.finalize(self, log.close)
        self._code: int | None = None
        self._timeout = 0.0
        self._limit = self._limited(0.0)
        self._resident, self._note, self._watched, self._seconds_of_look = 0, "", -_TICK, 0.0

    @classmethod
    def fork(cls, main: Callable[[Parent], object], *, own_namespace: bool = False) -> Process:
        """Fork this process; the copy calls ``main`` and ends.

        ``own_namespace``: in a namespace of its own (`enter_namespace`, where `has_namespaces`).
        """
        pipe, other = Pipe()
        if own_namespace:
            with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as receiver:
                _pass_credentials(receiver, True)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        dies = _dies_with_parent()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries with threads, which the child doesn't use
            pid = os.fork()
        if pid:
            other.close()
            return _NamespacedProcess(pid, pipe) if own_namespace else cls(pid, pipe, ready=True)
        status = _FAILED
        try:
            os.setsid()
            if dies:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                pipe.close()
                if own_namespace:
                    enter_namespace()
                    os.setsid()
                    os.write(other.fileno(), b"p")
                close_all_but(other.fileno())
                main(Parent(other))
            status = 0
        finally:
            os._exit(status)

    @classmethod
    def start(
        cls, main: Callable[..., object], *arguments: Any, quiet: bool = False, main_module: bool = False
    ) -> Process:
        """Start a new interpreter that calls ``main(parent, *arguments)``, both pickled, and ends.

        Its output goes to standard error; if ``quiet``, only the last line is kept, for the report of its loss.
        ``main_module``: it also imports this process's main module, as `multiprocessing` does.
        """
        data = spawn.get_preparation_data("assay worker")
        for key in ("authkey", *(() if main_module else ("init_main_from_name", "init_main_from_path"))):
            data.pop(key, None)
        messages = [pickle.dumps(data), pickle.dumps((main, arguments))]
        process = cls.start_plain(_WORKER, quiet=quiet)
        with suppress(OSError):  # `poll` will notice that it has ended
            for message in messages:
                process.pipe.send_bytes(message)
        return process

    @classmethod
    def start_plain(
        cls,
        body: str,
        arguments: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        quiet: bool = True,
        sandbox: Sandbox | None = None,
    ) -> Process:
        """Start a new interpreter that runs the text ``body``, which may be independent of this package."""
        log = tempfile.TemporaryFile() if quiet else None  # noqa: SIM115 - as long as the process
        pipe, other = Pipe()
        dies = _dies_with_parent()
        parent = 0 if sandbox else os.getpid()  # which is no process of the sandbox's
        with other:
            start = _START_TEXT.format(dies=dies and not sandbox, parent=parent, pipe=other.fileno())
            command = [sys.executable, "-P", "-c", start + body, *arguments]
            child = subprocess.Popen(
                sandbox.command(command, environment or {}, dies=dies) if sandbox else command,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log or 2,
                stderr=log or 2,
                start_new_session=True,
                env=environment,
            )
        child.returncode = 0  # `alive` and `kill` wait for it
        return cls(child.pid, pipe, log=log)

    def _first_byte(self) -> int:
        """Receive the process's first byte; return its sender's number in this namespace, 0 where that isn't Linux's.

        Raises `OSError` if none comes.
        """
        data, about = b"", list[tuple[int, int, bytes]]()
        if _ready(self._socket, select.POLLIN, _START):
            data, about, _, _ = self._socket.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
        if data != b"p":
            raise OSError("the forked process has ended at once")
        _pass_credentials(self._socket, False)
        return next((_CREDENTIALS.unpack(data)[0] for _, _, data in about), 0)

    @property
    def alive(self) -> bool:
        """Return whether it is still running."""
        if self._code is None:
            self._code = self._exit_code()
        return self._code is None

    def _exit_code(self, *, wait: bool = False) -> int | None:
        """Return its exit code, None while it runs; ``wait`` for its end."""
        pid, status = os.waitpid(self._outer, 0 if wait else os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def _limited(self, seconds: float) -> CpuLimit:
        return CpuLimit(
            seconds, process_clock(self.pid), queued=queue_clock(self.pid), others=lambda: spent_below(self.pid)
        )

    def submit(self, message: bytes, timeout: float) -> float:
        """Send a message, which `poll` answers; return the seconds until the next sign of life (more at startup)."""
        self._timeout, self._note, self._beats = timeout, "", 0
        self._limit = self._limited(timeout if self._ready else max(timeout, _START))
        if self._log is not None:
            os.ftruncate(self._log.fileno(), 0)
            os.lseek(self._log.fileno(), 0, os.SEEK_SET)  # also for the process, which shares the file offset
        # What comes before the question is no answer to it.
        self._unsolicited = not self.heartbeats and (bool(self._received) or _ready(self._socket, select.POLLIN, 0))
        with suppress(OSError):  # `poll` will notice that it has ended
            self._send(message)
        return self._limit.seconds

    def _send(self, message: bytes) -> None:
        """Send a message as `Connection.send_bytes` does, until the limit of time: the process may not read."""
        left = memoryview(_framed(message))
        while left and not self._limit.is_over():
            _ready(self._socket, select.POLLOUT, min(self._limit.next_check, _TICK))
            with suppress(BlockingIOError):
                left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]

    def _receive(self) -> bytes | None:
        """Return the next message, as `Connection.send_bytes` sends it; None if there isn't a whole one yet.

        Raises `EOFError` and `OSError` where the pipe is closed, `ValueError` for what is no message.
        """
        for _ in range(_READS):
            message = _message_of(self._received, self.largest)
            if message is not None:
                return message
            try:
                data = self._socket.recv(_READ, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if not data:
                raise EOFError
            self._received += data
        return None

    def poll(self) -> bytes | Lost | None:
        """Return the answer, or how the process was lost, or None if neither is known yet."""
        alive = self.alive  # checked before the pipe is read, so that everything sent before the end is read
        try:
            while (frame := self._receive()) is not None:
                if self._unsolicited:
                    return self._lost("crash", _NO_MESSAGE)
                self._ready = True
                if self.memory and not self._resident:
                    self.limit_from_now()
                if frame[:1] == _ANSWER:
                    return frame[1:]
                if frame == _COPY:
                    return self._lost("crash", "a copy of its process, which it had forked, came back from the call")
                if frame[:1] != _HEARTBEAT or len(frame) < 9 or self._beats >= self.heartbeats:
                    return self._lost("crash", _NO_MESSAGE)
                (seconds,) = struct.unpack_from("<d", frame, 1)
                if not 0.0 <= seconds <= self.longest:  # nor NaN
                    return self._lost("crash", _NO_MESSAGE)
                self._beats += 1
                self._note = frame[9:].decode("utf-8", errors="replace")
                self._limit = self._limited(seconds or self._timeout)
                if self.on_heartbeat is not None:
                    self.on_heartbeat(self._limit.seconds)
        except ValueError:
            return self._lost("crash", _NO_MESSAGE)
        except (EOFError, OSError):
            return self._lost("crash")
        if not alive:
            return self._lost("crash")
        if breach := self._breach():
            return self._lost("crash", *breach)
        if self._limit.is_over():
            limit = self._limit.seconds
            return self._lost("timeout", f"nothing came back for {limit:g} s, and it could not be interrupted")
        return None

    def _breach(self) -> tuple[str, str] | None:
        """Return how it and its children exceed a limit, and which; looked for at most once in a tick."""
        if not (self._resident or self.processes) or time.monotonic() < self._watched + self._tick:
            return None
        self._watched, all_of_it = time.monotonic(), descendants(self._holder)
        if 0 < self.processes < len(all_of_it):
            return f"it had started more than {self.processes:,} processes", "processes"
        most = self._resident + self.memory
        self._seconds_of_look = time.monotonic() - self._watched
        if self._resident and len(all_of_it) <= _MOST_HOLDING and _held(all_of_it, most) > most:
            return f"it held more than {self.memory / GIB:.3g} GiB of memory", "memory"
        return None

    def limit_from_now(self) -> None:
        """Count the memory that it may hold from what it holds now."""
        self._resident = _held(descendants(self._holder))

    def result(self) -> bytes | Lost:
        """Wait for the answer or loss that `poll` returns."""
        while (answer := self.poll()) is None:
            wait_for([self])
        return answer

    def kill(self) -> int:
        """End it, its group and what it has started in others; wait for its end, and return its exit code, as
        `multiprocessing` defines it."""
        if not self.pipe.closed:
            if self.alive:
                self._end_below()
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.pipe.close()
            self._socket.close()
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it has no process group yet
            self._code = self._exit_code(wait=True)
        assert self._code is not None
        return self._code

    def _end_below(self) -> None:
        """End the processes below it, in sessions of their own too."""
        with suppress(OSError):  # it has ended
            os.kill(self.pid, signal.SIGSTOP)  # it starts no further ones
            for _ in range(_PASSES):
                below = descendants(self.pid)[1:]
                for each in below:
                    with suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
                if not below:
                    return

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end; return whether it came within ``seconds``, as `CpuLimit` counts them."""
        limit = self._limited(seconds)
        while self.alive and not limit.is_over():
            time.sleep(0.01)
        return not self.alive

    def printed(self) -> list[str]:
        """Return the last lines that a quiet process has printed since the last message, without empty ones."""
        if self._log is None:
            return []
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), 1 << 16, max(0, size - (1 << 16))).decode("utf-8", errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()]

    @property
    def printed_bytes(self) -> int:
        """Return the bytes that a quiet process has printed since the last message."""
        return os.fstat(self._log.fileno()).st_size if self._log is not None else 0

    def last_words(self) -> str:
        """Return the last line that a quiet process has printed."""
        return "".join(self.printed()[-1:])

    @property
    def soon(self) -> float:
        """Return the seconds after which it must be checked, even if it is silent."""
        return min(self._limit.next_check, self._tick)

    @property
    def _tick(self) -> float:
        return min(_TICK, max(_MEMORY_TICK, _PAUSES * self._seconds_of_look)) if self.memory else _TICK

    def _lost(self, kind: str, message: str = "", broke: str = "") -> Lost:
        if not self.ends_within(0.0 if message else _GRACE) and not message:
            message, broke = "it closed the pipe to the process that judges it, and went on", "pipe"
        code, last = self.kill(), self.last_words()[:200]
        ending = f"the process ended itself with status {code}"
        if code < 0:
            with suppress(ValueError):
                ending = f"the process was ended by {signal.Signals(-code).name}"
        return Lost(kind, message or ending + (f" ({last})" if last else ""), self._note, broke)


class _NamespacedProcess(Process):
    """A process in a namespace, which ends with it; ``outer`` is its parent there, and ends as it does."""

    def __init__(self, outer: int, pipe: Connection) -> None:
        super().__init__(outer, pipe, ready=True)
        self.pid = self._holder = self._first_byte()

    def _end_below(self) -> None:
        """End it, and so the namespace; its first process, where that was taken over, ends with its own parent."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        if not self.ends_within(_TICK):
            os.kill(self._outer, signal.SIGKILL)


class Parent:
    """The child's end of the pipe: answers questions and sends heartbeats."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
        faulthandler.disable()  # the parent reports faults
        if sys.platform == "linux":  # what a process below it leaves behind is its own child, and ends with it
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with suppress(OSError):  # on Linux, out-of-memory should kill this process rather than its parent
            Path("/proc/self/oom_score_adj").write_text("1000")

    def heartbeat(self, note: str = "", seconds: float = 0.0) -> None:
        """Send a heartbeat and a note; the next follows within ``seconds`` (0: the question's timeout)."""
        self._pipe.send_bytes(_HEARTBEAT + struct.pack("<d", seconds) + note.encode()[:_NOTE_BYTES])

    def serve(self, answer: Callable[[bytes], bytes]) -> None:
        """Answer one message after the other, until the pipe is closed. A copy of this process that comes back from an
        answer loses it."""
        own = os.getpid()
        with suppress(EOFError, ConnectionError):
            while True:
                result = answer(self._pipe.recv_bytes())
                if os.getpid() != own:
                    self._pipe.send_bytes(_COPY)
                    os._exit(_FAILED)
                self._pipe.send_bytes(_ANSWER + result)


def wait_for(processes: Iterable[Process], until: float = float("inf")) -> None:
    """Wait until one of the processes sends something or must be checked, or until the moment ``until``."""
    processes = list(processes)
    seconds = min(until - time.monotonic(), *(process.soon for process in processes))
    wait([process.pipe for process in processes], max(0.0, seconds))


def limit_memory(beyond: int) -> None:
    """Let this process, and its children, hold ``beyond`` bytes more than it does now; larger requests fail.

    The limit counts its private writable pages (RLIMIT_DATA), touched or not. Address space (RLIMIT_AS) is no useful
    measure: 16 threads of torch reserve a GiB of it, and a CUDA driver all there is. Whether the driver stays within
    RLIMIT_DATA is not known, so a process with a device is polled instead (`Process.memory`). No effect without Linux's
    /proc.
    """
    with suppress(OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _pages("self", 5) + beyond
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _ready(what: socket.socket, event: int, seconds: float) -> bool:
    """Wait until a socket can be read or written; return whether it can."""
    poll = select.poll()
    poll.register(what, event)
    return bool(poll.poll(1000 * seconds))


def _framed(message: bytes) -> bytes:
    """Return a message with the header that `multiprocessing.connection.Connection` reads."""
    size = len(message)
    return (struct.pack("!i", size) if size < 1 << 31 else struct.pack("!iQ", -1, size)) + message


def _message_of(received: bytearray, largest: int) -> bytes | None:
    """Take the first message, as `_framed`, from what has come; None if it isn't whole yet.

    Raises `ValueError` for one of more than ``largest`` bytes.
    """
    if len(received) < 4:
        return None
    (size,), head = struct.unpack_from("!i", received), 4
    if size == -1:
        if len(received) < 12:
            return None
        (size,), head = struct.unpack_from("!Q", received, 4), 12
    if not 0 <= size <= largest:
        raise ValueError(f"a message of {size} bytes")
    if len(received) < head + size:
        return None
    message = bytes(memoryview(received)[head : head + size])
    del received[: head + size]
    return message


def left_by(pid: int) -> tuple[int, int]:
    """Return how many processes are below a process, also where their parent or first thread has ended; and how many of
    them have left its session, without those that torch starts to compile."""
    below, own = descendants(pid)[1:], _session(pid)
    return len(below), sum(_session(each) not in (0, own) and not _compiles(each) for each in below)


def _session(pid: int) -> int:
    """Return the session of a process, 0 if it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _compiles(pid: int) -> bool:
    try:
        return SHARED_WORKERS in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _held(processes: list[int], most: float = 0.0) -> int:
    """Return the bytes of memory that these processes hold, at least if they are more than ``most``.

    Pages that several of them share count once, for which the system needs milliseconds: asked where more than ``most``
    is held otherwise.
    """
    held = sum(map(_resident, processes))
    return sum(map(_proportional, processes)) if held > most and len(processes) > 1 else held


def _resident(pid: int) -> int:
    """Return the bytes of memory that a process holds, without its pages of files; 0 if unknown."""
    with suppress(OSError):
        # A first thread that has ended holds nothing.
        return _kib(f"{pid}/status", _HELD) or max(
            _kib(f"{pid}/task/{task}/status", _HELD) for task in os.listdir(f"/proc/{pid}/task")
        )
    return 0


def _proportional(pid: int) -> int:
    """Return the bytes of memory that a process holds, its share of pages that others hold too."""
    with suppress(OSError):
        return _kib(f"{pid}/smaps_rollup", _SHARE)
    return _resident(pid)


_HELD, _SHARE = ("RssAnon:", "RssShmem:"), ("Pss_Anon:", "Pss_Shmem:")


def _kib(file: str, names: tuple[str, ...]) -> int:
    """Return the sum of these lines of a file of /proc, in bytes."""
    lines = Path("/proc", file).read_text(errors="replace").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))


def _pages(process: str, column: int) -> int:
    """Return a column of /proc/PID/statm, in bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[column]) * os.sysconf("SC_PAGE_SIZE")


def _dies_with_parent() -> bool:
    """Return whether Linux should end children with their parent: it takes the end of a thread for the parent's."""
    return sys.platform == "linux" and threading.current_thread() is threading.main_thread()


_SERVER = """
def _empty(folders):
    import os, subprocess
    full = [folder for folder in folders if not os.access(folder, os.R_OK | os.X_OK) or os.listdir(folder)]
    for command in (["chmod", "-R", "u+rwx", *full], ["find", *full, "-xdev", "-mindepth", "1", "-delete"]):
        if full:
            subprocess.run(command, stdout=-3, stderr=-3)

def _free_memory_and_queues():
    import ctypes
    library = ctypes.CDLL(None)
    for kind, free in ("shm", library.shmctl), ("sem", library.semctl), ("msg", library.msgctl):
        try:
            with open(f"/proc/sysvipc/{kind}") as file:
                for line in file.read().splitlines()[1:]:
                    free(int(line.split()[1]), 0, 0) if kind == "sem" else free(int(line.split()[1]), 0, None)
        except OSError:
            pass

def _end_children(forks):
    import os, signal, time
    count, detached, forks = 0, set(), {str(each).encode() for each in forks}
    for _ in range(400):
        parents, left = {}, [os.getpid()]
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z" or int(fields[17]) > 1:
                if fields[3] not in forks:
                    detached.add(int(name))
                parents.setdefault(int(fields[1]), []).append(int(name))
        for each in left:
            left += parents.get(each, [])
        for pid in left[1:]:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        detached &= set(left[1:])
        count = max(count, len(detached))
        if len(left) == 1:
            return f"{count} left, all ended"
        time.sleep(0.005)
    return f"{count} left, not ended"

def _serve_forks(pipe, serve):
    import ctypes, os, signal
    from multiprocessing import connection, reduction
    parent, forks = os.getpid(), set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with __import__("contextlib").suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a process leaves behind is this one's child
        ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: no process may trace this one
    if _refused and os.getpid() == 1:  # in a sandbox, before any code that nobody trusts
        class Program(ctypes.Structure):
            _fields_ = [("steps", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
        # A filter of calls (1), which doesn't slow the processor down (4).
        ctypes.CDLL(None).syscall(ctypes.c_long(_seccomp), 1, 4, ctypes.byref(Program(len(_refused) // 8, _refused)))
    while True:
        try:
            what, pid = pipe.recv_bytes().decode().split()
        except EOFError:
            return
        if what == "fork":
            handle, log = reduction.recv_handle(pipe), reduction.recv_handle(pipe) if int(pid) else None
            found = os.fork()
            if found == 0:
                pipe.close()
                for output in (1, 2) if log is not None else ():
                    os.dup2(log, output)
                os.setsid()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                with __import__("contextlib").suppress(OSError, AttributeError):
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                    ctypes.CDLL(None).prctl(4, 1)
                os.write(handle, b"p")  # whose credentials tell the process's number outside of a sandbox
                status = 1
                try:
                    if os.getppid() == parent:
                        serve(connection.Connection(handle))
                    status = 0
                finally:
                    os._exit(status)
            for each in (handle,) if log is None else (handle, log):
                os.close(each)
            answer = str(found)
            forks.add(found)
        elif what == "clean":
            folders = pipe.recv_bytes().decode().split("\\n")
            answer = _end_children(forks)
            forks.clear()
            _empty([folder for folder in folders if folder])
            if int(pid):  # in a sandbox, whose own they are
                _free_memory_and_queues()
        else:
            try:
                ended, status = os.waitpid(int(pid), 0 if what == "wait" else os.WNOHANG)
                answer = str(os.waitstatus_to_exitcode(status)) if ended else ""
            except ChildProcessError:
                answer = str(-int(signal.SIGKILL))
        pipe.send_bytes(answer.encode())
"""


class ForkServer:
    """A plain interpreter with the slow imports done, from which processes are forked within milliseconds.

    It runs the text ``body``, and then its function ``serve(pipe)`` in each forked process; the text is independent of
    this package. `_SERVER` answers two kinds of messages: to fork, with one end of a pipe that the new process serves,
    and to report the exit code of one of its processes. These end with the server, and the server with the process that
    started it. ``environment``: the environment variables of all of them. ``quiet`` drops what they print; else it
    goes to standard error. ``sandbox``: what all of them run in.
    """

    def __init__(
        self,
        body: str,
        serve: str,
        environment: Mapping[str, str],
        *,
        quiet: bool = True,
        sandbox: Sandbox | None = None,
    ) -> None:
        rest = f"\n_serve_forks(connection.Connection(pipe), {serve})\n"
        calls = "_seccomp, _refused = {!r}, {!r}".format(*call_filter())
        text = f"{body}\n{calls}\n{_SERVER}\nfrom multiprocessing import connection{rest}"
        self._process = Process.start_plain(text, environment=environment, quiet=quiet, sandbox=sandbox)
        self.pid, self.boxed = self._process.pid, sandbox is not None

    @classmethod
    def kept(cls, body: str, serve: str, environment: Mapping[str, str], *, quiet: bool = True) -> ForkServer:
        """Return this process's server of this text, started now if there is none; it ends with this process."""
        key = os.getpid(), body  # a fork of this process needs its own
        server = _kept.get(key)
        if server is None or not server.alive:
            server = _kept[key] = cls(body, serve, environment, quiet=quiet)
            atexit.register(server.end)
        return server

    @property
    def alive(self) -> bool:
        """Return whether it can still fork."""
        return self._process.alive

    def fork(self, *, quiet: bool = False) -> Process:
        """Return a new process; ``quiet`` keeps what it prints for the report of its loss.

        Raises `OSError` where the server is lost.
        """
        log = tempfile.TemporaryFile() if quiet else None  # noqa: SIM115 - as long as the process
        ours, theirs = Pipe()
        with theirs, socket.fromfd(ours.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as receiver:
            _pass_credentials(receiver, True)
            self._process.pipe.send_bytes(b"fork 1" if log else b"fork 0")
            reduction.send_handle(self._process.pipe, theirs.fileno(), None)
            if log is not None:
                reduction.send_handle(self._process.pipe, log.fileno(), None)
            number = int(self._answer())
        return _ForkedProcess(number, ours, self, log)

    def exit_code(self, pid: int, *, wait: bool = False) -> int | None:
        """Return the exit code of a process, None while it runs; ``wait`` for its end. -9 where the server is lost."""
        try:
            self._process.pipe.send_bytes(f"{'wait' if wait else 'look'} {pid}".encode())
            answer = self._answer()
            return int(answer) if answer else None
        except (OSError, EOFError):
            return -int(signal.SIGKILL)

    def _answer(self) -> str:
        if not self._process.pipe.poll(_START):
            raise OSError("the fork server doesn't answer")
        return self._process.pipe.recv_bytes(64).decode()

    def clean(self, folders: Iterable[str] = ()) -> int | None:
        """End its processes, with those that they left behind in sessions of their own; return how many these were.

        ``folders`` are emptied then, by it, and in a sandbox System V's memory, semaphores and queues. None if the
        server is lost, or something doesn't end.
        """
        try:
            self._process.pipe.send_bytes(b"clean 1" if self.boxed else b"clean 0")
            self._process.pipe.send_bytes("\n".join(folders).encode())
            count, _, words = self._answer().partition(" ")
            return int(count) if words == "left, all ended" else None
        except (OSError, EOFError, ValueError):
            return None

    def end(self) -> None:
        """End it and its processes, with those that they left behind."""
        if self._process.alive:
            self.clean()
        self._process.kill()


_kept: dict[tuple[int, str], ForkServer] = {}
_CREDENTIALS = struct.Struct("3i")  # Linux's struct ucred: process, user, group


def _pass_credentials(receiver: socket.socket, on: bool) -> None:
    """Let messages come with their sender's numbers, where the system is Linux."""
    if hasattr(socket, "SO_PASSCRED"):
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, int(on))


class _ForkedProcess(Process):
    """A process whose exit code its server knows, which calls it ``number``."""

    def __init__(self, number: int, pipe: Connection, server: ForkServer, log: IO[bytes] | None) -> None:
        super().__init__(number, pipe, log=log, ready=True)
        self._server, self._number = server, number
        self.pid = self._first_byte() or number
        # What it detaches is the server's child; what others hold outside of a sandbox isn't this one's.
        self._holder = server.pid if server.boxed else self.pid

    def _end_below(self) -> None:
        """Leave what has a session of its own to the server, which counts it (`ForkServer.clean`)."""

    def _exit_code(self, *, wait: bool = False) -> int | None:
        return self._server.exit_code(self._number, wait=wait)
