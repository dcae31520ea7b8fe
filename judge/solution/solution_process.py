"""The judging process's handle on a solution's processes (`host`): starts them, sends requests, ends them.

All processes of a judgement are in one sandbox, where this machine has one (`assay.runtime.sandbox`). Answers are plain
data, and may have any form: the solution can take over its process.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import torch

from assay.judge import TEMPORARY
from assay.judge.problems.kernelbench import rewritten
from assay.judge.problems.problem import Answer, Instance, Sizes
from assay.runtime.deadline import descendants
from assay.runtime.files import OwnFolder
from assay.runtime.process import GIB, MOST_PROCESSES, ForkServer, Lost, Process
from assay.runtime.sandbox import (
    QUEUES,
    SHARED,
    Sandbox,
    bare_environment,
    can_hide,
    clean_environment,
    unavailable,
    version,
)
from assay.runtime.tensors import unpack
from assay.verify.errors import SettingError

_NO_ANSWER = "its process answered with what is no answer"
_LARGEST = 1 << 31  # bytes of an answer
_LONGEST_ERROR = 2000  # characters
_IMPORT = 4.0  # times the limit of a request for importing and building a solution; it may compile
SANDBOXES = ("auto", "bwrap", "none")


class SolutionError(Exception):
    """The solution raised, or took too long; ``kind`` as of a failure: "crash" or "timeout".

    ``lost``: its process ended too. ``during``: the trial that was being made.
    """

    def __init__(
        self, message: str, kind: str = "crash", seen: Mapping[str, Any] | None = None, *, lost: bool = False
    ) -> None:
        super().__init__(message)
        self.kind, self.seen, self.lost = kind, dict(seen or {}), lost
        self.during: Any = None


@dataclass
class Called:
    """The result of one call: plain tensors, and the host's observations."""

    outputs: list[torch.Tensor]
    seen: dict[str, Any]


class SolutionHost:
    """Where the processes of one judgement run: a folder and a fork server, in a sandbox; a context manager.

    ``sandbox``: "auto" takes one where this machine has it, "bwrap" needs it, "none" takes none. ``hidden``: a folder
    that is not there. ``sandboxed``: in words what it runs in, "not sandboxed: ..." with the reason otherwise. At the
    end nothing of the judgement is left, and the server, which has imported torch, waits for the next. Raises
    `SettingError` where a sandbox is needed and there is none.
    """

    def __init__(self, sandbox: str, hidden: Path, *, gpus: bool) -> None:
        if sandbox not in SANDBOXES:
            raise SettingError(f"sandbox={sandbox!r}; expected one of {', '.join(map(repr, SANDBOXES))}")
        why = "not asked for" if sandbox == "none" else unavailable()
        if why and sandbox == "bwrap":
            raise SettingError(f"sandbox='bwrap': {why}")
        self.sandboxed = f"not sandboxed: {why}" if why else version()
        own = (hidden,) if not why and can_hide(hidden) else ()  # else one sandbox serves for all folders
        self._keep((bool(why), own, gpus), lambda folder: None if why else Sandbox(folder, own, gpus), bare_environment)

    @classmethod
    def of_reference(cls) -> SolutionHost:
        """Return where the reference is timed: apart from the solution, with the user's caches of compilers."""
        host = cls.__new__(cls)
        host.sandboxed = "not sandboxed: the problem's own"
        host._keep(("reference",), lambda folder: None, lambda folder: clean_environment())
        return host

    def _keep(
        self,
        key: tuple[object, ...],
        box: Callable[[Path], Sandbox | None],
        environment: Callable[[Path], dict[str, str]],
    ) -> None:
        """Take the kept server of this key, or start it."""
        self._key = os.getpid(), os.getcwd(), *key  # a fork of this process needs its own
        self._boxed = key[0] is False
        if self._key in _servers and not _servers[self._key][0].alive:
            _end(self._key)
        for other in [each for each in _servers if each[:1] + each[2:3] == (os.getpid(), key[0]) and each != self._key]:
            _end(other)  # each holds a torch in memory
        if self._key not in _servers:
            folder = OwnFolder(TEMPORARY)
            variables = {**environment(folder.path), "PYTHONDONTWRITEBYTECODE": "1"}
            server = ForkServer(_PROGRAM, "_serve", variables, sandbox=box(folder.path))
            _servers[self._key] = server, folder
        self._server, folder = _servers[self._key]
        self.folder = folder.path

    def __enter__(self) -> SolutionHost:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.left_behind() is None:
            _end(self._key)

    def left_behind(self) -> int | None:
        """End all processes and empty what they could write; return how many were detached, None if some don't end."""
        return self._server.clean([str(self.folder), *((*SHARED, QUEUES) if self._boxed else ())])

    def fork(self) -> Process:
        """Return a new process of `host`. Raises `SolutionError` where there is none any more."""
        try:
            return self._server.fork(quiet=True)
        except (OSError, EOFError, ValueError):
            raise SolutionError("its processes can't be started any more", lost=True) from None


_servers: dict[tuple[object, ...], tuple[ForkServer, OwnFolder]] = {}


def _end(key: tuple[object, ...]) -> None:
    server, folder = _servers.pop(key)
    server.end()
    folder.close()


@atexit.register
def _end_all() -> None:
    for key in [key for key in _servers if key[0] == os.getpid()]:
        _end(key)


class SolutionProcess:
    """A solution in a process of its own; a context manager, which ends the process.

    ``memory``: GiB that it may allocate beyond its start. ``timeout``: CPU seconds per request. At other sizes, the
    solution's own constants with the name and value of a given size are rewritten.
    """

    def __init__(
        self,
        answer: Answer,
        where: SolutionHost,
        *,
        device: str = "cpu",
        timeout: float = 30.0,
        memory: float = 8.0,
        threads: int = 1,
    ) -> None:
        self._answer, self._device, self._timeout, self._threads = answer, device, timeout, threads
        # This process never writes there: the solution may put links in the way.
        self._folder = where.folder / secrets.token_hex(8)
        self._process = where.fork()
        self._memory, self.printed = int(memory * GIB), 0
        self._process.memory, self._process.heartbeats = self._memory, 0
        self._process.processes = MOST_PROCESSES
        self._process.largest = min(self._memory, _LARGEST)
        self._process.limit_from_now()
        self._built, self._results = 0, list[tuple[Any, Any]]()
        self._names: tuple[str, ...] = ()
        self.build_observations: list[dict[str, Any]] = []
        """The host's observations of each build."""
        self.unbound: frozenset[str] = frozenset()
        """Names of tensors that `build` returns but that are plain attributes, no parameters or buffers."""

    def __enter__(self) -> SolutionProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.printed += self._process.printed_bytes
        self._process.kill()

    def ask(self, do: str, timeout: float | None = None, **question: Any) -> dict[str, Any]:
        """Send a request and return its answer. Raises `SolutionError`."""
        self.printed += self._process.printed_bytes
        self._process.submit(pickle.dumps({"do": do, **question}), timeout or self._timeout)
        result = self._process.result()
        if isinstance(result, Lost):
            raise SolutionError(result.message, result.kind, lost=True)
        try:
            answer = unpack(result)
        except Exception as error:
            raise SolutionError(f"{_NO_ANSWER} ({type(error).__name__})") from None
        if not isinstance(answer, dict):
            raise SolutionError(_NO_ANSWER)
        if "error" in answer:
            with _answering():
                seen = _observed(answer.get("seen", {}))
            raise SolutionError(str(answer["error"])[:_LONGEST_ERROR], seen=seen)
        return answer

    def build(
        self,
        instance: Instance,
        seed: int,
        *,
        evaluating: bool = False,
        given: Sizes | None = None,
        pretend: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Build the solution, anew if it was built before; return its parameters, buffers and other tensors.

        Raises `SolutionError`.
        """
        known = {name: value for name, value in (given or {}).items() if isinstance(value, int)}
        self._built += 1
        folder = self._folder / f"solution{self._built}"
        files = {name: _resized(name, text, instance.sizes, known) for name, text in self._answer.files.items()}
        entry = self._answer.entry
        answer = self.ask(
            "build",
            _IMPORT * self._timeout,
            folder=str(folder),
            files=files,
            memory=self._memory if self._device == "cpu" else 0,
            module=Path(self._answer.main).with_suffix("").as_posix().replace("/", "."),
            entry=entry.name,
            kind=entry.kind,
            style=entry.style,
            init=instance.init,
            init_named=dict(instance.init_named),
            seed=seed,
            device=self._device,
            threads=self._threads,
            evaluating=evaluating,
            pretend=pretend,
        )
        self._results = [(shape, dtype) for _, shape, dtype in instance.results]
        self._names = tuple(name for name, _, _ in instance.results)
        with _answering():
            self.build_observations.append(_observed(answer["seen"]))
            own, unbound = (
                {str(name): _tensor(value) for name, value in _mapping(answer[key]).items()}
                for key in ("state", "unbound")
            )
            self.unbound = frozenset(unbound)
            return {**own, **unbound}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set parameters by name. Raises `SolutionError`."""
        self.ask("load", state=dict(state))

    def store(self, name: str, arguments: Sequence[Any], how: str = "new") -> None:
        """Store arguments in the process under a name; ``how``: see `host._Host.store`. Raises `SolutionError`."""
        self.ask("store", name=name, arguments=tuple(arguments), how=how)

    def call(
        self,
        name: str,
        *,
        seed: int | None = None,
        keep: bool = False,
        pause: bool = False,
        like: Sequence[torch.Tensor] = (),
        fill: float | None = None,
    ) -> Called:
        """Call the solution with the arguments of that name. Raises `SolutionError`.

        Before the call, tensors of NaN in the form of ``like`` are freed, whose memory results may reuse; uninitialised
        tensors hold ``fill``.
        """
        dirt = [(tuple(part.shape), part.dtype) for part in like]
        how: dict[str, Any] = {"seed": seed, "keep": keep, "pause": pause, "dirt": dirt, "fill": fill}
        answer = self.ask("call", name=name, results=self._results, into=self._names, **how)
        with _answering():
            return Called([_tensor(value) for value in answer["outputs"]], _observed(answer["seen"]))

    def time(
        self,
        names: Sequence[str],
        seeds: Sequence[int],
        rolled: Sequence[int],
        scaled: Sequence[int],
        changes: Sequence[tuple[int, float]],
    ) -> tuple[list[float], dict[str, Any]]:
        """Return the seconds of a call for each of ``changes``, with the arguments of ``names`` in turn.

        A change is a shift, by which the tensors with indices ``rolled`` are rolled, and a factor of those with indices
        ``scaled``; random generators get the arguments' seed. Raises `SolutionError`.
        """
        how: dict[str, Any] = {"names": list(names), "seeds": list(seeds), "rolled": list(rolled)}
        how |= {"scaled": list(scaled), "changes": list(changes)}
        answer = self.ask("time", results=self._results, into=self._names, **how)
        with _answering():
            results = [float(value) for value in answer["seconds"]]
            if len(results) != len(changes):
                raise ValueError
            return results, _observed(answer["seen"])

    def fetch(self, numbers: Sequence[int]) -> list[Called]:
        """Return the results of the timed calls with these numbers. Raises `SolutionError`."""
        answer = self.ask("fetch", numbers=list(numbers))
        with _answering():
            timed = [_mapping(one) for one in answer["timed"]]
            if len(timed) != len(numbers):
                raise ValueError
            return [Called([_tensor(value) for value in one["outputs"]], _observed(one["seen"])) for one in timed]

    @property
    def processor_seconds(self) -> float:
        """Return the CPU seconds of its threads and of processes below it; NaN if the system doesn't report them."""
        seconds = math.nan
        for pid in reversed(descendants(self._process.pid)):
            try:
                # the id of a process's CPU clock on Linux
                seconds = time.clock_gettime((~pid << 3) | 2) + (0.0 if math.isnan(seconds) else seconds)
            except (OSError, OverflowError):  # it has ended
                continue
        return seconds

    def compile(self) -> None:
        """Replace the solution by its `torch.compile`d form. Raises `SolutionError`."""
        self.ask("compiled")


def _text(module: str) -> str:
    """Return a module's text. The module isn't imported: it watches the process that it is in."""
    return Path(str(find_spec(module).origin)).read_text(encoding="utf-8")  # type: ignore[union-attr]


_IMPORTED = re.compile(r"from assay\.judge\.solution\.watched import \([^)]*\)[^\n]*\n")
_PROGRAM = _IMPORTED.sub("", f"{_text('assay.judge.solution.watched')}\n{_text('assay.judge.solution.host')}")


def _resized(name: str, text: str, sizes: Sizes, given: Mapping[str, int]) -> str:
    """Return a file of the solution with its constants rewritten to the problem's sizes."""
    if not name.endswith(".py") or not given:
        return text
    try:
        return rewritten(text, {key: value for key, value in sizes.items() if isinstance(value, int)}, given)
    except SyntaxError:
        return text


@contextmanager
def _answering() -> Iterator[None]:
    """Raise `SolutionError` for errors inside, where an answer of any form is read."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise SolutionError(f"{_NO_ANSWER} ({type(error).__name__})") from None


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError
    return value


class _Observed(TypedDict, total=False):
    """The host's observations of a call, as they cross over: see `host._Host`."""

    settings: list[tuple[str, str, str]]
    replaced: list[str]
    events: list[tuple[str, str, str]]
    nesting: str
    odd: list[tuple[int, str]]
    mutated: list[int]
    aliases: list[tuple[int, int]]
    stale: list[int]
    late: list[int]
    busy: float
    threads: list[str]


def _observed(value: Any) -> dict[str, Any]:
    """Return observations of the right types. Raises `ValueError` for others."""
    return dict(msgspec.convert(value, _Observed))


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return value
