"""Timing a solution at the sizes that a problem states; what came of timed calls is judged like all else."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import replace

from assay.judge.account import Account
from assay.judge.bench import Bench
from assay.judge.course import Course
from assay.judge.problems.own import own_answer
from assay.judge.problems.sizes import described
from assay.judge.solution.inputs import may_roll
from assay.judge.solution.solution_process import SolutionError, SolutionProcess
from assay.judge.solution.trials import Seen
from assay.judge.speed import Speed, Stopwatch, Time, by_turns, compared, hidden
from assay.runtime.errors import one_line

_SECONDS = {"quick": 0.2, "usual": 1.0, "thorough": 4.0}
_PICKED = {"quick": 2, "usual": 4, "thorough": 8}
_DRAWS = 3
_FIXED_DRAWS = 12  # where no tensor may be rolled, so that a series has no more calls
_TRIES = 3  # of timing, until nothing seems to be hidden from the clock: a busy machine can look like that once
_BYTES = 2**29  # that the results of a series may take
_LONGEST_NOTE = 120


def timed(account: Account, course: Course, bench: Bench, first: Seen) -> Speed:
    """Time the solution beside the reference, and judge calls among those that were timed; ``first`` was one alone.

    No call has numbers that an earlier one had, and none has numbers that could be known beforehand: draws are by
    seeds of chance, and rolled from call to call. Which calls are judged is chosen when all are made. Raises
    `SolutionError`.
    """
    ways = account.ways
    indices = may_roll(first.arguments, bench.kinds)
    seeds = [secrets.randbelow(2**31) for _ in range(_DRAWS if indices else _FIXED_DRAWS)]
    data = [bench.trial("given", seed) for seed in seeds]
    arguments = [bench.arguments(trial) for trial in data]
    names = [f"t{index}" for index in range(len(data))]
    size = sum(part.numel() * part.element_size() for part in first.outputs)
    most = max(2, _BYTES // max(2 * size, 1)) if indices else len(data)
    with ExitStack() as stack:
        for name, values in zip(names, arguments, strict=True):
            course.process.place(name, values)
        own, notes, others = Stopwatch(course.process, names, seeds, indices), [], {}
        compiles = ways.effort != "quick" if ways.compiled is None else ways.compiled
        for title in ("reference", *(["compiled"] if compiles else [])):
            try:
                process = stack.enter_context(ways.process(own_answer(account.problem)))
                _prepare(process, account, bench)
                for name, values in zip(names, arguments, strict=True):
                    process.place(name, values)
                if title == "compiled":
                    process.compile()
                    process.time(names[:1], seeds[:1], [], [0, 0])
                others[title] = Stopwatch(process, names, seeds, indices)
            except SolutionError as error:
                notes.append(f"the {title} can't be timed here ({one_line(error)[:_LONGEST_NOTE]})")
        for _ in range(_TRIES):
            by_turns([own, *others.values()], ways.seconds or _SECONDS[ways.effort], most)
            if not hidden(own, others.get("reference")):
                break
        notes += compared(own, others.get("reference"), on_cpu=ways.device == "cpu")
        times = {title: Time.of(watch.seconds) for title, watch in others.items()}
        sizes = described(bench.choice, account.problem.given[0])
        speed = Speed(
            sizes, ways.device, Time.of(own.seconds), times.get("reference"), times.get("compiled"), "; ".join(notes)
        )
        course.cheats += own.cheats
        for index, shift, called in own.picked(_PICKED[ways.effort]):
            trial = replace(data[index], shift=shift)
            course.take(bench.judged(trial, bench.arguments(trial), called, timed=True), ["conduct"])
    return speed


def _prepare(process: SolutionProcess, account: Account, bench: Bench) -> None:
    """The reference in a process like the solution's, with the same weights."""
    state = process.build(bench.meaning.instance, account.ways.seed, evaluating=bench.meaning.evaluating)
    if bench.meaning is not bench.made and state:
        process.load(bench.meaning.state)
