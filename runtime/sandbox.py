"""A sandbox for programs that nobody trusts: bubblewrap's namespaces of Linux.

Inside, a program sees the system's programs and libraries, Python and what it imports, all read-only, and writes to its
own folder alone. It has no network, no environment variables but those given, and no process outside; all of its
processes end with it. What that defends against, and what not, is in docs/sandbox.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
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
