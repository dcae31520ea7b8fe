"""What watches a solution inside its own process: audit events, and libraries and settings that it changes.

A part of the program of `assay.judge.solution.host`, whose text begins with this one; it imports nothing from assay.
"""

import _ctypes
import _posixsubprocess
import builtins
import contextlib
import gc
import json
import os
import pickle
import random
import signal
import site
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

_frame, _real, _exists, _fspath = sys._getframe, os.path.realpath, os.path.lexists, os.fspath
_MAX_EVENTS = 12  # of each kind: enough to name a cheat, and a loop that opens files can't flood the answer
_STANDARD = os.path.dirname(os.__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_FILES = ("open", "os.listdir", "os.scandir", "os.rename", "os.link")
_NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo")
_INSIDE = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
_CODE = ("__code__", "__defaults__", "__kwdefaults__")
_EVENTS = frozenset((
    *_FILES, "os.mkdir", "import", "sys._getframe", "sys._current_frames", "sys.settrace", "sys.setprofile",
    "gc.get_objects", "gc.get_referrers", "gc.get_referents", "object.__getattr__", "object.__setattr__",
    "sys._current_exceptions", "sys.addaudithook", "sys.monitoring.register_callback",
    "subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.posix_spawn", "os.kill", "os.killpg", "ctypes.dlopen",
    "ctypes.dlsym", "ctypes.dlsym/handle", *_NETWORK,
))  # fmt: skip
_SYSTEM_PATHS = (
    "/usr/lib", "/usr/local/lib", "/usr/share", "/usr/include", "/usr/bin", "/lib", "/lib64", "/opt/cuda", "/opt/rocm",
    "/usr/local/cuda", "/sys/devices", "/sys/class", "/sys/bus", "/sys/module", "/sys/fs/cgroup", "/proc/cpuinfo",
    "/proc/meminfo", "/proc/stat", "/proc/version", "/proc/filesystems", "/proc/driver", "/proc/sys", "/dev/null",
    "/dev/zero", "/dev/random", "/dev/urandom", "/dev/dri", "/dev/kfd", "/etc/os-release", "/etc/localtime",
    "/etc/ld.so.cache", "/etc/mime.types",
)  # fmt: skip
_VARIABLES = (
    "CUDA", "CUBLAS", "CUDNN", "NVIDIA", "NVCC", "TORCH", "PYTORCH", "TRITON", "OMP_", "MKL", "OPENBLAS", "XLA", "JAX",
    "HIP", "ROCM", "ROCR", "LC_", "PYTHON", "KMP", "NUMBA", "CUTE", "CUTLASS", "TILELANG", "TVM", "MAX_JOBS", "TF32",
)  # fmt: skip
_USUAL_VARIABLES = ("HOME", "PATH", "LANG", "TMPDIR", "TEMP", "TMP", "USER", "CC", "CXX", "LD_LIBRARY_PATH", "PWD")
_symbol, _C_LIBRARY = _ctypes.dlsym, _ctypes.dlopen("libc.so.6" if sys.platform == "linux" else "libSystem.dylib", 0)
_C_LIBRARIES = ("libc.", "libc-", "libm.", "libm-", "libpthread", "libdl")
_OWN_PROC_FILES = ("status", "stat", "statm", "cgroup", "mountinfo")
_LOADERS = ("serialization.py", "_weights_only_unpickler.py")
_COMPILERS = ("_inductor/", "_dynamo/", "_functorch/", "fx/", "utils/cpp_extension", "utils/_triton")


def _roots() -> tuple[str, ...]:
    """Return the folders that any program may read: Python, its libraries, compiler caches, facts about the machine."""
    home = os.path.expanduser("~")
    cache = os.path.join(tempfile.gettempdir(), "torchinductor_")
    results = [*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, site.getusersitepackages(), *_SYSTEM_PATHS]
    results += [path for path in sys.path if path.endswith("-packages")]
    results += [os.path.join(home, ".triton"), os.path.join(home, ".cache"), cache, "/dev/nvidia"]
    return tuple({_real(path) for path in results if path} - {"/"})


class _Watched:
    """Audit events that the solution caused: ``events`` has [event, object, line of the solution] for each.

    A file is the solution's own if it is in its folder or the solution created it. It may also read ``roots``.
    """

    def __init__(self) -> None:
        self.folder, self.active, self.events = "?", False, list[list[str]]()
        self.roots, self.created, self.inside = _roots(), set[str](), threading.local()

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active or event not in _EVENTS or getattr(self.inside, "now", False):
            return
        self.inside.now = True  # recording an event raises events itself
        try:
            self._note(event, arguments)
        finally:
            self.inside.now = False

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        what = str(arguments[0])[:200] if arguments else ""
        if event == "object.__getattr__":
            if arguments[1] not in _INSIDE or not (self._is_own(_frame(2)) or self._hands_out(_frame(2))):
                return
            what = arguments[1]
        elif event == "object.__setattr__":
            own = str(getattr(getattr(arguments[0], "__code__", None), "co_filename", "")).startswith(self.folder)
            if arguments[1] not in _CODE or own or not self._is_own(_frame(2)):
                return
            what = f"{getattr(arguments[0], '__qualname__', what)}.{arguments[1]}"
        elif event == "import":
            if what.partition(".")[0] != "assay":
                return
        elif event == "sys._getframe":
            if not (self._is_own(_frame(2)) or _frame(2).f_globals.get("__name__") in ("inspect", "traceback")):
                return
        elif event == "os.mkdir":
            self.created.add(_real(os.fsdecode(arguments[0])))
            return
        elif event in ("os.kill", "os.killpg"):
            if arguments[0] not in (os.getppid(), 0, 1, -1):
                return  # a process of its own
        elif event in _NETWORK and getattr(arguments[0], "family", None) == socket.AF_UNIX:
            return  # processes of its own
        elif event == "ctypes.dlopen":
            if arguments[0] and not os.path.basename(os.fsdecode(arguments[0])).startswith(_C_LIBRARIES):
                return
            what = "the C library"
        elif event.startswith("ctypes.dlsym"):
            if not _is_of_c_library(*arguments):
                return
            event, what = "ctypes.dlopen", f"the C library's {arguments[1]}"
        elif event in _FILES:
            if self._writes_outside(event, arguments):
                self._add("write", what, self._line(_frame(2), by_libraries=True))
                return
            what = self._foreign(event, arguments)
            if not what:
                return
        by = _frame(2).f_back if _frame(2).f_code is _fork_exec.__code__ else _frame(2)
        self._add(event, what, self._line(by, by_libraries=event in _FILES))

    def read_variable(self, name: Any) -> None:
        """Note that the solution reads an environment variable that no library documents."""
        if not self.active or str(name).startswith(_VARIABLES) or name in _USUAL_VARIABLES:
            return
        frame: Any = _frame(2)
        while frame is not None and _name(frame) in ("<frozen os>", "<frozen _collections_abc>"):
            frame = frame.f_back
        if frame is not None and _name(frame).startswith(self.folder):  # a library's reads are its own
            self._add("os.environ", str(name)[:80], self._line(frame, by_libraries=False))

    def _add(self, event: str, what: str, line: str) -> None:
        entry = [event, what, line]
        if line and entry not in self.events and sum(old[0] == event for old in self.events) < _MAX_EVENTS:
            self.events.append(entry)

    def _writes_outside(self, event: str, arguments: tuple[Any, ...]) -> bool:
        """Return whether a file is opened for writing that is neither in the solution's folder nor a device."""
        flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
        if isinstance(arguments[0], int) or not arguments[0] or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return False
        path = _real(os.fsdecode(_fspath(arguments[0])))
        own = (_real(os.path.dirname(self.folder)), _real(tempfile.gettempdir()), "/tmp", "/var/tmp", "/dev")
        return not any(path.startswith(root + os.sep) for root in own)

    def _foreign(self, event: str, arguments: tuple[Any, ...]) -> str:
        """Return the path that is read or listed if it is neither the solution's own nor free to read, else ""."""
        name = "." if arguments[0] is None else arguments[0]
        if isinstance(name, int) or not name:
            return ""
        path = _real(os.fsdecode(_fspath(name)))
        flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
        if flags & os.O_CREAT and not _exists(path):
            self.created.add(path)
            return ""
        if flags & os.O_ACCMODE == os.O_WRONLY:
            return ""
        own = (_real(os.path.dirname(self.folder)), *self.created)
        if any(path == root or path.startswith(root + os.sep) for root in (*own, *self.roots)):
            return ""
        if path.startswith(tuple(root for root in self.roots if root.endswith(("torchinductor_", "nvidia")))):
            return ""
        process = path.split(os.sep)
        if process[1] == "proc" and process[2:3] == [str(os.getpid())] and process[-1] in _OWN_PROC_FILES:
            return ""
        if event != "open" and _name(_frame(3)).startswith("<frozen importlib"):
            return ""  # the import system searching sys.path
        return path[:200]

    def _is_own(self, frame: Any) -> bool:
        """Return whether a frame runs the solution's text, or code that was generated at run time."""
        return _name(frame).startswith(self.folder) or not _is_module(frame)

    def _hands_out(self, frame: Any) -> bool:
        """Return whether a frame runs a function of the standard library by which the solution gets frames."""
        if frame.f_globals.get("__name__") == "inspect":
            return True
        return frame.f_code.co_name == "walk_tb" and self._is_own(frame.f_back)

    def _line(self, frame: Any, *, by_libraries: bool) -> str:
        """Return the solution's line that caused an event, "" if none did.

        The solution may act directly, through the standard library, generated code or torch's loaders; with
        ``by_libraries`` also through other libraries, except compilers, which have files of their own.
        """
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
    """Return whether a frame's code comes from the module that it claims, and was not generated at run time."""
    name, module = _name(frame), sys.modules.get(str(frame.f_globals.get("__name__")))
    if frame.f_globals is vars(_own_main):
        return frame.f_code.co_name != "<module>" or frame.f_back is None
    if module is None or vars(module) is not frame.f_globals:
        return False
    return name.startswith("<frozen") or name == str(getattr(module, "__file__", ""))


def _is_of_c_library(library: Any, name: Any) -> bool:
    """Return whether a name that is looked up in a library, or its handle, is the C library's own function there."""
    handle = getattr(library, "_handle", library)
    try:
        return bool(_symbol(handle, name) == _symbol(_C_LIBRARY, name))
    except (OSError, TypeError, ValueError):  # it isn't in both
        return False


_own_main, _other_main = sys.modules["__main__"], type(sys)("__main__")


def hide() -> None:
    """Put an empty module in this program's place: a solution finds nothing of the program by its name."""
    sys.modules["__main__"] = _other_main


watched = _Watched()
sys.addaudithook(watched.hook)


def _fork_exec(*arguments: Any) -> Any:
    """Start a program as before, and say so: `subprocess` does, others don't."""
    sys.audit("subprocess.Popen", "")
    return _fork_exec_before(*arguments)


_fork_exec_before, _posixsubprocess.fork_exec = _posixsubprocess.fork_exec, _fork_exec


class Variables(type(os.environ)):  # type: ignore[misc]
    """The environment variables, whose readers are noted."""

    def __getitem__(self, name: Any) -> Any:
        watched.read_variable(name)
        return super().__getitem__(name)


os.environ.__class__ = Variables


_SPACES: tuple[Any, ...] = (
    torch, torch.Tensor, torch.nn, torch.nn.functional, torch.testing, torch.cuda, np, np.testing, time, random,
    builtins, contextlib, gc, json, json.JSONEncoder, os, pickle, signal, threading, threading.Thread, Connection,
)  # fmt: skip
_LIBRARY = os.path.dirname(torch.__file__)
_MODULES = {name: sys.modules[name] for name in ("torch", "torch.nn", "numpy", "time", "random", "sys", "os")}
own_classes: list[type] = []
_OPERATIONS = (
    "clone", "copy_", "contiguous", "as_strided", "view", "view.dtype", "detach", "alias", "resolve_conj",
    "resolve_neg", "_to_copy", "empty.memory_format", "fill_.Scalar",
)  # fmt: skip
_dump, _handler, _pid = torch._C._dispatch_dump, signal.getsignal, os.getpid
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_SMALL = 2.0**-60
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack


def settings() -> dict[str, str]:
    """Return the current global settings that change other code's numbers, by name, as text."""
    cuda, cpu = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    convolution = getattr(torch.backends.cudnn, "conv", None)
    values = {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.is_autocast_enabled('cuda')": torch.is_autocast_enabled("cuda"),
        "torch.get_autocast_dtype('cpu')": torch.get_autocast_dtype("cpu"),
        "torch.set_flush_denormal": 5e-324 * 1.0 == 0.0,
        "the rounding mode": "to nearest" if 1.0 + _SMALL == 1.0 == 1.0 - _SMALL else "another",
        "torch.backends.cudnn.conv.fp32_precision": getattr(convolution, "fp32_precision", ""),
        "torch.backends.mkldnn.matmul.fp32_precision": getattr(cpu, "fp32_precision", ""),
        "torch.backends.cuda.matmul.fp32_precision": getattr(cuda, "fp32_precision", ""),
        "torch.backends.mkldnn.enabled": torch.backends.mkldnn.enabled,
        "torch.backends.cudnn.enabled": torch.backends.cudnn.enabled,
        "numpy.geterr()": sorted(np.geterr().items()),
    }
    for name in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ):
        values[f"torch.backends.cuda.matmul.{name}"] = getattr(cuda, name, None)
    return {name: "ieee" if str(value) == "none" else str(value) for name, value in values.items()}


def restore_settings(before: dict[str, str]) -> None:
    """Restore the default dtype and the number of threads, which the next call depends on."""
    torch.set_default_dtype(getattr(torch, before["torch.get_default_dtype()"].removeprefix("torch.")))
    torch.set_num_threads(int(before["torch.get_num_threads()"]))


def _public(name: str) -> bool:
    return name[0] != "_" or name[:2] == "__"


class Before:
    """What libraries and this program were like before the solution; `replaced` tells what it has replaced since."""

    def __init__(self) -> None:
        self.names = [dict(vars(space)) for space in _spaces()]
        self.operations = [_dump(f"aten::{name}") for name in _OPERATIONS]
        self.near = near()


def near() -> Any:
    """Return what could run between the end of a call and the copies of its results, to be compared: it takes 30 us."""
    spaces = [dict(vars(space)) for space in (builtins, gc, Connection, _own_main, *own_classes)]
    callbacks = list(gc.callbacks)
    return spaces, callbacks, _function_modes(), _dispatch_modes(), [_handler(each) for each in _SIGNALS], _pid()


def _spaces() -> tuple[Any, ...]:
    return (*_SPACES, _own_main, _other_main, *own_classes)


def replaced(before: Before) -> list[str]:
    """Restore the functions that were replaced since ``before``, of libraries only public ones; return their names."""
    _, callbacks, *modes, handlers, pid = near()
    results = [
        f"signal.{one.name}" for one, old, now in zip(_SIGNALS, before.near[4], handlers, strict=True) if now is not old
    ]
    results += ["gc.callbacks"] if callbacks != before.near[1] else []
    results += ["torch's modes"] if modes != list(before.near[2:4]) else []
    results += ["the process by a fork of it"] if pid != before.near[5] else []
    operations = zip(_OPERATIONS, before.operations, strict=True)
    results += [f"aten::{name}" for name, old in operations if _dump(f"aten::{name}") != old]
    for name, module in _MODULES.items():
        if sys.modules.get(name) is not module:
            results.append(f"sys.modules[{name!r}]")
            sys.modules[name] = module
    for space, old in zip(_spaces(), before.names, strict=True):
        now = dict(vars(space))
        for name, value in old.items():
            other, own = now.get(name), "__main__" in (space.__name__, getattr(space, "__module__", ""))
            own = own or space is Connection
            if other is value or not (own or _public(name)) or not (callable(value) or callable(other)):
                continue
            code = getattr(other, "__code__", None)
            if code is not None and code.co_filename.startswith(_LIBRARY):
                continue  # torch wraps some of its own functions when torch._dynamo is imported
            results.append(f"{'__main__.' * (own and isinstance(space, type))}{space.__name__}.{name}")
            with contextlib.suppress(Exception):
                setattr(space, name, value)
        if space is _other_main:
            results += [f"__main__.{name}" for name in now.keys() - old.keys()]
        elif isinstance(space, type):
            for name in now.keys() - old.keys():
                if _public(name) and any(name in vars(base) for base in space.__mro__[1:]):
                    results.append(f"{space.__name__}.{name}")
                    with contextlib.suppress(Exception):
                        delattr(space, name)
    return results
