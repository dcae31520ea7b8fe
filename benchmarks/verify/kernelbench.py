"""Which references of KernelBench numbers can be computed with, how far, and how tight the tolerance is.

Called by `benchmarks.coverage` with a copy of the public repository's folder KernelBench. Each problem is evaluated at
small sizes that still run (those at which `assay judge` begins), with inputs and weights as the problem draws them.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from assay.golden.arithmetic import BallArithmetic, RoundingModel
from assay.golden.evaluation.golden import golden_of
from assay.golden.lowering.dispatch import Lowering
from assay.golden.lowering.tensor import TracedTensor, read
from assay.verify.problems.reading import read_problem
from assay.verify.problems.sizes import limits, small

SECONDS = 120
LEVELS = ("level1", "level2", "level3")


@dataclass(frozen=True)
class Found:
    """Of one problem: why it has no golden, or the shares of elements with a finite radius, and the tolerance.

    ``finite`` is that of the golden, ``allowed`` that of the tolerance. The allowed radius over what PyTorch is off in
    float32: ``width`` is its median over the elements, ``least`` that of the element where PyTorch uses most of what is
    allowed. ``outside`` is how many elements PyTorch's float32 has beyond it.
    """

    name: str
    why: str = ""
    finite: float = 0.0
    allowed: float = 0.0
    width: float | None = None
    least: float | None = None
    outside: int = 0


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def found(path: Path, model: RoundingModel) -> Found:
    """What becomes of one problem."""
    try:
        with _limited(SECONDS), torch.no_grad():
            problem = read_problem(path)
            given = problem.given[0]
            choice = small(problem, given, limits("quick")["small"])
            if choice is None:
                return Found(path.stem, "no sizes that are small")
            instance = problem.make(choice.sizes, 0)
            module: Any = instance.module.eval() if instance.module is not None else instance.reference
            arguments = instance.draw(0)
            return _measured(path.stem, module, arguments, model)
    except Exception as error:
        return Found(path.stem, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:160])


def _measured(name: str, module: Callable[..., Any], arguments: tuple[Any, ...], model: RoundingModel) -> Found:
    eager = [x.double() for x in tree_leaves(module(*tree_map(_copied, arguments))) if isinstance(x, torch.Tensor)]
    exact, allowed = (_evaluated(module, arguments, xp) for xp in (BallArithmetic(), BallArithmetic(model)))
    of, finite, bounded, outside, widths = 0, 0, 0, 0, []
    for right, limit, got in zip(exact, allowed, eager, strict=True):
        off = (got - right.value.double()).abs()
        certain = right.radius.isfinite() | ~right.value.isfinite()  # of NaN and infinities the class is the answer
        known = right.radius.isfinite() & right.value.isfinite()
        open_ended = limit.radius.isinf()
        beyond = off > limit.radius + right.radius + 2.0**-24 * right.value.abs()
        of, finite, bounded = of + off.numel(), finite + int(certain.sum()), bounded + int((~open_ended).sum())
        outside += int((beyond & known & ~open_ended).sum())
        widths += [(limit.radius / off)[(off > 0) & known & ~open_ended]]
    used = torch.cat([x.reshape(-1) for x in widths])
    width, least = (float(used.median()), float(used.min())) if used.numel() else (None, None)
    return Found(name, "", finite / max(of, 1), bounded / max(of, 1), width, least, outside)


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _evaluated(module: Callable[..., Any], arguments: tuple[Any, ...], xp: Any) -> list[Any]:
    ctx = Lowering(xp)
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        numbers = tree_map(lambda x: ctx.lift(_copied(x)), arguments)
        with ctx:
            results = module(*numbers)
        leaves = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
        return [golden_of(read(x) if isinstance(x, TracedTensor) else xp.exact(x)) for x in leaves]
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _tenths(ratios: Iterable[float | None], places: Sequence[int] = (0, 4, 8)) -> str:
    """Some of the nine numbers that part the ratios into tenths."""
    parts = statistics.quantiles([ratio for ratio in ratios if ratio is not None], n=10)
    return ", ".join(f"{parts[place]:.3g}" for place in places)


def section(folder: Path, model: RoundingModel) -> Iterator[str]:
    """The lines of the page: a table of the levels, what doesn't evaluate, and the widest tolerances."""
    levels = {level: [found(p, model) for p in sorted((folder / level).glob("*.py"))] for level in LEVELS}
    yield (
        "| level | references | with a golden | of these finite at 99 % of the elements | tolerance finite there "
        "| eager float32 outside | radius over error at the worst element: 10 %, median, 90 % | in the median of the "
        "elements |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for level, rows in levels.items():
        whole = [row for row in rows if not row.why]
        yield (
            f"| {level} | {len(rows)} | {len(whole)} | {sum(row.finite >= 0.99 for row in whole)} | "
            f"{sum(row.allowed >= 0.99 for row in whole)} | {sum(row.outside > 0 for row in whole)} | "
            f"{_tenths(row.least for row in whole)} | {_tenths(row.width for row in whole)} |"
        )
    both = [row for level in LEVELS[:2] for row in levels[level] if row.least is not None]
    yield ""
    yield (
        "The worst element is the one that a verdict's ratio is of, where PyTorch uses most of what is allowed. Over "
        f"levels 1 and 2 together, in tenths: {_tenths((row.least for row in both), range(9))}."
    )
    every = [row for rows in levels.values() for row in rows]
    yield ""
    yield "Without a golden, or with one that is open at more than 1 % of the elements:"
    yield ""
    yield from (
        f"- {row.name}: {row.why or f'{row.finite:.1%} of the elements finite'}"
        for row in every
        if row.why or row.finite < 0.99
    )
    yield ""
    yield "The widest tolerances:"
    yield ""
    widest = sorted((row for row in every if row.width is not None), key=lambda row: -(row.width or 0))[:12]
    yield from (f"- {row.name}: {row.width:.3g} times what eager float32 is off, in the median" for row in widest)
