"""A fork server: a plain interpreter with the slow imports done, from which processes are forked within milliseconds.

It runs a program text that is independent of this package. The text answers two kinds of messages on its pipe
(`_SERVER`): to fork, with one end of a pipe that the new process serves, and to report the exit code of one of its
processes. The processes end with the server, and the server with the process that started it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection

from assay.runtime.process import Process

_SERVER = """
def _serve_forks(pipe, serve):
    import ctypes, os, signal
    from multiprocessing import connection, reduction
    parent = os.getpid()
    while True:
        try:
            what, pid = pipe.recv_bytes().decode().split()
        except EOFError:
            return
        if what == "fork":
            handle = reduction.recv_handle(pipe)
            found = os.fork()
            if found == 0:
                pipe.close()
                os.setsid()
                with __import__("contextlib").suppress(OSError, AttributeError):
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                status = 1
                try:
                    if os.getppid() == parent:
                        serve(connection.Connection(handle))
                    status = 0
                finally:
                    os._exit(status)
            os.close(handle)
            answer = str(found)
        else:
            try:
                ended, status = os.waitpid(int(pid), 0 if what == "wait" else os.WNOHANG)
                answer = str(os.waitstatus_to_exitcode(status)) if ended else ""
            except ChildProcessError:
                answer = str(-int(signal.SIGKILL))
        pipe.send_bytes(answer.encode())
"""
_START = 300.0  # seconds that its imports may take


class ForkedProcess(Process):
    def __init__(self, pid: int, pipe: Connection, server: ForkServer) -> None:
        super().__init__(pid, pipe, ready=True)
        self._server = server

    @property
    def alive(self) -> bool:
        """Return whether it is still running."""
        if self._code is None:
            self._code = self._server.exit_code(self.pid)
        return self._code is None

    def kill(self) -> int:
        """End it and its group, and wait for the end; return its exit code."""
        if not self.pipe.closed:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.pipe.close()
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it has no process group yet
            self._code = self._server.exit_code(self.pid, wait=True)
        return -int(signal.SIGKILL) if self._code is None else self._code


class ForkServer:
    """A plain interpreter that runs the text ``body``, and then its function ``serve(pipe)`` in each forked process.

    ``environment``: the environment variables of all of them.
    """

    def __init__(self, body: str, serve: str, environment: Mapping[str, str]) -> None:
        rest = f"\n_serve_forks(connection.Connection(pipe), {serve})\n"
        text = f"{body}\n{_SERVER}\nfrom multiprocessing import connection{rest}"
        self._process = Process.start_plain(text, (), environment)

    @property
    def alive(self) -> bool:
        """Return whether it can still fork."""
        return self._process.alive

    def fork(self) -> ForkedProcess:
        """Return a new process. Raises `OSError` where the server is lost."""
        ours, theirs = Pipe()
        with theirs:
            self._process.pipe.send_bytes(b"fork 0")
            reduction.send_handle(self._process.pipe, theirs.fileno(), None)
        return ForkedProcess(int(self._answer()), ours, self)

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

    def end(self) -> None:
        """End it and its processes."""
        self._process.kill()
