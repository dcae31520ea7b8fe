"""Timing a solution at the sizes that a problem states; what came of timed calls is judged like all else."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from assay.runtime.errors import one_line
from assay.verify.judging.account import Account
from assay.verify.judging.bench import Bench
from assay.verify.judging.course import Course
from assay.verify.judging.solution_process import SolutionError, SolutionProcess
from assay.verify.judging.speed import Speed, Stopwatch, Time, by_turns
from assay.verify.judging.trials import Trial
from assay.verify.problems.own import own_answer
from assay.verify.problems.sizes import described

_SECONDS = {"quick": 0.2, "usual": 1.0, "thorough": 4.0}
_PICKED = {"quick": 2, "usual": 4, "thorough": 8}
_LONGEST_NOTE = 120


def timed(account: Account, course: Course, bench: Bench, data: Sequence[Trial]) -> None:
    """Time the solution beside the reference, with the arguments of these trials in turn, and judge calls among them.

    Which these are is chosen when all are made. Raises `SolutionError`.
    """
    ways = account.ways
    arguments = [bench.arguments(trial) for trial in data]
    names = [f"t{place}" for place in range(len(data))]
    with ExitStack() as stack:
        for name, values in zip(names, arguments, strict=True):
            course.process.place(name, values)
        own, notes, others = Stopwatch(course.process, names), [], {}
        compiles = ways.effort != "quick" if ways.compiled is None else ways.compiled
        for title in ("reference", *(["compiled"] if compiles else [])):
            try:
                process = stack.enter_context(ways.process(own_answer(account.problem)))
                _prepare(process, account, bench)
                for name, values in zip(names, arguments, strict=True):
                    process.place(name, values)
                if title == "compiled":
                    process.compile()
                    process.time(names[:1], 2)
                others[title] = Stopwatch(process, names)
            except SolutionError as error:
                notes.append(f"the {title} can't be timed here ({one_line(error)[:_LONGEST_NOTE]})")
        by_turns([own, *others.values()], _SECONDS[ways.effort])
        times = {title: Time.of(watch.seconds) for title, watch in others.items()}
        sizes = described(bench.choice, account.problem.given[0])
        account.speed = Speed(
            sizes, ways.device, Time.of(own.seconds), times.get("reference"), times.get("compiled"), "; ".join(notes)
        )
        course.cheats += [*own.cheats, *own.untold]
        for place, called in own.picked(_PICKED[ways.effort]):
            course.take(bench.judged(data[place], arguments[place], called, timed=True), ["conduct"])


def _prepare(process: SolutionProcess, account: Account, bench: Bench) -> None:
    """The reference in a process like the solution's, with the same weights."""
    state = process.build(bench.meaning.instance, account.ways.seed, evaluating=bench.meaning.evaluating)
    if bench.meaning is not bench.made and state:
        process.load(bench.meaning.state)
