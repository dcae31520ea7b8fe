"""A process that may crash, hang or take all memory: started, asked, limited, and ended with whatever it has started.

It is a fork, so that any callable can run there, or a new interpreter, where a fork is no help: a forked thread pool
hangs, and a device's context doesn't survive. It leads a group of its own, which ends with it. Where the process that
started it is killed, it ends too: at once on Linux, elsewhere when it next reads from its pipe or writes to it.

Messages are bytes; what an answer's bytes mean, and whether they may be trusted, is the caller's to know. Between a
question and its answer a process may say that it is alive (`Parent.heartbeat`): with a note, which outlives it, and the
seconds within which it says something again, which a busy machine doesn't shorten (`runtime.deadline`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe, spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from assay.runtime.deadline import CpuLimit, process_clock

GIB = 2**30
_ANSWER, _HEARTBEAT = b"a", b"h"
_NOTE_BYTES = 1 << 16
_TICK = 1.0  # seconds between two looks at a process that says nothing
_MEMORY_TICK = 0.05  # the same where its memory is watched
_START = 300.0  # seconds that a new interpreter may take to import what it needs
_GRACE = 10.0  # seconds that a process has to end after it has closed its pipe
_FAILED = 70  # exit status of a fork whose main function raised
_PR_SET_PDEATHSIG = 1
_START_TEXT = """
import ctypes, os
pipe = {pipe}
if {dies}: ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != {parent}: os._exit(1)
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

_TEST_RUNNERS = ("PYTEST", "ASSAY", "HYPOTHESIS", "COV_")  # prefixes of variables by which code knows that it is tested


def clean_environment() -> dict[str, str]:
    """Return the environment variables without those by which test runners are known."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_TEST_RUNNERS)}


@dataclass(frozen=True)
class Lost:
    """A process that did not come back: "crash" or "timeout", how it ended, and the last note that it left."""

    kind: str
    message: str
    note: str = ""


class Process:
    """A process, by its number, and the pipe to it.

    ``on_heartbeat`` is told within how many seconds the process says something again. ``memory``: how many bytes it may
    hold beyond those that it had when it said something first; looked at every 50 ms, where `limit_memory` can't be
    used.
    """

    def __init__(self, pid: int, pipe: Connection, *, log: IO[bytes] | None = None, ready: bool = False) -> None:
        self.pid, self.pipe = pid, pipe
        self.on_heartbeat: Callable[[float], None] | None = None
        self.memory = 0
        self._log, self._ready = log, ready
        self._code: int | None = None
        self._timeout = 0.0
        self._limit = CpuLimit(0.0, process_clock(pid))
        self._resident, self._note = 0, ""

    @classmethod
    def fork(cls, main: Callable[[Parent], object]) -> Process:
        """A copy of this process that calls ``main`` and ends."""
        pipe, other = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        dies = _dies_with_parent()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries with threads, which the child doesn't enter
            pid = os.fork()
        if pid:
            other.close()
            return cls(pid, pipe, ready=True)
        status = _FAILED
        try:
            os.setsid()
            if dies:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                pipe.close()
                main(Parent(other))
            status = 0
        finally:
            os._exit(status)

    @classmethod
    def start(
        cls, main: Callable[..., object], *arguments: Any, quiet: bool = False, main_module: bool = False
    ) -> Process:
        """A new interpreter that calls ``main(parent, *arguments)``, both pickled, and ends.

        What it prints goes to standard error; if ``quiet``, nowhere but the last line into how it was lost.
        ``main_module``: it imports this process's main module too, as `multiprocessing` does.
        """
        data = spawn.get_preparation_data("assay worker")
        for key in ("authkey", *(() if main_module else ("init_main_from_name", "init_main_from_path"))):
            data.pop(key, None)
        messages = [pickle.dumps(data), pickle.dumps((main, arguments))]
        process = cls._interpreter(_WORKER, (), quiet)
        with suppress(OSError):  # `poll` will find it gone
            for message in messages:
                process.pipe.send_bytes(message)
        return process

    @classmethod
    def start_plain(cls, body: str, arguments: Iterable[str], environment: Mapping[str, str]) -> Process:
        """A new interpreter that runs the text ``body``, and knows nothing of this project."""
        return cls._interpreter(body, arguments, True, environment)

    @classmethod
    def _interpreter(
        cls, body: str, arguments: Iterable[str], quiet: bool, environment: Mapping[str, str] | None = None
    ) -> Process:
        log = tempfile.TemporaryFile() if quiet else None  # noqa: SIM115 - as long as the process
        pipe, other = Pipe()
        with other:
            start = _START_TEXT.format(dies=_dies_with_parent(), parent=os.getpid(), pipe=other.fileno())
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", start + body, *arguments],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log or 2,
                stderr=log or 2,
                start_new_session=True,
                env=environment,
            )
        child.returncode = 0  # it is waited for by `alive` and `kill`
        return cls(child.pid, pipe, log=log)

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is None

    def submit(self, message: bytes, timeout: float) -> float:
        """Ask; `poll` answers. It has ``timeout`` seconds to say something, longer if it is only starting: how many."""
        self._timeout, self._note = timeout, ""
        self._expect(timeout if self._ready else max(timeout, _START))
        if self._log is not None:
            os.ftruncate(self._log.fileno(), 0)
            os.lseek(self._log.fileno(), 0, os.SEEK_SET)  # of the process too, which shares the open file
        with suppress(OSError):  # `poll` will find it gone
            self.pipe.send_bytes(message)
        return self._limit.seconds

    def poll(self) -> bytes | Lost | None:
        """The answer, or how the process was lost, or None as long as neither is known."""
        alive = self.alive  # before the pipe is read, which holds what was said until then
        try:
            while self.pipe.poll():
                frame = self.pipe.recv_bytes()
                self._ready = True
                self._resident = self._resident or (_resident(self.pid) if self.memory else 0)
                if frame[:1] == _ANSWER:
                    return frame[1:]
                self._hear(frame)
        except (EOFError, OSError):
            return self._lost("crash")
        if not alive:
            return self._lost("crash")
        if self._resident and _resident(self.pid) - self._resident > self.memory:
            return self._lost("crash", f"it held more than {self.memory / GIB:.3g} GiB of memory")
        if self._limit.is_over():
            limit = self._limit.seconds
            return self._lost("timeout", f"nothing came back for {limit:g} s, and it could not be interrupted")
        return None

    def result(self) -> bytes | Lost:
        """What `poll` gives in the end."""
        while (answer := self.poll()) is None:
            wait_for([self])
        return answer

    def kill(self) -> int:
        """End it and its group, and wait until it has; its exit code, as `multiprocessing` gives it."""
        if not self.pipe.closed:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.pipe.close()
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it leads no group yet
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        assert self._code is not None
        return self._code

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end; whether it came within so many seconds, as `CpuLimit` counts them."""
        limit = CpuLimit(seconds, process_clock(self.pid))
        while self.alive and not limit.is_over():
            time.sleep(0.01)
        return not self.alive

    def last_words(self) -> str:
        """The last line that a quiet process has printed."""
        if self._log is None:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        printed = os.pread(self._log.fileno(), 1 << 16, max(0, size - (1 << 16))).decode("utf-8", errors="replace")
        return printed.strip().splitlines()[-1].strip() if printed.strip() else ""

    @property
    def soon(self) -> float:
        """Seconds after which it must be looked at, whether it says something or not."""
        return min(self._limit.next_check, _MEMORY_TICK if self.memory else _TICK)

    def _hear(self, frame: bytes) -> None:
        (seconds,) = struct.unpack_from("<d", frame, 1)
        self._note = frame[9:].decode("utf-8", errors="replace")
        self._expect(seconds or self._timeout)
        if self.on_heartbeat is not None:
            self.on_heartbeat(self._limit.seconds)

    def _expect(self, seconds: float) -> None:
        self._limit = CpuLimit(seconds, process_clock(self.pid))

    def _lost(self, kind: str, message: str = "") -> Lost:
        self.ends_within(0.0 if message else _GRACE)
        code, last = self.kill(), self.last_words()[:200]
        return Lost(kind, message or _ending(code) + (f" ({last})" if last else ""), self._note)


class Parent:
    """The other end: what a process asks and tells the one that started it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        faulthandler.disable()  # a fault is the parent's to report
        with suppress(OSError):  # when memory runs out on Linux, better this process than its parent
            Path("/proc/self/oom_score_adj").write_text("1000")

    def heartbeat(self, note: str = "", seconds: float = 0.0) -> None:
        """Say that all is well, within how many ``seconds`` that is said again (0: as was asked), and leave a note."""
        self._pipe.send_bytes(_HEARTBEAT + struct.pack("<d", seconds) + note.encode()[:_NOTE_BYTES])

    def serve(self, answer: Callable[[bytes], bytes]) -> None:
        """Answer one message after the other, until nobody asks any more."""
        with suppress(EOFError, ConnectionError):
            while True:
                self._pipe.send_bytes(_ANSWER + answer(self._pipe.recv_bytes()))


def wait_for(processes: Iterable[Process], until: float = float("inf")) -> None:
    """Wait until one of the processes says something or must be looked at, or until the monotonic clock says so."""
    processes = list(processes)
    seconds = min(until - time.monotonic(), *(process.soon for process in processes))
    wait([process.pipe for process in processes], max(0.0, seconds))


def limit_memory(beyond: int) -> None:
    """Let this process, and whatever it starts, hold ``beyond`` bytes more than it does: what needs more is refused.

    Counted are the writable pages of its own (RLIMIT_DATA), touched or not. Address space as such (RLIMIT_AS) is no
    measure: 16 threads of torch reserve a GiB of it, and a driver of CUDA all there is; whether the latter stays within
    RLIMIT_DATA is not known, so a process on a device is watched instead (`Process.memory`). Without effect where
    Linux's /proc isn't there.
    """
    with suppress(OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _pages("self", 5) + beyond
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 where the system doesn't say."""
    with suppress(OSError):
        return _pages(str(pid), 1)
    return 0


def _pages(process: str, column: int) -> int:
    """A column of /proc/PID/statm, in bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[column]) * os.sysconf("SC_PAGE_SIZE")


def _dies_with_parent() -> bool:
    """Whether Linux shall end what is started here with its parent: it takes the end of a thread for the parent's."""
    return sys.platform == "linux" and threading.current_thread() is threading.main_thread()


def _ending(code: int) -> str:
    """How a process ended, by its exit code."""
    if code < 0:
        with suppress(ValueError):
            return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended itself with status {code}"
