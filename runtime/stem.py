"""A stem: a plain interpreter that has imported what is slow to import, and of which processes are forked in no time.

What runs in it is a text that knows nothing of this project. The text answers two kinds of messages on its pipe (see
`BRANCHING`): to fork, with the end of a pipe that the new process serves, and to tell how a process of its ended. A
process dies with the stem, the stem with the one that started it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection

from assay.runtime.process import Process

BRANCHING = """
def _branch(pipe, serve):
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
"""The part of a stem's text that forks: ``_branch(pipe, serve)``."""

_START = 300.0  # seconds that its imports may take


class Branch(Process):
    """A process forked of a stem."""

    def __init__(self, pid: int, pipe: Connection, stem: Stem) -> None:
        super().__init__(pid, pipe, ready=True)
        self._stem = stem

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        if self._code is None:
            self._code = self._stem.told("look", self.pid)
        return self._code is None

    def kill(self) -> int:
        """End it and its group, and wait until it has; its exit code."""
        if not self.pipe.closed:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.pipe.close()
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it leads no group yet
            self._code = self._stem.told("wait", self.pid)
        return -int(signal.SIGKILL) if self._code is None else self._code


class Stem:
    """A plain interpreter that runs ``body`` up to its imports, and then ``serve(pipe)`` in each process forked of it.

    ``body`` defines ``serve``; ``environment`` is that of all of them.
    """

    def __init__(self, body: str, serve: str, environment: Mapping[str, str]) -> None:
        rest = f"\n_branch(connection.Connection(pipe), {serve})\n"
        text = f"{body}\n{BRANCHING}\nfrom multiprocessing import connection{rest}"
        self._process = Process.start_plain(text, (), environment)

    @property
    def alive(self) -> bool:
        """Whether it can still be forked."""
        return self._process.alive

    def branch(self) -> Branch:
        """A new process. Raises `OSError` where the stem is lost."""
        ours, theirs = Pipe()
        with theirs:
            self._process.pipe.send_bytes(b"fork 0")
            reduction.send_handle(self._process.pipe, theirs.fileno(), None)
        return Branch(int(self._answer()), ours, self)

    def told(self, what: str, pid: int) -> int | None:
        """The exit code of a process: "wait" for it, or "look" whether there is one. -9 where the stem is lost."""
        try:
            self._process.pipe.send_bytes(f"{what} {pid}".encode())
            answer = self._answer()
            return int(answer) if answer else None
        except (OSError, EOFError):
            return -int(signal.SIGKILL)

    def _answer(self) -> str:
        if not self._process.pipe.poll(_START):
            raise OSError("the interpreter that processes are forked of doesn't answer")
        return self._process.pipe.recv_bytes(64).decode()

    def end(self) -> None:
        """End it, and what was forked of it."""
        self._process.kill()
