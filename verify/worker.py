"""An isolated kernel's process: cases in, outputs as bytes or failures out.

Either a fork or a new process; each leads a process group of its own, so that what a kernel starts ends with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from assay.verify.calls import Call, target_of
from assay.verify.errors import SettingError
from assay.verify.inputs.cases import Case, build
from assay.verify.result import Failure

if TYPE_CHECKING:
    from assay.verify.trial import Bench

_FAILED = 70  # exit status of a worker whose harness failed


class Process:
    """A process that leads its group, by its number; a child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is None

    def kill(self) -> None:
        """End it and its group, and wait until it has."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it leads no group yet
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)

    def ended(self, patience: float) -> int:
        """Its exit code, once it ends by itself or, after so many seconds, by force."""
        until = time.monotonic() + patience
        while self.is_alive() and time.monotonic() < until:
            time.sleep(0.01)
        self.kill()
        assert self._code is not None
        return self._code


def forked(bench: Bench, pipe: Connection, parents: Connection) -> Process:
    """A worker that is a copy of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of libraries with threads, which the child doesn't enter
        pid = os.fork()
    if pid:
        return Process(pid)
    status = _FAILED
    try:
        os.setsid()
        parents.close()
        torch.set_num_threads(1)
        call = replace(bench.call, before=_teller(pipe))
        status = _serve(pipe, lambda: replace(bench, call=call, isolation=None, goldens=None))
    finally:
        os._exit(status)


def started(bench: Bench, pipe: Connection) -> Process:
    """A worker that is a new process and imports the kernel; `SettingError` where that has no importable name."""
    target = target_of(bench.call.kernel)
    if not target:
        raise SettingError(
            "isolate: on a device, and under jax, the kernel runs in a new process, which must import it; "
            "expected a function of a module, got one without an importable name"
        )
    call = bench.call
    settings = (target, dict(call.listed), call.framework, call.timeout, bench.contract, str(bench.device))
    read, write = os.pipe()
    body = f"from assay.verify.worker import serve_new; serve_new({pipe.fileno()}, {read})"
    child = subprocess.Popen([sys.executable, "-c", body], pass_fds=(pipe.fileno(), read), start_new_session=True)
    os.close(read)
    with os.fdopen(write, "wb") as file:
        file.write(pickle.dumps((sys.path, settings)))
    child.returncode = 0  # `Process` waits for it
    return Process(child.pid)


def serve_new(pipe: int, settings: int) -> None:
    """The life of a new process; its arguments are file descriptors."""
    from assay.verify.repro import load_target
    from assay.verify.trial import Bench

    with os.fdopen(settings, "rb") as file:
        path, (target, listed, framework, timeout, contract, device) = pickle.loads(file.read())
    sys.path[:] = path
    end = Connection(pipe)

    def bench() -> Bench:
        return Bench(Call(load_target(target), listed, framework, timeout, _teller(end)), contract, device)

    sys.exit(_serve(end, bench))


def _teller(pipe: Connection) -> Callable[[Case, float], None]:
    """What tells the process that judges of each call, and within how many seconds it comes back."""

    def tell(case: Case, seconds: float) -> None:
        pipe.send_bytes(json.dumps({"within": seconds}).encode())

    return tell


def _serve(pipe: Connection, bench_of: Callable[[], Bench]) -> int:
    """Answer until nobody asks any more; the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.disable()  # a fault is the parent's to report
    with suppress(OSError):  # when memory runs out on Linux, better a worker than the parent
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        bench = bench_of()
        with contextlib.suppress(EOFError):
            while True:
                case = pickle.loads(pipe.recv_bytes())
                _send(pipe, bench.observe(case, build(case, bench.device)))
        return 0
    except Exception:
        pipe.send_bytes(json.dumps({"error": traceback.format_exc()}).encode())
        return _FAILED


def _send(pipe: Connection, answer: tuple[torch.Tensor, ...] | Failure) -> None:
    if isinstance(answer, Failure):
        head: dict[str, Any] = {name: getattr(answer, name) for name in ("kind", "message", "output", "index")}
        pipe.send_bytes(json.dumps(head).encode())
        return
    outputs = [output.detach().cpu().contiguous() for output in answer]
    kinds = [(str(output.dtype).removeprefix("torch."), list(output.shape)) for output in outputs]
    pipe.send_bytes(json.dumps({"outputs": kinds}).encode())
    for output in outputs:
        pipe.send_bytes(output.reshape(-1).view(torch.uint8).numpy().tobytes())
