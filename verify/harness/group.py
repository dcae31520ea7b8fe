"""Processes of a torch.distributed group on this machine, which call functions: started once, and kept."""

from __future__ import annotations

import math
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from assay.runtime.process import Lost, Parent, Process, wait_for
from assay.runtime.tensors import pack, unpack
from assay.verify.errors import SettingError

_GRACE = 2.0  # seconds that the other ranks have left once one has failed
_START = 120.0  # seconds in which a process imports torch and joins the group


class RankError(RuntimeError):
    """What one rank raised, or that it went away; an examination reports it as a crash."""


class Group:
    """``world`` processes of a gloo group; a context manager, which ends them.

    ``timeout`` is how many seconds the ranks have for one call, wherever it is made from.

    They start with `start` or the first call, and anew after one that failed or was interrupted: a collective that not
    all ranks have entered leaves the group unusable.
    """

    def __init__(self, world: int = 2, timeout: float = 120.0) -> None:
        if isinstance(world, bool) or not isinstance(world, int) or world < 1:
            raise SettingError(f"world={world!r}; expected a whole number of at least 1")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
            raise SettingError(f"timeout={timeout!r}; expected seconds, a positive number")
        if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
            raise SettingError("world: this build of torch has no gloo backend")
        self.world = world
        self.timeout = timeout
        self._ranks: list[Process] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], parts: Sequence[Sequence[Any]], **options: Any) -> list[Any]:
        """``function(*parts[rank], **options)`` on each rank at once; the results in the order of the ranks.

        ``function`` must be importable by its name. Each rank gets a copy of its part, and returns tensors, numbers,
        texts, None, or lists of these: nothing that a rank made is unpickled here. Raises `SettingError` for a function
        that isn't importable, and `RankError` where a rank raises, ends, or returns something else, or where none has
        failed and not all have answered in time.
        """
        if len(parts) != self.world:
            raise SettingError(f"parts: expected one for each of the {self.world} ranks, got {len(parts)}")
        messages = [message_for(function, part, options) for part in parts]
        self.start()
        return self._answers(messages, self.timeout, "no answer")

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.kill()
        if self._folder is not None:
            self._folder.cleanup()
        self._ranks, self._folder = [], None

    def start(self) -> None:
        """Start the processes, unless they run; `RankError` where they don't come up."""
        if not self._ranks:
            self._folder = tempfile.TemporaryDirectory(prefix="assay-")
            settings = self.world, Path(self._folder.name, "rendezvous").as_uri(), self.timeout
            self._ranks = [Process.start(_serve, rank, *settings, main_module=True) for rank in range(self.world)]
            self._answers([message_for(_ready, (), {})] * self.world, _START, "not started")

    def _answers(self, messages: Sequence[bytes], timeout: float, lack: str) -> list[Any]:
        """An answer of each rank; `RankError` for the first that has failed, named with the others that did.

        ``lack`` is what is said of the ranks that have not answered within ``timeout`` seconds. Whatever is raised, an
        examination's time limit too, ends the group.
        """
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        until = time.monotonic() + timeout
        try:
            for rank, message in zip(self._ranks, messages, strict=True):
                rank.submit(message, math.inf)  # the time is kept here, for all of them
            while waiting := [number for number in range(self.world) if number not in results | failures]:
                if time.monotonic() > until:
                    if not failures:
                        names = ", ".join(map(str, waiting))
                        raise RankError(f"rank {names}: {lack} within {timeout:g} s")
                    break
                wait_for([self._ranks[number] for number in waiting], until)
                for number in waiting:
                    answer = self._ranks[number].poll()
                    if isinstance(answer, Lost):
                        failures[number] = answer.message
                    elif answer is not None:
                        succeeded, result = unpack(answer)
                        (results if succeeded else failures)[number] = result
                if failures:
                    until = min(until, time.monotonic() + _GRACE)
            if failures:
                raise RankError("; ".join(f"rank {number}: {failures[number]}" for number in sorted(failures)))
        except BaseException:
            self.close()
            raise
        return [results[number] for number in range(self.world)]


def message_for(function: Callable[..., Any], part: Sequence[Any], options: dict[str, Any]) -> bytes:
    """A call for a rank, which gets copies of its part. Raises `SettingError` for a function that isn't importable."""
    own = [x.detach().clone(memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x for x in part]
    try:
        return pickle.dumps((function, own, options))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SettingError(
            f"function: other processes must be able to import it by its name ({error}); put it at a module's top"
        ) from None


def _ready() -> None:
    """What a rank is asked first, which it answers once it has joined."""


def _serve(parent: Parent, rank: int, world: int, meeting: str, timeout: float) -> None:
    """A rank: join the group, then call what comes."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=max(_START, timeout))  # for joining too; a call's own limit is kept by the caller
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=limit)

    def answer(message: bytes) -> bytes:
        try:
            function, part, options = pickle.loads(message)
            return pack((True, function(*part, **options)))
        except Exception as error:
            return pack((False, f"{type(error).__name__}: {error}"))

    parent.serve(answer)
