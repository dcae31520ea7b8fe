"""The program that runs in a solution's process: it builds, calls, times and watches the solution.

`assay.judge.solution.solution_process` runs this file's text on its own: it imports nothing from assay at module level
(interpreted Triton kernels load the interpreter later), so a solution finds torch, NumPy and this text, and nothing
else. Requests arrive as pickles from the judging process; answers are JSON and the bytes of plain tensors (read by
`assay.runtime.tensors`), so that no object which the solution made crosses over. Functions that the answers depend on
are bound to private names before the solution is imported, because a solution may patch torch or the standard library.

Sections: audit events, changed settings and libraries, tensors as bytes, results and arguments, the host itself.
"""

import contextlib
import gc
import importlib
import json
import os
import pickle
import random
import resource
import site
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_frame, _real, _exists, _fspath = sys._getframe, os.path.realpath, os.path.lexists, os.fspath
_MAX_EVENTS = 12  # of each kind: enough to name a cheat, and a loop that opens files can't flood the answer
_STANDARD = os.path.dirname(os.__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_FILES = ("open", "os.listdir", "os.scandir", "os.rename", "os.link")
_NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo")
_INSIDE = ("tb_frame", "gi_frame", "cr_frame")
_EVENTS = frozenset((
    *_FILES, "os.mkdir", "import", "sys._getframe", "sys._current_frames", "sys.settrace", "sys.setprofile",
    "gc.get_objects", "gc.get_referrers", "gc.get_referents", "object.__getattr__",
    "subprocess.Popen", "os.system", "os.fork", "os.posix_spawn", "os.kill", "os.killpg", "ctypes.dlopen", *_NETWORK,
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
            self.created.add(_real(os.fsdecode(arguments[0])))
            return
        elif event in ("os.kill", "os.killpg"):
            if arguments[0] not in (os.getppid(), 0, 1, -1):
                return  # a process of its own
        elif event in _NETWORK and getattr(arguments[0], "family", None) == socket.AF_UNIX:
            return  # processes of its own
        elif event == "ctypes.dlopen":
            if arguments[0] and not os.path.basename(os.fsdecode(arguments[0])).startswith(("libc.", "libc-")):
                return
            what = "the C library"
        elif event in _FILES:
            if self._writes_outside(event, arguments):
                self._add("write", what, self._line(_frame(2), by_libraries=True))
                return
            what = self._foreign(event, arguments)
            if not what:
                return
        self._add(event, what, self._line(_frame(2), by_libraries=event in _FILES))

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
    if module is None or vars(module) is not frame.f_globals:
        return False
    if module.__name__ == "__main__":
        return frame.f_code.co_name != "<module>" or frame.f_back is None
    return name.startswith("<frozen") or name == str(getattr(module, "__file__", ""))


watched = _Watched()
sys.addaudithook(watched.hook)


class Variables(type(os.environ)):  # type: ignore[misc]
    """The environment variables, whose readers are noted."""

    def __getitem__(self, name: Any) -> Any:
        watched.read_variable(name)
        return super().__getitem__(name)


os.environ.__class__ = Variables


_SPACES: tuple[Any, ...] = (
    torch, torch.Tensor, torch.nn.functional, torch.testing, torch.cuda, np, np.testing, time, random,
)  # fmt: skip
_LIBRARY = os.path.dirname(torch.__file__)
_MODULES = {name: sys.modules[name] for name in ("torch", "torch.nn", "numpy", "time", "random", "sys", "os")}
own_classes: list[type] = []


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


def namespaces() -> list[dict[str, Any]]:
    """Return a snapshot of the watched libraries' and this module's names."""
    return [dict(vars(space)) for space in _spaces()]


def _spaces() -> tuple[Any, ...]:
    return (*_SPACES, sys.modules["__main__"], *own_classes)


def replaced(before: list[dict[str, Any]]) -> list[str]:
    """Restore the functions that were replaced since ``before``, of libraries only public ones; return their names."""
    results = []
    for name, module in _MODULES.items():
        if sys.modules.get(name) is not module:
            results.append(f"sys.modules[{name!r}]")
            sys.modules[name] = module
    for space, old in zip(_spaces(), before, strict=True):
        now = dict(vars(space))
        for name, value in old.items():
            other, own = now.get(name), "__main__" in (space.__name__, getattr(space, "__module__", ""))
            if other is value or not (own or _public(name)) or not (callable(value) or callable(other)):
                continue
            code = getattr(other, "__code__", None)
            if code is not None and code.co_filename.startswith(_LIBRARY):
                continue  # torch wraps some of its own functions when torch._dynamo is imported
            results.append(f"{'__main__.' * (own and isinstance(space, type))}{space.__name__}.{name}")
            with contextlib.suppress(Exception):
                setattr(space, name, value)
        if isinstance(space, type):
            for name in now.keys() - old.keys():
                if _public(name) and any(name in vars(base) for base in space.__mro__[1:]):
                    results.append(f"{space.__name__}.{name}")
                    with contextlib.suppress(Exception):
                        delattr(space, name)
    return results


TENSOR, NEW, DETACH, CLONE = torch.Tensor, torch.empty, torch.Tensor.detach, torch.Tensor.clone
CONTIGUOUS, STRIDED, VIEW = torch.Tensor.contiguous, torch.Tensor.as_strided, torch.Tensor.view
NUMPY, CPU, COPY, TO = torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.copy_, torch.Tensor.to
UINT8, SUBCLASS, ADDRESS = torch.uint8, torch.Tensor.as_subclass, torch.Tensor.data_ptr
_dumps = json.dumps


def leaves(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, TENSOR):
        return [tree]
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in leaves(part)]
    return []


def mapped(tree: Any, function: Any) -> Any:
    if isinstance(tree, TENSOR):
        return function(tree)
    if isinstance(tree, list | tuple):
        made = [mapped(part, function) for part in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    if isinstance(tree, dict):
        return {name: mapped(part, function) for name, part in tree.items()}
    return tree


def content_of(tensor: torch.Tensor) -> Any:
    """Return a contiguous CPU copy of a tensor, and its bytes."""
    plain = CONTIGUOUS(CPU(DETACH(SUBCLASS(tensor, TENSOR))))
    flat = STRIDED(plain, (plain.numel(),), (1,))
    return plain, NUMPY(VIEW(flat, UINT8)).tobytes()


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's elements and the one after the last."""
    if tensor.numel() == 0:
        return (0, 0)
    span = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return (ADDRESS(tensor), ADDRESS(tensor) + span * tensor.element_size())


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    first, second = _address_range(a), _address_range(b)
    return a.device == b.device and first[0] < second[1] and second[0] < first[1]


class Answer:
    """An answer: JSON, followed by the bytes of the tensors that it refers to."""

    def __init__(self) -> None:
        self.contents: list[bytes] = []

    def tensor(self, value: torch.Tensor) -> dict[str, Any]:
        plain, content = content_of(value)
        self.contents.append(content)
        return {"tensor": [str(plain.dtype).removeprefix("torch."), list(plain.shape), len(content)]}

    def packed(self, value: Any) -> bytes:
        head = _dumps(value).encode()
        return b"".join([len(head).to_bytes(8, "little"), head, *self.contents])


def is_wrapped(value: Any) -> bool:
    """Return whether a tensor subclass still holds ordinary data (it doesn't override ``__torch_dispatch__``)."""
    return isinstance(value, TENSOR) and type(value).__torch_dispatch__ is TENSOR.__torch_dispatch__


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and content_of(a)[1] == content_of(b)[1]


_roll, _flat, _as = torch.roll, torch.Tensor.flatten, torch.Tensor.view_as
_EMPTY = (
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
)  # fmt: skip


def parts(result: Any, names: tuple[str, ...] = ()) -> tuple[list[Any], str]:
    """Flatten lists, tuples and dicts, without None; return the values and their nesting as text, ``(*,(*,*))``.

    A dict whose keys are ``names`` is read in their order. A list of one value is the same as the value.
    """
    if isinstance(result, dict):
        known = set(names) == set(result)
        result = [result[name] for name in names] if known else list(result.values())
    if not isinstance(result, list | tuple):
        return ([], "") if result is None else ([result], "*")
    inner = [parts(part) for part in result]
    flat = [leaf for results, _ in inner for leaf in results]
    nested = [words for _, words in inner if words]
    return flat, nested[0] if len(nested) == 1 else f"({','.join(nested)})" if nested else ""


def roll_into(target: Any, base: Any, indices: list[int], shift: int) -> None:
    """Copy ``base`` into the memory of ``target``; roll the tensors at ``indices`` by ``shift`` elements of memory.

    On the CPU the copy bypasses torch, so that no version counter shows the change.
    """
    for index, (now, old) in enumerate(zip(leaves(target), leaves(base), strict=True)):
        by = shift % old.numel() if index in indices and old.numel() else 0
        if now.device.type != "cpu":
            with _no_grad():
                COPY(now, _as(_roll(_flat(old), by), old) if by else old)
        elif old.numel():
            to, of = (NUMPY(VIEW(STRIDED(DETACH(x), (x.numel(),), (1,)), UINT8)) for x in (now, old))
            cut = by * old.element_size()
            to[:cut] = of[len(of) - cut :]
            to[cut:] = of[: len(of) - cut]


def litter(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Fill and free tensors of NaN like the results: elements that a kernel never writes show if memory is reused."""
    dirt = [NEW(shape, dtype=dtype) for shape, dtype in shapes if dtype.is_floating_point for _ in range(2)]
    for tensor in dirt:
        tensor.fill_(float("nan"))


class Filled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, uninitialised floating-point tensors hold ``value``."""

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = value
        if "torch._dynamo" in sys.modules:
            Filled.__torch_dispatch__ = _not_compiled  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise entering the mode imports torch._dynamo, which takes seconds (torch 2.13)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and result.is_floating_point() and result.device.type != "meta":
            result.fill_(self.value)
        return result


_not_compiled = torch._disable_dynamo(Filled.__torch_dispatch__)  # type: ignore[attr-defined]


def unbound(module: Any, registered: dict[str, Any]) -> dict[str, Any]:
    """Return floating-point tensors that a module holds as plain attributes, not ``registered``, by path."""
    known = {ADDRESS(value) for value in registered.values()}
    result: dict[str, Any] = {}

    def walk(value: Any, path: str, depth: int) -> None:
        if isinstance(value, TENSOR):
            plain = type(value) in (TENSOR, torch.nn.Parameter) and value.layout == torch.strided
            if plain and value.is_floating_point() and value.numel() and ADDRESS(value) not in known:
                result.setdefault(path, value)
        elif depth and isinstance(value, dict):
            for name, part in value.items():
                walk(part, f"{path}.{name}", depth - 1)
        elif depth and isinstance(value, list | tuple):
            for number, part in enumerate(value):
                walk(part, f"{path}.{number}", depth - 1)

    for prefix, child in module.named_modules():
        for name, value in vars(child).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                walk(value, f"{prefix}.{name}".lstrip("."), 2)
    return {name: value for name, value in result.items() if name not in registered}


def limit(memory: int) -> None:
    """Let this process and its children hold ``memory`` bytes more, start so many, and write files of so many bytes.

    0 sets no limit of memory. No limit can be raised again: what a solution allocates at once is refused before the
    judging process looks. See `assay.runtime.process.limit_memory`.
    """
    limits = {resource.RLIMIT_FSIZE: _FILE_SIZE, resource.RLIMIT_CORE: 0}
    if os.getppid() == 1:  # in a sandbox: elsewhere the user's other processes count too
        limits[resource.RLIMIT_NPROC] = _PROCESSES
    if memory and resource.getrlimit(resource.RLIMIT_DATA)[1] == resource.RLIM_INFINITY:
        with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as pages:
            limits[resource.RLIMIT_DATA] = int(pages.read().split()[5]) * os.sysconf("SC_PAGE_SIZE") + memory
    for kind, most in limits.items():
        with contextlib.suppress(OSError, ValueError):  # a lower limit is in force
            resource.setrlimit(kind, (most, most))


_no_grad, _seed, _clock, _sleep, _cpu_times = torch.no_grad, torch.manual_seed, time.perf_counter, time.sleep, os.times
_threads, _abspath, _module = threading.enumerate, os.path.abspath, torch.nn.Module
_disable_gc, _enable_gc = gc.disable, gc.enable
_PROCESSES = 4096  # threads and processes of the user: torch.compile starts many
_FILE_SIZE = 1 << 32  # bytes
_PAUSE = 0.03  # seconds after a call in which late writes show; the CPU time used in it shows background threads


class _Host:
    """A solution, its arguments by name, and its results. Public methods answer one kind of request each."""

    def __init__(self) -> None:
        self.callable: Any = None
        self.style, self.device = "arguments", "cpu"
        self.stored: dict[str, Any] = {}
        self.results: list[Any] = []
        self.timed: list[Any] = []
        self.base: dict[str, Any] = {}
        self.unbound: dict[str, Any] = {}
        self.before = namespaces()
        self.settings = settings()
        self.alive = {thread.ident for thread in _threads()}
        self.surroundings: Any = contextlib.nullcontext
        self.interprets = False

    def build(self, request: dict[str, Any]) -> Any:
        """Import the solution's main file and construct its callable."""
        folder, before = _abspath(request["folder"]), watched.folder
        for name, text in request["files"].items():
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        limit(request["memory"])
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(before):
                del sys.modules[name]
        sys.path[:] = [folder, *(path for path in sys.path if path != before)]
        watched.folder = folder
        os.chdir(folder)
        self.stored, self.base, self.results, self.timed = {}, {}, [], []
        self.style, self.device = request["style"], request["device"]
        torch.set_num_threads(request["threads"])
        if self.callable is None:
            self.settings = settings()
        self.interprets = request["pretend"]
        if self.interprets:
            from assay.interpreter import faithful

            self.surroundings = lambda: faithful(pretend="cuda")
            with self.surroundings():
                pass  # imports of the interpreter itself must not count as the solution's
            self.before = namespaces()
        random.seed(request["seed"])
        np.random.seed(request["seed"])
        _seed(request["seed"])
        with self._watching():
            result = getattr(importlib.import_module(request["module"]), request["entry"])
            if request["kind"] == "class":
                _seed(request["seed"])
                result = result(*request["init"], **request["init_named"])
                result = result.to(self.device) if hasattr(result, "to") else result
                if request["evaluating"] and hasattr(result, "eval"):
                    result.eval()
        self.callable = result
        answer, seen = Answer(), self._observations()
        state = result.state_dict() if isinstance(result, _module) else {}
        self.unbound = unbound(result, state) if isinstance(result, _module) else {}
        tensors = {"state": state, "unbound": self.unbound}
        content = {
            key: {"dict": {name: answer.tensor(x) for name, x in group.items()}} for key, group in tensors.items()
        }
        return answer, {**content, "seen": {"dict": seen}}

    def load(self, request: dict[str, Any]) -> Any:
        """Copy other parameters, by name, into the present ones."""
        plain = {name: value for name, value in request["state"].items() if name in self.unbound}
        with self._watching(), _no_grad():
            for name, value in plain.items():
                COPY(self.unbound[name], value)
            registered = {name: value for name, value in request["state"].items() if name not in plain}
            if registered:
                self.callable.load_state_dict(registered, strict=False)
        return Answer(), {}

    def store(self, request: dict[str, Any]) -> Any:
        """Store arguments by name.

        ``how``: "new" memory; "plain" copies into the previous arguments; "quiet" does so without a change of their
        version counters; "objects" like "quiet", and makes new tensor objects of the same memory.
        """
        tree = mapped(request["arguments"], lambda tensor: CLONE(TO(tensor, self.device)))
        old = self.stored.get(request["name"])
        self.base.pop(request["name"], None)
        if request["how"] == "new" or old is None:
            self.stored[request["name"]] = tree
            return Answer(), {}
        now, new = leaves(old), leaves(tree)
        for target, value in zip(now, new, strict=True):
            if request["how"] == "plain" or target.device.type != "cpu":
                with _no_grad():
                    COPY(target, value)
            elif value.numel():  # through NumPy, so that torch's version counter stays
                flat = NUMPY(VIEW(STRIDED(DETACH(target), (target.numel(),), (1,)), UINT8))
                flat[:] = NUMPY(VIEW(STRIDED(CONTIGUOUS(value), (value.numel(),), (1,)), UINT8))
        if request["how"] == "objects":
            self.stored[request["name"]] = mapped(
                old, lambda tensor: STRIDED(DETACH(tensor), tensor.shape, tensor.stride())
            )
        return Answer(), {}

    def call(self, request: dict[str, Any]) -> Any:
        """Call the solution once; answer its results and the observations."""
        arguments = self.stored[request["name"]]
        held = [CLONE(leaf) for leaf in leaves(arguments)]
        litter(request["dirt"])
        with contextlib.nullcontext() if request["fill"] is None else Filled(request["fill"]):
            outputs, nesting = parts(self._run(self._prepare(arguments, request)), request["into"])
        answer, seen = Answer(), self._observations()
        seen["nesting"] = nesting
        plain, odd = self._plain(outputs)
        copies = [CLONE(DETACH(value)) for value in plain]
        seen["odd"] = odd
        seen["mutated"] = [
            k for k, (a, b) in enumerate(zip(leaves(arguments), held, strict=True)) if not same_bits(a, b)
        ]
        seen["aliases"] = [
            [k, j] for k, value in enumerate(plain) for j, leaf in enumerate(leaves(arguments)) if overlap(value, leaf)
        ]
        seen["stale"] = [
            k for k, value in enumerate(plain) for old in self.results for other in old if overlap(value, other)
        ]
        content = [answer.tensor(value) for value in copies]
        if request["pause"]:
            used = sum(_cpu_times()[:2])
            _sleep(_PAUSE)
            seen["late"] = [k for k, (a, b) in enumerate(zip(plain, copies, strict=True)) if not same_bits(a, b)]
            seen["busy"] = sum(_cpu_times()[:2]) - used
            seen["threads"] = [thread.name for thread in _threads() if thread.ident not in self.alive]
        self.results = [plain] if request["keep"] else []
        return answer, {"outputs": content, "seen": {"dict": seen}}

    def time(self, request: dict[str, Any]) -> Any:
        """Time a call for each of ``shifts``; arguments of ``names`` take turns and are rolled by the shift.

        No two calls have the same numbers. Results are copied as each call returns, for `fetch`.
        """
        names, seconds, self.results = request["names"], list[float](), []
        self.timed = []
        for count, shift in enumerate(request["shifts"]):
            name = names[count % len(names)]
            arguments = self.stored[name]
            if name not in self.base:
                self.base[name] = mapped(arguments, CLONE)
            roll_into(arguments, self.base[name], request["rolled"], shift)
            work = self._prepare(arguments, {**request, "seed": request["seeds"][count % len(names)]})
            began = _clock()
            result = self._run(work)
            if self.device != "cpu":
                torch.cuda.synchronize()
            seconds.append(_clock() - began)
            plain, odd = self._plain(parts(result, request["into"])[0])
            own = [k for k, value in enumerate(plain) if not any(overlap(value, x) for x in leaves(arguments))]
            self.timed.append(([CLONE(DETACH(value)) for value in plain], plain, odd, own))
        return Answer(), {"seconds": seconds, "seen": {"dict": self._observations()}}

    def fetch(self, request: dict[str, Any]) -> Any:
        """Answer the results of the timed calls with these numbers, and which of them changed since."""
        answer, result = Answer(), []
        for number in request["numbers"]:
            copies, plain, odd, own = self.timed[number]
            late = [k for k in own if not same_bits(plain[k], copies[k])]
            seen = {"dict": {"odd": odd, "late": late}}
            result.append({"dict": {"outputs": [answer.tensor(value) for value in copies], "seen": seen}})
        return answer, {"timed": result}

    def compiled(self, request: dict[str, Any]) -> Any:
        """Replace the callable by what `torch.compile` makes of it."""
        self.callable = torch.compile(self.callable)
        return Answer(), {}

    def _prepare(self, arguments: Any, request: dict[str, Any]) -> Any:
        """Seed the random generators, allocate results where they are handed in, and return the call to make."""
        if request.get("seed") is not None:
            random.seed(request["seed"])
            np.random.seed(request["seed"] % 2**32)
            _seed(request["seed"])
        if self.style == "data":
            return lambda: self.callable(arguments[0] if len(arguments) == 1 else tuple(arguments))
        if self.style != "destination":
            return lambda: self.callable(*arguments)
        into = [NEW(shape, dtype=dtype, device=self.device) for shape, dtype in request["results"]]
        for tensor in into:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
        return lambda: (self.callable(*arguments, *into), into)[1]

    def _run(self, work: Any) -> Any:
        """Make a call without garbage collection, as timed calls need, and return its result."""
        _disable_gc()
        try:
            with self._watching(), _no_grad():
                return work()
        finally:
            _enable_gc()

    @staticmethod
    def _plain(outputs: list[Any]) -> tuple[list[torch.Tensor], list[list[Any]]]:
        """Return the outputs as plain tensors, and [index, class] of the ones that are not plain."""
        plain, odd = [], []
        for index, value in enumerate(outputs):
            if type(value) in (int, float, bool):
                value = torch.tensor(value)
            if type(value) not in (TENSOR, torch.nn.Parameter) or value.layout != torch.strided or value.is_meta:
                odd.append([index, type(value).__name__])
                value = SUBCLASS(DETACH(value), TENSOR) if is_wrapped(value) else NEW(0)
            plain.append(value)
        return plain, odd

    def _observations(self) -> dict[str, Any]:
        now = settings()
        changed = [[name, old, now[name]] for name, old in self.settings.items() if now[name] != old]
        if changed:
            restore_settings(self.settings)
            self.settings = settings()
        events, watched.events = watched.events, []
        if "assay" in sys.modules and not self.interprets:
            events.append(["import", "assay", "some line"])
        return {"settings": changed, "replaced": replaced(self.before), "events": events}

    @contextlib.contextmanager
    def _watching(self) -> Any:
        with self.surroundings():
            watched.active = True  # stays on: threads may go on after a call
            yield


own_classes += [_Host, type(watched)]


def _serve(pipe: Any) -> None:
    host = _Host()
    while True:
        try:
            request = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer, content = getattr(host, request["do"])(request)
        except BaseException as error:
            answer, content = Answer(), {"error": _error_text(error), "seen": {"dict": host._observations()}}
        pipe.send_bytes(b"a" + answer.packed({"dict": content}))


def _error_text(error: BaseException) -> str:
    """Return an error in one line, with the solution's line that raised it."""
    words = " ".join(str(error).split()) or "no message"
    words = words if len(words) <= 600 else f"{words[:300]} ... {words[-300:]}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(watched.folder)]
    position = f" (at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {words}{position}"
