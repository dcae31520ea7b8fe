"""`judge`: a solution of a kernel benchmark's problem, by the derived tolerance, at many sizes, and by its conduct."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from assay.judge.account import Account, Ways
from assay.judge.bench import Bench
from assay.judge.conduct import Cheat, noticed
from assay.judge.course import Course
from assay.judge.problems.own import own_answer
from assay.judge.problems.problem import Answer, Problem, Sizes
from assay.judge.problems.reading import read
from assay.judge.problems.sizes import Choice, Extent, described, edge, extent, limits, near, odd, small, wide
from assay.judge.solution import source
from assay.judge.solution.solution_process import SolutionError
from assay.judge.solution.trials import Trial
from assay.judge.summing_up import verdict_of, workload_of
from assay.judge.timing import timed as time_it
from assay.judge.verdict import SolutionVerdict
from assay.runtime.environment import generators_kept, standard_environment
from assay.runtime.errors import names_checked
from assay.runtime.own_modules import asks_for_cuda
from assay.verify.contract import Contract, contract_from_table
from assay.verify.errors import SettingError
from assay.verify.findings import Failure

_GIVEN = {"quick": 1, "usual": 3, "thorough": 1000}  # how many of the stated sizes are judged
_INTERPRETED = ("python", "triton", "pytorch")  # languages that need no GPU


@names_checked("judge", "setting", SettingError)
def judge(
    problem: str | Path,
    solution: str | Path,
    *,
    effort: Literal["quick", "usual", "thorough"] = "usual",
    seed: int = 0,
    device: str = "cpu",
    contract: Contract | str | None = None,
    timeout: float = 30.0,
    memory: float = 8.0,
    timed: bool | Literal["all"] = True,
    compiled: bool | None = None,
    seconds: float | None = None,
    trial: str = "",
) -> SolutionVerdict:
    """Judge a solution of a problem: a KernelBench file, a FlashInfer Trace definition, a folder with reference.py and
    task.yml, or a robust-kbench folder (docs/judge.md).

    The solution lives in a process of its own, which gets no more than its files and its arguments. It is called at
    small sizes, odd ones, one large one, and at the sizes that the problem states, as far as this machine copes; with
    weights none of which is constant; with numbers of any amplitude; in memory whose numbers change. All results, those
    of timed calls among them, are held against the reference's golden and what ``contract`` allows. ``effort`` says how
    much is tried; ``timeout`` is in seconds of processor time per question, ``memory`` in GiB beyond what its process
    starts with. ``timed``: it is timed beside the reference at the first of the stated sizes, or at "all" of them,
    which are judged then; with ``compiled`` (None: not at quick effort) beside what `torch.compile` makes of the
    reference; for ``seconds`` each (None: as the effort has it). ``trial`` is one call's line, to be made alone.

    Raises `ProblemError`, `SettingError`, `ContractError` or `ReproError` on what can't be judged; whatever the
    solution does becomes part of the verdict.
    """
    promised = contract_from_table(contract) if isinstance(contract, str) else contract or Contract()
    ways = Ways(effort, seed, str(device), promised, timeout, memory, timed, compiled, seconds)
    result, answer = read(problem, solution)
    only = Trial.of_line(trial) if trial else None
    return judged(Account(result, answer, ways, str(solution)), only)


def judged(account: Account, only: Trial | None = None) -> SolutionVerdict:
    """`judge` of what was read; ``only`` one trial."""
    started = time.perf_counter()
    with generators_kept(), standard_environment():
        return replace(_verdict(account, only), seconds=time.perf_counter() - started)


def _verdict(account: Account, only: Trial | None) -> SolutionVerdict:
    answer, ways = account.answer, account.ways
    has_gpu = torch.cuda.is_available()
    if answer.language not in _INTERPRETED and not has_gpu:
        words = f"the solution is {answer.language}, which needs a GPU, and there is none here"
        return verdict_of(account, None, "REFUSED", words)
    texts = "".join(text for name, text in answer.files.items() if name.endswith(".py"))
    pretend = not has_gpu and ("triton" in texts or "cuda" in texts)
    with ways.process(answer) as process:
        course = Course(account.problem, process, ways.contract, ways.seed, ways.effort, pretend)
        course.cheats += _in_the_text(account.problem, answer)
        try:
            if only is None:
                _all(account, course)
            else:
                _alone(account, course, only)
        except SolutionError as error:
            if asks_for_cuda(error) and not has_gpu:
                return verdict_of(account, course, "REFUSED", f"the solution needs a GPU, which isn't here ({error})")
            failure = Failure(error.kind, account.some_case(course), str(error))
            course.cheats += noticed(error.seen, set())
            course.fail("numbers", failure, error.during or Trial())
        course.of_all()
    return verdict_of(account, course)


def _in_the_text(problem: Problem, answer: Answer) -> list[Cheat]:
    """What the solution's text shows."""
    files = {name: text for name, text in answer.files.items() if name not in problem.companions}
    results = []
    if source.is_pasted(problem.source, own_answer(problem).entry.name, files, answer.entry.name):
        results.append(Cheat("reference-pasted", answer.main))
    if imported := source.imported_graders(files, problem.path.stem):
        results.append(Cheat("reference-imported", imported[0]))
    if patched := source.patches(files):
        results.append(Cheat("patched-library", patched[0]))
    return results


def _all(account: Account, course: Course) -> None:
    """Small sizes, odd ones, one large one, and the stated ones."""
    problem, limit = account.problem, limits(account.ways.effort)
    given = problem.given[0]
    base = small(problem, given, limit["small"])
    if base is None:
        base = Choice("given", given, extent(problem, given))
    if course.first(_bench(account, course, base, given)):
        others = [odd(problem, base, limit["small"])]
        others += [of(problem, base, given, limit["wide"]) for of in (edge, wide)]
        for other in others:
            if other is not None:
                course.other_sizes(_bench(account, course, other, given))
    most = len(problem.given) if account.ways.timed == "all" else _GIVEN[account.ways.effort]
    for stated in problem.given[:most]:
        _given(account, course, stated, limit["given"])
    for stated in problem.given[most:]:
        account.not_judged.append(
            f"{_named(stated)}: this effort judges {most} of {len(problem.given)} that are stated"
        )
    if course.refusal and not any(seen.outputs for seen in course.seen) and not course.is_explicit:
        words = f"at sizes other than the given ones: {course.refusal}"
        failure = Failure("crash", account.some_case(course), words)
        course.fail("numbers", failure, Trial(base.kind, base.sizes))


def _bench(account: Account, course: Course, choice: Choice, given: Sizes) -> Bench:
    account.sizes.append(f"{choice.kind}: {described(choice, given)}")
    return course.bench(choice, given)


def _given(account: Account, course: Course, given: Sizes, limit: Extent) -> None:
    """Stated sizes, or what comes nearest: judged alone and among timed calls."""
    choice = near(account.problem, given, limit)
    if choice is None:
        account.not_judged.append(f"{_named(given)}: beyond this machine")
        return
    bench, before = _bench(account, course, choice, given), len(course.seen)
    first = bench.tried(bench.trial("given", account.ways.seed + 31), name="t0", pause=True)
    refused = course.refused(first, bench)
    if choice.kind != "given":
        instead = "and it takes no others" if refused else f"{described(choice, given)} was"
        account.not_judged.append(f"{_named(given)}: beyond what this effort takes on here; {instead}")
    if refused:
        return
    course.take(first, ["shapes"])
    if choice.kind == "given":
        account.workloads.append(workload_of(account, described(choice, given), given, first))
    if not first.outputs:
        return
    if choice.extent.operations < limit.operations // 4:
        course.one_element(bench, first)
    is_next = account.speed is None or (account.ways.timed == "all" and choice.kind == "given")
    if account.ways.timed and is_next:
        speed = time_it(account, course, bench, first)
        account.speed = account.speed or speed
        if choice.kind == "given":
            account.workloads[-1] = replace(account.workloads[-1], speed=speed)
    if choice.kind == "given":
        account.workloads[-1] = replace(account.workloads[-1], judged=len(course.seen) - before)


def _named(given: Sizes) -> str:
    """Stated sizes in words, with the name that the problem has for them."""
    words, name = described(Choice("given", given, Extent(0, 0)), given), given.get("@uuid")
    return f"{words} ({name})" if name else words


def _alone(account: Account, course: Course, trial: Trial) -> None:
    """One call of an earlier verdict."""
    given = account.problem.given[0]
    sizes: Mapping[str, object] = {**given, **trial.sizes}
    bench = _bench(account, course, Choice(trial.kind, sizes, extent(account.problem, sizes)), given)
    if trial.weights == "redrawn" and bench.can_redraw:
        bench.load_redrawn()
    if trial.memory != "new":
        course.take(bench.tried(bench.trial("given", account.ways.seed + 2), name="a"), ["numbers"])
    course.take(bench.tried(trial, name="a", pause=True), ["numbers"])
