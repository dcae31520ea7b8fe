"""The program that runs in a solution's process: it builds, calls, times and watches the solution.

`assay.judge.solution.solution_process` runs this file's text, behind that of `watched`, on its own: it imports nothing
from assay at module level (interpreted Triton kernels load the interpreter later), so a solution finds torch, NumPy and
this text, and nothing else. Requests arrive as pickles from the judging process; answers are JSON and the bytes of
plain tensors (read by `assay.runtime.tensors`), so that no object which the solution made crosses over. Functions that
the answers depend on are bound to private names before the solution is imported, because a solution may patch torch or
the standard library.

Sections: tensors as bytes, results and arguments, the host itself.
"""

import contextlib
import gc
import importlib
import json
import os
import pickle
import random
import resource
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from assay.judge.solution.watched import (
    Before,
    hide,
    near,
    own_classes,
    replaced,
    restore_settings,
    settings,
    watched,
)  # fmt: skip

TENSOR, NEW, DETACH, CLONE = torch.Tensor, torch.empty, torch.Tensor.detach, torch.Tensor.clone
CONTIGUOUS, STRIDED, VIEW = torch.Tensor.contiguous, torch.Tensor.as_strided, torch.Tensor.view
NUMPY, CPU, COPY, TO = torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.copy_, torch.Tensor.to
UINT8, SUBCLASS, ADDRESS = torch.uint8, torch.Tensor.as_subclass, torch.Tensor.data_ptr
MULTIPLY, PARAMETER = torch.Tensor.mul, torch.nn.Parameter
PLAIN, POSITIVE = torch.Tensor.resolve_conj, torch.Tensor.resolve_neg  # of views whose signs are changed when read
# The encoder in C, no part of which can be replaced.
_encoder: Any = json.encoder
_encoded = _encoder.c_make_encoder(None, None, _encoder.c_encode_basestring_ascii, None, ": ", ", ", False, False, True)
_MOST_RESULTS = 1000


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
    plain = CONTIGUOUS(POSITIVE(PLAIN(CPU(DETACH(SUBCLASS(tensor, TENSOR))))))
    flat = STRIDED(plain, (plain.numel(),), (1,))
    return plain, NUMPY(VIEW(flat, UINT8)).tobytes()


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's elements and the one after the last."""
    if tensor.numel() == 0:
        return (0, 0)
    span = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return (ADDRESS(tensor), ADDRESS(tensor) + span * tensor.element_size())


def overlaps(some: list[torch.Tensor], others: list[torch.Tensor]) -> list[list[int]]:
    """Return [index, index] of each pair of tensors of two lists that share memory."""
    both = [[(*_address_range(tensor), hash(tensor.device)) for tensor in tensors] for tensors in (some, others)]
    a, b = (_array(spans, "int64").reshape(-1, 3) for spans in both)
    a = a[:, None]
    shared = (a[..., 0] < b[:, 1]) & (b[:, 0] < a[..., 1]) & (a[..., 2] == b[:, 2])
    return [list(pair) for pair in zip(*(indices.tolist() for indices in shared.nonzero()), strict=True)]


class Answer:
    """An answer: JSON, followed by the bytes of the tensors that it refers to."""

    def __init__(self) -> None:
        self.contents: list[bytes] = []

    def tensor(self, value: torch.Tensor) -> dict[str, Any]:
        plain, content = content_of(value)
        self.contents.append(content)
        return {"tensor": [str(plain.dtype).removeprefix("torch."), list(plain.shape), len(content)]}

    def packed(self, value: Any) -> bytes:
        head = "".join(_encoded(value, 0)).encode()
        return b"".join([len(head).to_bytes(8, "little"), head, *self.contents])


def is_wrapped(value: Any) -> bool:
    """Return whether a tensor subclass still holds ordinary data (it doesn't override ``__torch_dispatch__``)."""
    return isinstance(value, TENSOR) and type(value).__torch_dispatch__ is TENSOR.__torch_dispatch__


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and content_of(a)[1] == content_of(b)[1]


_items, _listed, _tupled, _array = dict.items, list.__iter__, tuple.__iter__, np.array
_roll, _flat, _as = torch.roll, torch.Tensor.flatten, torch.Tensor.view_as
_EMPTY = (
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
)  # fmt: skip


def parts(result: Any, names: tuple[str, ...] = ()) -> tuple[list[Any], str]:
    """Flatten lists, tuples and dicts, without None; return the values and their nesting as text, ``(*,(*,*))``.

    A dict whose keys are ``names`` is read in their order. A list of one value is the same as the value. What a class
    of its own makes of its content, which would be computed only now, isn't asked for.
    """
    kind = type(result)
    if issubclass(kind, dict):
        pairs = list(_items(result))
        result = [value for _, value in pairs]
        # No other key is hashed or compared: what its class does would be done only now.
        content = dict(pairs) if all(type(key) is str for key, _ in pairs) else {}
        if names and set(names) == set(content):
            result = [content[name] for name in names]
    elif issubclass(kind, list | tuple):
        result = list(_listed(result) if issubclass(kind, list) else _tupled(result))
    else:
        return ([], "") if result is None else ([result], "*")
    inner = [parts(part) for part in result]
    flat = [leaf for results, _ in inner for leaf in results]
    nested = [words for _, words in inner if words]
    return flat, nested[0] if len(nested) == 1 else f"({','.join(nested)})" if nested else ""


def roll_into(target: Any, base: Any, indices: list[int], shift: int, scaled: list[int], factor: float) -> None:
    """Copy ``base`` into the memory of ``target``; roll the tensors at ``indices`` by ``shift`` elements of memory, and
    multiply those at ``scaled`` by ``factor``.

    On the CPU the copy bypasses torch, so that no version counter shows the change.
    """
    for index, (now, old) in enumerate(zip(leaves(target), leaves(base), strict=True)):
        if factor != 1.0 and index in scaled:
            with _no_grad():
                old = MULTIPLY(old, factor)
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
            plain = type(value) in (TENSOR, PARAMETER) and value.layout == torch.strided
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
_threads, _abspath, _module, _open = threading.enumerate, os.path.abspath, torch.nn.Module, open
_disable_gc, _enable_gc, _synchronize, _library = gc.disable, gc.enable, torch.cuda.synchronize, torch.library.Library
_PROCESSES = 4096  # threads and processes of the user: torch.compile starts many
_FILE_SIZE = 1 << 32  # bytes
_PAUSE = 0.03  # seconds after a call in which late writes show; the CPU time used in it shows background threads


def _would_run(threads: list[threading.Thread]) -> bool:
    """Return whether one of these threads wants a processor, each of three times."""
    wanting = {thread.native_id for thread in threads}
    for _ in range(3 if wanting else 0):
        now = set()
        for task in wanting:
            with contextlib.suppress(OSError), _open(f"/proc/self/task/{task}/stat", "rb") as file:
                now |= {task} if file.read().rpartition(b")")[2].split()[:1] == [b"R"] else set()
        wanting = now
        _sleep(_PAUSE / 3)
    return bool(wanting)


@contextlib.contextmanager
def _without_gc() -> Any:
    """Collect no garbage inside: a timed call isn't held up, and no finaliser runs before its results are copied."""
    _disable_gc()
    try:
        yield
    finally:
        _enable_gc()


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
        self.before = Before()
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
                for value in list(vars(module).values()):
                    if type(value) is _library:
                        value._destroy()  # type: ignore[no-untyped-call]  # its operations can be registered again
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
            self.before = Before()
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
        with _without_gc():
            return self._call(request)

    def _call(self, request: dict[str, Any]) -> Any:
        arguments = self.stored[request["name"]]
        held = [CLONE(leaf) for leaf in leaves(arguments)]
        litter(request["dirt"])
        with contextlib.nullcontext() if request["fill"] is None else Filled(request["fill"]):
            outputs, nesting = parts(self._run(self._prepare(arguments, request)), request["into"])
        plain, odd = self._plain(outputs)
        copies = [CLONE(DETACH(value)) for value in plain]
        answer, seen = Answer(), self._observations()
        seen["nesting"], seen["odd"] = nesting, odd
        seen["mutated"] = [
            k for k, (a, b) in enumerate(zip(leaves(arguments), held, strict=True)) if not same_bits(a, b)
        ]
        seen["aliases"] = overlaps(plain, leaves(arguments))
        seen["stale"] = [k for old in self.results for k, _ in overlaps(plain, old)]
        content = [answer.tensor(value) for value in copies]
        if request["pause"]:
            used = sum(_cpu_times()[:2])
            _sleep(_PAUSE)
            seen["late"] = [k for k, (a, b) in enumerate(zip(plain, copies, strict=True)) if not same_bits(a, b)]
            threads = [thread for thread in _threads() if thread.ident not in self.alive]
            # On a busy machine a thread that would work may get no processor meanwhile.
            seen["busy"] = _PAUSE if _would_run(threads) else sum(_cpu_times()[:2]) - used
            seen["threads"] = [thread.name for thread in threads]
        self.results = [plain] if request["keep"] else []
        return answer, {"outputs": content, "seen": {"dict": seen}}

    def time(self, request: dict[str, Any]) -> Any:
        """Time a call for each of ``changes``, a shift and a factor, by which the arguments of ``names`` are rolled and
        multiplied in turn.

        No two calls have the same numbers. Results are copied as each call returns, for `fetch`.
        """
        names, seconds, self.results = request["names"], list[float](), []
        self.timed, changed = [], dict[str, None]()
        for count, (shift, factor) in enumerate(request["changes"]):
            name = names[count % len(names)]
            arguments = self.stored[name]
            if name not in self.base:
                self.base[name] = mapped(arguments, CLONE)
            roll_into(arguments, self.base[name], request["rolled"], shift, request["scaled"], factor)
            work = self._prepare(arguments, {**request, "seed": request["seeds"][count % len(names)]})
            with _without_gc():
                began = _clock()
                result = self._run(work)
                if self.device != "cpu":
                    _synchronize()
                seconds.append(_clock() - began)
                if near() != self.before.near:
                    changed |= dict.fromkeys(replaced(self.before))
                plain, odd = self._plain(parts(result, request["into"])[0])
                theirs = {k for k, _ in overlaps(plain, leaves(arguments))}
                own = [k for k in range(len(plain)) if k not in theirs]
                self.timed.append(([CLONE(DETACH(value)) for value in plain], plain, odd, own))
        seen = self._observations()
        seen["replaced"] += changed.keys() - {*seen["replaced"]}
        return Answer(), {"seconds": seconds, "seen": {"dict": seen}}

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
        """Make a call and return its result."""
        with self._watching(), _no_grad():
            return work()

    @staticmethod
    def _plain(outputs: list[Any]) -> tuple[list[torch.Tensor], list[list[Any]]]:
        """Return the outputs as plain tensors, and [index, class] of the ones that are not plain."""
        plain, odd = [], []
        for index, value in enumerate(outputs[:_MOST_RESULTS]):
            kind = type(value)  # whose class may compare itself to others as it likes
            if kind is int or kind is float or kind is bool:
                value, kind = torch.tensor(value), TENSOR
            if not (kind is TENSOR or kind is PARAMETER) or value.layout != torch.strided or value.is_meta:
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
    hide()
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
