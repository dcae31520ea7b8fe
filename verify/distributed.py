"""Functions that run on several processes: each rank gets its part of a case, and every rank's result is examined.

A `Group` is N processes of a torch.distributed gloo group on this machine, started once and kept. `examine_ranks`
holds each rank's result against the whole op's spec: a result that is right on rank 0 alone is none.
"""

from __future__ import annotations

import math
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch

from assay.verify.errors import SettingError
from assay.verify.examination import examine
from assay.verify.joint import joined
from assay.verify.verdict import Verdict

_GRACE = 2.0  # seconds that the other ranks have left once one has failed
_START = 120.0  # seconds in which a process imports torch and joins the group
_spawn = get_context("spawn")  # a forked torch may hang in its thread pool


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
        self._processes: list[Any] = []
        self._ends: list[connection.Connection[Any, Any]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], parts: Sequence[Sequence[Any]], **options: Any) -> list[Any]:
        """``function(*parts[rank], **options)`` on each rank at once; the results in the order of the ranks.

        ``function`` must be importable by its name. Each rank gets a copy of its part. Raises `SettingError` for a
        function that isn't importable, and `RankError` where a rank raises or ends, or none
        has failed and not all have answered in time.
        """
        if len(parts) != self.world:
            raise SettingError(f"parts: expected one for each of the {self.world} ranks, got {len(parts)}")
        messages = [_message(function, part, options) for part in parts]
        try:
            self.start()
            for end, message in zip(self._ends, messages, strict=True):
                end.send_bytes(message)
            return self._answers(self.timeout, "no answer")
        except BaseException:  # the time limit of an examination among them
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for end in self._ends:
            end.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._ends, self._folder = [], [], None

    def start(self) -> None:
        """Start the processes, unless they run; `RankError` where they don't come up."""
        if self._processes:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="assay-")
        meeting = Path(self._folder.name, "rendezvous").as_uri()
        for rank in range(self.world):
            here, there = _spawn.Pipe()
            process = _spawn.Process(target=_serve, args=(there, rank, self.world, meeting, self.timeout), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._ends.append(here)
        try:
            self._answers(_START, "not started")  # each says that it has joined
        except BaseException:
            self.close()
            raise

    def _answers(self, patience: float, lack: str) -> list[Any]:
        """An answer of each rank; `RankError` for the first that has failed, named with the others that did.

        ``lack`` is what is said of the ranks that have not answered within ``patience`` seconds.
        """
        end_of_patience = time.monotonic() + patience
        found: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(found) + len(failures) < self.world:
            open_ends = {end: rank for rank, end in enumerate(self._ends) if rank not in found | failures}
            left = max(0.0, end_of_patience - time.monotonic())
            ready = connection.wait(list(open_ends), _GRACE if failures else left)
            if not ready and not failures:
                missing = ", ".join(map(str, open_ends.values()))
                raise RankError(f"rank {missing}: {lack} within {patience:g} s")
            if not ready:
                break
            for end in ready:
                rank = open_ends[end]  # type: ignore[index]  # connection.wait hands back what it was given
                try:
                    succeeded, answer = pickle.loads(self._ends[rank].recv_bytes())
                except (EOFError, ConnectionError):
                    succeeded, answer = False, "the process ended"
                (found if succeeded else failures)[rank] = answer
        if failures:
            raise RankError("; ".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
        return [found[rank] for rank in range(self.world)]


def _message(function: Callable[..., Any], part: Sequence[Any], options: dict[str, Any]) -> bytes:
    own = [x.detach().clone(memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x for x in part]
    try:
        return pickle.dumps((function, own, options))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SettingError(
            f"function: other processes must be able to import it by its name ({error}); put it at a module's top"
        ) from None


def _serve(end: connection.Connection[Any, Any], rank: int, world: int, meeting: str, patience: float) -> None:
    """A rank: join the group, then call what comes, until the pipe closes."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=max(_START, patience))  # for joining too; a call's own limit is kept by the caller
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=limit)
    end.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            message = end.recv_bytes()
        except (EOFError, ConnectionError):
            return
        try:
            function, part, options = pickle.loads(message)
            result = function(*part, **options)
            answer = pickle.dumps((True, _owned(result)))
        except Exception as error:
            answer = pickle.dumps((False, f"{type(error).__name__}: {error}"))
        end.send_bytes(answer)


def _owned(result: Any) -> Any:
    """Tensors without graph, and without the rest of the memory that they are views of."""
    if isinstance(result, torch.Tensor):
        return result.detach().clone(memory_format=torch.contiguous_format)
    return type(result)(map(_owned, result)) if type(result) in (tuple, list) else result


@dataclass(frozen=True)
class RanksVerdict:
    """A verdict for each rank."""

    ranks: tuple[Verdict, ...]

    @property
    def failed(self) -> tuple[int, ...]:
        """The ranks that did not pass."""
        return joined(dict(enumerate(self.ranks)))[1]

    @property
    def passed(self) -> bool:
        """Whether every rank passes."""
        return not self.failed

    @property
    def outcome(self) -> str:
        """FAIL where a rank fails, else the first outcome that is no PASS."""
        return joined(dict(enumerate(self.ranks)))[0]

    def __str__(self) -> str:
        words = f": rank {', '.join(map(str, self.failed))} of {len(self.ranks)}" if self.failed else ""
        reports = [f"rank {rank}: {verdict}" for rank, verdict in enumerate(self.ranks)]
        return "\n".join([f"{self.outcome}{words}", *reports])


def examine_ranks(function: Callable[..., Any], op: str, group: Group, **settings: Any) -> RanksVerdict:
    """Examine ``function``, run on every rank of ``group``, as op ``op``: an examination for each rank's result.

    Each rank calls ``function`` with its part of a case, and must return the whole result:

    - ``all_reduce``: a rank has its share of the rows of shards[R,N], as ``torch.tensor_split`` deals them out (none
      where there are fewer rows than ranks), and returns y[N];
    - ``linear``, row-parallel: a rank has its share of the columns of x[M,K] and weight[N,K], and bias[N] whole, and
      returns x weight^T + bias.

    ``settings`` are those of `examine`. Raises as `examine` does, and `SettingError` for another op or a function that
    can't be imported by its name.
    """
    if op not in _DEALT:
        raise SettingError(f"op={op!r} is not dealt out to ranks; expected one of {', '.join(map(repr, _DEALT))}")
    _message(function, (), {})
    group.start()  # not within the time that the first call has
    return RanksVerdict(
        tuple(examine(of_rank(function, op, group, rank), op, **settings) for rank in range(group.world))
    )


def of_rank(function: Callable[..., Any], op: str, group: Group, rank: int) -> Callable[..., Any]:
    """A kernel of ``op``: ``function`` on every rank, with the result of one."""

    def kernel(*tensors: torch.Tensor, **options: Any) -> Any:
        return group.run(function, _DEALT[op](tensors, group.world), **options)[rank]

    kernel.__name__ = kernel.__qualname__ = f"{getattr(function, '__qualname__', function)} on rank {rank}"
    return kernel


def _rows_of_shards(tensors: Sequence[torch.Tensor], world: int) -> list[tuple[torch.Tensor, ...]]:
    return [(part,) for part in tensors[0].tensor_split(world)]


def _columns_of_factors(tensors: Sequence[torch.Tensor], world: int) -> list[tuple[torch.Tensor, ...]]:
    x, weight, bias = tensors
    parts = zip(x.tensor_split(world, 1), weight.tensor_split(world, 1), strict=True)
    return [(left, right, bias) for left, right in parts]


_DEALT: dict[str, Callable[[Sequence[torch.Tensor], int], list[tuple[torch.Tensor, ...]]]] = {
    "all_reduce": _rows_of_shards,
    "linear": _columns_of_factors,
}
