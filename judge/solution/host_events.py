"""What a solution asks of the system and of Python's inside: by Python's audit events, and whose lines are below them.

A part of the text that `host` is; see there. A file is a solution's own where it is its folder's, or was made by it; it
may read Python's, its libraries', and what tells of the machine.
"""

import os
import site
import sys
import sysconfig
import tempfile
import threading
from typing import Any

import torch

_frame, _real, _exists, _fspath = sys._getframe, os.path.realpath, os.path.lexists, os.fspath
_MOST_EVENTS = 12  # of each kind
_STANDARD = os.path.dirname(os.__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_FILES = ("open", "os.listdir", "os.scandir", "os.rename", "os.link")
_INSIDE = ("tb_frame", "gi_frame", "cr_frame")
_EVENTS = frozenset((
    *_FILES, "os.mkdir", "import", "sys._getframe", "sys._current_frames", "sys.settrace", "sys.setprofile",
    "gc.get_objects", "gc.get_referrers", "gc.get_referents", "object.__getattr__",
    "subprocess.Popen", "os.system", "os.fork", "os.posix_spawn", "socket.connect",
))  # fmt: skip
_MACHINE = (
    "/usr/lib", "/usr/local/lib", "/usr/share", "/usr/include", "/usr/bin", "/lib", "/lib64", "/opt/cuda", "/opt/rocm",
    "/usr/local/cuda", "/sys/devices", "/sys/class", "/sys/bus", "/sys/module", "/sys/fs/cgroup", "/proc/cpuinfo",
    "/proc/meminfo", "/proc/stat", "/proc/version", "/proc/filesystems", "/proc/driver", "/proc/sys", "/dev/null",
    "/dev/zero", "/dev/random", "/dev/urandom", "/dev/dri", "/dev/kfd", "/etc/os-release", "/etc/localtime",
    "/etc/ld.so.cache", "/etc/mime.types",
)  # fmt: skip
_OF_PROCESS = ("status", "stat", "statm", "cgroup", "mountinfo")
_LOADERS = ("serialization.py", "_weights_only_unpickler.py")
_COMPILERS = ("_inductor/", "_dynamo/", "_functorch/", "fx/", "utils/cpp_extension", "utils/_triton")


def _roots() -> tuple[str, ...]:
    """Where Python, its libraries and the caches of compilers lie."""
    home = os.path.expanduser("~")
    cache = os.path.join(tempfile.gettempdir(), "torchinductor_")
    results = [*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, site.getusersitepackages(), *_MACHINE]
    results += [path for path in sys.path if path.endswith("-packages")]
    results += [os.path.join(home, ".triton"), os.path.join(home, ".cache"), cache, "/dev/nvidia"]
    return tuple({_real(path) for path in results if path} - {"/"})


class _Watched:
    """What the solution's own lines ask for, or have others do: event, object, and the line."""

    def __init__(self) -> None:
        self.folder, self.active, self.found = "?", False, list[list[str]]()
        self.roots, self.made, self.inside = _roots(), set[str](), threading.local()

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active or event not in _EVENTS or getattr(self.inside, "now", False):
            return
        self.inside.now = True  # what follows raises events too
        try:
            self._note(event, arguments)
        finally:
            self.inside.now = False

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        what = str(arguments[0])[:200] if arguments else ""
        if event == "object.__getattr__":
            if arguments[1] not in _INSIDE or not self._is_own(_frame(2)):
                return
            what = arguments[1]
        elif event == "import":
            if what.partition(".")[0] != "assay":
                return
        elif event == "sys._getframe":
            if not (self._is_own(_frame(2)) or _frame(2).f_globals.get("__name__") in ("inspect", "traceback")):
                return
        elif event == "os.mkdir":
            self.made.add(_real(os.fsdecode(arguments[0])))
            return
        elif event in _FILES:
            what = self._foreign(event, arguments)
            if not what:
                return
        line = self._line(_frame(2), by_libraries=event in _FILES)
        results = [event, what, line]
        if line and results not in self.found and sum(old[0] == event for old in self.found) < _MOST_EVENTS:
            self.found.append(results)

    def _foreign(self, event: str, arguments: tuple[Any, ...]) -> str:
        """The path that is read or listed, where that is none of the solution's affair."""
        given = "." if arguments[0] is None else arguments[0]
        if isinstance(given, int) or not given:
            return ""
        given = os.fsdecode(_fspath(given))
        path = _real(given)
        flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
        if flags & os.O_CREAT and not _exists(path):
            self.made.add(path)
            return ""
        if flags & os.O_ACCMODE == os.O_WRONLY:
            return ""
        own = (_real(os.path.dirname(self.folder)), *self.made)
        if any(path == root or path.startswith(root + os.sep) for root in (*own, *self.roots)):
            return ""
        if path.startswith(tuple(root for root in self.roots if root.endswith(("torchinductor_", "nvidia")))):
            return ""
        process = path.split(os.sep)
        if process[1] == "proc" and process[2:3] == [str(os.getpid())] and process[-1] in _OF_PROCESS:
            return ""
        if event != "open" and _name(_frame(3)).startswith("<frozen importlib"):
            return ""  # where modules are looked for
        return path[:200]

    def _is_own(self, frame: Any) -> bool:
        """Whether a frame runs the solution's text, or a text that was made as it runs."""
        return _name(frame).startswith(self.folder) or not _is_module(frame)

    def _line(self, frame: Any, *, by_libraries: bool) -> str:
        """The line of the solution that asked: itself, by Python's own library, by a text that it has made, by what
        torch loads; with ``by_libraries`` also by others, but not by compilers, which have files of their own."""
        while frame is not None:
            name = _name(frame)
            if name.startswith(self.folder):
                return f"{name[len(self.folder) + 1 :]}:{frame.f_lineno}"
            if _is_module(frame) and not _is_standard(name):
                inner = name.removeprefix(_TORCH)
                module = str(frame.f_globals["__name__"]).partition(".")[0]
                if inner.startswith(_COMPILERS) or module in ("triton", "assay"):
                    return ""
                if not by_libraries and inner not in _LOADERS:
                    return ""
            frame = frame.f_back
        return "" if threading.current_thread() is threading.main_thread() else "a thread of its own"


def _name(frame: Any) -> str:
    return str(frame.f_code.co_filename)


def _is_standard(name: str) -> bool:
    return name.startswith("<frozen") or (name.startswith(_STANDARD) and "-packages" not in name)


def _is_module(frame: Any) -> bool:
    """Whether a frame's text is that of the module that it claims, and not one made as the program runs."""
    name, module = _name(frame), sys.modules.get(str(frame.f_globals.get("__name__")))
    if module is None or vars(module) is not frame.f_globals:
        return False
    if module.__name__ == "__main__":
        return frame.f_code.co_name != "<module>" or frame.f_back is None
    return name.startswith("<frozen") or name == str(getattr(module, "__file__", ""))


watched = _Watched()
sys.addaudithook(watched.hook)
