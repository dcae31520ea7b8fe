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

from assay.judge.solution.host_bytes import (
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
from assay.judge.solution.host_data import Filled, litter, loose, parts, roll_into
from assay.judge.solution.host_events import watched
from assay.judge.solution.host_watch import namespaces, own_classes, put_back, replaced, settings

_no_grad, _seed, _clock, _sleep, _stats = torch.no_grad, torch.manual_seed, time.perf_counter, time.sleep, os.times
_threads, _abspath, _module = threading.enumerate, os.path.abspath, torch.nn.Module
_collect_no, _collect = gc.disable, gc.enable
_PAUSE = 0.03  # seconds in which what comes late may come


class _Host:
    """A solution, its arguments by name, and what it has given."""

    def __init__(self) -> None:
        self.callable: Any = None
        self.style, self.device = "arguments", "cpu"
        self.placed: dict[str, Any] = {}
        self.results: list[Any] = []
        self.timed: list[Any] = []
        self.base: dict[str, Any] = {}
        self.loose: dict[str, Any] = {}
        self.before = namespaces()
        self.settings = settings()
        self.alive = {thread.ident for thread in _threads()}
        self.surroundings: Any = contextlib.nullcontext
        self.interprets = False

    def build(self, ask: dict[str, Any]) -> Any:
        """Write the files, import the main one, construct what is to be called."""
        folder, before = _abspath(ask["folder"]), watched.folder
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(before):
                del sys.modules[name]
        sys.path[:] = [folder, *(path for path in sys.path if path != before)]
        watched.folder = folder
        os.chdir(folder)
        self.placed, self.base, self.results, self.timed = {}, {}, [], []
        self.style, self.device = ask["style"], ask["device"]
        torch.set_num_threads(ask["threads"])
        if self.callable is None:
            self.settings = settings()
        self.interprets = ask["pretend"]
        if self.interprets:
            from assay.interpreter import faithful

            self.surroundings = lambda: faithful(pretend="cuda")
            with self.surroundings():
                pass  # what it imports of its own is none of the solution's doing
            self.before = namespaces()
        random.seed(ask["seed"])
        np.random.seed(ask["seed"])
        _seed(ask["seed"])
        with self._watching():
            result = getattr(importlib.import_module(ask["module"]), ask["entry"])
            if ask["kind"] == "class":
                _seed(ask["seed"])
                result = result(*ask["init"], **ask["init_named"])
                result = result.to(self.device) if hasattr(result, "to") else result
                if ask["evaluating"] and hasattr(result, "eval"):
                    result.eval()
        self.callable = result
        answer, seen = Answer(), self._seen()
        state = result.state_dict() if isinstance(result, _module) else {}
        self.loose = loose(result, state) if isinstance(result, _module) else {}
        told = {"state": state, "loose": self.loose}
        made = {key: {"dict": {name: answer.tensor(part) for name, part in of.items()}} for key, of in told.items()}
        return answer, {**made, "seen": {"dict": seen}}

    def load(self, ask: dict[str, Any]) -> Any:
        """Other parameters, by name, into the memory of the present ones."""
        plain = {name: value for name, value in ask["state"].items() if name in self.loose}
        with self._watching(), _no_grad():
            for name, value in plain.items():
                COPY(self.loose[name], value)
            registered = {name: value for name, value in ask["state"].items() if name not in plain}
            if registered:
                self.callable.load_state_dict(registered, strict=False)
        return Answer(), {}

    def place(self, ask: dict[str, Any]) -> Any:
        """Keep arguments by name: in new memory, or in that of those before ("plain", "quiet", "objects")."""
        tree = mapped(ask["arguments"], lambda tensor: CLONE(TO(tensor, self.device)))
        old = self.placed.get(ask["name"])
        self.base.pop(ask["name"], None)
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
        litter(ask["dirt"])
        with contextlib.nullcontext() if ask["fill"] is None else Filled(ask["fill"]):
            outputs, nesting = parts(self._called(self._prepared(arguments, ask)), ask["into"])
        answer, seen = Answer(), self._seen()
        seen["nesting"] = nesting
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
        """A call for each of ``shifts``, with the arguments of these names in turn, rolled by it.

        No numbers come twice. What a call gives is copied as it comes back, for `fetch`.
        """
        names, seconds, self.results = ask["names"], list[float](), []
        self.timed = []
        for count, shift in enumerate(ask["shifts"]):
            name = names[count % len(names)]
            arguments = self.placed[name]
            if name not in self.base:
                self.base[name] = mapped(arguments, CLONE)
            roll_into(arguments, self.base[name], ask["rolled"], shift)
            work = self._prepared(arguments, {**ask, "seed": ask["seeds"][count % len(names)]})
            began = _clock()
            result = self._called(work)
            if self.device != "cpu":
                torch.cuda.synchronize()
            seconds.append(_clock() - began)
            plain, odd = self._checked(parts(result, ask["into"])[0])
            own = [k for k, value in enumerate(plain) if not any(overlap(value, x) for x in leaves(arguments))]
            self.timed.append(([CLONE(DETACH(value)) for value in plain], plain, odd, own))
        return Answer(), {"seconds": seconds, "seen": {"dict": self._seen()}}

    def fetch(self, ask: dict[str, Any]) -> Any:
        """What the timed calls of these numbers gave, and which of it has become other since."""
        answer, result = Answer(), []
        for number in ask["numbers"]:
            copies, plain, odd, own = self.timed[number]
            late = [k for k in own if not same_bits(plain[k], copies[k])]
            seen = {"dict": {"odd": odd, "late": late}}
            result.append({"dict": {"outputs": [answer.tensor(value) for value in copies], "seen": seen}})
        return answer, {"timed": result}

    def compiled(self, ask: dict[str, Any]) -> Any:
        """From now on what torch's compiler makes of it."""
        self.callable = torch.compile(self.callable)
        return Answer(), {}

    def _prepared(self, arguments: Any, ask: dict[str, Any]) -> Any:
        """The call that is to be made, with the random generators set and memory for its results."""
        if ask.get("seed") is not None:
            random.seed(ask["seed"])
            np.random.seed(ask["seed"] % 2**32)
            _seed(ask["seed"])
        if self.style == "data":
            return lambda: self.callable(arguments[0] if len(arguments) == 1 else tuple(arguments))
        if self.style != "destination":
            return lambda: self.callable(*arguments)
        into = [NEW(shape, dtype=dtype, device=self.device) for shape, dtype in ask["results"]]
        for tensor in into:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
        return lambda: (self.callable(*arguments, *into), into)[1]

    def _called(self, work: Any) -> Any:
        """A call's result; the collector is off, as where calls are timed."""
        _collect_no()
        try:
            with self._watching(), _no_grad():
                return work()
        finally:
            _collect()

    @staticmethod
    def _checked(outputs: list[Any]) -> tuple[list[torch.Tensor], list[list[Any]]]:
        """The outputs that are tensors of torch's own; of the others, place and class."""
        plain, odd = [], []
        for index, value in enumerate(outputs):
            if type(value) in (int, float, bool):
                value = torch.tensor(value)
            if type(value) not in (TENSOR, torch.nn.Parameter) or value.layout != torch.strided or value.is_meta:
                odd.append([index, type(value).__name__])
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
        if "assay" in sys.modules and not self.interprets:
            events.append(["import", "assay", "some line"])
        return {"settings": changed, "replaced": replaced(self.before), "events": events}

    @contextlib.contextmanager
    def _watching(self) -> Any:
        with self.surroundings():
            watched.active = True  # and from now on, as threads may go on after a call
            yield


own_classes += [_Host, type(watched)]


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
    index = f" (at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {words}{index}"
