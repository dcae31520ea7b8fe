"""A sandbox for programs that nobody trusts: bubblewrap's namespaces of Linux.

Inside, a program sees the system's programs and libraries, Python and what it imports, all read-only, and writes to its
own folder alone. It has no network, no environment variables but those given, and no process outside; all of its
processes end with it. What that defends against, and what not, is in docs/sandbox.md.

A fork, which must call functions that no sandbox could import, can have the last two of these: a namespace of its own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_PROGRAM = "bwrap"
_INSTALL = "apt install bubblewrap, or your system's package of that name"
_NAMESPACES = (
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--cap-drop", "ALL",
)  # fmt: skip
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/sys", "/nix/store", "/gnu/store")
_SETTINGS = (
    "alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "nsswitch.conf", "passwd", "group", "localtime",
    "timezone", "locale.conf", "os-release", "mime.types", "OpenCL", "nvidia", "rocm",
)  # fmt: skip
"""What programs read of /etc: neither keys nor passwords."""
_TOOLS = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH", "CC", "CXX", "TRITON_PTXAS_PATH")
"""Variables whose folders and files are there too, outside of home and temporary folders."""
_LIBRARIES = ("torch", "triton", "numpy")  # wherever they are installed
_PRIVATE = ("/", "/tmp", "/var", "/run", "/root", "/home", "/mnt", "/media", "/etc", "/proc", "/dev")
SHARED = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders in memory that can be written besides its own: code names them."""
QUEUES = "/dev/mqueue"
"""The folder of POSIX message queues."""
_MOST_SHARED = 1 << 30  # bytes of each
_GPU_NODES = ("/dev/nvidia*", "/dev/nvidia-caps/*", "/dev/dri/*", "/dev/kfd")
_KEPT = (
    "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES", "ROCM_PATH", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CC", "CXX",
    "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "TRITON_PTXAS_PATH", "XLA_FLAGS",
)  # fmt: skip

_NEW_PROCESSES, _NEW_MOUNTS, _NEW_USER = 0x20000000, 0x20000, 0x10000000  # of Linux's <linux/sched.h>
_PRIVATE_MOUNTS, _PLAIN_MOUNT = 0x44000, 14  # of <linux/mount.h>: recursive and private; no programs, devices, setuid
_DIES_WITH_PARENT = 1  # of <linux/prctl.h>
_TEST_RUNNERS = ("PYTEST", "ASSAY", "HYPOTHESIS", "COV_")  # prefixes of variables that reveal a test run


_REFUSED_CALLS = {  # by machine: what its calls are counted from, the number of seccomp, and those of
    # memfd_create, memfd_secret and shmget, whose memory no process need hold; ptrace, process_vm_readv and _writev;
    # unshare, setns, mount; userfaultfd, bpf, io_uring_setup, keyctl, add_key, perf_event_open
    "x86_64": (0xC000003E, 317, (319, 447, 29, 101, 310, 311, 272, 308, 165, 323, 321, 425, 250, 248, 298)),
    "aarch64": (0xC00000B7, 277, (279, 447, 194, 117, 270, 271, 97, 268, 40, 282, 280, 425, 219, 217, 241)),
}  # fmt: skip
"""Calls of Linux that a program which nobody trusts doesn't need, by its <asm/unistd.h> and <linux/audit.h>."""


def call_filter() -> tuple[int, bytes]:
    """Return the number of the system's call seccomp, and the filter for it that refuses `_REFUSED_CALLS`: they fail
    as unknown ones do. (0, nothing) for other machines.

    The filter is a program of Linux's classic BPF (<linux/filter.h>): instructions of 16 bits, two jumps and a number.
    """
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, unknown = 0x7FFF0000, 0x00050000 | errno.ENOSYS  # of <linux/seccomp.h>
    machine, number, calls = _REFUSED_CALLS.get(platform.machine(), (0, 0, ()))
    refuse = len(calls) + 1
    steps = [(load, 0, 0, 4), (equal, 0, refuse + 2, machine), (load, 0, 0, 0), (at_least, refuse, 0, 1 << 30)]
    steps += [(equal, refuse - 1 - k, 0, call) for k, call in enumerate(calls)]
    steps += [(answer, 0, 0, allow), (answer, 0, 0, unknown)]
    return number, b"".join(struct.pack("=HBBI", *step) for step in steps) if calls else b""


@cache
def unavailable() -> str:
    """Return why this machine has no sandbox, in words; empty if it has one."""
    if shutil.which(_PROGRAM) is None:
        return f"{_PROGRAM} isn't installed ({_INSTALL})"
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = Sandbox(Path(folder)).command([sys.executable, "-S", "-c", ""], {"LANG": "C"})
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{_PROGRAM} doesn't run ({error})"
    if done.returncode:
        return f"{_PROGRAM} can't make namespaces here ({(done.stderr.strip().splitlines() or ['no message'])[-1]})"
    return ""


@cache
def version() -> str:
    """Return the sandbox's name and version, e.g. "bubblewrap 0.8.0". Call it only where there is one."""
    return subprocess.run([_PROGRAM, "--version"], capture_output=True, text=True, check=False).stdout.strip()


def clean_environment() -> dict[str, str]:
    """Return the environment variables, without any that reveals a test runner."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_TEST_RUNNERS)}


def bare_environment(home: Path) -> dict[str, str]:
    """Return the environment variables of a program that nobody trusts: libraries' own settings, and no secret."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    folders = {"HOME": str(home), "TMPDIR": str(home), "TRITON_CACHE_DIR": str(home / "triton")}
    return {**kept, **folders, "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"), "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class Sandbox:
    """A sandbox in which ``folder`` alone can be written, besides what is in memory (`SHARED`).

    ``hidden``: folders whose content isn't there even where they are in one that is. ``gpus``: the device nodes of GPUs
    are there.
    """

    folder: Path
    hidden: tuple[Path, ...] = ()
    gpus: bool = False

    def command(self, command: Sequence[str], environment: Mapping[str, str], *, dies: bool = True) -> list[str]:
        """Return the command that runs ``command`` inside; ``dies`` with the process that starts it."""
        # As process 1 it can't be stopped or killed from inside.
        arguments = [_PROGRAM, *_NAMESPACES, "--as-pid-1", *(["--die-with-parent"] if dies else [])]
        for path in SHARED[:2]:
            arguments += ["--perms", "1777", "--size", str(_MOST_SHARED), "--tmpfs", path]
        seen = _seen()
        for path in map(str, seen):
            if os.path.islink(path):
                arguments += ["--symlink", os.readlink(path), path]
            else:
                arguments += ["--ro-bind", path, path]
        for hidden in sorted(Path(os.path.realpath(path)) for path in self.hidden):
            if can_hide(hidden):
                arguments += ["--tmpfs", str(hidden), "--remount-ro", str(hidden)]
        arguments += ["--dev", "/dev", "--proc", "/proc"]
        if os.path.isdir("/proc/sys/fs/mqueue"):
            arguments += ["--mqueue", QUEUES]
        arguments += ["--perms", "1777", "--size", str(_MOST_SHARED), "--tmpfs", "/dev/shm"]
        if self.gpus:
            for node in sorted(str(node) for pattern in _GPU_NODES for node in Path("/").glob(pattern[1:])):
                arguments += ["--dev-bind", node, node]
        folder = os.path.realpath(self.folder)
        arguments += ["--bind", folder, folder, "--chdir", folder, "--clearenv"]
        arguments += ["--remount-ro", "/dev", "--remount-ro", "/"]
        for name, value in environment.items():
            arguments += ["--setenv", name, value]
        return [*arguments, "--", *command]


@cache
def has_namespaces() -> bool:
    """Return whether `enter_namespace` works here."""
    if sys.platform != "linux":
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries with threads, which the child doesn't use
        pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            enter_namespace()
            os._exit(0)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def enter_namespace() -> None:
    """Go on in a copy of this process, in a namespace of processes: none outside has a number there, or can be traced.

    The copy is below the namespace's first process, which can't be ended from inside. With the copy all that it has
    started ends, in sessions of its own too; this process then ends as the copy did, and they with this process. Call
    it in a fork, which has one thread. Raises `OSError` where the system doesn't allow it.
    """
    library = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if library.unshare(_NEW_PROCESSES | _NEW_MOUNTS):  # root's alone; others need a namespace of users too
        _succeeds(library.unshare(_NEW_PROCESSES | _NEW_MOUNTS | _NEW_USER))
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        for name, text in maps.items():
            Path("/proc/self", name).write_text(text)
    reader, writer = os.pipe()
    first = os.fork()
    if first:
        _end_as(first, reader)
    library.prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    os.close(reader)
    poll = select.poll()
    poll.register(writer, 0)
    if poll.poll(0):  # the parent has ended already
        os._exit(1)
    _succeeds(library.mount(None, b"/", None, _PRIVATE_MOUNTS, None))
    _succeeds(library.mount(b"proc", b"/proc", b"proc", _PLAIN_MOUNT, None))
    copy = os.fork()
    if copy:
        close_all_but(writer)
        while (ended := os.wait())[0] != copy:
            pass
        os.write(writer, str(ended[1]).encode())
        os._exit(0)
    os.close(writer)


def _end_as(first: int, reader: int) -> None:
    """End as the process did whose status comes from a namespace, after all that was in it."""
    close_all_but(reader)
    text = os.read(reader, 16)
    os.waitpid(first, 0)
    code = os.waitstatus_to_exitcode(int(text or signal.SIGKILL))
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the other one's counts
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _succeeds(result: int) -> None:
    """Raise `OSError` where a function of the C library has failed."""
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def close_all_but(kept: int) -> None:
    """Close all files but the standard ones and ``kept``: a kernel must not find the pipes of this process's parent."""
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def can_hide(folder: Path) -> bool:
    """Return whether a folder is in one that is there, and holds none that is needed."""
    real, seen = Path(os.path.realpath(folder)), _seen()
    is_there = any(real.is_relative_to(path) for path in seen)
    return is_there and not any(path.is_relative_to(real) for path in (*seen, *_needed()))


def _seen() -> list[Path]:
    """Return the folders and files that are there, outer ones first."""
    paths = {*map(Path, _SYSTEM), *(Path("/etc", name) for name in _SETTINGS), *_needed(), *_of_variables()}
    paths |= {Path(os.path.realpath(path)) for path in paths}
    results: list[Path] = []
    for path in sorted(path for path in paths if path.exists()):
        if not any(path.is_relative_to(other) for other in results):
            results.append(path)
    return results


def _of_variables() -> list[Path]:
    parts = (part for name in _TOOLS for part in os.environ.get(name, "").split(os.pathsep))
    paths = [Path(part) for part in parts if os.path.isabs(part)]
    private = [Path(os.path.realpath(path)) for path in (*_PRIVATE, tempfile.gettempdir(), Path.home(), Path.cwd())]
    return [path for path in paths if not any(_is_in(path, one) for one in private)]


def _is_in(path: Path, folder: Path) -> bool:
    """Return whether a path is in a folder, or is the file system's root as that is."""
    real = Path(os.path.realpath(path))
    return real == folder or (folder != Path("/") and real.is_relative_to(folder))


def _needed() -> list[Path]:
    """Return the folders that Python, its libraries and this package are in, outer ones first."""
    paths: Iterable[str] = (
        sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *(x for x in sys.path if x.endswith("-packages")),
        *(os.path.dirname(file) for file in _files_of_this_package()),
        *(os.path.dirname(spec.origin) for name in _LIBRARIES if (spec := find_spec(name)) and spec.origin),
    )  # fmt: skip
    both = {Path(of(path)) for path in paths if path for of in (os.path.realpath, os.path.abspath)}
    return sorted(path for path in both - {Path("/")} if path.is_dir())


def _files_of_this_package() -> list[str]:
    """Return a file of each folder of this package: an editable installation has them in several places."""
    own = __name__.partition(".")[0]
    modules = [
        module for name, module in list(sys.modules.items()) if name.partition(".")[0] == own and name.count(".") <= 1
    ]
    return [file for module in modules if (file := getattr(module, "__file__", None))]
