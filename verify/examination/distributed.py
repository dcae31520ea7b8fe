"""Functions that run on several processes: each rank gets its part of a case, and every rank's result is examined.

`examine_ranks` holds each rank's result, or what their shares of it come to together, against the whole op's spec: a
result that is right on rank 0 alone is none. A `Group` is the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from assay.golden.registry import Spec, spec, specs
from assay.runtime.tensors import same_numbers
from assay.verify.errors import SettingError
from assay.verify.examination.procedure import examine
from assay.verify.harness.group import Group, RankError, message_for
from assay.verify.verdict import Verdict, joint_outcome

__all__ = ["Group", "RankError", "RanksVerdict", "examine_ranks", "of_rank"]


@dataclass(frozen=True)
class RanksVerdict:
    """A verdict for each rank; of results that ranks share out, one verdict of the whole for all of them.

    ``differing`` says where the results of two ranks, which should be the same, have other bits; empty where none have.
    """

    ranks: tuple[Verdict, ...]
    differing: str = ""

    @property
    def failed(self) -> tuple[int, ...]:
        """The ranks that did not pass."""
        return joint_outcome(dict(enumerate(self.ranks)))[1]

    @property
    def passed(self) -> bool:
        """Whether every rank passes, and ranks with the same data have the same bits."""
        return not self.failed and not self.differing

    @property
    def outcome(self) -> str:
        """FAIL where a rank fails or two differ, else the first outcome that is no PASS."""
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
    dealt: Mapping[str, str] | None = None,
    gathered: str = "",
    **settings: Any,
) -> RanksVerdict:
    """Examine ``function``, run on every rank of ``group``, as op ``op``: an examination for each rank's result.

    Each rank calls ``function`` with its part of a case. ``dealt`` says, by a tensor's name, along which symbol ranks
    share it out, as ``torch.tensor_split`` does it; other tensors come whole. Left out, those are dealt that have the
    op's `Axes.sharded`:

    - ``all_reduce``: a rank has its share of the rows of shards[R,N], none where there are fewer rows than ranks;
    - ``linear``, row-parallel: a rank has its share of the columns of x[M,K] and weight[N,K], and bias[N] whole.

    Each rank must return the whole result, and all the same bits. With ``gathered``, a symbol of the results, a rank
    returns its share along that instead: the shares, put together in the order of the ranks, are examined once.

    ``settings`` are those of `examine`. Raises as `examine` does, and `SettingError` for an op of which nothing says
    what is dealt, for a name or symbol that the op lacks, and for a function that can't be imported by its name.
    """
    message_for(function, (), {})
    kernels = [of_rank(function, op, group, rank, dealt=dealt, gathered=gathered) for rank in range(group.world)]
    group.start()  # not within the time that the first call has
    if gathered:
        return RanksVerdict((examine(kernels[0], op, **settings),) * group.world)
    verdicts = tuple(examine(kernel, op, **settings) for kernel in kernels)
    return RanksVerdict(verdicts, next((words for kernel in kernels for words in kernel.differing), ""))


class _OfRank:
    """What `of_rank` returns; ``differing`` is where ranks first had other bits than rank 0, in words."""

    def __init__(
        self,
        function: Callable[..., Any],
        definition: Spec,
        group: Group,
        rank: int,
        dealt: Mapping[str, str],
        along: str,
    ) -> None:
        self.function, self.definition, self.group, self.rank = function, definition, group, rank
        self.dealt, self.gathered = dealt, along
        self.differing: list[str] = []
        self.__name__ = self.__qualname__ = f"{getattr(function, '__qualname__', function)} on rank {rank}"

    def __call__(self, *tensors: torch.Tensor, **options: Any) -> Any:
        parts = _dealt(self.definition, tensors, self.group.world, self.dealt)
        answers = self.group.run(self.function, parts, **options)
        if self.gathered:
            return self._together(answers, options)
        if not self.differing:
            self.differing.extend(_difference(answers))
        return answers[self.rank]

    def _together(self, answers: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """The results whose shares, by rank, these are; what the symbol isn't a dimension of comes from the rank."""
        known = {name: value for name, value in options.items() if name in self.definition.options}
        returns = self.definition.signature(known).returns
        shares = [answer if isinstance(answer, list) else [answer] for answer in answers]
        whole = [
            torch.cat(parts, tensor.dims.index(self.gathered)) if self.gathered in tensor.dims else parts[self.rank]
            for tensor, parts in zip(returns, zip(*shares, strict=True), strict=True)
        ]
        return whole if isinstance(answers[0], list) else whole[0]


def of_rank(
    function: Callable[..., Any],
    op: str,
    group: Group,
    rank: int,
    *,
    dealt: Mapping[str, str] | None = None,
    gathered: str = "",
) -> _OfRank:
    """A kernel of ``op``: ``function`` on every rank, with the result of one; see `examine_ranks`."""
    definition = spec(op)
    dims = {tensor.name: tensor.dims for tensor in definition.tensors}
    if dealt is None:
        if definition.axes.sharded is None:
            known = ", ".join(repr(name) for name in specs() if spec(name).axes.sharded)
            raise SettingError(f"op={op!r} is not dealt out to ranks; expected one of {known}, or dealt= for it")
        dealt = {name: definition.axes.sharded for name, own in dims.items() if definition.axes.sharded in own}
    for name, symbol in dealt.items():
        if symbol not in dims.get(name, ()):
            shapes = ", ".join(f"{tensor}[{','.join(own)}]" for tensor, own in dims.items())
            raise SettingError(f"dealt: {name}={symbol!r}; expected a tensor and a symbol of {shapes}")
    results = {symbol for tensor in definition.signature().returns for symbol in tensor.dims}
    if gathered and gathered not in results:
        raise SettingError(f"gathered={gathered!r}; expected one of {', '.join(sorted(results))}")
    return _OfRank(function, definition, group, rank, dealt, gathered)


def _difference(answers: Sequence[Any]) -> Iterator[str]:
    """In words, where a rank's results have other bits than those of rank 0."""
    first, *others = [answer if isinstance(answer, list) else [answer] for answer in answers]
    for rank, other in enumerate(others, 1):
        for whole, own in zip(first, other, strict=False):
            if not isinstance(whole, torch.Tensor) or not isinstance(own, torch.Tensor):
                continue
            if whole.shape != own.shape or whole.dtype != own.dtype:
                yield f"rank {rank} gave {_form(own)}, rank 0 {_form(whole)}"
            elif not same_numbers(whole, own):
                yield f"rank {rank} gave other bits than rank 0 in a result {_form(whole)}"


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _dealt(
    definition: Spec, tensors: Sequence[torch.Tensor], world: int, dealt: Mapping[str, str]
) -> list[tuple[torch.Tensor, ...]]:
    """Each rank's part: its share of the places along the symbol that a tensor is dealt out by, or all of it."""
    shares = [
        x.tensor_split(world, tensor.dims.index(dealt[tensor.name])) if tensor.name in dealt else [x] * world
        for x, tensor in zip(tensors, definition.tensors, strict=True)
    ]
    return list(zip(*shares, strict=True))
