"""A sandbox for programs that nobody trusts: bubblewrap's namespaces of Linux.

Inside, a program sees the file system read-only and without hidden folders, and writes to its own folder alone. It has
no network, no environment variables but those given, and no process outside; all of its processes end with it. What
that defends against, and what not, is in docs/sandbox.md.
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
from pathlib import Path

_PROGRAM = "bwrap"
_INSTALL = "apt install bubblewrap, or your system's package of that name"
_NAMESPACES = (
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--cap-drop", "ALL",
)  # fmt: skip
_HIDDEN = ("/tmp", "/var/tmp", "/run", "/root", "/home", "/mnt", "/media")
# Never hidden as a problem's folder: programs and libraries are there.
_SYSTEM = ("/", "/usr", "/usr/local", "/opt", "/etc", "/lib", "/bin", "/var", "/srv")
SHARED = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders in memory that can be written besides its own: code names them."""
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


def hides(path: Path) -> bool:
    """Return whether every sandbox hides this path."""
    return any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in _always_hidden())


def _always_hidden() -> list[Path]:
    folders = {Path(os.path.realpath(path)) for path in (*_HIDDEN, tempfile.gettempdir(), Path.home(), Path.cwd())}
    return sorted(path for path in folders - {Path("/")} if path.is_dir())


@dataclass(frozen=True)
class Sandbox:
    """A sandbox in which ``folder`` alone can be written, besides what is in memory (`SHARED`).

    ``hidden``: folders whose content isn't there, besides those of users and temporary files; what Python itself needs
    of them is. ``gpus``: the device nodes of GPUs are there.
    """

    folder: Path
    hidden: tuple[Path, ...] = ()
    gpus: bool = False

    def command(self, command: Sequence[str], environment: Mapping[str, str], *, dies: bool = True) -> list[str]:
        """Return the command that runs ``command`` inside; ``dies`` with the process that starts it."""
        # As process 1 it can't be stopped or killed from inside.
        arguments = [_PROGRAM, *_NAMESPACES, "--as-pid-1", *(["--die-with-parent"] if dies else [])]
        arguments += ["--ro-bind", "/", "/"]
        own = [Path(os.path.realpath(path)) for path in self.hidden if not hides(path) and str(path) not in _SYSTEM]
        empty = [str(path) for path in sorted([*_always_hidden(), *own])]
        for path in empty:
            arguments += ["--perms", "1777", "--size", str(_MOST_SHARED), "--tmpfs", path]
        for needed in _needed():
            if any(needed.is_relative_to(path) for path in empty):
                arguments += ["--ro-bind", str(needed), str(needed)]
        arguments += ["--dev", "/dev", "--proc", "/proc"]
        arguments += ["--perms", "1777", "--size", str(_MOST_SHARED), "--tmpfs", "/dev/shm"]
        if self.gpus:
            for node in sorted(str(node) for pattern in _GPU_NODES for node in Path("/").glob(pattern[1:])):
                arguments += ["--dev-bind", node, node]
        folder = os.path.realpath(self.folder)
        arguments += ["--bind", folder, folder, "--chdir", folder, "--clearenv"]
        for path in ("/dev", *(path for path in empty if path not in SHARED)):
            arguments += ["--remount-ro", path]
        for name, value in environment.items():
            arguments += ["--setenv", name, value]
        return [*arguments, "--", *command]


def _needed() -> list[Path]:
    """Return the folders that Python, its libraries and this package are in, outer ones first."""
    paths: Iterable[str] = (
        sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *(x for x in sys.path if x.endswith("-packages")),
        *(os.path.dirname(file) for file in _files_of_this_package()),
    )  # fmt: skip
    real = {Path(os.path.realpath(path)) for path in paths if path} | {Path(path) for path in (sys.prefix,)}
    return sorted(path for path in real - {Path("/")} if path.is_dir())


def _files_of_this_package() -> list[str]:
    """Return a file of each folder of this package: an editable installation has them in several places."""
    own = __name__.partition(".")[0]
    modules = [
        module for name, module in list(sys.modules.items()) if name.partition(".")[0] == own and name.count(".") <= 1
    ]
    return [file for module in modules if (file := getattr(module, "__file__", None))]
