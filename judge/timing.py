"""Times a solution at the sizes that a problem states, alternately with the reference, and judges timed calls."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch.utils._pytree import tree_leaves

from assay.judge.problems.own import own_answer
from assay.judge.problems.sizes import sizes_text
from assay.judge.report import Report
from assay.judge.run import Run
from assay.judge.solution.inputs import may_roll, may_scale
from assay.judge.solution.solution_process import SolutionError, SolutionHost, SolutionProcess
from assay.judge.solution.trials import Observation
from assay.judge.speed import Speed, Stopwatch, Time, alternate, compared, hidden
from assay.judge.under_test import SolutionUnderTest
from assay.runtime.errors import one_line

_SECONDS = {"quick": 0.2, "usual": 1.0, "thorough": 4.0}  # of each side
_SAMPLED = {"quick": 2, "usual": 4, "thorough": 8}  # timed calls that are judged: each costs a golden
_DRAWS = 3  # of the arguments, which the calls take in turn and roll
_FIXED_DRAWS = 6  # draws if no tensor may be changed; a series has then no more calls than draws, which are its own
_TRIES = 3  # of timing, until the clock hides nothing: on a busy machine one series may look as if it did
_BYTES = 2**29  # that the copied results of a series may take in the solution's process
_LONGEST_NOTE = 120  # characters of an error message


def timed(report: Report, run: Run, under_test: SolutionUnderTest, first: Observation) -> Speed:
    """Time the solution alternately with the reference and judge a sample of the timed calls; ``first`` was untimed.

    No call repeats the numbers of an earlier one, and no numbers are known beforehand: seeds are random, and arguments
    are rolled and scaled from call to call. The calls to judge are chosen after all are made. Raises `SolutionError`.
    """
    options = report.options
    indices, factors = may_roll(first.arguments, under_test.kinds), may_scale(first.arguments, under_test.kinds)
    changes = bool(indices or factors)
    seeds = [secrets.randbelow(2**31) for _ in range(_DRAWS if changes else _FIXED_DRAWS)]
    data = [under_test.trial("given", seed) for seed in seeds]
    arguments = [under_test.arguments(trial) for trial in data]
    names = [f"t{index}" for index in range(len(data))]
    size = sum(part.numel() * part.element_size() for part in first.outputs)
    most = max(2, _BYTES // max(2 * size, 1)) if changes else len(data)

    def renewed() -> list[int]:
        results = [secrets.randbelow(2**31) for _ in names]
        for name, seed in zip(names, results, strict=True):
            run.process.store(name, under_test.arguments(replace(data[0], seed=seed)))
        return results

    with ExitStack() as stack:
        host = stack.enter_context(SolutionHost.of_reference())  # which the solution can't slow down
        for name, values in zip(names, arguments, strict=True):
            run.process.store(name, values)
        # As many as a product in float64 of a number of float32, and in float32 of one of 16 bits, doesn't round.
        tensors = [leaf for leaf in tree_leaves(first.arguments) if isinstance(leaf, torch.Tensor)]
        bits = 12 if any(tensor.element_size() == 2 for tensor in tensors) else 24
        own = Stopwatch(run.process, names, seeds, indices, factors, bits, None if changes else renewed)
        notes, others = [], {}
        compiles = options.effort != "quick" if options.compiled is None else options.compiled
        for title in ("reference", *(["compiled"] if compiles else [])):
            try:
                process = stack.enter_context(options.process(own_answer(report.problem), host))
                _prepare(process, report, under_test)
                for name, values in zip(names, arguments, strict=True):
                    process.store(name, values)
                if title == "compiled":
                    process.compile()
                    process.time(names[:1], seeds[:1], [], [], [(0, 1.0)] * 2)
                others[title] = Stopwatch(process, names, seeds, indices, factors, bits)
            except SolutionError as error:
                notes.append(f"the {title} can't be timed here ({one_line(error)[:_LONGEST_NOTE]})")
        for _ in range(_TRIES):
            alternate([own, *others.values()], options.seconds or _SECONDS[options.effort], most)
            if not hidden(own, others.get("reference")):
                break
        notes += compared(own, others.get("reference"), on_cpu=options.device == "cpu")
        times = {title: Time.of(watch.seconds) for title, watch in others.items()}
        sizes = sizes_text(under_test.choice, report.problem.given[0])
        speed = Speed(
            sizes,
            options.device,
            Time.of(own.seconds),
            times.get("reference"),
            times.get("compiled"),
            "; ".join(notes),
            interpreted=run.pretend and "triton" in report.answer.text,
        )
        run.cheats += own.cheats
        for seed, (shift, factor), called in own.sampled(_SAMPLED[options.effort]):
            trial = replace(data[0], seed=seed, shift=shift, factor=factor)
            run.take(under_test.judged(trial, under_test.arguments(trial), called, timed=True), ["conduct"])
    return speed


def _prepare(process: SolutionProcess, report: Report, under_test: SolutionUnderTest) -> None:
    """Build the reference in a process like the solution's, with the same weights."""
    state = process.build(under_test.model.instance, report.options.seed, evaluating=under_test.model.evaluating)
    if under_test.model is not under_test.constructed and state:
        process.load(under_test.model.state)
