"""Functions that run on several processes: each rank gets its part of a case, and every rank's result is examined.

`examine_ranks` compares each rank's result, or the ranks' shares put together, with the whole op's spec: a result that
is right on rank 0 only doesn't pass. A `Group` holds the processes of a torch.distributed group on this machine, which
are started once and reused.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from assay.golden.registry import Spec, spec, specs
from assay.runtime.files import OwnFolder
from assay.runtime.process import Lost, Parent, Process, wait_for
from assay.runtime.tensors import pack, same_numbers, unpack
from assay.verify.errors import SettingError
from assay.verify.examination.procedure import examine
from assay.verify.verdict import Verdict, joint_outcome

_GRACE = 2.0  # seconds for the other ranks once one has failed: they may wait in a collective for ever
_START = 120.0  # seconds in which a process imports torch and joins the group


class RankError(RuntimeError):
    """An exception or early exit of a rank; an examination reports it as a crash."""


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
        self._folder: OwnFolder | None = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], parts: Sequence[Sequence[Any]], **options: Any) -> list[Any]:
        """Call ``function(*parts[rank], **options)`` on every rank at once; return the results by rank.

        ``function`` must be importable by its name. Each rank gets a copy of its part, and returns tensors, numbers,
        strings, None, or lists of these: nothing that a rank made is unpickled here. Raises `SettingError` for a
        function that isn't importable, and `RankError` if a rank raises, ends, returns something else, or doesn't
        answer in time.
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
            self._folder.close()
        self._ranks, self._folder = [], None

    def start(self) -> None:
        """Start the processes, unless they run; `RankError` where they don't come up."""
        if not self._ranks:
            self._folder = OwnFolder("assay-ranks-")
            settings = self.world, (self._folder.path / "rendezvous").as_uri(), self.timeout
            self._ranks = [Process.start(_serve, rank, *settings, main_module=True) for rank in range(self.world)]
            self._answers([message_for(_ready, (), {})] * self.world, _START, "not started")

    def _answers(self, messages: Sequence[bytes], timeout: float, lack: str) -> list[Any]:
        """Return an answer of each rank. Raises `RankError` for the first rank that failed; the message names the
        others.

        ``lack`` describes ranks that haven't answered within ``timeout`` seconds. Any exception, including an
        examination's time limit, ends the group.
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
    """Return a rank's call, with copies of its part. Raises `SettingError` for a function that isn't importable."""
    own = [x.detach().clone(memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x for x in part]
    try:
        return pickle.dumps((function, own, options))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SettingError(
            f"function: other processes must be able to import it by its name ({error}); put it at a module's top"
        ) from None


def _ready() -> None:
    """Return nothing: the first call of each rank, answered once it has joined."""


def _serve(parent: Parent, rank: int, world: int, meeting: str, timeout: float) -> None:
    """Join the group as one rank, and answer its calls."""
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


__all__ = ["Group", "RankError", "RanksVerdict", "examine_ranks", "of_rank"]


@dataclass(frozen=True)
class RanksVerdict:
    """A verdict for each rank; one verdict for all if the ranks share out their results.

    ``differing`` says where the results of two ranks, which should be the same, differ in bits; empty if they don't.
    """

    ranks: tuple[Verdict, ...]
    differing: str = ""

    @property
    def failed(self) -> tuple[int, ...]:
        """The ranks that did not pass."""
        return joint_outcome(dict(enumerate(self.ranks)))[1]

    @property
    def passed(self) -> bool:
        """Whether every rank passes, and ranks with the same data return the same bits."""
        return not self.failed and not self.differing

    @property
    def outcome(self) -> str:
        """FAIL if a rank fails or two differ, else the first outcome other than PASS."""
        return "FAIL" if self.differing else joint_outcome(dict(enumerate(self.ranks)))[0]

    def __str__(self) -> str:
        words = f": rank {', '.join(map(str, self.failed))} of {len(self.ranks)}" if self.failed else ""
        first = [f"{self.outcome}{words}", *filter(None, [self.differing])]
        if len(set(map(id, self.ranks))) < len(self.ranks):
            return "\n".join([*first, f"all ranks: {self.ranks[0]}"])
        return "\n".join([*first, *(f"rank {rank}: {verdict}" for rank, verdict in enumerate(self.ranks))])


def examine_ranks(
    function: Callable[..., Any],
    op: str,
    group: Group,
    *,
    sharded: Mapping[str, str] | None = None,
    gathered: str = "",
    **settings: Any,
) -> RanksVerdict:
    """Examine ``function``, run on every rank of ``group``, as op ``op``: an examination for each rank's result.

    Each rank calls ``function`` with its part of a case. ``sharded`` says, by a tensor's name, along which symbol ranks
    share it out, as ``torch.tensor_split`` does it; other tensors come whole. Left out, those are sharded that have the
    op's `Axes.sharded`:

    - ``all_reduce``: a rank has its share of the rows of shards[R,N], none where there are fewer rows than ranks;
    - ``linear``, row-parallel: a rank has its share of the columns of x[M,K] and weight[N,K], and bias[N] whole.

    Each rank must return the whole result, and all the same bits. With ``gathered``, a symbol of the results, a rank
    returns its share along that instead: the shares, put together in the order of the ranks, are examined once.

    ``settings`` are those of `examine`. Raises as `examine` does, and `SettingError` for an op of which nothing says
    what is sharded, for a name or symbol that the op lacks, and for a function that can't be imported by its name.
    """
    message_for(function, (), {})
    kernels = [of_rank(function, op, group, rank, sharded=sharded, gathered=gathered) for rank in range(group.world)]
    group.start()  # not within the time that the first call has
    if gathered:
        return RanksVerdict((examine(kernels[0], op, **settings),) * group.world)
    verdicts = tuple(examine(kernel, op, **settings) for kernel in kernels)
    return RanksVerdict(verdicts, next((words for kernel in kernels for words in kernel.differing), ""))


class _OfRank:
    """The kernel that `of_rank` returns; ``differing`` says where another rank's bits first differed from rank 0's."""

    is_remote = True

    def __init__(
        self,
        function: Callable[..., Any],
        definition: Spec,
        group: Group,
        rank: int,
        sharded: Mapping[str, str],
        along: str,
    ) -> None:
        self.function, self.definition, self.group, self.rank = function, definition, group, rank
        self.sharded, self.gathered = sharded, along
        self.differing: list[str] = []
        self.__name__ = self.__qualname__ = f"{getattr(function, '__qualname__', function)} on rank {rank}"

    def __call__(self, *tensors: torch.Tensor, **options: Any) -> Any:
        parts = _shards_of(self.definition, tensors, self.group.world, self.sharded)
        answers = self.group.run(self.function, parts, **options)
        if self.gathered:
            return self._together(answers, options)
        if not self.differing:
            self.differing.extend(_difference(answers))
        return answers[self.rank]

    def _together(self, answers: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return results joined from the ranks' shares; a result without the symbol comes from this kernel's rank."""
        known = {name: value for name, value in options.items() if name in self.definition.options}
        returns = self.definition.signature(known).returns
        shares = [answer if isinstance(answer, list) else [answer] for answer in answers]
        joined = [
            torch.cat(parts, tensor.dims.index(self.gathered)) if self.gathered in tensor.dims else parts[self.rank]
            for tensor, parts in zip(returns, zip(*shares, strict=True), strict=True)
        ]
        return joined if isinstance(answers[0], list) else joined[0]


def of_rank(
    function: Callable[..., Any],
    op: str,
    group: Group,
    rank: int,
    *,
    sharded: Mapping[str, str] | None = None,
    gathered: str = "",
) -> _OfRank:
    """Return a kernel of ``op`` that runs ``function`` on every rank and returns one rank's result; see
    `examine_ranks`."""
    definition = spec(op)
    dims = {tensor.name: tensor.dims for tensor in definition.tensors}
    if sharded is None:
        if definition.axes.sharded is None:
            known = ", ".join(repr(name) for name in specs() if spec(name).axes.sharded)
            raise SettingError(f"op={op!r} is not sharded over ranks; expected one of {known}, or sharded= for it")
        sharded = {name: definition.axes.sharded for name, own in dims.items() if definition.axes.sharded in own}
    for name, symbol in sharded.items():
        if symbol not in dims.get(name, ()):
            shapes = ", ".join(f"{tensor}[{','.join(own)}]" for tensor, own in dims.items())
            raise SettingError(f"sharded: {name}={symbol!r}; expected a tensor and a symbol of {shapes}")
    results = {symbol for tensor in definition.signature().returns for symbol in tensor.dims}
    if gathered and gathered not in results:
        raise SettingError(f"gathered={gathered!r}; expected one of {', '.join(sorted(results))}")
    return _OfRank(function, definition, group, rank, sharded, gathered)


def _difference(answers: Sequence[Any]) -> Iterator[str]:
    """Yield in words where a rank's results differ in bits from those of rank 0."""
    first, *others = [answer if isinstance(answer, list) else [answer] for answer in answers]
    for rank, other in enumerate(others, 1):
        for expected, actual in zip(first, other, strict=False):
            if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
                continue
            if expected.shape != actual.shape or expected.dtype != actual.dtype:
                yield f"rank {rank} gave {_form(actual)}, rank 0 {_form(expected)}"
            elif not same_numbers(expected, actual):
                yield f"rank {rank} gave other bits than rank 0 in a result {_form(expected)}"


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shards_of(
    definition: Spec, tensors: Sequence[torch.Tensor], world: int, sharded: Mapping[str, str]
) -> list[tuple[torch.Tensor, ...]]:
    """Return each rank's part: its share of each tensor that is split along a symbol, and the other tensors whole."""
    shares = [
        x.tensor_split(world, tensor.dims.index(sharded[tensor.name])) if tensor.name in sharded else [x] * world
        for x, tensor in zip(tensors, definition.tensors, strict=True)
    ]
    return list(zip(*shares, strict=True))
