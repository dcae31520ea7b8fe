"""The process that a solution lives in: it is built here, called, timed and watched. Run as a text, alone.

Nothing of this project is imported, unless interpreted Triton kernels need it: what stands here, and in `host_watch`
and `host_bytes`, is one text, and all that a solution finds beside torch. Questions come as pickles from the process
that judges; answers are JSON and the bytes of plain tensors (as `assay.runtime.tensors` reads them), so that no object
of the solution's making ever crosses.
"""

import contextlib
import gc
import importlib
import os
import pickle
import random
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from assay.verify.judging.host_bytes import (
    CLONE,
    CONTIGUOUS,
    COPY,
    DETACH,
    NEW,
    NUMPY,
    STRIDED,
    SUBCLASS,
    TENSOR,
    TO,
    UINT8,
    VIEW,
    Answer,
    is_wrapped,
    leaves,
    mapped,
    overlap,
    same_bits,
)  # fmt: skip
from assay.verify.judging.host_watch import namespaces, put_back, replaced, settings, watched

_no_grad, _seed, _clock, _sleep, _stats = torch.no_grad, torch.manual_seed, time.perf_counter, time.sleep, os.times
_threads, _abspath, _module = threading.enumerate, os.path.abspath, torch.nn.Module
_EMPTY = (
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
)  # fmt: skip
_PAUSE = 0.03  # seconds in which what comes late may come


class _Host:
    """A solution, its arguments by name, and what it has given."""

    def __init__(self) -> None:
        self.callable: Any = None
        self.style, self.device = "arguments", "cpu"
        self.placed: dict[str, Any] = {}
        self.results: list[Any] = []
        self.timed: list[Any] = []
        self.before = namespaces()
        self.settings = settings()
        self.alive = {thread.ident for thread in _threads()}
        self.surroundings: Any = contextlib.nullcontext

    def build(self, ask: dict[str, Any]) -> Any:
        """Write the files, import the main one, construct what is to be called."""
        folder, before = _abspath(ask["folder"]), watched.folder
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(before):
                del sys.modules[name]
        sys.path[:] = [folder, *(path for path in sys.path if path != before)]
        watched.folder = folder
        os.chdir(folder)
        self.placed, self.results, self.timed = {}, [], []
        self.style, self.device = ask["style"], ask["device"]
        torch.set_num_threads(ask["threads"])
        if self.callable is None:
            self.settings = settings()
        if ask["pretend"]:
            from assay.interpreter import faithful

            self.surroundings = lambda: faithful(pretend="cuda")
            with self.surroundings():
                pass  # what it imports of its own is none of the solution's doing
            self.before = namespaces()
        random.seed(ask["seed"])
        np.random.seed(ask["seed"])
        _seed(ask["seed"])
        with self._watching():
            found = getattr(importlib.import_module(ask["module"]), ask["entry"])
            if ask["kind"] == "class":
                _seed(ask["seed"])
                found = found(*ask["init"], **ask["init_named"])
                found = found.to(self.device) if hasattr(found, "to") else found
                if ask["evaluating"] and hasattr(found, "eval"):
                    found.eval()
        self.callable = found
        answer, seen = Answer(), self._seen()
        state = found.state_dict() if isinstance(found, _module) else {}
        return answer, {
            "state": {"dict": {name: answer.tensor(value) for name, value in state.items()}},
            "seen": {"dict": seen},
        }

    def load(self, ask: dict[str, Any]) -> Any:
        """Other parameters, by name, into the memory of the present ones."""
        with self._watching(), _no_grad():
            self.callable.load_state_dict(ask["state"], strict=False)
        return Answer(), {}

    def place(self, ask: dict[str, Any]) -> Any:
        """Keep arguments by name: in new memory, or in that of those before ("plain", "quiet", "objects")."""
        tree = mapped(ask["arguments"], lambda tensor: CLONE(TO(tensor, self.device)))
        old = self.placed.get(ask["name"])
        if ask["how"] == "new" or old is None:
            self.placed[ask["name"]] = tree
            return Answer(), {}
        now, new = leaves(old), leaves(tree)
        for target, value in zip(now, new, strict=True):
            if ask["how"] == "plain" or target.device.type != "cpu":
                with _no_grad():
                    COPY(target, value)
            elif value.numel():  # so that no counter of versions tells
                flat = NUMPY(VIEW(STRIDED(DETACH(target), (target.numel(),), (1,)), UINT8))
                flat[:] = NUMPY(VIEW(STRIDED(CONTIGUOUS(value), (value.numel(),), (1,)), UINT8))
        if ask["how"] == "objects":
            self.placed[ask["name"]] = mapped(
                old, lambda tensor: STRIDED(DETACH(tensor), tensor.shape, tensor.stride())
            )
        return Answer(), {}

    def call(self, ask: dict[str, Any]) -> Any:
        """One call, its results, and what was noticed."""
        arguments = self.placed[ask["name"]]
        held = [CLONE(leaf) for leaf in leaves(arguments)]
        _litter(ask["dirt"])
        with contextlib.nullcontext() if ask["fill"] is None else _Filled(ask["fill"]):
            _, outputs = self._called(arguments, ask)
        answer, seen = Answer(), self._seen()
        plain, odd = self._checked(outputs)
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
        if ask["pause"]:
            used = sum(_stats()[:2])
            _sleep(_PAUSE)
            seen["late"] = [k for k, (a, b) in enumerate(zip(plain, copies, strict=True)) if not same_bits(a, b)]
            seen["busy"] = sum(_stats()[:2]) - used
            seen["threads"] = [thread.name for thread in _threads() if thread.ident not in self.alive]
        self.results = [plain] if ask["keep"] else []
        return answer, {"outputs": content, "seen": {"dict": seen}}

    def time(self, ask: dict[str, Any]) -> Any:
        """Calls with the arguments of these names in turn; their results are kept for `fetch`."""
        names, seconds, self.results = ask["names"], list[float](), []
        self.timed = []
        gc.disable()
        try:
            for count in range(ask["count"]):
                arguments = self.placed[names[count % len(names)]]
                began = _clock()
                _, outputs = self._called(arguments, ask)
                if self.device != "cpu":
                    torch.cuda.synchronize()
                seconds.append(_clock() - began)
                self.timed.append(outputs)
        finally:
            gc.enable()
        return Answer(), {"seconds": seconds, "seen": {"dict": self._seen()}}

    def fetch(self, ask: dict[str, Any]) -> Any:
        """What the timed calls of these numbers gave."""
        answer, found = Answer(), []
        for number in ask["numbers"]:
            plain, odd = self._checked(self.timed[number])
            found.append({"dict": {"outputs": [answer.tensor(value) for value in plain], "odd": odd}})
        return answer, {"timed": found}

    def compiled(self, ask: dict[str, Any]) -> Any:
        """From now on what torch's compiler makes of it."""
        self.callable = torch.compile(self.callable)
        return Answer(), {}

    def _called(self, arguments: Any, ask: dict[str, Any]) -> tuple[Any, list[Any]]:
        if ask.get("seed") is not None:
            random.seed(ask["seed"])
            np.random.seed(ask["seed"] % 2**32)
            _seed(ask["seed"])
        with self._watching(), _no_grad():
            if self.style == "data":
                result = self.callable(arguments[0] if len(arguments) == 1 else tuple(arguments))
            elif self.style == "destination":
                into = [NEW(shape, dtype=dtype, device=self.device) for shape, dtype in ask["results"]]
                for tensor in into:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
                self.callable(*arguments, *into)
                result = into
            else:
                result = self.callable(*arguments)
        outputs = list(result.values()) if isinstance(result, dict) else result
        outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        return result, outputs

    @staticmethod
    def _checked(outputs: list[Any]) -> tuple[list[torch.Tensor], list[list[Any]]]:
        """The outputs that are tensors of torch's own; of the others, place and class."""
        plain, odd = [], []
        for place, value in enumerate(outputs):
            if type(value) in (int, float, bool):
                value = torch.tensor(value)
            if type(value) not in (TENSOR, torch.nn.Parameter) or value.layout != torch.strided or value.is_meta:
                odd.append([place, type(value).__name__])
                value = SUBCLASS(DETACH(value), TENSOR) if is_wrapped(value) else NEW(0)
            plain.append(value)
        return plain, odd

    def _seen(self) -> dict[str, Any]:
        now = settings()
        changed = [[name, old, now[name]] for name, old in self.settings.items() if now[name] != old]
        if changed:
            put_back(self.settings)
            self.settings = settings()
        events, watched.found = watched.found, []
        return {"settings": changed, "replaced": replaced(self.before), "events": events}

    @contextlib.contextmanager
    def _watching(self) -> Any:
        with self.surroundings():
            watched.active = True
            try:
                yield
            finally:
                watched.active = False


def _litter(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Free tensors like the results that are full of NaN: what is never written then shows, where memory is reused."""
    dirt = [NEW(shape, dtype=dtype) for shape, dtype in shapes if dtype.is_floating_point for _ in range(2)]
    for tensor in dirt:
        tensor.fill_(float("nan"))


class _Filled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, uninitialised tensors of floating-point numbers hold one value."""

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and result.is_floating_point() and result.device.type != "meta":
            result.fill_(self.value)
        return result


def _serve(pipe: Any) -> None:
    host = _Host()
    while True:
        try:
            ask = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer, content = getattr(host, ask["do"])(ask)
        except BaseException as error:
            answer, content = Answer(), {"error": _told(error), "seen": {"dict": host._seen()}}
        pipe.send_bytes(b"a" + answer.packed({"dict": content}))


def _told(error: BaseException) -> str:
    """An error in one line, and where in the solution it arose."""
    words = " ".join(str(error).split()) or "no message"
    words = words if len(words) <= 600 else f"{words[:300]} ... {words[-300:]}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(watched.folder)]
    place = f" (at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {words}{place}"
